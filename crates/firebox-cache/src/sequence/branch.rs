//! Branches of a sequence.

use std::sync::Arc;

use crate::error::CacheError;
use crate::kv_run::{KvRun, Source};
use crate::page_buffers::PAGE_TOKENS;
use crate::sequence::SequenceCache;

impl SequenceCache {
    /// Returns whether it is the only owner of a page, so that dropping it would free the page.
    pub fn has_own_page(&self) -> bool {
        let of_one_page = |together: &[KvRun]| match &together[0].source {
            Source::Page(page) => Arc::strong_count(page) == together.len(),
            Source::Mapped(_) => false,
        };
        Arc::strong_count(&self.runs) == 1 && self.runs.chunk_by(KvRun::lies_with).any(of_one_page)
    }

    /// Returns a clone that continues without delay: a partly filled page is copied now. A plain clone copies it on its first
    /// token, unless it is the first to continue. In both cases attention reads later tokens in the same spans, so results are
    /// bit-equal.
    pub fn branch(&mut self) -> Result<Self, CacheError> {
        self.discard_pass();
        self.release_trailing_slots();
        let mut branch = self.clone();
        let Some(last) = self.runs.last().filter(|last| last.end() == self.position) else {
            return Ok(branch);
        };
        let Source::Page(from) = &last.source else { return Ok(branch) };
        // If the page cannot be continued in place, each sequence copies it when it continues.
        if last.slots.end == PAGE_TOKENS || !from.can_append(last.slots.end) {
            return Ok(branch);
        }
        branch.repoint_last_block(last, &self.copy_page(from, &last.slots)?);
        Ok(branch)
    }

    /// Releases the slots behind the last tokens that were left by a rewind or by a dropped clone that had continued, unless
    /// another sequence may have continued in them. Clones that have not continued share the runs.
    pub(super) fn release_trailing_slots(&self) {
        if let Some(last) = self.runs.last()
            && let Source::Page(page) = &last.source
            && last.end() == self.position
        {
            let own = self.runs.iter().rev().take_while(|run| run.lies_with(last)).count();
            page.unclaim(last.slots.end, || Arc::strong_count(page) == own);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;
    use std::thread;

    use burn::tensor::{Device, Tensor};

    use super::*;
    use crate::layer_kv::LayerKv;
    use crate::layout::{KvType, LayerLayout, Layout};
    use crate::pool::PagePool;
    use crate::sequence::LayerCache;

    fn pool() -> PagePool {
        let layers = vec![LayerLayout::Attention { kv_heads: 1, head_dim: 2 }];
        PagePool::new(Layout { layers, kv_dtype: KvType::F32, device: Device::flex() })
    }

    fn fill(sequence: &mut SequenceCache, count: usize, number: f32) {
        let numbers = || Tensor::full([1, count, 2], number, &Device::flex());
        if let LayerCache::Attention(mut cache) = sequence.layer(0) {
            cache.append(numbers(), numbers());
        }
        sequence.advance();
    }

    fn numbers(sequence: &SequenceCache) -> Vec<f32> {
        let keys = sequence.stored(0).unwrap().into_iter().map(|run| match run {
            LayerKv::Attention { keys, .. } => keys.dequantize(2).narrow(2, 0, 1),
            LayerKv::Latents(_) | LayerKv::HiddenStates(_) => unreachable!("an attention layer"),
        });
        keys.flat_map(|keys| keys.try_into_vec_as::<f32>().unwrap()).collect()
    }

    /// The next clone gets the slots of the failed one, so its tokens form the same spans.
    #[test]
    fn slots_of_a_dropped_clone_are_reused() {
        let pool = pool();
        let mut sequence = SequenceCache::new(&pool);
        sequence.reserve(3).unwrap();
        fill(&mut sequence, 3, 1.0);
        let mut failed = sequence.clone();
        failed.reserve(2).unwrap();
        fill(&mut failed, 2, 2.0);
        // While the failed clone exists, its slots are taken, and others continue in copies.
        let mut beside = sequence.clone();
        beside.reserve(1).unwrap();
        fill(&mut beside, 1, 3.0);
        assert_eq!(beside.positions().next(), Some(0..4));
        assert_eq!(numbers(&failed), [1.0, 1.0, 1.0, 2.0, 2.0]);
        drop((failed, beside));
        let mut next = sequence.clone();
        next.reserve(2).unwrap();
        fill(&mut next, 2, 4.0);
        assert_eq!(next.positions().next(), Some(0..5));
        assert_eq!((numbers(&next), numbers(&sequence)), (vec![1.0, 1.0, 1.0, 4.0, 4.0], vec![1.0; 3]));
    }

    /// One continues in the page, the other in a copy.
    #[test]
    fn clones_that_continue_concurrently_have_the_same_layout_as_alone() {
        let pool = pool();
        let mut sequence = SequenceCache::new(&pool);
        sequence.reserve(3).unwrap();
        fill(&mut sequence, 3, 1.0);
        let start = Barrier::new(2);
        for _ in 0..2000 {
            let goes_on = |mut clone: SequenceCache| {
                start.wait();
                clone.reserve(2).unwrap();
                clone
            };
            let clones = [sequence.clone(), sequence.clone()];
            let clones = thread::scope(|scope| {
                let threads = clones.map(|clone| scope.spawn(|| goes_on(clone)));
                threads.map(|thread| thread.join().unwrap())
            });
            for clone in &clones {
                assert_eq!(clone.positions().next(), Some(0..5));
            }
        }
    }

    /// Branches and clones are taken before a pass and in the middle of one.
    #[test]
    fn branches_do_not_overwrite_each_other() {
        let pool = pool();
        let mut sequence = SequenceCache::new(&pool);
        sequence.reserve(3).unwrap();
        fill(&mut sequence, 3, 1.0);
        let mut branch = sequence.branch().unwrap();
        sequence.reserve(2).unwrap();
        let mut clone = sequence.clone();
        for (sequence, number) in [(&mut branch, 2.0), (&mut clone, 3.0), (&mut sequence, 4.0)] {
            sequence.reserve(2).unwrap();
            fill(sequence, 2, number);
        }
        for (sequence, number) in [(branch, 2.0), (clone, 3.0), (sequence, 4.0)] {
            assert_eq!(numbers(&sequence), [1.0, 1.0, 1.0, number, number]);
        }
        assert_eq!(pool.free_pages(), pool.pages());
    }
}
