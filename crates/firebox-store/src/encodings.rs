//! What the tensors of a bundle are encoded as.

use std::collections::BTreeSet;

use crate::checkpoint::Checkpoint;
use crate::encoding::{Bits, Encoding, Quantization, TILE_ROWS};
use crate::error::StoreError;
use crate::importance::Importance;
use crate::quantize::{fitted_scale, is_quantized, scale_of, weighted_error};
use crate::row_reader::RowReader;
use crate::tensor_index::TensorInfo;

/// Tiles of a matrix on which the loss of its quantization is measured, spread evenly.
const MEASURED_TILES: usize = 16;

/// What tensors are encoded as: as they are, or quantized, most of them in few bits and some in more.
#[derive(Debug, Default)]
pub(crate) struct Encodings<'a> {
    quantization: Option<Quantization>,
    importance: Option<&'a Importance>,
    /// Tensors that are stored in eight bits.
    wide: BTreeSet<String>,
}

/// What a matrix gains if it is stored in eight bits.
struct Widening<'a> {
    info: &'a TensorInfo,
    /// Squared error that is avoided, relative to the product.
    gain: f64,
    /// Bits that it takes.
    cost: f64,
}

impl<'a> Encodings<'a> {
    /// Quantizes projections and embeddings, if a quantization is given.
    pub fn new(quantization: Option<Quantization>, importance: Option<&'a Importance>) -> Self {
        Self { quantization, importance, wide: BTreeSet::new() }
    }

    /// Stores those matrices in eight bits that lose most by fewer, until quantized weights take `target_bits` on average.
    pub fn mixed(mut self, checkpoint: &Checkpoint, target_bits: f64) -> Result<Self, StoreError> {
        let all = |reason: String| StoreError::Quantize { tensor: "(all)".into(), reason };
        let Some(narrow @ Quantization { bits: Bits::Q4, group }) = self.quantization else {
            return Err(all("an average of bits is reached from q4; ask for that".into()));
        };
        let wide = Quantization { bits: Bits::Q8, group };
        let matrices: Vec<&TensorInfo> = checkpoint.tensors().filter(|info| is_quantized(info)).collect();
        let weights: f64 = matrices.iter().map(|info| info.shape.iter().product::<usize>() as f64).sum();
        let bits = |quantization| -> Result<f64, StoreError> {
            matrices.iter().map(|info| bits(info, quantization)).sum()
        };
        let (least, most) = (bits(narrow)? / weights, bits(wide)? / weights);
        if !(least..=most).contains(&target_bits) {
            return Err(all(format!(
                "an average of {target_bits} bits; in groups of {group} this model takes {least:.2} to {most:.2}"
            )));
        }
        let mut widenings = Vec::new();
        for info in matrices {
            let gain = self.gain(checkpoint, info, narrow, wide)?;
            let cost = self::bits(info, wide)? - self::bits(info, narrow)?;
            widenings.push(Widening { info, gain, cost });
        }
        widenings.sort_by(|a, b| (b.gain / b.cost).total_cmp(&(a.gain / a.cost)));
        let mut left = (target_bits - least) * weights;
        for Widening { info, gain, cost } in widenings {
            if gain > 0.0 && cost <= left {
                left -= cost;
                self.wide.insert(info.name.clone());
            }
        }
        Ok(self)
    }

    /// The number of matrices that are stored in eight bits though others are in four.
    pub fn wide(&self) -> usize {
        self.wide.len()
    }

    /// The encoding of a tensor in the bundle.
    pub fn of(&self, info: &TensorInfo) -> Encoding {
        match self.quantization {
            Some(Quantization { group, .. }) if self.wide.contains(&info.name) => {
                Encoding::Grouped(Quantization { bits: Bits::Q8, group })
            }
            Some(quantization) if is_quantized(info) => Encoding::Grouped(quantization),
            _ => info.encoding,
        }
    }

    /// The importance of a matrix's inputs, if it is known.
    pub fn importance_of(&self, info: &TensorInfo) -> Result<Option<&'a [f32]>, StoreError> {
        let Some(importance) = self.importance.and_then(|importance| importance.of(&info.name)) else {
            return Ok(None);
        };
        match info.shape.last() {
            Some(inputs) if *inputs == importance.len() => Ok(Some(importance)),
            _ => Err(StoreError::Quantize {
                tensor: info.name.clone(),
                reason: format!("the importance of {} inputs was given for it", importance.len()),
            }),
        }
    }

    /// How much smaller the squared error of a matrix's products is if it is wide, relative to the products.
    fn gain(
        &self,
        checkpoint: &Checkpoint,
        info: &TensorInfo,
        narrow: Quantization,
        wide: Quantization,
    ) -> Result<f64, StoreError> {
        let mut reader = RowReader::of_matrix(checkpoint, &info.name)?;
        let importance = match self.importance_of(info)? {
            Some(importance) => importance.to_vec(),
            None => vec![1.0; reader.inputs],
        };
        let fault = |reason: String| StoreError::Quantize { tensor: info.name.clone(), reason };
        let tiles = reader.rows.div_ceil(TILE_ROWS);
        let (mut avoided, mut squares) = (0.0f64, 0.0f64);
        let mut values = Vec::new();
        for tile in (0..tiles).step_by(tiles.div_ceil(MEASURED_TILES).max(1)) {
            let first = tile * TILE_ROWS;
            let rows = first..reader.rows.min(first + TILE_ROWS);
            reader.numbers(&rows, &mut values)?;
            for row in values.chunks(reader.inputs) {
                for (group, importance) in row.chunks(narrow.group).zip(importance.chunks(narrow.group)) {
                    let plain = scale_of(narrow.bits, group).map_err(fault)?;
                    let scale = fitted_scale(narrow.bits, group, importance, plain);
                    let error = weighted_error(narrow.bits, group, importance, scale);
                    let scale = scale_of(wide.bits, group).map_err(fault)?;
                    avoided += f64::from(error - weighted_error(wide.bits, group, importance, scale));
                    squares += group.iter().zip(importance).map(|(x, w)| f64::from(x * x * w)).sum::<f64>();
                }
            }
        }
        Ok(if squares > 0.0 { avoided / squares } else { 0.0 })
    }
}

/// Bits that a matrix takes, with its scales.
fn bits(info: &TensorInfo, quantization: Quantization) -> Result<f64, StoreError> {
    let encoding = Encoding::Grouped(quantization);
    let fault = |reason: String| StoreError::Quantize { tensor: info.name.clone(), reason };
    let bytes = encoding.data_bytes(&info.shape).map_err(fault)?;
    let scales = encoding.scale_bytes(&info.shape).map_err(fault)?;
    Ok((bytes + scales) as f64 * 8.0)
}
