//! Tables of rotary position embeddings.

use std::f64::consts::TAU;
use std::ops::Range;

use burn::tensor::{Device, Tensor, TensorData};
use firebox_kernels::rope::{rotate, rotate_by, rotate_normed};
use firebox_kernels::transfers;

use crate::config::{RopeConfig, RopeLayout, RopeScaling};
use crate::norm::RmsNorm;

/// Cosines and sines of consecutive positions for one position scheme.
///
/// Angles are products in f32, as in the reference implementation: at position 30,000 the rounding is a
/// thousandth of a turn, and models were trained with it.
#[derive(Debug, Clone)]
pub(crate) struct RopeTable {
    cos: Tensor<3>,
    sin: Tensor<3>,
    layout: RopeLayout,
}

impl RopeTable {
    /// Computes one row for every position of every group, in order. A group is a range of positions and the
    /// length of the sequence that they belong to.
    pub fn new(config: &RopeConfig, groups: &[(Range<usize>, usize)], device: &Device) -> Self {
        let pairs = config.width.div_ceil(2);
        let tables = config.angles(groups).map(|values| {
            let rows = values.len() / pairs;
            transfers::count_upload();
            Tensor::from_data(TensorData::new(values, [rows, 1, pairs]), device)
        });
        Self::from_tables(config, tables)
    }

    /// Takes cosines and sines, `[rows, 1, pairs]`.
    pub fn from_tables(config: &RopeConfig, [cos, sin]: [Tensor<3>; 2]) -> Self {
        Self { cos, sin, layout: config.layout }
    }

    /// Returns cosines and sines, and whether rotated pairs are interleaved.
    pub fn angles(&self) -> ([Tensor<3>; 2], bool) {
        ([self.cos.clone(), self.sin.clone()], self.layout == RopeLayout::Interleaved)
    }

    /// Rotates the first part of every head of `[tokens, heads, head_dim]`.
    pub fn rotate(&self, heads: Tensor<3>) -> Tensor<3> {
        rotate(heads, self.cos.clone(), self.sin.clone(), self.layout == RopeLayout::Interleaved)
    }

    /// [`rotate`](Self::rotate) after normalising the heads.
    pub fn rotate_normed(&self, heads: Tensor<3>, norm: &RmsNorm) -> Tensor<3> {
        let angles = [self.cos.clone(), self.sin.clone()];
        let interleaved = self.layout == RopeLayout::Interleaved;
        rotate_normed(heads, norm.weight.val(), norm.epsilon, norm.weight_offset, angles, interleaved)
    }
}

impl RopeConfig {
    /// Returns cosines and sines of the positions of every group, in order. A group is a range of positions and the length of
    /// the sequence that they belong to.
    pub(crate) fn angles(&self, groups: &[(Range<usize>, usize)]) -> [Vec<f32>; 2] {
        let (mut cos, mut sin) = (Vec::new(), Vec::new());
        for (positions, length) in groups {
            let (frequencies, magnitude) = self.frequencies(*length);
            for position in positions.clone() {
                for frequency in &frequencies {
                    let angle = f64::from(position as f32 * frequency);
                    cos.push(angle.cos() as f32 * magnitude);
                    sin.push(angle.sin() as f32 * magnitude);
                }
            }
        }
        [cos, sin]
    }

    /// Returns the radians per position of every pair, and the factor of cosines and sines, for a sequence of
    /// `length` tokens.
    pub(crate) fn frequencies(&self, length: usize) -> (Vec<f32>, f32) {
        let base = |theta: f64| -> Vec<f32> {
            (0..self.width)
                .step_by(2)
                .map(|i| (1.0 / theta.powf(i as f64 / self.width as f64)) as f32)
                .collect()
        };
        let plain = base(self.theta);
        match &self.scaling {
            RopeScaling::None => (plain, 1.0),
            RopeScaling::Linear { factor } => (plain.into_iter().map(|f| f / factor).collect(), 1.0),
            RopeScaling::Dynamic { factor, original } => {
                let stretch = factor * (length.max(*original) as f64 / *original as f64) - (factor - 1.0);
                let width = self.width as f64;
                (base(self.theta * stretch.powf(width / (width - 2.0))), 1.0)
            }
            RopeScaling::Yarn { factor, original, beta_fast, beta_slow, truncate, attention_factor } => {
                let ramp = self.yarn_ramp(*original, *beta_fast, *beta_slow, *truncate);
                let frequencies = plain
                    .into_iter()
                    .zip(ramp)
                    .map(|(f, ramp)| f / *factor as f32 * ramp + f * (1.0 - ramp))
                    .collect();
                (frequencies, *attention_factor)
            }
            RopeScaling::Llama3 { factor, low_frequency, high_frequency, original } => {
                let original = *original as f32;
                let stretched = |f: f32| {
                    let wavelength = TAU as f32 / f;
                    if wavelength > original / low_frequency {
                        f / factor
                    } else if wavelength < original / high_frequency {
                        f
                    } else {
                        let smooth =
                            (original / wavelength - low_frequency) / (high_frequency - low_frequency);
                        (1.0 - smooth) * f / factor + smooth * f
                    }
                };
                (plain.into_iter().map(stretched).collect(), 1.0)
            }
            RopeScaling::LongRope { short, long, original, attention_factor } => {
                let factors = if length > *original { long } else { short };
                (plain.into_iter().zip(factors).map(|(f, factor)| f / factor).collect(), *attention_factor)
            }
            RopeScaling::Proportional { pairs, factor } => {
                let scaled = |(pair, f): (usize, f32)| if pair < *pairs { f / factor } else { 0.0 };
                (plain.into_iter().enumerate().map(scaled).collect(), 1.0)
            }
            RopeScaling::Factors { factors } => {
                (plain.into_iter().zip(factors).map(|(f, factor)| f / factor).collect(), 1.0)
            }
        }
    }

    /// Rotates cached keys `[kv_heads, positions, head_dim]` back by a number of positions.
    pub(crate) fn turn_back(&self, keys: Tensor<3>, frequencies: &[f32], back: usize) -> Tensor<3> {
        let device = keys.device();
        let angles = frequencies.iter().map(|frequency| -f64::from(back as f32 * frequency));
        let (cos, sin): (Vec<f32>, Vec<f32>) =
            angles.map(|angle| (angle.cos() as f32, angle.sin() as f32)).unzip();
        let table = |values: Vec<f32>| Tensor::<1>::from_floats(values.as_slice(), &device);
        rotate_by(keys, table(cos), table(sin), self.layout == RopeLayout::Interleaved)
    }

    /// Returns the shortest length that has the frequencies of `length`. Cached keys stay valid while it does
    /// not change.
    pub(crate) fn epoch(&self, length: usize) -> usize {
        match &self.scaling {
            RopeScaling::Dynamic { original, .. } => length.max(*original),
            RopeScaling::LongRope { original, .. } if length > *original => original + 1,
            _ => 0,
        }
    }

    /// Returns the interpolated share of each frequency, from 0 (high frequencies) to 1 (low ones).
    fn yarn_ramp(&self, original: usize, beta_fast: f64, beta_slow: f64, truncate: bool) -> Vec<f32> {
        let width = self.width as f64;
        let dimension =
            |rotations: f64| width * (original as f64 / (rotations * TAU)).ln() / (2.0 * self.theta.ln());
        let (mut low, mut high) = (dimension(beta_fast), dimension(beta_slow));
        if truncate {
            (low, high) = (low.floor(), high.ceil());
        }
        let (low, mut high) = (low.max(0.0), high.min(width - 1.0));
        if low == high {
            // Avoids a ramp of width zero.
            high += 0.001;
        }
        (0..self.width.div_ceil(2))
            .map(|pair| ((pair as f32 - low as f32) / (high - low) as f32).clamp(0.0, 1.0))
            .collect()
    }
}
