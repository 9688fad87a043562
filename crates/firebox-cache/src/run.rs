use std::ops::Range;
use std::sync::Arc;

use firebox_kernels::attend::Visibility;

use crate::page::{PAGE, Page};
use crate::remembered::Remembered;

/// Keys and values of consecutive positions that lie together.
#[derive(Debug, Clone)]
pub(crate) struct Run {
    pub source: Source,
    pub slots: Range<usize>,
    /// Of the first slot.
    pub position: usize,
    /// Which slots may be seen; absent means all.
    pub visible: Option<Visibility>,
    /// Whether no slot may be seen.
    pub hidden: bool,
}

#[derive(Debug, Clone)]
pub(crate) enum Source {
    Page(Arc<Page>),
    Mapped(Arc<Mapped>),
}

/// Keys and values that are only read, in files that are mapped, for example. Sequences share them.
///
/// Slots are in blocks of [`PAGE`]. What goes on where the last of them end within a block goes on in a page that has
/// the block's slots copied, so that it lies together as it would have without a file in between.
#[derive(Debug)]
pub struct Mapped {
    /// What every layer remembers; absent for recurrent ones.
    pub layers: Vec<Option<Remembered>>,
}

impl Run {
    pub fn new(source: Source, slots: Range<usize>, position: usize) -> Self {
        Self { source, slots, position, visible: None, hidden: false }
    }

    pub fn len(&self) -> usize {
        self.slots.len()
    }

    /// The position after the last.
    pub fn end(&self) -> usize {
        self.position + self.len()
    }

    /// Some of its slots, counted from its first.
    pub fn part(&self, range: Range<usize>) -> Self {
        let slots = self.slots.start + range.start..self.slots.start + range.end;
        Self::new(self.source.clone(), slots, self.position + range.start)
    }

    /// Where its slots would be in a page, if they are in one block of what is mapped.
    pub fn in_block(&self) -> Option<Range<usize>> {
        let block = self.slots.start / PAGE * PAGE;
        let slots = self.slots.start - block..self.slots.end - block;
        (matches!(self.source, Source::Mapped(_)) && slots.end <= PAGE).then_some(slots)
    }

    /// Whether both are in the same page, or the same block of what is mapped.
    pub fn lies_with(&self, other: &Self) -> bool {
        match (&self.source, &other.source) {
            (Source::Page(one), Source::Page(other)) => Arc::ptr_eq(one, other),
            (Source::Mapped(one), Source::Mapped(two)) => {
                Arc::ptr_eq(one, two) && self.slots.start / PAGE == other.slots.start / PAGE
            }
            _ => false,
        }
    }

    pub fn read(&self, layer: usize) -> Option<Remembered> {
        match &self.source {
            Source::Page(page) => page.read(layer, &self.slots),
            Source::Mapped(mapped) => Some(mapped.layers.get(layer)?.as_ref()?.part(self.slots.clone())),
        }
    }
}
