use std::sync::Arc;

use crate::error::CacheError;
use crate::page::PAGE;
use crate::run::{Run, Source};
use crate::sequence::SequenceCache;

impl SequenceCache {
    /// Whether a page would be free without it: one of which it is the only owner.
    pub fn has_own_page(&self) -> bool {
        let of_one_page = |together: &[Run]| match &together[0].source {
            Source::Page(page) => Arc::strong_count(page) == together.len(),
            Source::Mapped(_) => false,
        };
        Arc::strong_count(&self.runs) == 1 && self.runs.chunk_by(Run::lies_with).any(of_one_page)
    }

    /// A clone that goes on without waiting: a page that is not full is copied now. A mere clone copies it when it goes on,
    /// unless it is the first to do so. Either way attention reads what comes behind in the same spans, so that all say the same
    /// to the last bit.
    pub fn branch(&mut self) -> Result<Self, CacheError> {
        self.give_up_pass();
        self.free_slots();
        let mut branch = self.clone();
        let Some(last) = self.runs.last().filter(|last| last.end() == self.position) else {
            return Ok(branch);
        };
        let Source::Page(from) = &last.source else { return Ok(branch) };
        // Where nobody goes on in the page itself, each copies it when it goes on.
        if last.slots.end == PAGE || !from.goes_on(last.slots.end) {
            return Ok(branch);
        }
        branch.go_over(last, &self.copied_page(from, &last.slots)?);
        Ok(branch)
    }

    /// Gives up the slots behind the last tokens that are left from tokens taken back, or from a clone that went on and is
    /// gone, unless somebody else may have gone on in them. Clones that have not gone on share the runs.
    pub(super) fn free_slots(&self) {
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
    use crate::layout::{KvType, LayerLayout, Layout};
    use crate::pool::Pool;
    use crate::remembered::Remembered;
    use crate::sequence::LayerCache;

    fn pool() -> Pool {
        let layers = vec![LayerLayout::Attention { kv_heads: 1, head_dim: 2 }];
        Pool::new(Layout { layers, kept: KvType::F32, device: Device::flex() })
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
            Remembered::Attention { keys, .. } => keys.dequantize(2).narrow(2, 0, 1),
            Remembered::States(_) => unreachable!("an attention layer"),
        });
        keys.flat_map(|keys| keys.try_into_vec_as::<f32>().unwrap()).collect()
    }

    /// What it was going to say comes to the same spans as if it had been asked only once.
    #[test]
    fn a_clone_that_fails_leaves_its_place_to_the_next() {
        let pool = pool();
        let mut sequence = SequenceCache::new(&pool);
        sequence.reserve(3).unwrap();
        fill(&mut sequence, 3, 1.0);
        let mut failed = sequence.clone();
        failed.reserve(2).unwrap();
        fill(&mut failed, 2, 2.0);
        // As long as it is there, what it has said is its own, and others go on in copies.
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

    /// One of them goes on in the page, the other in a copy.
    #[test]
    fn clones_that_go_on_at_the_same_moment_lie_as_if_each_were_alone() {
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

    /// Whether they left before a pass or in the middle of one.
    #[test]
    fn branches_write_over_nothing_of_each_other() {
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
