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

/// The tensors of a page, layer by layer: nothing for recurrent ones.
#[derive(Debug, Default)]
pub(crate) struct Room(Vec<Option<Remembered>>);

impl Room {
    pub fn new(layout: &Layout) -> Self {
        let Layout { layers, kept, device } = layout;
        let room = |layer: &LayerLayout| match *layer {
            LayerLayout::Attention { kv_heads, head_dim } => {
                let side = || empty(*kept, kv_heads, head_dim, device);
                Some(Remembered::Attention { keys: side(), values: side() })
            }
            LayerLayout::States { width } => Some(Remembered::States(empty(KvType::F32, 1, width, device))),
            LayerLayout::Recurrent => None,
        };
        Self(layers.iter().map(room).collect())
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
        if let Some(Some(held)) = self.content().room.0.get_mut(layer) {
            held.assign(at, added);
        }
    }

    /// Writes over all slots what they hold in another page: as a whole, which is several times as fast as in parts.
    pub fn copy(&self, other: &Self) {
        let (mut content, other) = (self.content(), other.content());
        for (to, from) in content.room.0.iter_mut().zip(&other.room.0) {
            if let (Some(to), Some(from)) = (to, from) {
                to.assign(0, from.clone());
            }
        }
    }

    /// Replaces the keys of some slots.
    pub fn change_keys(&self, layer: usize, slots: &Range<usize>, change: impl FnOnce(Stored) -> Stored) {
        if let Some(Some(Remembered::Attention { keys, .. })) = self.content().room.0.get_mut(layer) {
            let changed = change(keys.part(slots.clone()));
            keys.assign(slots.start, changed);
        }
    }

    /// What some slots hold, where it lies.
    pub fn read(&self, layer: usize, slots: &Range<usize>) -> Option<Remembered> {
        Some(self.content().room.0.get(layer)?.as_ref()?.part(slots.clone()))
    }

    /// A panic while the lock was held has left tensors whole: they are values that are replaced.
    fn content(&self) -> MutexGuard<'_, Content> {
        self.content.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Page {
    fn drop(&mut self) {
        let content = self.content.get_mut().unwrap_or_else(PoisonError::into_inner);
        self.pool.give(std::mem::take(&mut content.room));
    }
}
