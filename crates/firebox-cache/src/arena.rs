//! Memory on accelerators that the pages of a pool share, so that a kernel reads many pages from few buffers.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use burn::tensor::{DType, Device};
use firebox_kernels::attention::KvTensor;

/// The most places of a chunk. A chunk has as many places as there are already, so that unused ones at most double the memory; more
/// chunks than a launch binds buffers cost another launch.
const MAX_PLACES: usize = 16;

/// Chunks of places for keys and values of pages, by layer and size.
#[derive(Debug, Default)]
pub(crate) struct Arena(Mutex<Chunks>);

#[derive(Debug, Default)]
struct Chunks {
    all: Vec<Chunk>,
    /// The id of the next chunk.
    next: u64,
}

/// Places in one memory.
#[derive(Debug)]
struct Chunk {
    id: u64,
    layer: usize,
    shape: [usize; 3],
    places: Vec<[KvTensor; 2]>,
    /// Indices of places that no page has.
    free: Vec<usize>,
}

/// A page's place, which returns to the arena when it is dropped. What was read from it before is done then: the work of a device that
/// follows overwrites it.
#[derive(Debug)]
pub(crate) struct Place {
    arena: Arc<Arena>,
    chunk: u64,
    index: usize,
}

impl Arena {
    /// Takes a place for keys and values of this shape in a layer. Returns `None` on devices whose tensors do not share memory.
    pub fn take(
        self: &Arc<Self>,
        layer: usize,
        shape: [usize; 3],
        device: &Device,
        dtype: DType,
    ) -> Option<(Place, [KvTensor; 2])> {
        let mut chunks = self.chunks();
        let is_alike = |chunk: &Chunk| chunk.layer == layer && chunk.shape == shape;
        let has_place = |chunk: &&mut Chunk| is_alike(chunk) && !chunk.free.is_empty();
        if chunks.all.iter_mut().find(has_place).is_none() {
            let held: usize =
                chunks.all.iter().filter(|chunk| is_alike(chunk)).map(|chunk| chunk.places.len()).sum();
            let places = KvTensor::pairs(shape, held.clamp(1, MAX_PLACES), device, dtype)?;
            let (id, free) = (chunks.next, (0..places.len()).rev().collect());
            chunks.next += 1;
            chunks.all.push(Chunk { id, layer, shape, places, free });
        }
        let chunk = chunks.all.iter_mut().find(has_place)?;
        let index = chunk.free.pop()?;
        let place = Place { arena: self.clone(), chunk: chunk.id, index };
        Some((place, chunk.places[index].clone()))
    }

    /// Puts a place back. A chunk without pages is freed.
    fn put(&self, id: u64, index: usize) {
        let mut chunks = self.chunks();
        chunks.all.retain_mut(|chunk| {
            if chunk.id == id {
                chunk.free.push(index);
            }
            chunk.free.len() < chunk.places.len()
        });
    }

    fn chunks(&self) -> MutexGuard<'_, Chunks> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.arena.put(self.chunk, self.index);
    }
}
