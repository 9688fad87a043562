//! Visibility masks of spans.

use std::sync::Arc;

/// Mask of the visible positions of a span: one bit per position, starting at the lowest bit of the first
/// word. Positions beyond the last word are hidden.
///
/// Clones share the bits.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Visibility(Arc<[u64]>);

impl Visibility {
    /// The words of the mask.
    #[cfg(any(feature = "wgpu", feature = "cuda"))]
    pub(super) fn words(&self) -> &[u64] {
        &self.0
    }

    /// Whether the position at `index` from the start of the span is visible.
    #[inline(always)]
    pub fn contains(&self, index: usize) -> bool {
        match self.0.get(index / 64) {
            Some(word) => word >> (index % 64) & 1 == 1,
            None => false,
        }
    }
}

/// One item for each position.
///
/// ```
/// use firebox_kernels::attention::Visibility;
///
/// let visible: Visibility = [true, false, true].into_iter().collect();
/// assert!(visible.contains(0) && !visible.contains(1) && visible.contains(2) && !visible.contains(3));
/// ```
impl FromIterator<bool> for Visibility {
    fn from_iter<I: IntoIterator<Item = bool>>(items: I) -> Self {
        let mut words = Vec::new();
        for (index, visible) in items.into_iter().enumerate() {
            if index % 64 == 0 {
                words.push(0);
            }
            words[index / 64] |= u64::from(visible) << (index % 64);
        }
        Self(words.into())
    }
}
