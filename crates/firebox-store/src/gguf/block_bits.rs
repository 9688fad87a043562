//! Numbers within the bytes of a block.

use half::f16;

/// The f16 at a byte.
pub(super) fn half_at(block: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([block[at], block[at + 1]]).to_f32()
}

/// Extracts a 4-bit value of sixteen bytes: low halves hold the first sixteen weights, high halves the others.
pub(super) fn nibble(bytes: &[u8], index: usize) -> u8 {
    if index < 16 { bytes[index] & 0x0F } else { bytes[index - 16] >> 4 }
}

/// One bit of a little-endian bit field.
pub(super) fn bit(bytes: &[u8], index: usize) -> u8 {
    (bytes[index / 8] >> (index % 8)) & 1
}
