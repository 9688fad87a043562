//! Head norms, rotation and the write to the KV cache, fused on accelerators.

use std::ops::Range;

use burn::tensor::Tensor;

use super::KvTensor;
use super::batch_attention;
#[cfg(any(feature = "wgpu", feature = "cuda"))]
use super::cube;
use super::head_transform::HeadTransform;
use super::span::AttentionSequence;
use crate::linear::RowNorm;
use crate::norm::rms_norm;
use crate::rope::rotate;

/// Applies a [`HeadTransform`] to queries and keys and writes keys and values to pages. On accelerators both happen in one launch
/// for up to four pages.
#[derive(Debug)]
pub struct RopeAndCache(Kind);

#[derive(Debug)]
enum Kind {
    #[cfg(any(feature = "wgpu", feature = "cuda"))]
    Cube(cube::CubeRopeAndCache),
    /// Transformed queries and keys, and values.
    Plain([Tensor<3>; 3]),
}

impl RopeAndCache {
    /// Takes queries, keys and values, `[rows, heads, head_dim]` each.
    pub fn new(heads: [Tensor<3>; 3], transform: HeadTransform) -> Self {
        #[cfg(any(feature = "wgpu", feature = "cuda"))]
        if cube::supports_rope_and_cache(&heads[0]) {
            return Self(Kind::Cube(cube::CubeRopeAndCache::new(heads, transform)));
        }
        let HeadTransform { query_norm, key_norm, angles, interleaved, .. } = transform;
        let placed = |heads: Tensor<3>, norm: Option<RowNorm>| {
            let heads = match norm {
                Some(norm) => rms_norm(heads, norm.weight, norm.epsilon, norm.offset),
                None => heads,
            };
            match angles.clone() {
                Some([cos, sin]) => rotate(heads, cos, sin, interleaved),
                None => heads,
            }
        };
        let [query, key, value] = heads;
        Self(Kind::Plain([placed(query, query_norm), placed(key, key_norm), value]))
    }

    /// Writes the keys and values of some rows to the positions from `at` on, as [`KvTensor::overwrite_both`] does. Every row has to be
    /// written once before [`query`](Self::query) or [`attend`](Self::attend).
    ///
    /// # Panics
    /// As [`KvTensor::assign`] does.
    pub fn write(&self, rows: Range<usize>, [keys, values]: [&mut KvTensor; 2], at: usize) {
        match &self.0 {
            #[cfg(any(feature = "wgpu", feature = "cuda"))]
            Kind::Cube(heads_cache) => {
                let (KvTensor::Float(kept_keys), KvTensor::Float(kept_values)) = (keys, values) else {
                    panic!("bytes are kept by `KvTensor::overwrite_both`")
                };
                let end = at + rows.len();
                for kept in [&*kept_keys, &*kept_values] {
                    assert!(
                        heads_cache.fits(kept) && end <= kept.dims()[1],
                        "{:?} for {end} positions",
                        kept.dims()
                    );
                }
                assert_eq!(kept_keys.dtype(), kept_values.dtype(), "keys and values of different dtypes");
                kept_keys.inplace(|keys| {
                    let mut kept = None;
                    kept_values.inplace(|values| {
                        let [keys, values] = heads_cache.write(rows, [keys, values], at);
                        kept = Some(keys);
                        values
                    });
                    kept.unwrap_or_else(|| unreachable!("it has been placed"))
                });
            }
            Kind::Plain([_, key, value]) => {
                let part = |heads: &Tensor<3>| {
                    KvTensor::Float(heads.clone().narrow(0, rows.start, rows.len()).swap_dims(0, 1))
                };
                KvTensor::overwrite_both([keys, values], at, [part(key), part(value)]);
            }
        }
    }

    /// Computes [attention](batch_attention) of the transformed queries to spans that hold what was [written](Self::write). On accelerators
    /// rows of decode steps are transformed, written and attend in one launch.
    pub fn attend(self, sequences: Vec<AttentionSequence>) -> Tensor<2> {
        match self.0 {
            #[cfg(any(feature = "wgpu", feature = "cuda"))]
            Kind::Cube(heads_cache) if heads_cache.attends() => heads_cache.attend(sequences),
            _ => batch_attention(self.query(), sequences),
        }
    }

    /// Returns the transformed queries.
    pub fn query(self) -> Tensor<3> {
        match self.0 {
            #[cfg(any(feature = "wgpu", feature = "cuda"))]
            Kind::Cube(heads_cache) => heads_cache.query(),
            Kind::Plain([query, ..]) => query,
        }
    }
}
