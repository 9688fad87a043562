//! Pages: keys and values of up to 128 positions in all layers.

use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use firebox_kernels::attention::KvTensor;

use crate::error::CacheError;
use crate::layer_kv::LayerKv;
use crate::page_buffers::{PAGE_TOKENS, PageBuffers, is_accelerator};
use crate::pool::PagePool;

/// Keys and values of up to [`PAGE_TOKENS`] positions in all layers. Several sequences may read a page; every slot is
/// written once, by the sequence that claimed it.
#[derive(Debug)]
pub(crate) struct Page {
    content: Mutex<Content>,
    pool: PagePool,
}

#[derive(Debug)]
struct Content {
    buffers: PageBuffers,
    /// The number of claimed slots.
    used: usize,
    /// Whether the page is shared with readers outside the family of clones, so that sequences continue in a copy.
    frozen: bool,
    /// The number of writes and reallocations, by which a [page table](crate::PageTable) tells that the page has changed.
    writes: u64,
}

impl Page {
    fn new(buffers: PageBuffers, pool: PagePool) -> Self {
        Self { content: Mutex::new(Content { buffers, used: 0, frozen: false, writes: 0 }), pool }
    }

    /// Bytes that are allocated now.
    pub fn bytes(&self) -> usize {
        self.content().buffers.bytes()
    }

    /// Claims up to `count` slots from `from` on, unless another sequence has continued from there. Returns the number of
    /// claimed slots.
    pub fn claim(&self, from: usize, count: usize) -> usize {
        let mut content = self.content();
        if content.used != from {
            return 0;
        }
        let taken = count.min(PAGE_TOKENS - from);
        content.used += taken;
        taken
    }

    /// Frees the slots from `from` on if `is_unshared` confirms that only sequences ending there hold the page. The check runs
    /// under the lock, while no slot can be claimed; later holders claim what is free then.
    pub fn unclaim(&self, from: usize, is_unshared: impl FnOnce() -> bool) {
        let mut content = self.content();
        if is_unshared() {
            (content.used, content.frozen) = (from, false);
        }
    }

    /// Freezes the page: sequences that would continue in the middle of it continue in a copy.
    pub fn freeze(&self) {
        self.content().frozen = true;
    }

    /// Returns whether slots from `from` on can be claimed in place: none is claimed, and the page is not frozen.
    pub fn can_append(&self, from: usize) -> bool {
        let content = self.content();
        !content.frozen && content.used == from
    }

    /// The number of writes so far.
    pub fn writes(&self) -> u64 {
        self.content().writes
    }

    /// Allocates room for all positions in every layer that holds any, so that later writes find their buffers where they are.
    pub fn grow(&self) {
        let mut content = self.content();
        content.writes += 1;
        for layer in 0..content.buffers.layers.len() {
            content.buffers.layer(layer, PAGE_TOKENS, self.pool.layout());
        }
    }

    /// Writes the slots from `at` on.
    pub fn write(&self, layer: usize, at: usize, added: LayerKv) {
        let mut content = self.content();
        content.writes += 1;
        if let Some(held) = content.buffers.layer(layer, at + added.positions(), self.pool.layout()) {
            held.assign(at, added);
        }
    }

    /// Lets `write` fill `count` slots of keys and values from `at` on.
    pub fn write_with(&self, layer: usize, at: usize, count: usize, write: impl FnOnce([&mut KvTensor; 2])) {
        let mut content = self.content();
        content.writes += 1;
        if let Some(LayerKv::Attention { keys, values }) =
            content.buffers.layer(layer, at + count, self.pool.layout())
        {
            write([keys, values]);
        }
    }

    /// Lets `write` fill one slot of hidden states.
    pub fn write_states_with(&self, layer: usize, at: usize, write: impl FnOnce(&mut KvTensor)) {
        let mut content = self.content();
        content.writes += 1;
        if let Some(LayerKv::HiddenStates(states)) = content.buffers.layer(layer, at + 1, self.pool.layout())
        {
            write(states);
        }
    }

    /// Copies all buffers of another page as a whole, which is several times as fast as copying slots.
    pub fn copy(&self, other: &Self) {
        let (mut content, other) = (self.content(), other.content());
        content.writes += 1;
        for (layer, from) in other.buffers.layers.iter().enumerate() {
            if let Some(from) = from
                && let Some(to) = content.buffers.layer(layer, from.positions(), self.pool.layout())
            {
                to.assign(0, from.clone());
            }
        }
    }

    /// Replaces the keys of some slots. In a layer of latents, replaces the rows, which serve as both.
    pub fn change_keys(&self, layer: usize, slots: &Range<usize>, change: impl FnOnce(KvTensor) -> KvTensor) {
        let mut content = self.content();
        content.writes += 1;
        let layout = self.pool.layout();
        match content.buffers.layer(layer, slots.end, layout) {
            Some(LayerKv::Attention { keys, values }) => {
                let changed = change(keys.part(slots.clone()));
                if matches!(changed, KvTensor::Float(_)) && is_accelerator(&layout.device) {
                    // In place, so that the page goes on sharing memory with others.
                    let unchanged = values.part(slots.clone());
                    KvTensor::overwrite_both([keys, values], slots.start, [changed, unchanged]);
                } else {
                    keys.assign(slots.start, changed);
                }
            }
            Some(LayerKv::Latents(rows)) => rows.assign(slots.start, change(rows.part(slots.clone()))),
            Some(LayerKv::HiddenStates(_)) | None => {}
        }
    }

    /// A view of what some slots hold.
    pub fn read(&self, layer: usize, slots: &Range<usize>) -> Option<LayerKv> {
        let mut content = self.content();
        let bytes = content.buffers.bytes();
        let view = content.buffers.layer(layer, slots.end, self.pool.layout())?.part(slots.clone());
        content.writes += u64::from(content.buffers.bytes() != bytes);
        Some(view)
    }

    /// A panic under the lock leaves the tensors intact: mismatches are refused before anything is written.
    fn content(&self) -> MutexGuard<'_, Content> {
        self.content.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl PagePool {
    /// Takes a page that will first hold `positions`.
    pub(crate) fn take(&self, positions: usize) -> Result<Arc<Page>, CacheError> {
        Ok(Arc::new(Page::new(self.take_buffers(positions)?, self.clone())))
    }

    /// Takes a page if one is available without evicting anything.
    pub(crate) fn take_idle(&self, positions: usize) -> Option<Arc<Page>> {
        Some(Arc::new(Page::new(self.take_idle_buffers(positions)?, self.clone())))
    }
}

impl Drop for Page {
    fn drop(&mut self) {
        let content = self.content.get_mut().unwrap_or_else(PoisonError::into_inner);
        self.pool.release(std::mem::take(&mut content.buffers));
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use burn::tensor::{DType, Device, Tensor};

    use super::*;
    use crate::layout::{KvType, LayerLayout, Layout};
    use crate::ledger::PageLedger;
    use crate::page_buffers::MIN_BUFFER_POSITIONS;

    #[test]
    fn layer_buffers_are_allocated_and_grow_on_write() {
        let attention = LayerLayout::Attention { kv_heads: 1, head_dim: 4 };
        let layers = vec![attention, LayerLayout::Recurrent, attention];
        let pool = PagePool::new(Layout { layers, kv_dtype: KvType::F32, device: Device::flex() });
        let made =
            |page: &Page| page.content().buffers.layers.iter().map(Option::is_some).collect::<Vec<_>>();
        let page = pool.take(1).unwrap();
        assert_eq!(made(&page), [false; 3]);
        let side = || KvTensor::Float(Tensor::ones([1, 2, 4], (&Device::flex(), DType::F32)));
        for layer in [1, 2] {
            page.write(layer, 3, LayerKv::Attention { keys: side(), values: side() });
        }
        assert_eq!(made(&page), [false, false, true]);
        let buffers = |page: &Page| page.content().buffers.layers[2].as_ref().map(LayerKv::positions);
        assert_eq!(buffers(&page), Some(MIN_BUFFER_POSITIONS));
        page.write(2, 70, LayerKv::Attention { keys: side(), values: side() });
        assert_eq!(buffers(&page), Some(PAGE_TOKENS));
        let copy = pool.take(PAGE_TOKENS).unwrap();
        copy.copy(&page);
        assert_eq!(made(&copy), [false, false, true]);
        for slots in [2..4, 69..71] {
            let Some(LayerKv::Attention { keys: KvTensor::Float(keys), .. }) = copy.read(2, &slots) else {
                panic!("the layer was written to");
            };
            assert_eq!(keys.try_into_vec_as::<f32>().unwrap(), [0.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0]);
        }

        drop((page, copy));
        assert_eq!((pool.pages(), pool.free_pages()), (2, 2));
        pool.reserve(3, PAGE_TOKENS);
        assert_eq!(made(&pool.take(PAGE_TOKENS).unwrap()), [true, false, true]);
    }

    #[test]
    fn reserved_pages_match_sequence_lengths_and_the_smallest_sufficient_is_taken() {
        let layers = vec![LayerLayout::Attention { kv_heads: 1, head_dim: 4 }; 2];
        let layout = Layout { layers, kv_dtype: KvType::F16, device: Device::flex() };
        let position = layout.bytes_per_position();
        let pool = PagePool::new(layout);
        pool.reserve(2, PAGE_TOKENS + 20);
        let bytes = |page: &Page| page.content().buffers.bytes() / position;
        let taken = [1, 300, 40, 32].map(|positions| pool.take(positions).unwrap());
        assert_eq!(taken.each_ref().map(|page| bytes(page)), [32, PAGE_TOKENS, PAGE_TOKENS, 32]);
        assert_eq!(bytes(&pool.take(1).unwrap()), 0, "no reserved page is left");
        drop(taken);
        assert_eq!(bytes(&pool.take(PAGE_TOKENS).unwrap()), PAGE_TOKENS);
        assert_eq!(pool.free_pages(), 5);
        pool.reserve(1, 3 * PAGE_TOKENS);
        assert_eq!(pool.free_pages(), 5, "free pages count, whatever their size");
    }

    /// Allows every page and counts allocated bytes.
    #[derive(Debug, Default)]
    struct Taken(AtomicUsize);

    impl PageLedger for Taken {
        fn may_allocate(&self, _: usize) -> bool {
            true
        }
        fn has_headroom(&self, _: usize) -> bool {
            true
        }
        fn freed(&self, _: usize) {}
        fn grew(&self, bytes: usize) {
            self.0.fetch_add(bytes, Ordering::Relaxed);
        }
        fn shrank(&self, bytes: usize) {
            self.0.fetch_sub(bytes, Ordering::Relaxed);
        }
    }

    #[test]
    fn pages_report_allocated_bytes_to_the_ledger() {
        let layers =
            vec![LayerLayout::Attention { kv_heads: 1, head_dim: 4 }, LayerLayout::HiddenStates { width: 3 }];
        let layout = Layout { layers, kv_dtype: KvType::F16, device: Device::flex() };
        let (taken, all) = (Arc::new(Taken::default()), PAGE_TOKENS * layout.bytes_per_position());
        let pool = PagePool::with_ledger(layout, taken.clone());
        let bytes = || taken.0.load(Ordering::Relaxed);
        let page = pool.take(1).unwrap();
        assert_eq!((pool.bytes(), bytes()), (all, 0));
        let side = || KvTensor::Float(Tensor::ones([1, 2, 4], (&Device::flex(), DType::F32)));
        for (at, expected) in [(3, MIN_BUFFER_POSITIONS), (9, MIN_BUFFER_POSITIONS), (70, PAGE_TOKENS)] {
            page.write(0, at, LayerKv::Attention { keys: side(), values: side() });
            assert_eq!(bytes(), expected * 2 * 4 * 2);
        }
        let copy = pool.take(1).unwrap();
        copy.copy(&page);
        assert_eq!(bytes(), 2 * PAGE_TOKENS * 2 * 4 * 2);
        drop((page, copy));
        assert_eq!((pool.pages(), bytes()), (0, 0));
        pool.reserve(1, PAGE_TOKENS);
        assert_eq!(bytes(), all, "a reserved page is allocated in full");
        pool.shrink();
        assert_eq!(bytes(), 0);
    }
}
