use std::sync::Arc;

use burn::tensor::Tensor;
use firebox_kernels::attend::Stored;

use super::SequenceCache;
use crate::error::CacheError;
use crate::layout::{LayerLayout, Layout};
use crate::run::{Run, Source};

impl SequenceCache {
    /// Takes up the positions that what was forgotten has left, so that positions run from 0 without a gap.
    /// `rotate` takes a layer, keys `[kv_heads, positions, head_dim]`, and how far back they move.
    ///
    /// Keys in pages that are shared with other sequences are copied; theirs stay where they are.
    pub fn close_up(
        &mut self,
        rotate: impl Fn(usize, Tensor<3>, usize) -> Tensor<3>,
    ) -> Result<(), CacheError> {
        self.give_up_pass();
        let alone = Arc::get_mut(&mut self.runs).is_some();
        let changed = |back: usize| {
            let Layout { layers, kept, .. } = self.pool.layout();
            let rotate = &rotate;
            move |layer: usize, keys: Stored| match layers[layer] {
                LayerLayout::Attention { head_dim, .. } => {
                    kept.store(rotate(layer, keys.dequantize(head_dim), back))
                }
                LayerLayout::Recurrent | LayerLayout::States { .. } => keys,
            }
        };
        let (mut runs, mut next, mut in_place) = (Vec::with_capacity(self.runs.len()), 0, Vec::new());
        // Two runs may lie in one page, with what was between them forgotten.
        for together in self.runs.chunk_by(Run::lies_with) {
            let mut to = next;
            next += together.iter().map(Run::len).sum::<usize>();
            // What moves at all moves behind what was forgotten, and so does the last.
            if together.last().is_none_or(|last| last.end() == next) {
                runs.extend_from_slice(together);
                continue;
            }
            for run in self.owned(together, alone)? {
                if let Source::Page(page) = &run.source {
                    in_place.push((page.clone(), run.slots.clone(), run.position - to));
                }
                let position = to;
                to += run.len();
                runs.push(Run { position, ..run });
            }
        }
        // Only now, when nothing can fail any more: an error leaves everything as it was.
        for (page, slots, back) in in_place.into_iter().filter(|(.., back)| *back > 0) {
            for layer in 0..self.pool.layout().layers.len() {
                page.change_keys(layer, &slots, |keys| changed(back)(layer, keys));
            }
        }
        self.runs = Arc::new(runs);
        self.position = next;
        self.cover();
        Ok(())
    }
}
