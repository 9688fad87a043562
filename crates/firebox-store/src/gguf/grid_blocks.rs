//! Decoding of blocks whose weights are entries of a grid, four or eight weights together; see [`dequant`](super::dequant).
//!
//! The grids are part of the formats. The files beside this one hold them, as `tests/fixtures/make_blocks.py` writes them:
//! one little-endian 16-bit integer an entry, with two bits for each of eight weights or three bits for each of four, the
//! first weight in the lowest bits.

use super::block_bits::{bit, half_at};

const IQ1: &[u8; 4096] = include_bytes!("grids/iq1.bin");
const IQ2_XXS: &[u8; 512] = include_bytes!("grids/iq2_xxs.bin");
const IQ2_XS: &[u8; 1024] = include_bytes!("grids/iq2_xs.bin");
const IQ2_S: &[u8; 2048] = include_bytes!("grids/iq2_s.bin");
const IQ3_XXS: &[u8; 512] = include_bytes!("grids/iq3_xxs.bin");
const IQ3_S: &[u8; 1024] = include_bytes!("grids/iq3_s.bin");

/// The magnitudes that two bits of IQ2's grids stand for. The fourth does not occur.
const IQ2_LEVELS: [u8; 4] = [8, 25, 43, 0];

/// The magnitudes that three bits of IQ3_XXS' grid stand for.
const IQ3_XXS_LEVELS: [u8; 8] = [4, 12, 20, 28, 36, 44, 52, 62];

/// The distance of IQ1's levels from whole numbers.
const IQ1_DELTA: f32 = 0.125;

/// The weight at `at` of a grid's entry, in steps of `BITS`.
fn level<const BITS: usize>(grid: &[u8], entry: usize, at: usize) -> usize {
    let packed = usize::from(u16::from_le_bytes([grid[2 * entry], grid[2 * entry + 1]]));
    (packed >> (BITS * at)) & ((1 << BITS) - 1)
}

fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([bytes[2 * at], bytes[2 * at + 1]])
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    let bytes = &bytes[4 * at..];
    u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])
}

/// The half of a byte: the low one for even indices.
fn half_byte(bytes: &[u8], index: usize) -> u8 {
    (bytes[index / 2] >> (index % 2 * 4)) & 0x0F
}

/// Seven signs of eight: the last one makes the number of negative ones even.
fn even_sign(signs: u32, at: usize) -> bool {
    let seven = signs & 0x7F;
    let eight = seven | ((seven.count_ones() & 1) << 7);
    (eight >> at) & 1 == 1
}

fn signed(value: f32, negative: bool) -> f32 {
    if negative { -value } else { value }
}

pub(super) fn iq2_xxs(block: &[u8; 66]) -> [f32; 256] {
    let d = half_at(block, 0);
    std::array::from_fn(|i| {
        let part = &block[2 + 8 * (i / 32)..][..8];
        let (entry, signs) = (part[i % 32 / 8], u32_at(part, 1));
        let scale = d * (0.5 + (signs >> 28) as f32) * 0.25;
        let value = IQ2_LEVELS[level::<2>(IQ2_XXS, entry.into(), i % 8)];
        signed(scale * f32::from(value), even_sign(signs >> (i % 32 / 8 * 7), i % 8))
    })
}

pub(super) fn iq2_xs(block: &[u8; 74]) -> [f32; 256] {
    let d = half_at(block, 0);
    std::array::from_fn(|i| {
        let packed = u16_at(&block[2..66], i / 8);
        let scale = d * (0.5 + f32::from(half_byte(&block[66..], i / 16))) * 0.25;
        let value = IQ2_LEVELS[level::<2>(IQ2_XS, usize::from(packed & 511), i % 8)];
        signed(scale * f32::from(value), even_sign(u32::from(packed >> 9), i % 8))
    })
}

pub(super) fn iq2_s(block: &[u8; 82]) -> [f32; 256] {
    let d = half_at(block, 0);
    let (low, signs, high, scales) = (&block[2..34], &block[34..66], &block[66..74], &block[74..]);
    std::array::from_fn(|i| {
        let group = i / 8;
        let high = (high[group / 4] >> (group % 4 * 2)) & 3;
        let entry = usize::from(low[group]) | (usize::from(high) << 8);
        let scale = d * (0.5 + f32::from(half_byte(scales, i / 16))) * 0.25;
        let value = IQ2_LEVELS[level::<2>(IQ2_S, entry, i % 8)];
        signed(scale * f32::from(value), bit(signs, i) == 1)
    })
}

pub(super) fn iq3_xxs(block: &[u8; 98]) -> [f32; 256] {
    let d = half_at(block, 0);
    std::array::from_fn(|i| {
        let signs = u32_at(&block[66..], i / 32);
        let scale = d * (0.5 + (signs >> 28) as f32) * 0.5;
        let value = IQ3_XXS_LEVELS[level::<3>(IQ3_XXS, block[2 + i / 4].into(), i % 4)];
        signed(scale * f32::from(value), even_sign(signs >> (i % 32 / 8 * 7), i % 8))
    })
}

pub(super) fn iq3_s(block: &[u8; 110]) -> [f32; 256] {
    let d = half_at(block, 0);
    let (low, high, signs, scales) = (&block[2..66], &block[66..74], &block[74..106], &block[106..]);
    std::array::from_fn(|i| {
        let entry = usize::from(low[i / 4]) | (usize::from(bit(high, i / 4)) << 8);
        let scale = d * f32::from(1 + 2 * half_byte(scales, i / 32));
        // Its levels are the odd numbers.
        let value = (2 * level::<3>(IQ3_S, entry, i % 4) + 1) as f32;
        signed(scale * value, bit(signs, i) == 1)
    })
}

/// The value of IQ1's grid without its scale.
fn iq1(entry: usize, at: usize, below: bool) -> f32 {
    let whole = level::<2>(IQ1, entry, at) as f32 - 1.0;
    whole + if below { -IQ1_DELTA } else { IQ1_DELTA }
}

pub(super) fn iq1_s(block: &[u8; 50]) -> [f32; 256] {
    let d = half_at(block, 0);
    std::array::from_fn(|i| {
        let (group, high) = (i / 8, u16_at(&block[34..], i / 32));
        let entry = usize::from(block[2 + group]) | (usize::from((high >> (group % 4 * 3)) & 7) << 8);
        let scale = d * f32::from(2 * ((high >> 12) & 7) + 1);
        scale * iq1(entry, i % 8, high & 0x8000 != 0)
    })
}

/// The scale of the block is in the highest four bits of each of four words, whose other bits are four scales each.
pub(super) fn iq1_m(block: &[u8; 56]) -> [f32; 256] {
    let scales = &block[48..];
    let bits = (0..4).fold(0, |bits, at| bits | ((u16_at(scales, at) >> 12) << (4 * at)));
    let d = half::f16::from_bits(bits).to_f32();
    std::array::from_fn(|i| {
        let (group, part) = (i / 8, i / 16);
        let high = half_byte(&block[32..48], group);
        let entry = usize::from(block[group]) | (usize::from(high & 7) << 8);
        let scale = d * f32::from(2 * ((u16_at(scales, part / 4) >> (part % 4 * 3)) & 7) + 1);
        scale * iq1(entry, i % 8, high & 8 != 0)
    })
}
