//! Heads of queries, keys and values, and what they are normalised and rotated with.

use burn::tensor::Tensor;
use burn_cubecl::tensor::CubeTensor;

use super::super::head_transform::HeadTransform;
use super::heads_kernels::{How, SizesLaunch};
use crate::cube::{dims, floats, primitive};
use crate::linear::RowNorm;

/// What kernels that transform heads read.
#[derive(Debug)]
pub(super) struct HeadInputs {
    /// `[rows, heads, head_dim]`
    pub query: CubeTensor,
    pub key: CubeTensor,
    pub value: CubeTensor,
    /// Weight, epsilon and offset.
    query_norm: Option<(CubeTensor, f32, f32)>,
    key_norm: Option<(CubeTensor, f32, f32)>,
    angles: Option<[CubeTensor; 2]>,
    interleaved: bool,
}

impl HeadInputs {
    pub fn new(heads: [Tensor<3>; 3], transform: HeadTransform) -> Self {
        let [query, key, value] = heads.map(|heads| floats(primitive(heads)));
        let norm = |norm: Option<RowNorm>| {
            norm.map(|norm| (floats(primitive(norm.weight)), norm.epsilon as f32, norm.offset))
        };
        let angles = transform.angles.map(|angles| angles.map(|angles| floats(primitive(angles))));
        Self {
            query_norm: norm(transform.query_norm),
            key_norm: norm(transform.key_norm),
            angles: angles.filter(|[cos, _]| dims::<3>(cos)[2] > 0),
            interleaved: transform.interleaved,
            query,
            key,
            value,
        }
    }

    /// Queries, keys, values, the weights of their norms, and angles.
    pub fn buffers(&self) -> [CubeTensor; 7] {
        // Every binding needs a buffer, also those that are not read.
        let weight = |norm: &Option<(CubeTensor, f32, f32)>| {
            norm.as_ref().map_or(&self.query, |(weight, ..)| weight).clone()
        };
        let [cos, sin] = self.angles.clone().unwrap_or_else(|| [self.query.clone(), self.query.clone()]);
        let [query, key, value] = [&self.query, &self.key, &self.value].map(CubeTensor::clone);
        [query, key, value, weight(&self.query_norm), weight(&self.key_norm), cos, sin]
    }

    /// Sizes for pages of `rows` rows.
    pub fn sizes(&self, rows: usize) -> SizesLaunch {
        let ([_, heads, head_dim], [_, kv_heads, _]) = (dims(&self.query), dims(&self.key));
        let pairs = self.angles.as_ref().map_or(0, |[cos, _]| dims::<3>(cos)[2]);
        let numbers = |norm: &Option<(CubeTensor, f32, f32)>| {
            norm.as_ref().map_or((0.0, 0.0), |(_, epsilon, offset)| (*epsilon, *offset))
        };
        let ((query_epsilon, query_offset), (key_epsilon, key_offset)) =
            (numbers(&self.query_norm), numbers(&self.key_norm));
        SizesLaunch::new(
            heads as u32,
            kv_heads as u32,
            head_dim as u32,
            pairs as u32,
            rows as u32,
            query_epsilon,
            query_offset,
            key_epsilon,
            key_offset,
        )
    }

    pub fn how(&self, counted: bool) -> How {
        How {
            query_normed: self.query_norm.is_some(),
            key_normed: self.key_norm.is_some(),
            interleaved: self.interleaved,
            counted,
        }
    }
}
