//! Decoding of blocks of two to four bits a weight without grids; see [`dequant`](super::dequant).

use super::block_bits::{half_at, nibble};

/// The sixteen values of a nibble in IQ4_NL and IQ4_XS.
const NONLINEAR: [i8; 16] = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];

/// The values of a four-bit float of one mantissa bit (E2M1), doubled.
const E2M1: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

/// Half the power of two that a biased exponent stands for, because the values of [`E2M1`] are doubled.
pub(crate) fn half_of_e8m0(exponent: u8) -> f32 {
    f32::from_bits(match exponent {
        // Subnormal numbers.
        0 | 1 => 0x0020_0000 << exponent,
        _ => u32::from(exponent - 1) << 23,
    })
}

/// Two bits of a weight: each 32 bytes hold 128 weights, of which the first 32 have the lowest bits.
fn pair(bytes: &[u8], index: usize) -> u8 {
    (bytes[index / 128 * 32 + index % 32] >> (index % 128 / 32 * 2)) & 3
}

pub(super) fn q2_k(block: &[u8; 84]) -> [f32; 256] {
    let (scales, values) = (&block[..16], &block[16..80]);
    let (d, dmin) = (half_at(block, 80), half_at(block, 82));
    std::array::from_fn(|i| {
        let packed = scales[i / 16];
        let (scale, min) = (d * f32::from(packed & 0x0F), dmin * f32::from(packed >> 4));
        scale * f32::from(pair(values, i)) - min
    })
}

pub(super) fn q3_k(block: &[u8; 110]) -> [f32; 256] {
    let (high, values, packed) = (&block[..32], &block[32..96], &block[96..108]);
    let d = half_at(block, 108);
    // Sixteen scales of six bits: the low four of all in eight bytes, the high two in the next four.
    let scale = |at: usize| {
        let low = (packed[at % 8] >> (at / 8 * 4)) & 0x0F;
        let high = (packed[8 + at % 4] >> (at / 4 * 2)) & 0x03;
        d * (f32::from(low | (high << 4)) - 32.0)
    };
    std::array::from_fn(|i| {
        // Without its high bit a weight is lower by four.
        let less = 4 * (1 - ((high[i % 32] >> (i / 32)) & 1));
        scale(i / 16) * (f32::from(pair(values, i)) - f32::from(less))
    })
}

pub(super) fn iq4_nl(block: &[u8; 18]) -> [f32; 32] {
    let d = half_at(block, 0);
    std::array::from_fn(|i| d * f32::from(NONLINEAR[usize::from(nibble(&block[2..], i))]))
}

pub(super) fn iq4_xs(block: &[u8; 136]) -> [f32; 256] {
    let (d, high) = (half_at(block, 0), u16::from_le_bytes([block[2], block[3]]));
    std::array::from_fn(|i| {
        let (part, within) = (i / 32, i % 32);
        let low = (block[4 + part / 2] >> (part % 2 * 4)) & 0x0F;
        let scale = low | (((high >> (2 * part)) as u8 & 3) << 4);
        let value = nibble(&block[8 + 16 * part..][..16], within);
        d * (f32::from(scale) - 32.0) * f32::from(NONLINEAR[usize::from(value)])
    })
}

pub(super) fn mxfp4(block: &[u8; 17]) -> [f32; 32] {
    let d = half_of_e8m0(block[0]);
    std::array::from_fn(|i| d * f32::from(E2M1[usize::from(nibble(&block[1..], i))]))
}

/// Five ternary digits in a byte, the highest first: the byte is their number, scaled from 243 to 256.
pub(super) fn tq1_0(block: &[u8; 54]) -> [f32; 256] {
    const POWERS: [u8; 5] = [1, 3, 9, 27, 81];
    let d = half_at(block, 52);
    std::array::from_fn(|i| {
        let (byte, digit) = match i {
            0..160 => (i % 32, i / 32),
            160..240 => (32 + i % 16, (i - 160) / 16),
            _ => (48 + i % 4, (i - 240) / 4),
        };
        let rest = u16::from(block[byte].wrapping_mul(POWERS[digit]));
        d * (f32::from((rest * 3) >> 8) - 1.0)
    })
}

pub(super) fn tq2_0(block: &[u8; 66]) -> [f32; 256] {
    let d = half_at(block, 64);
    std::array::from_fn(|i| d * (f32::from(pair(&block[..64], i)) - 1.0))
}
