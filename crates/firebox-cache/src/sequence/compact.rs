//! Compaction of positions after evictions.

use std::sync::Arc;

use burn::tensor::Tensor;
use firebox_kernels::attention::KvTensor;

use super::SequenceCache;
use crate::error::CacheError;
use crate::kv_run::{KvRun, Source};
use crate::layout::{LayerLayout, Layout};

impl SequenceCache {
    /// Renumbers positions from 0 without gaps, closing those that evictions left. `rotate` takes a layer, keys
    /// `[kv_heads, positions, head_dim]`, and the distance by which they move back. Keys that are values too are passed whole.
    ///
    /// Keys in pages shared with other sequences are copied; the originals stay unchanged.
    pub fn compact_positions(
        &mut self,
        rotate: impl Fn(usize, Tensor<3>, usize) -> Tensor<3>,
    ) -> Result<(), CacheError> {
        self.discard_pass();
        let alone = Arc::get_mut(&mut self.runs).is_some();
        let changed = |back: usize| {
            let Layout { layers, kv_dtype, .. } = self.pool.layout();
            let rotate = &rotate;
            move |layer: usize, keys: KvTensor| match layers[layer] {
                LayerLayout::Attention { head_dim, .. } | LayerLayout::Latents { width: head_dim } => {
                    kv_dtype.store(rotate(layer, keys.dequantize(head_dim), back))
                }
                LayerLayout::Shared { .. } | LayerLayout::Recurrent | LayerLayout::HiddenStates { .. } => {
                    keys
                }
            }
        };
        let (mut runs, mut next, mut in_place) = (Vec::with_capacity(self.runs.len()), 0, Vec::new());
        // Two runs lie in one page if tokens between them were evicted.
        for together in self.runs.chunk_by(KvRun::lies_with) {
            let mut to = next;
            next += together.iter().map(KvRun::len).sum::<usize>();
            // Tokens only move if something before them was evicted, and then the last run moves too.
            if together.last().is_none_or(|last| last.end() == next) {
                runs.extend_from_slice(together);
                continue;
            }
            for run in self.exclusive_runs(together, alone)? {
                if let Source::Page(page) = &run.source {
                    in_place.push((page.clone(), run.slots.clone(), run.position - to));
                }
                let position = to;
                to += run.len();
                runs.push(KvRun { position, ..run });
            }
        }
        // Nothing can fail from here on, so an error leaves the cache unchanged.
        for (page, slots, back) in in_place.into_iter().filter(|(.., back)| *back > 0) {
            for layer in 0..self.pool.layout().layers.len() {
                page.change_keys(layer, &slots, |keys| changed(back)(layer, keys));
            }
        }
        self.runs = Arc::new(runs);
        self.position = next;
        self.refresh_visibility();
        Ok(())
    }
}
