use std::ops::Range;
use std::sync::{Mutex, MutexGuard, PoisonError};

use burn::tensor::{Bytes, DType, Device, Int, Tensor, TensorData};
use firebox_kernels::attend::Stored;

use crate::layout::{KvType, LayerLayout, Layout};
use crate::pool::Pool;
use crate::remembered::Remembered;

/// Positions of a page.
pub const PAGE: usize = 128;

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

/// The tensors of a page, layer by layer, each made when it is first used: a machine takes its time to
/// give memory that was never used, and whoever shares it should not wait for all layers at once. There are none for
/// recurrent ones.
#[derive(Debug)]
pub(crate) struct Room(Vec<Option<Remembered>>);

impl Room {
    pub fn new(layout: &Layout) -> Self {
        Self(layout.layers.iter().map(|_| None).collect())
    }

    /// With all that there will ever be in it.
    pub fn furnished(layout: &Layout) -> Self {
        let mut room = Self::new(layout);
        for layer in 0..layout.layers.len() {
            room.layer(layer, layout);
        }
        room
    }

    fn layer(&mut self, layer: usize, layout: &Layout) -> Option<&mut Remembered> {
        let held = self.0.get_mut(layer)?;
        if held.is_none() {
            let Layout { layers, kept, device } = layout;
            *held = match layers[layer] {
                LayerLayout::Attention { kv_heads, head_dim } => {
                    let side = || empty(*kept, kv_heads, head_dim, device);
                    Some(Remembered::Attention { keys: side(), values: side() })
                }
                LayerLayout::States { width } => {
                    Some(Remembered::States(empty(KvType::F32, 1, width, device)))
                }
                LayerLayout::Recurrent => None,
            };
        }
        held.as_mut()
    }
}

fn empty(kept: KvType, kv_heads: usize, head_dim: usize, device: &Device) -> Stored {
    match kept {
        KvType::F32 | KvType::F16 => {
            let shape = [kv_heads, PAGE, head_dim];
            let count = kv_heads * PAGE * head_dim;
            // Of zeros that are handed over: to fill a tensor takes as much memory again, for a moment, and a
            // machine with virtual memory of its own is slow to give it.
            let (zeros, dtype) = match kept {
                KvType::F32 => (Bytes::from_elems(vec![0f32; count]), DType::F32),
                _ => (Bytes::from_elems(vec![0u16; count]), DType::F16),
            };
            let zeros = TensorData::from_bytes(zeros, shape, dtype);
            Stored::Float(Tensor::from_data(zeros, (device, dtype)))
        }
        KvType::Int8 => Stored::Bytes {
            words: Tensor::<3, Int>::zeros([kv_heads, PAGE, head_dim.div_ceil(4)], (device, DType::I32)),
            scales: Tensor::zeros([kv_heads, PAGE], (device, DType::F32)),
        },
    }
}

impl Page {
    pub fn new(room: Room, pool: Pool) -> Self {
        Self { content: Mutex::new(Content { room, used: 0, kept: false }), pool }
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

    /// Whether nobody has claimed the slots from `from` on.
    pub fn is_free(&self, from: usize) -> bool {
        self.content().used == from
    }

    /// Lets the slots from `from` on be claimed again. The caller is the only one who knows of the page.
    pub fn unclaim(&self, from: usize) {
        let mut content = self.content();
        (content.used, content.kept) = (from, false);
    }

    /// Whoever goes on in the middle of it goes on in a copy from now on.
    pub fn keep(&self) {
        self.content().kept = true;
    }

    /// Whether that is so.
    pub fn is_kept(&self) -> bool {
        self.content().kept
    }

    /// Fills slots from `at` on.
    pub fn write(&self, layer: usize, at: usize, added: Remembered) {
        if let Some(held) = self.content().room.layer(layer, self.pool.layout()) {
            held.assign(at, added);
        }
    }

    /// Writes over all slots what they hold in another page: as a whole, which is several times as fast as in parts.
    pub fn copy(&self, other: &Self) {
        let (mut content, other) = (self.content(), other.content());
        for (layer, from) in other.room.0.iter().enumerate() {
            if let Some(from) = from
                && let Some(to) = content.room.layer(layer, self.pool.layout())
            {
                to.assign(0, from.clone());
            }
        }
    }

    /// Replaces the keys of some slots.
    pub fn change_keys(&self, layer: usize, slots: &Range<usize>, change: impl FnOnce(Stored) -> Stored) {
        let mut content = self.content();
        if let Some(Remembered::Attention { keys, .. }) = content.room.layer(layer, self.pool.layout()) {
            let changed = change(keys.part(slots.clone()));
            keys.assign(slots.start, changed);
        }
    }

    /// What some slots hold, where it lies.
    pub fn read(&self, layer: usize, slots: &Range<usize>) -> Option<Remembered> {
        Some(self.content().room.layer(layer, self.pool.layout())?.part(slots.clone()))
    }

    /// A panic while the lock was held has left tensors whole: they are values that are replaced.
    fn content(&self) -> MutexGuard<'_, Content> {
        self.content.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Page {
    fn drop(&mut self) {
        let content = self.content.get_mut().unwrap_or_else(PoisonError::into_inner);
        self.pool.give(std::mem::replace(&mut content.room, Room(Vec::new())));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_layer_takes_memory_when_it_is_written_to() {
        let attention = LayerLayout::Attention { kv_heads: 1, head_dim: 4 };
        let layers = vec![attention, LayerLayout::Recurrent, attention];
        let pool = Pool::new(Layout { layers, kept: KvType::F32, device: Device::flex() });
        let made = |page: &Page| page.content().room.0.iter().map(Option::is_some).collect::<Vec<_>>();
        let page = pool.take().unwrap();
        assert_eq!(made(&page), [false; 3]);
        let side = || Stored::Float(Tensor::ones([1, 2, 4], (&Device::flex(), DType::F32)));
        for layer in [1, 2] {
            page.write(layer, 3, Remembered::Attention { keys: side(), values: side() });
        }
        assert_eq!(made(&page), [false, false, true]);
        let copy = pool.take().unwrap();
        copy.copy(&page);
        assert_eq!(made(&copy), [false, false, true]);
        let Some(Remembered::Attention { keys: Stored::Float(keys), .. }) = copy.read(2, &(2..4)) else {
            panic!("it was written to");
        };
        assert_eq!(keys.try_into_vec_as::<f32>().unwrap(), [0.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0]);

        drop((page, copy));
        assert_eq!((pool.pages(), pool.free_pages()), (2, 2));
        pool.reserve(3);
        assert_eq!(made(&pool.take().unwrap()), [true, false, true]);
    }
}
