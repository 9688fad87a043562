//! Slots of a pass, and copies of pages that a sequence cannot continue in.

use std::ops::Range;
use std::sync::Arc;

use super::SequenceCache;
use crate::error::CacheError;
use crate::kv_run::{KvRun, Source};
use crate::page::Page;
use crate::page_buffers::PAGE_TOKENS;

impl SequenceCache {
    /// Reserves slots for the tokens of a pass, unless as many are reserved already. An earlier incomplete pass is discarded.
    pub fn reserve(&mut self, count: usize) -> Result<(), CacheError> {
        // A clone does not own the slots that were reserved before it was cloned.
        if count == self.pending && Arc::get_mut(&mut self.runs).is_some() {
            return Ok(());
        }
        self.discard_pass();
        self.release_trailing_slots();
        let taken = self.claim_in_last_page(count)?;
        let runs = Arc::make_mut(&mut self.runs);
        let (mut rest, mut position) = (count - taken, self.position + taken);
        self.pending = count;
        while rest > 0 {
            let page = match self.pool.take(rest) {
                Ok(page) => page,
                Err(error) => {
                    self.discard_pass();
                    return Err(error);
                }
            };
            let taken = page.claim(0, rest);
            runs.push(KvRun::new(Source::Page(page), 0..taken, position));
            (rest, position) = (rest - taken, position + taken);
        }
        self.refresh_visibility();
        Ok(())
    }

    /// Claims the slots behind the last tokens in their page, `count` at most. Returns how many were claimed.
    pub(super) fn claim_in_last_page(&mut self, count: usize) -> Result<usize, CacheError> {
        loop {
            self.ensure_appendable()?;
            let position = self.position;
            let last = Arc::make_mut(&mut self.runs).last_mut().filter(|last| last.end() == position);
            let Some(KvRun { source: Source::Page(page), slots, .. }) = last else { return Ok(0) };
            let taken = page.claim(slots.end, count);
            slots.end += taken;
            // If another sequence continued there since the check, the next iteration copies the page.
            if taken > 0 || count == 0 || slots.end == PAGE_TOKENS {
                return Ok(taken);
            }
        }
    }

    /// Makes the last block appendable where it ends in the middle and cannot be continued in place. The memory layout of a
    /// sequence must not depend on other sequences, because it determines the rounding of the last bits.
    pub(super) fn ensure_appendable(&mut self) -> Result<(), CacheError> {
        self.copy_last_block().or_else(|_| {
            // Evict prefixes that are held for reuse, if that frees a page or makes a copy unnecessary.
            self.pool.reclaim_all();
            self.release_trailing_slots();
            self.copy_last_block()
        })
    }

    /// Copies the last block if it is mapped or frozen, or if another sequence continued in it.
    pub(super) fn copy_last_block(&mut self) -> Result<(), CacheError> {
        let Some(last) = self.runs.last().filter(|last| last.end() == self.position) else { return Ok(()) };
        match &last.source {
            Source::Mapped(_) => {
                let Some(slots) = last.in_block().filter(|slots| slots.end < PAGE_TOKENS) else {
                    return Ok(());
                };
                let run = self.copy_run(last, slots.start)?;
                let run = KvRun { visible: last.visible.clone(), hidden: last.hidden, ..run };
                if let Some(last) = Arc::make_mut(&mut self.runs).last_mut() {
                    *last = run;
                }
            }
            Source::Page(page) if last.slots.end < PAGE_TOKENS && !page.can_append(last.slots.end) => {
                let (own, last) = (self.copy_page(page, &last.slots)?, last.clone());
                self.repoint_last_block(&last, &own);
            }
            Source::Page(_) => {}
        }
        Ok(())
    }

    /// Repoints the runs that lie together with `last` at the end to another page.
    pub(super) fn repoint_last_block(&mut self, last: &KvRun, page: &Arc<Page>) {
        let runs = Arc::make_mut(&mut self.runs).iter_mut().rev();
        for run in runs.take_while(|run| run.lies_with(last)) {
            run.source = Source::Page(page.clone());
        }
    }

    /// A new page with a copy of another one, with slots claimed up to the end of `slots`.
    pub(super) fn copy_page(&self, from: &Page, slots: &Range<usize>) -> Result<Arc<Page>, CacheError> {
        let page = self.pool.take(slots.end)?;
        page.claim(0, slots.end);
        page.copy(from);
        Ok(page)
    }

    /// Returns `together`, runs that lie together, in pages that no other sequence reads, at the same places, so that they and
    /// later tokens form the same spans as before.
    pub(super) fn exclusive_runs(&self, together: &[KvRun], alone: bool) -> Result<Vec<KvRun>, CacheError> {
        let (Some(first), Some(last)) = (together.first(), together.last()) else { return Ok(Vec::new()) };
        let blocks: Option<Vec<Range<usize>>> = together.iter().map(KvRun::in_block).collect();
        let (page, places) = match (&first.source, blocks) {
            (Source::Page(page), _) if alone && Arc::strong_count(page) == together.len() => {
                return Ok(together.to_vec());
            }
            (Source::Page(page), _) => {
                let places = together.iter().map(|run| run.slots.clone()).collect();
                (self.copy_page(page, &last.slots)?, places)
            }
            (Source::Mapped(_), Some(places)) => {
                let end = places.last().map_or(0, |last| last.end);
                let page = self.pool.take(end)?;
                page.claim(0, end);
                for (run, slots) in together.iter().zip(&places) {
                    self.write_run(&page, slots.start, run);
                }
                (page, places)
            }
            // The mapped runs span more than one block.
            (Source::Mapped(_), None) => {
                let parts = together.iter().flat_map(|run| {
                    let starts = (0..run.len()).step_by(PAGE_TOKENS);
                    starts.map(|start| run.part(start..run.len().min(start + PAGE_TOKENS)))
                });
                return parts.map(|part| self.copy_run(&part, 0)).collect();
            }
        };
        let own = |(run, slots): (&KvRun, Range<usize>)| KvRun {
            source: Source::Page(page.clone()),
            slots,
            ..run.clone()
        };
        Ok(together.iter().zip(places).map(own).collect())
    }

    /// Copies a run to a new page, from `slot` on.
    pub(super) fn copy_run(&self, run: &KvRun, slot: usize) -> Result<KvRun, CacheError> {
        let page = self.pool.take(slot + run.len())?;
        let slots = slot..page.claim(0, slot + run.len());
        self.write_run(&page, slot, run);
        Ok(KvRun::new(Source::Page(page), slots, run.position))
    }

    /// Writes a run's contents to a page, from `slot` on.
    pub(super) fn write_run(&self, page: &Page, slot: usize, run: &KvRun) {
        for layer in 0..self.pool.layout().layers.len() {
            if let Some(held) = run.read(layer) {
                page.write(layer, slot, held);
            }
        }
    }
}
