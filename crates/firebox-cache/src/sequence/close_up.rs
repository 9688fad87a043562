use std::sync::Arc;

use burn::tensor::Tensor;
use firebox_kernels::attend::Stored;

use super::SequenceCache;
use crate::error::CacheError;
use crate::layout::{LayerLayout, Layout};
use crate::page::{PAGE, Page};
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
            let moved: Vec<(&Run, usize)> = together
                .iter()
                .map(|run| {
                    next += run.len();
                    (run, next - run.len())
                })
                .collect();
            let own = match &together[0].source {
                _ if moved.iter().all(|(run, to)| run.position == *to) => {
                    runs.extend_from_slice(together);
                    continue;
                }
                Source::Page(page) if alone && Arc::strong_count(page) == together.len() => page.clone(),
                // Whoever shares it or not, the sequence reads the same spans afterwards.
                Source::Page(page) => self.copied_page(page, &together[together.len() - 1].slots)?,
                Source::Mapped(_) => match self.copied_block(together)? {
                    Some(page) => page,
                    None => {
                        for (run, to) in moved {
                            self.copy_moved(run, to, changed(run.position - to), &mut runs)?;
                        }
                        continue;
                    }
                },
            };
            for (run, to) in moved {
                let slots = run.in_block().unwrap_or_else(|| run.slots.clone());
                runs.push(Run::new(Source::Page(own.clone()), slots.clone(), to));
                in_place.push((own.clone(), slots, run.position - to));
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

    /// A page that holds what some runs of one block of what is mapped do, at the same places, as a page would that had never
    /// been in a file: what comes after them then lies in the same spans. Nothing where a run is longer than its block.
    fn copied_block(&self, runs: &[Run]) -> Result<Option<Arc<Page>>, CacheError> {
        let Some(slots) = runs.iter().map(Run::in_block).collect::<Option<Vec<_>>>() else { return Ok(None) };
        let end = slots.last().map_or(0, |last| last.end);
        let page = self.pool.take(end)?;
        page.claim(0, end);
        for (run, slots) in runs.iter().zip(slots) {
            self.write_run(&page, slots.start, run, |_, keys| keys);
        }
        Ok(Some(page))
    }

    fn copy_moved(
        &self,
        run: &Run,
        position: usize,
        changed: impl Fn(usize, Stored) -> Stored + Copy,
        runs: &mut Vec<Run>,
    ) -> Result<(), CacheError> {
        if run.position == position {
            runs.push(run.clone());
            return Ok(());
        }
        for start in (0..run.len()).step_by(PAGE) {
            let part = run.part(start..run.len().min(start + PAGE));
            runs.push(self.copied(&part, 0, position + start, changed)?);
        }
        Ok(())
    }
}
