//! Runs of consecutive positions that lie together in a page or in a mapped file.

use std::ops::Range;
use std::sync::Arc;

use firebox_kernels::attention::Visibility;

use crate::layer_kv::LayerKv;
use crate::page::Page;
use crate::page_buffers::PAGE_TOKENS;

/// Consecutive positions that lie together.
#[derive(Debug, Clone)]
pub(crate) struct KvRun {
    pub source: Source,
    pub slots: Range<usize>,
    /// The position of the first slot.
    pub position: usize,
    /// Which slots later tokens may attend to; `None` means all.
    pub visible: Option<Visibility>,
    /// True if later tokens may attend to none of the slots.
    pub hidden: bool,
}

#[derive(Debug, Clone)]
pub(crate) enum Source {
    Page(Arc<Page>),
    Mapped(Arc<MappedKv>),
}

/// Read-only keys and values, such as those of a mapped file, shared between sequences.
///
/// Slots are grouped in blocks of [`PAGE_TOKENS`]. A sequence that continues in the middle of a block first copies the
/// block's slots to a page, so that they lie together as they would without a file.
#[derive(Debug)]
pub struct MappedKv {
    /// The tensors of every layer; `None` for recurrent layers.
    pub layers: Vec<Option<LayerKv>>,
}

impl KvRun {
    pub fn new(source: Source, slots: Range<usize>, position: usize) -> Self {
        Self { source, slots, position, visible: None, hidden: false }
    }

    pub fn len(&self) -> usize {
        self.slots.len()
    }

    /// The position after the last slot.
    pub fn end(&self) -> usize {
        self.position + self.len()
    }

    /// A part of the run, by indices relative to its first slot.
    pub fn part(&self, range: Range<usize>) -> Self {
        let slots = self.slots.start + range.start..self.slots.start + range.end;
        Self::new(self.source.clone(), slots, self.position + range.start)
    }

    /// The slots' places within a page, if they lie in a single block of a mapped file.
    pub fn in_block(&self) -> Option<Range<usize>> {
        let block = self.slots.start / PAGE_TOKENS * PAGE_TOKENS;
        let slots = self.slots.start - block..self.slots.end - block;
        (matches!(self.source, Source::Mapped(_)) && slots.end <= PAGE_TOKENS).then_some(slots)
    }

    /// Returns whether both lie in the same page, or in the same block of a mapped file.
    pub fn lies_with(&self, other: &Self) -> bool {
        match (&self.source, &other.source) {
            (Source::Page(one), Source::Page(other)) => Arc::ptr_eq(one, other),
            (Source::Mapped(one), Source::Mapped(two)) => {
                Arc::ptr_eq(one, two) && self.slots.start / PAGE_TOKENS == other.slots.start / PAGE_TOKENS
            }
            _ => false,
        }
    }

    pub fn read(&self, layer: usize) -> Option<LayerKv> {
        match &self.source {
            Source::Page(page) => page.read(layer, &self.slots),
            Source::Mapped(mapped) => Some(mapped.layers.get(layer)?.as_ref()?.part(self.slots.clone())),
        }
    }
}
