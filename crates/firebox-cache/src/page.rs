use std::ops::Range;
use std::sync::{Mutex, MutexGuard, PoisonError};

use burn::tensor::{Bytes, DType, Int, Tensor, TensorData};
use firebox_kernels::attend::Stored;

use crate::layout::{KvType, LayerLayout, Layout};
use crate::pool::Pool;

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
}

/// The tensors of a page, layer by layer.
#[derive(Debug, Default)]
pub(crate) struct Room(Vec<Option<Sides>>);

#[derive(Debug)]
struct Sides {
    keys: Stored,
    values: Stored,
}

impl Room {
    pub fn new(layout: &Layout) -> Self {
        let Layout { layers, kept, device } = layout;
        let side = |kv_heads, head_dim: usize| match kept {
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
        };
        let sides = |layer: &LayerLayout| match *layer {
            LayerLayout::Attention { kv_heads, head_dim } => {
                Some(Sides { keys: side(kv_heads, head_dim), values: side(kv_heads, head_dim) })
            }
            LayerLayout::Recurrent => None,
        };
        Self(layers.iter().map(sides).collect())
    }
}

impl Page {
    pub fn new(room: Room, pool: Pool) -> Self {
        Self { content: Mutex::new(Content { room, used: 0 }), pool }
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
        self.content().used = from;
    }

    /// Fills slots from `at` on.
    pub fn write(&self, layer: usize, at: usize, keys: Stored, values: Stored) {
        if let Some(Some(sides)) = self.content().room.0.get_mut(layer) {
            sides.keys.assign(at, keys);
            sides.values.assign(at, values);
        }
    }

    /// Writes over all slots what they hold in another page: as a whole, which is several times as fast as in parts.
    pub fn copy(&self, other: &Self) {
        let (mut content, other) = (self.content(), other.content());
        for (to, from) in content.room.0.iter_mut().zip(&other.room.0) {
            if let (Some(to), Some(from)) = (to, from) {
                to.keys.assign(0, from.keys.clone());
                to.values.assign(0, from.values.clone());
            }
        }
    }

    /// Replaces the keys of some slots.
    pub fn change_keys(&self, layer: usize, slots: &Range<usize>, change: impl FnOnce(Stored) -> Stored) {
        if let Some(Some(sides)) = self.content().room.0.get_mut(layer) {
            let changed = change(sides.keys.part(slots.clone()));
            sides.keys.assign(slots.start, changed);
        }
    }

    /// Keys and values of some slots, where they lie.
    pub fn read(&self, layer: usize, slots: &Range<usize>) -> Option<(Stored, Stored)> {
        let content = self.content();
        let sides = content.room.0.get(layer)?.as_ref()?;
        Some((sides.keys.part(slots.clone()), sides.values.part(slots.clone())))
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
