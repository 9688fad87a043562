//! What the integers of a format mean to products with them.

/// The arithmetic of a format of integers. Code for panels is compiled once for each.
pub(super) trait Arithmetic: Sync {
    /// Whether activations are rounded to 8 bits; see [`IntegerWidth`](super::activations::IntegerWidth).
    const I8_ACTIVATIONS: bool;
    /// Whether the halves of a chunk have scales of their own.
    const HALF_SCALES: bool = false;
    /// Whether a minimum is added to every number.
    const HAS_MINIMUM: bool = false;
    /// Whether a few rows of activations are multiplied with it row by row, see [`q6k`](super::q6k). Such
    /// weights take 8-bit activations, have scales for half chunks, and no minimums.
    const ROW_BLOCKS: bool = false;
}

/// 16-bit activations.
pub(super) struct Wide;
/// 16-bit activations, and minimums.
pub(super) struct WideWithMinimum;
/// 8-bit activations.
pub(super) struct Narrow;
/// 8-bit activations, and minimums.
pub(super) struct NarrowWithMinimum;
/// 8-bit activations, and scales for half chunks.
pub(super) struct NarrowHalves;
/// 8-bit activations, and scales and minimums for half chunks.
pub(super) struct NarrowHalvesWithMinimum;
/// Row blocks.
pub(super) struct InRowBlocks;

impl Arithmetic for Wide {
    const I8_ACTIVATIONS: bool = false;
}

impl Arithmetic for WideWithMinimum {
    const I8_ACTIVATIONS: bool = false;
    const HAS_MINIMUM: bool = true;
}

impl Arithmetic for Narrow {
    const I8_ACTIVATIONS: bool = true;
}

impl Arithmetic for NarrowWithMinimum {
    const I8_ACTIVATIONS: bool = true;
    const HAS_MINIMUM: bool = true;
}

impl Arithmetic for NarrowHalves {
    const I8_ACTIVATIONS: bool = true;
    const HALF_SCALES: bool = true;
}

impl Arithmetic for NarrowHalvesWithMinimum {
    const I8_ACTIVATIONS: bool = true;
    const HALF_SCALES: bool = true;
    const HAS_MINIMUM: bool = true;
}

impl Arithmetic for InRowBlocks {
    const I8_ACTIVATIONS: bool = true;
    const HALF_SCALES: bool = true;
    const ROW_BLOCKS: bool = true;
}
