//! The block formats of GGUF files, decoded 32 inputs at a time from where they lie.

use super::rows::{CHUNK, Rows};
use crate::simd::{LANES, Lanes, f16_to_f32};

/// A block format.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum BlockFormat {
    Q8_0,
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q4K,
    Q5K,
    Q6K,
}

impl BlockFormat {
    /// Inputs of one block.
    pub fn inputs(self) -> usize {
        match self {
            Self::Q8_0 | Self::Q4_0 | Self::Q4_1 | Self::Q5_0 | Self::Q5_1 => 32,
            Self::Q4K | Self::Q5K | Self::Q6K => 256,
        }
    }

    /// Bytes of one block.
    pub fn bytes(self) -> usize {
        match self {
            Self::Q8_0 => Q8_0::BYTES,
            Self::Q4_0 => Q4_0::BYTES,
            Self::Q4_1 => Q4_1::BYTES,
            Self::Q5_0 => Q5_0::BYTES,
            Self::Q5_1 => Q5_1::BYTES,
            Self::Q4K => Q4K::BYTES,
            Self::Q5K => Q5K::BYTES,
            Self::Q6K => Q6K::BYTES,
        }
    }
}

/// How a format lays out its blocks.
pub(super) trait Block: Sync {
    const BYTES: usize;
    const CHUNKS: usize;

    /// 32 consecutive inputs of a block.
    fn chunk<L: Lanes>(block: &[u8], chunk: usize) -> (L, L);
}

/// Rows of whole blocks.
pub(super) struct BlockRows<'a, B> {
    bytes: &'a [u8],
    inputs: usize,
    format: std::marker::PhantomData<B>,
}

impl<'a, B: Block> BlockRows<'a, B> {
    pub fn new(bytes: &'a [u8], inputs: usize) -> Self {
        Self { bytes, inputs, format: std::marker::PhantomData }
    }
}

impl<B: Block> Rows for BlockRows<'_, B> {
    fn inputs(&self) -> usize {
        self.inputs
    }

    #[inline(always)]
    fn chunk<L: Lanes>(&self, row: usize, chunk: usize) -> (L, L) {
        let blocks = self.inputs / (B::CHUNKS * CHUNK);
        let block = row * blocks + chunk / B::CHUNKS;
        B::chunk(&self.bytes[block * B::BYTES..][..B::BYTES], chunk % B::CHUNKS)
    }

    #[inline(always)]
    fn address(&self, row: usize, chunk: usize) -> *const u8 {
        let chunks = self.inputs / CHUNK;
        self.bytes.as_ptr().wrapping_add((row * chunks + chunk) * (B::BYTES / B::CHUNKS))
    }
}

pub(super) struct Q8_0;
pub(super) struct Q4_0;
pub(super) struct Q4_1;
pub(super) struct Q5_0;
pub(super) struct Q5_1;
pub(super) struct Q4K;
pub(super) struct Q5K;
pub(super) struct Q6K;

impl Block for Q8_0 {
    const BYTES: usize = 34;
    const CHUNKS: usize = 1;

    #[inline(always)]
    fn chunk<L: Lanes>(block: &[u8], _: usize) -> (L, L) {
        let values: &[i8] = bytemuck::cast_slice(&block[2..]);
        let scale = L::splat(half(block, 0));
        (L::from_i8(sixteen(values, 0)).mul(scale), L::from_i8(sixteen(values, LANES)).mul(scale))
    }
}

impl Block for Q4_0 {
    const BYTES: usize = 18;
    const CHUNKS: usize = 1;

    #[inline(always)]
    fn chunk<L: Lanes>(block: &[u8], _: usize) -> (L, L) {
        let scale = L::splat(half(block, 0));
        let (low, high) = L::from_nibbles(sixteen(block, 2));
        (low.mul(scale), high.mul(scale))
    }
}

impl Block for Q4_1 {
    const BYTES: usize = 20;
    const CHUNKS: usize = 1;

    #[inline(always)]
    fn chunk<L: Lanes>(block: &[u8], _: usize) -> (L, L) {
        let (scale, least) = (half(block, 0), half(block, 2));
        let (low, high) = L::from_nibbles(sixteen(block, 4));
        // Nibbles come with eight taken off.
        let (scale, offset) = (L::splat(scale), L::splat(least + 8.0 * scale));
        (offset.mul_add(low, scale), offset.mul_add(high, scale))
    }
}

impl Block for Q5_0 {
    const BYTES: usize = 22;
    const CHUNKS: usize = 1;

    #[inline(always)]
    fn chunk<L: Lanes>(block: &[u8], _: usize) -> (L, L) {
        let scale = L::splat(half(block, 0));
        let (mut low, mut high) = five_bits(sixteen(block, 6), word(block, 2));
        for value in low.iter_mut().chain(&mut high) {
            *value -= 16;
        }
        (L::from_i8(&low).mul(scale), L::from_i8(&high).mul(scale))
    }
}

impl Block for Q5_1 {
    const BYTES: usize = 24;
    const CHUNKS: usize = 1;

    #[inline(always)]
    fn chunk<L: Lanes>(block: &[u8], _: usize) -> (L, L) {
        let (scale, least) = (L::splat(half(block, 0)), L::splat(half(block, 2)));
        let (low, high) = five_bits(sixteen(block, 8), word(block, 4));
        (least.mul_add(L::from_i8(&low), scale), least.mul_add(L::from_i8(&high), scale))
    }
}

impl Block for Q4K {
    const BYTES: usize = 144;
    const CHUNKS: usize = 8;

    #[inline(always)]
    fn chunk<L: Lanes>(block: &[u8], chunk: usize) -> (L, L) {
        let (scale, least) = six_bit_scales(block, chunk);
        // Two chunks share 32 bytes, one in the low nibbles and one in the high.
        let bytes = 16 + chunk / 2 * CHUNK;
        let (first_low, first_high) = L::from_nibbles(sixteen(block, bytes));
        let (second_low, second_high) = L::from_nibbles(sixteen(block, bytes + LANES));
        let (first, second) =
            if chunk.is_multiple_of(2) { (first_low, second_low) } else { (first_high, second_high) };
        // Nibbles come with eight taken off.
        let (scale, offset) = (L::splat(scale), L::splat(8.0 * scale - least));
        (offset.mul_add(first, scale), offset.mul_add(second, scale))
    }
}

impl Block for Q5K {
    const BYTES: usize = 176;
    const CHUNKS: usize = 8;

    #[inline(always)]
    fn chunk<L: Lanes>(block: &[u8], chunk: usize) -> (L, L) {
        let (scale, least) = six_bit_scales(block, chunk);
        let shift = if chunk.is_multiple_of(2) { 0 } else { 4 };
        let (scale, least) = (L::splat(scale), L::splat(-least));
        let mut values = [0; CHUNK];
        for (i, value) in values.iter_mut().enumerate() {
            let nibble = block[48 + chunk / 2 * CHUNK + i] >> shift & 0x0F;
            *value = (nibble | (block[16 + i] >> chunk & 1) << 4) as i8;
        }
        (
            least.mul_add(L::from_i8(sixteen(&values, 0)), scale),
            least.mul_add(L::from_i8(sixteen(&values, LANES)), scale),
        )
    }
}

impl Block for Q6K {
    const BYTES: usize = 210;
    const CHUNKS: usize = 8;

    #[inline(always)]
    fn chunk<L: Lanes>(block: &[u8], chunk: usize) -> (L, L) {
        // Half a block is 128 inputs: four chunks, whose low nibbles take 64 bytes and whose high pairs 32.
        let (half_block, quarter) = (chunk / 4, chunk % 4);
        let shift = if quarter < 2 { 0 } else { 4 };
        let scale = half(block, 208);
        let mut values = [0; CHUNK];
        let low = &block[half_block * 64 + quarter % 2 * CHUNK..][..CHUNK];
        let high = &block[128 + half_block * CHUNK..][..CHUNK];
        for ((value, low), high) in values.iter_mut().zip(low).zip(high) {
            *value = ((low >> shift & 0x0F) | (high >> (2 * quarter) & 3) << 4) as i8 - 32;
        }
        let sub_scales = &block[192 + chunk * 2..][..2];
        (
            L::from_i8(sixteen(&values, 0)).mul(L::splat(scale * f32::from(sub_scales[0] as i8))),
            L::from_i8(sixteen(&values, LANES)).mul(L::splat(scale * f32::from(sub_scales[1] as i8))),
        )
    }
}

/// The scale and the least value of a chunk of a Q4_K or Q5_K block: six bits each, eight of both in twelve
/// bytes, the upper bits of the later ones spread over the earlier.
#[inline(always)]
fn six_bit_scales(block: &[u8], chunk: usize) -> (f32, f32) {
    let packed = &block[4..16];
    let (scale, least) = if chunk < 4 {
        (packed[chunk] & 0x3F, packed[chunk + 4] & 0x3F)
    } else {
        (
            (packed[chunk + 4] & 0x0F) | (packed[chunk - 4] >> 6) << 4,
            (packed[chunk + 4] >> 4) | (packed[chunk] >> 6) << 4,
        )
    };
    (half(block, 0) * f32::from(scale), half(block, 2) * f32::from(least))
}

/// Nibbles with a fifth bit each, low nibbles first.
#[inline(always)]
fn five_bits(bytes: &[u8; LANES], fifth: u32) -> ([i8; LANES], [i8; LANES]) {
    let (mut low, mut high) = ([0; LANES], [0; LANES]);
    for (i, byte) in bytes.iter().enumerate() {
        let bit = |at: usize| ((fifth >> at) & 1) as u8 * 16;
        low[i] = ((byte & 0x0F) | bit(i)) as i8;
        high[i] = ((byte >> 4) | bit(i + LANES)) as i8;
    }
    (low, high)
}

#[inline(always)]
fn half(block: &[u8], at: usize) -> f32 {
    f16_to_f32(u16::from_le_bytes([block[at], block[at + 1]]))
}

#[inline(always)]
fn word(block: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([block[at], block[at + 1], block[at + 2], block[at + 3]])
}

/// # Panics
/// If the slice ends before: blocks have been cut to their length, and offsets within them are constants.
#[inline(always)]
fn sixteen<T>(values: &[T], at: usize) -> &[T; LANES] {
    match values[at..].first_chunk() {
        Some(values) => values,
        None => panic!("a block is shorter than its format"),
    }
}
