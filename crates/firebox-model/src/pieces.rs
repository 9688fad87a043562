//! A block that is read in pieces.

use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use firebox_store::{LoadedTensors, StoreError, TensorInfo, Tensors, Weight};

use crate::block::Block;
use crate::slot::Slot;

/// The resident pieces of a block, and the block itself once all of them are resident.
#[derive(Debug)]
pub(crate) struct Pieces {
    /// The model's parts that the pieces are.
    parts: Range<usize>,
    /// Empty where there is one piece: once a device has the block, its bytes need not stay.
    pieces: Vec<Slot<LoadedTensors>>,
    block: Slot<Block>,
}

impl Pieces {
    pub fn new(parts: Range<usize>) -> Self {
        let several = if parts.len() > 1 { parts.len() } else { 0 };
        Self { pieces: (0..several).map(|_| Slot::new()).collect(), parts, block: Slot::new() }
    }

    pub fn parts(&self) -> Range<usize> {
        self.parts.clone()
    }

    /// Whether there is one piece, which is resident as a block.
    pub fn is_one(&self) -> bool {
        self.pieces.is_empty()
    }

    pub fn block(&self) -> Option<Arc<Block>> {
        self.block.get()
    }

    /// A resident piece of several.
    pub fn piece(&self, part: usize) -> Option<Arc<LoadedTensors>> {
        self.pieces.get(part - self.parts.start)?.get()
    }

    pub fn is_resident(&self, part: usize) -> bool {
        if self.is_one() { self.block.get().is_some() } else { self.piece(part).is_some() }
    }

    /// Parts that are not resident.
    pub fn missing(&self) -> impl Iterator<Item = usize> {
        self.parts().filter(|part| !self.is_resident(*part))
    }

    pub fn put(&self, part: usize, piece: Arc<LoadedTensors>) {
        if let Some(slot) = self.pieces.get(part - self.parts.start) {
            slot.set(Some(piece));
        }
    }

    /// Stores the block, unless a piece was evicted meanwhile.
    pub fn put_block(&self, block: Arc<Block>) {
        self.block.set(Some(block));
        // Eviction removes the piece before the block, so one of the two threads sees the other's change.
        if !self.is_one() && self.missing().next().is_some() {
            self.block.set(None);
        }
    }

    pub fn evict(&self, part: usize) {
        if let Some(slot) = self.pieces.get(part - self.parts.start) {
            slot.set(None);
        }
        self.block.set(None);
    }
}

/// The tensors of several pieces.
#[derive(Debug)]
pub(crate) struct JoinedPieces<'a>(pub &'a [Arc<LoadedTensors>]);

impl JoinedPieces<'_> {
    fn with(&self, name: &str) -> Option<&LoadedTensors> {
        self.0.iter().map(|piece| &**piece).find(|piece| piece.info(name).is_some())
    }
}

impl Tensors for JoinedPieces<'_> {
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
