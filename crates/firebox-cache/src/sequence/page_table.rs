//! Where a sequence's positions are stored, for steps that are recorded with their buffers.

use std::ops::Range;
use std::sync::{Arc, Weak};

use super::SequenceCache;
use crate::kv_run::{KvRun, MappedKv, Source};
use crate::page::Page;
use crate::page_buffers::PAGE_TOKENS;

/// The pages and slots of a sequence at one moment. It keeps no page in use.
#[derive(Debug)]
pub struct PageTable(Vec<Entry>);

#[derive(Debug)]
struct Entry {
    source: WeakSource,
    slots: Range<usize>,
    position: usize,
    hidden: bool,
}

#[derive(Debug)]
enum WeakSource {
    /// A page, and how often it had been written to.
    Page(Weak<Page>, u64),
    Mapped(Weak<MappedKv>),
}

impl SequenceCache {
    /// Returns where the positions are stored, those reserved for a pass included. Returns `None` if later tokens attend to only
    /// some positions of a page, or unless the last positions are those of a page from its first slot on.
    pub fn page_table(&self) -> Option<PageTable> {
        let in_page =
            self.runs.last().is_some_and(|run| matches!(run.source, Source::Page(_)) && run.slots.start == 0);
        if !in_page || self.runs.iter().any(|run| run.visible.is_some()) {
            return None;
        }
        Some(PageTable(self.runs.iter().map(Entry::new).collect()))
    }

    /// Allocates the last page for as many positions as a page holds, so that the pass and later ones write to the same buffers.
    pub fn grow_last_page(&self) {
        if let Some(KvRun { source: Source::Page(page), .. }) = self.runs.last() {
            page.grow();
        }
    }
}

impl PageTable {
    /// Returns whether nothing has changed in a sequence but that `steps` more positions of the last page are in use.
    pub fn leads_to(&self, sequence: &SequenceCache, steps: usize) -> bool {
        let Self(entries) = self;
        let last = entries.len() - 1;
        entries.len() == sequence.runs.len()
            && entries
                .iter()
                .zip(sequence.runs.iter())
                .enumerate()
                .all(|(index, (entry, run))| entry.leads_to(run, if index == last { steps } else { 0 }))
    }

    /// Returns by how many positions the last page of a sequence exceeds that of the table.
    pub fn steps_to(&self, sequence: &SequenceCache) -> Option<usize> {
        sequence.runs.last()?.slots.end.checked_sub(self.0.last()?.slots.end)
    }

    /// The number of steps after which the last page is full.
    pub fn steps_left(&self) -> usize {
        self.0.last().map_or(0, |last| PAGE_TOKENS - last.slots.end)
    }
}

impl Entry {
    fn new(run: &KvRun) -> Self {
        let source = match &run.source {
            Source::Page(page) => WeakSource::Page(Arc::downgrade(page), page.writes()),
            Source::Mapped(mapped) => WeakSource::Mapped(Arc::downgrade(mapped)),
        };
        Self { source, slots: run.slots.clone(), position: run.position, hidden: run.hidden }
    }

    fn leads_to(&self, run: &KvRun, steps: usize) -> bool {
        // While there is a weak reference, no other page is allocated at the same place.
        let same = match (&self.source, &run.source) {
            (WeakSource::Page(held, writes), Source::Page(page)) => {
                held.as_ptr() == Arc::as_ptr(page) && *writes == page.writes()
            }
            (WeakSource::Mapped(held), Source::Mapped(mapped)) => held.as_ptr() == Arc::as_ptr(mapped),
            _ => false,
        };
        same && self.slots.start == run.slots.start
            && self.slots.end + steps == run.slots.end
            && (self.position, self.hidden) == (run.position, run.hidden)
            && run.visible.is_none()
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::{DType, Device, Tensor};
    use firebox_kernels::attention::KvTensor;

    use crate::layer_kv::LayerKv;
    use crate::{KvType, LayerLayout, Layout, PagePool, SequenceCache};

    fn append(cache: &mut SequenceCache, tokens: usize) {
        let side = || Tensor::ones([1, tokens, 4], (&Device::flex(), DType::F32));
        cache.reserve(tokens).unwrap();
        cache.write_pass(0, |part| LayerKv::Attention {
            keys: KvTensor::Float(side()).part(part.clone()),
            values: KvTensor::Float(side()).part(part),
        });
        cache.advance();
    }

    fn sequence() -> SequenceCache {
        let layers = vec![LayerLayout::Attention { kv_heads: 1, head_dim: 4 }];
        let layout = Layout { layers, kv_dtype: KvType::F32, device: Device::flex() };
        let mut cache = SequenceCache::new(&PagePool::new(layout));
        append(&mut cache, 130);
        cache.grow_last_page();
        cache
    }

    /// Takes a step as a replay does: the slot is reserved, and no write is noticed.
    fn step(cache: &mut SequenceCache) {
        cache.reserve(1).unwrap();
        cache.advance();
    }

    #[test]
    fn replayed_steps_lead_on_to_the_end_of_the_page() {
        let mut cache = sequence();
        let table = cache.page_table().unwrap();
        assert_eq!(table.steps_left(), 126);
        for steps in 0..126 {
            assert!(table.leads_to(&cache, steps) && !table.leads_to(&cache, steps + 1), "{steps}");
            step(&mut cache);
        }
        assert!(table.leads_to(&cache, 126));
        step(&mut cache);
        assert!(!table.leads_to(&cache, 127), "another page");
    }

    #[test]
    fn whatever_moves_or_rewrites_positions_is_noticed() {
        type Change = fn(&mut SequenceCache);
        let changes: [(&str, Change); 6] = [
            ("a write", |cache| append(cache, 1)),
            ("an eviction", |cache| {
                cache.evict(3..5);
                step(cache);
                step(cache);
                step(cache);
            }),
            ("a rewind and other tokens", |cache| {
                cache.rewind(129);
                append(cache, 2);
            }),
            ("a grown page", |cache| {
                cache.grow_last_page();
                step(cache);
            }),
            ("a clone that went on first", |cache| {
                append(&mut cache.clone(), 1);
                append(cache, 1);
            }),
            ("a fresh sequence", |cache| {
                cache.clear();
                append(cache, 131);
            }),
        ];
        for (name, change) in changes {
            let mut cache = sequence();
            let table = cache.page_table().unwrap();
            change(&mut cache);
            assert_eq!(cache.len(), 131, "{name}");
            assert!(!table.leads_to(&cache, 1), "{name}");
        }
        let mut cache = sequence();
        let table = cache.page_table().unwrap();
        cache.rewind(130);
        step(&mut cache);
        assert!(table.leads_to(&cache, 1), "nothing has changed");
    }
}
