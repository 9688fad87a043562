use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use firebox_store::{LoadedTensors, StoreError, TensorInfo, Tensors, Weight};

use crate::block::Block;
use crate::slot::Slot;

/// A block that is read in pieces: those that are in memory, and the block itself, once it is made of all of them.
#[derive(Debug)]
pub(crate) struct Pieces {
    /// Which parts of the model they are.
    parts: Range<usize>,
    /// None where there is one piece only: of that nothing has to stay once a device has the block.
    kept: Vec<Slot<LoadedTensors>>,
    block: Slot<Block>,
}

impl Pieces {
    pub fn new(parts: Range<usize>) -> Self {
        let several = if parts.len() > 1 { parts.len() } else { 0 };
        Self { kept: (0..several).map(|_| Slot::new()).collect(), parts, block: Slot::new() }
    }

    pub fn parts(&self) -> Range<usize> {
        self.parts.clone()
    }

    /// Whether it is in memory as a block only, not in pieces.
    pub fn is_one(&self) -> bool {
        self.kept.is_empty()
    }

    pub fn block(&self) -> Option<Arc<Block>> {
        self.block.get()
    }

    /// A piece of several that is in memory.
    pub fn piece(&self, part: usize) -> Option<Arc<LoadedTensors>> {
        self.kept.get(part - self.parts.start)?.get()
    }

    pub fn is_resident(&self, part: usize) -> bool {
        if self.is_one() { self.block.get().is_some() } else { self.piece(part).is_some() }
    }

    /// Parts of it that are not in memory.
    pub fn missing(&self) -> impl Iterator<Item = usize> {
        self.parts().filter(|part| !self.is_resident(*part))
    }

    pub fn put(&self, part: usize, piece: Arc<LoadedTensors>) {
        if let Some(slot) = self.kept.get(part - self.parts.start) {
            slot.set(Some(piece));
        }
    }

    /// Puts the block there, unless a piece of it has gone meanwhile.
    pub fn put_block(&self, block: Arc<Block>) {
        self.block.set(Some(block));
        // Whoever lets go of a piece lets go of the block after it: one of both sees what the other one did.
        if !self.is_one() && self.missing().next().is_some() {
            self.block.set(None);
        }
    }

    pub fn evict(&self, part: usize) {
        if let Some(slot) = self.kept.get(part - self.parts.start) {
            slot.set(None);
        }
        self.block.set(None);
    }
}

/// Tensors of several pieces.
#[derive(Debug)]
pub(crate) struct Together<'a>(pub &'a [Arc<LoadedTensors>]);

impl Together<'_> {
    fn with(&self, name: &str) -> Option<&LoadedTensors> {
        self.0.iter().map(|piece| &**piece).find(|piece| piece.info(name).is_some())
    }
}

impl Tensors for Together<'_> {
    fn path(&self) -> &Path {
        self.0.first().map_or(Path::new(""), |piece| piece.path())
    }

    fn info(&self, name: &str) -> Option<&TensorInfo> {
        self.with(name)?.info(name)
    }

    fn weight(&self, name: &str) -> Result<Weight, StoreError> {
        let missing = || StoreError::MissingTensor { model: self.path().to_owned(), tensor: name.to_owned() };
        self.with(name).ok_or_else(missing)?.weight(name)
    }

    fn names(&self) -> Box<dyn Iterator<Item = &str> + '_> {
        Box::new(self.0.iter().flat_map(|piece| piece.names()))
    }
}
