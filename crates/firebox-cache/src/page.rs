use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use burn::tensor::{Bytes, DType, Device, Int, Tensor, TensorData};
use firebox_kernels::attend::Stored;

use crate::layout::{KvType, LayerLayout, Layout};
use crate::pool::{Ledger, Pool};
use crate::remembered::Remembered;

/// Positions of a page.
pub const PAGE: usize = 128;

/// Positions that a layer of a page has room for at least. A page is doubled as it fills: what conversations leave empty of
/// their last ones would otherwise be more than what they need.
const LEAST: usize = 16;

/// Keys and values of up to [`PAGE`] positions in all layers. Several sequences may read the same page; slots are
/// written once, by whoever has claimed them.
#[derive(Debug)]
pub(crate) struct Page {
    content: Mutex<Content>,
    pool: Pool,
}

#[derive(Debug)]
struct Content {
    room: Room,
    /// Slots that have been claimed.
    used: usize,
    /// Whether it is read by others than the sequences that know of each other.
    kept: bool,
}

/// The tensors of a page, layer by layer, each made when it is first used and larger when there is more to hold: a machine
/// takes its time to give memory that was never used, and most conversations end before their last page is full. There are
/// none for recurrent layers.
#[derive(Debug)]
pub(crate) struct Room {
    layers: Vec<Option<Remembered>>,
    /// Bytes of them.
    bytes: usize,
    /// Who is told of those.
    ledger: Option<Arc<dyn Ledger>>,
}

impl Room {
    pub fn new(layout: &Layout, ledger: Option<&Arc<dyn Ledger>>) -> Self {
        Self { layers: layout.layers.iter().map(|_| None).collect(), bytes: 0, ledger: ledger.cloned() }
    }

    /// With room for so many positions in it.
    pub fn furnished(positions: usize, layout: &Layout, ledger: Option<&Arc<dyn Ledger>>) -> Self {
        let mut room = Self::new(layout, ledger);
        for layer in 0..layout.layers.len() {
            room.layer(layer, positions, layout);
        }
        room
    }

    /// Bytes that it takes now.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// What holds a layer, with room for so many positions.
    fn layer(&mut self, layer: usize, positions: usize, layout: &Layout) -> Option<&mut Remembered> {
        let held = self.layers.get_mut(layer)?;
        let before = held.as_ref().map_or(0, Remembered::positions);
        if held.is_none() || before < positions {
            let positions = held_for(positions);
            let Layout { layers, kept, device } = layout;
            let mut larger = match layers[layer] {
                LayerLayout::Attention { kv_heads, head_dim } => {
                    let side = || empty(*kept, [kv_heads, positions, head_dim], device);
                    Remembered::Attention { keys: side(), values: side() }
                }
                LayerLayout::States { width } => {
                    Remembered::States(empty(KvType::F32, [1, positions, width], device))
                }
                LayerLayout::Recurrent => return None,
            };
            if let Some(held) = held {
                larger.assign(0, held.clone());
            }
            *held = Some(larger);
            let more = (positions - before) * layout.layer_bytes(layers[layer]);
            self.bytes += more;
            if let Some(ledger) = &self.ledger {
                ledger.filled(more);
            }
        }
        held.as_mut()
    }
}

/// Positions that a page has room for when so many are wanted of it.
fn held_for(positions: usize) -> usize {
    positions.next_power_of_two().clamp(LEAST, PAGE)
}

/// Positions that pages have room for in which a sequence of so many tokens lies.
pub fn positions_held(tokens: usize) -> usize {
    let rest = tokens % PAGE;
    tokens - rest + if rest == 0 { 0 } else { held_for(rest) }
}

impl Drop for Room {
    fn drop(&mut self) {
        if let Some(ledger) = &self.ledger {
            ledger.emptied(self.bytes);
        }
    }
}

fn empty(kept: KvType, shape: [usize; 3], device: &Device) -> Stored {
    match kept {
        KvType::F32 | KvType::F16 => {
            let count = shape.iter().product();
            // Of zeros that are handed over: to fill a tensor takes as much memory again, for a moment, and a
            // machine with virtual memory of its own is slow to give it.
            let (zeros, dtype) = match kept {
                KvType::F32 => (Bytes::from_elems(vec![0f32; count]), DType::F32),
                _ => (Bytes::from_elems(vec![0u16; count]), DType::F16),
            };
            let zeros = TensorData::from_bytes(zeros, shape, dtype);
            Stored::Float(Tensor::from_data(zeros, (device, dtype)))
        }
        KvType::Int8 => {
            let [kv_heads, positions, head_dim] = shape;
            let words = [kv_heads, positions, head_dim.div_ceil(4)];
            Stored::Bytes {
                words: Tensor::<3, Int>::zeros(words, (device, DType::I32)),
                scales: Tensor::zeros([kv_heads, positions], (device, DType::F32)),
            }
        }
    }
}

impl Page {
    pub fn new(room: Room, pool: Pool) -> Self {
        Self { content: Mutex::new(Content { room, used: 0, kept: false }), pool }
    }

    /// Bytes that it takes now.
    pub fn bytes(&self) -> usize {
        self.content().room.bytes()
    }

    /// Takes up to `count` slots from `from` on, as far as there are and unless somebody else has gone on from there.
    /// Returns how many.
    pub fn claim(&self, from: usize, count: usize) -> usize {
        let mut content = self.content();
        if content.used != from {
            return 0;
        }
        let taken = count.min(PAGE - from);
        content.used += taken;
        taken
    }

    /// Lets the slots from `from` on be claimed again, if nobody knows of the page but those who end there. That is asked where
    /// nobody can claim anything: whoever comes to know of it meanwhile claims what is free then.
    pub fn unclaim(&self, from: usize, nobody_else_knows: impl FnOnce() -> bool) {
        let mut content = self.content();
        if nobody_else_knows() {
            (content.used, content.kept) = (from, false);
        }
    }

    /// Whoever goes on in the middle of it goes on in a copy from now on.
    pub fn keep(&self) {
        self.content().kept = true;
    }

    /// Whether slots from `from` on can be claimed in the page itself: nobody has, and it is not kept for others.
    pub fn goes_on(&self, from: usize) -> bool {
        let content = self.content();
        !content.kept && content.used == from
    }

    /// Fills slots from `at` on.
    pub fn write(&self, layer: usize, at: usize, added: Remembered) {
        if let Some(held) = self.content().room.layer(layer, at + added.positions(), self.pool.layout()) {
            held.assign(at, added);
        }
    }

    /// Writes what another page has room for over the same slots: as a whole, which is several times as fast as in parts.
    pub fn copy(&self, other: &Self) {
        let (mut content, other) = (self.content(), other.content());
        for (layer, from) in other.room.layers.iter().enumerate() {
            if let Some(from) = from
                && let Some(to) = content.room.layer(layer, from.positions(), self.pool.layout())
            {
                to.assign(0, from.clone());
            }
        }
    }

    /// Replaces the keys of some slots.
    pub fn change_keys(&self, layer: usize, slots: &Range<usize>, change: impl FnOnce(Stored) -> Stored) {
        let mut content = self.content();
        let layout = self.pool.layout();
        if let Some(Remembered::Attention { keys, .. }) = content.room.layer(layer, slots.end, layout) {
            let changed = change(keys.part(slots.clone()));
            keys.assign(slots.start, changed);
        }
    }

    /// What some slots hold, where it lies.
    pub fn read(&self, layer: usize, slots: &Range<usize>) -> Option<Remembered> {
        Some(self.content().room.layer(layer, slots.end, self.pool.layout())?.part(slots.clone()))
    }

    /// A panic while the lock was held has left tensors whole: what does not fit is refused before any is written to.
    fn content(&self) -> MutexGuard<'_, Content> {
        self.content.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Page {
    fn drop(&mut self) {
        let content = self.content.get_mut().unwrap_or_else(PoisonError::into_inner);
        let nothing = Room { layers: Vec::new(), bytes: 0, ledger: None };
        self.pool.give(std::mem::replace(&mut content.room, nothing));
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    #[test]
    fn what_a_sequence_is_going_to_take_is_what_it_takes() {
        let layers = vec![LayerLayout::Attention { kv_heads: 1, head_dim: 4 }];
        let layout = Layout { layers, kept: KvType::F32, device: Device::flex() };
        for (tokens, held) in
            [(0, 0), (1, LEAST), (LEAST, LEAST), (17, 32), (PAGE, PAGE), (PAGE + 1, PAGE + LEAST)]
        {
            assert_eq!(positions_held(tokens), held, "{tokens}");
            let pages = (0..2).map(|page| tokens.saturating_sub(page * PAGE).min(PAGE));
            let rooms = pages
                .filter(|&positions| positions > 0)
                .map(|positions| Room::furnished(positions, &layout, None));
            assert_eq!(
                rooms.map(|room| room.bytes()).sum::<usize>(),
                held * layout.bytes_per_position(),
                "{tokens}"
            );
        }
    }

    #[test]
    fn a_layer_takes_memory_as_it_is_written_to() {
        let attention = LayerLayout::Attention { kv_heads: 1, head_dim: 4 };
        let layers = vec![attention, LayerLayout::Recurrent, attention];
        let pool = Pool::new(Layout { layers, kept: KvType::F32, device: Device::flex() });
        let made = |page: &Page| page.content().room.layers.iter().map(Option::is_some).collect::<Vec<_>>();
        let page = pool.take(1).unwrap();
        assert_eq!(made(&page), [false; 3]);
        let side = || Stored::Float(Tensor::ones([1, 2, 4], (&Device::flex(), DType::F32)));
        for layer in [1, 2] {
            page.write(layer, 3, Remembered::Attention { keys: side(), values: side() });
        }
        assert_eq!(made(&page), [false, false, true]);
        let room = |page: &Page| page.content().room.layers[2].as_ref().map(Remembered::positions);
        assert_eq!(room(&page), Some(LEAST));
        page.write(2, 70, Remembered::Attention { keys: side(), values: side() });
        assert_eq!(room(&page), Some(PAGE));
        let copy = pool.take(PAGE).unwrap();
        copy.copy(&page);
        assert_eq!(made(&copy), [false, false, true]);
        for slots in [2..4, 69..71] {
            let Some(Remembered::Attention { keys: Stored::Float(keys), .. }) = copy.read(2, &slots) else {
                panic!("it was written to");
            };
            assert_eq!(keys.try_into_vec_as::<f32>().unwrap(), [0.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0]);
        }

        drop((page, copy));
        assert_eq!((pool.pages(), pool.free_pages()), (2, 2));
        pool.reserve(3, PAGE);
        assert_eq!(made(&pool.take(PAGE).unwrap()), [true, false, true]);
    }

    #[test]
    fn pages_are_made_as_large_as_sequences_are_and_given_to_whom_they_suffice() {
        let layers = vec![LayerLayout::Attention { kv_heads: 1, head_dim: 4 }; 2];
        let layout = Layout { layers, kept: KvType::F16, device: Device::flex() };
        let position = layout.bytes_per_position();
        let pool = Pool::new(layout);
        pool.reserve(2, PAGE + 20);
        let bytes = |page: &Page| page.content().room.bytes / position;
        let taken = [1, 300, 40, 32].map(|positions| pool.take(positions).unwrap());
        assert_eq!(taken.each_ref().map(|page| bytes(page)), [32, PAGE, PAGE, 32]);
        assert_eq!(bytes(&pool.take(1).unwrap()), 0, "there were no more");
        drop(taken);
        assert_eq!(bytes(&pool.take(PAGE).unwrap()), PAGE);
        assert_eq!(pool.free_pages(), 5);
        pool.reserve(1, 3 * PAGE);
        assert_eq!(pool.free_pages(), 5, "there are as many, whatever they take");
    }

    /// Allows everything, and counts what pages have come to take.
    #[derive(Debug, Default)]
    struct Taken(AtomicUsize);

    impl Ledger for Taken {
        fn may_make(&self, _: usize) -> bool {
            true
        }
        fn has_room(&self, _: usize) -> bool {
            true
        }
        fn unmade(&self, _: usize) {}
        fn filled(&self, bytes: usize) {
            self.0.fetch_add(bytes, Ordering::Relaxed);
        }
        fn emptied(&self, bytes: usize) {
            self.0.fetch_sub(bytes, Ordering::Relaxed);
        }
    }

    #[test]
    fn a_page_tells_what_it_has_come_to_take() {
        let layers =
            vec![LayerLayout::Attention { kv_heads: 1, head_dim: 4 }, LayerLayout::States { width: 3 }];
        let layout = Layout { layers, kept: KvType::F16, device: Device::flex() };
        let (taken, all) = (Arc::new(Taken::default()), PAGE * layout.bytes_per_position());
        let pool = Pool::with_ledger(layout, taken.clone());
        let bytes = || taken.0.load(Ordering::Relaxed);
        let page = pool.take(1).unwrap();
        assert_eq!((pool.bytes(), bytes()), (all, 0));
        let side = || Stored::Float(Tensor::ones([1, 2, 4], (&Device::flex(), DType::F32)));
        for (at, expected) in [(3, LEAST), (9, LEAST), (70, PAGE)] {
            page.write(0, at, Remembered::Attention { keys: side(), values: side() });
            assert_eq!(bytes(), expected * 2 * 4 * 2);
        }
        let copy = pool.take(1).unwrap();
        copy.copy(&page);
        assert_eq!(bytes(), 2 * PAGE * 2 * 4 * 2);
        drop((page, copy));
        assert_eq!((pool.pages(), bytes()), (0, 0));
        pool.reserve(1, PAGE);
        assert_eq!(bytes(), all, "with all that there will ever be in it");
        pool.shrink();
        assert_eq!(bytes(), 0);
    }
}
