//! Decoding of block formats to f32. The order of operations is that of the `gguf` Python package, so results are bit-equal.
//! Products are rounded before they are added: Rust never fuses them.

use super::block_bits::{bit, half_at, nibble};
use super::{grid_blocks, low_bits};
use crate::encoding::BlockType;

/// Appends the weights of whole blocks; an incomplete block at the end is ignored.
pub(crate) fn dequantize(block: BlockType, data: &[u8], out: &mut Vec<f32>) {
    match block {
        BlockType::Q8_0 => each(data, out, q8_0),
        BlockType::Q4_0 => each(data, out, q4_0),
        BlockType::Q4_1 => each(data, out, q4_1),
        BlockType::Q5_0 => each(data, out, q5_0),
        BlockType::Q5_1 => each(data, out, q5_1),
        BlockType::Q4K => each(data, out, q4_k),
        BlockType::Q5K => each(data, out, q5_k),
        BlockType::Q6K => each(data, out, q6_k),
        BlockType::Q8_1 => each(data, out, q8_1),
        BlockType::Q2K => each(data, out, low_bits::q2_k),
        BlockType::Q3K => each(data, out, low_bits::q3_k),
        BlockType::IQ4NL => each(data, out, low_bits::iq4_nl),
        BlockType::IQ4XS => each(data, out, low_bits::iq4_xs),
        BlockType::MXFP4 => each(data, out, low_bits::mxfp4),
        BlockType::TQ1_0 => each(data, out, low_bits::tq1_0),
        BlockType::TQ2_0 => each(data, out, low_bits::tq2_0),
        BlockType::IQ1S => each(data, out, grid_blocks::iq1_s),
        BlockType::IQ1M => each(data, out, grid_blocks::iq1_m),
        BlockType::IQ2XXS => each(data, out, grid_blocks::iq2_xxs),
        BlockType::IQ2XS => each(data, out, grid_blocks::iq2_xs),
        BlockType::IQ2S => each(data, out, grid_blocks::iq2_s),
        BlockType::IQ3XXS => each(data, out, grid_blocks::iq3_xxs),
        BlockType::IQ3S => each(data, out, grid_blocks::iq3_s),
    }
}

fn each<const BYTES: usize, const LEN: usize>(
    data: &[u8],
    out: &mut Vec<f32>,
    read: fn(&[u8; BYTES]) -> [f32; LEN],
) {
    for block in data.as_chunks::<BYTES>().0 {
        out.extend_from_slice(&read(block));
    }
}

fn q8_0(block: &[u8; 34]) -> [f32; 32] {
    let d = half_at(block, 0);
    std::array::from_fn(|i| f32::from(block[2 + i] as i8) * d)
}

/// A format of activations, with the sum of the block after its scale, which decoding does not need.
fn q8_1(block: &[u8; 36]) -> [f32; 32] {
    let d = half_at(block, 0);
    std::array::from_fn(|i| f32::from(block[4 + i] as i8) * d)
}

fn q4_0(block: &[u8; 18]) -> [f32; 32] {
    let d = half_at(block, 0);
    std::array::from_fn(|i| d * (f32::from(nibble(&block[2..], i)) - 8.0))
}

fn q4_1(block: &[u8; 20]) -> [f32; 32] {
    let (d, m) = (half_at(block, 0), half_at(block, 2));
    std::array::from_fn(|i| (d * f32::from(nibble(&block[4..], i))) + m)
}

fn q5_0(block: &[u8; 22]) -> [f32; 32] {
    let d = half_at(block, 0);
    std::array::from_fn(|i| {
        let value = nibble(&block[6..], i) | (bit(&block[2..6], i) << 4);
        d * (f32::from(value) - 16.0)
    })
}

fn q5_1(block: &[u8; 24]) -> [f32; 32] {
    let (d, m) = (half_at(block, 0), half_at(block, 2));
    std::array::from_fn(|i| {
        let value = nibble(&block[8..], i) | (bit(&block[4..8], i) << 4);
        (d * f32::from(value)) + m
    })
}

/// The 6-bit scale and minimum of each of eight sub-blocks, packed in twelve bytes: four low scales and four low minima (six
/// bits each), then the low four bits of the other eight, whose top two bits are in the unused bits of the first bytes.
fn scale_and_min(packed: &[u8], sub_block: usize) -> (f32, f32) {
    let (scale, min) = if sub_block < 4 {
        (packed[sub_block] & 0x3F, packed[sub_block + 4] & 0x3F)
    } else {
        let low = packed[sub_block + 4];
        ((low & 0x0F) | ((packed[sub_block - 4] >> 2) & 0x30), (low >> 4) | ((packed[sub_block] >> 2) & 0x30))
    };
    (f32::from(scale), f32::from(min))
}

fn q4_k(block: &[u8; 144]) -> [f32; 256] {
    let (d, dmin) = (half_at(block, 0), half_at(block, 2));
    let (scales, values) = (&block[4..16], &block[16..]);
    let mut out = [0.0; 256];
    for (sub_block, out) in out.chunks_exact_mut(32).enumerate() {
        let (scale, min) = scale_and_min(scales, sub_block);
        let (scale, min) = (d * scale, dmin * min);
        let bytes = &values[sub_block / 2 * 32..][..32];
        for (out, byte) in out.iter_mut().zip(bytes) {
            let value = (byte >> (sub_block % 2 * 4)) & 0x0F;
            *out = scale * f32::from(value) - min;
        }
    }
    out
}

fn q5_k(block: &[u8; 176]) -> [f32; 256] {
    let (d, dmin) = (half_at(block, 0), half_at(block, 2));
    let (scales, high, values) = (&block[4..16], &block[16..48], &block[48..]);
    let mut out = [0.0; 256];
    for (sub_block, out) in out.chunks_exact_mut(32).enumerate() {
        let (scale, min) = scale_and_min(scales, sub_block);
        let (scale, min) = (d * scale, dmin * min);
        let bytes = &values[sub_block / 2 * 32..][..32];
        for ((out, byte), high) in out.iter_mut().zip(bytes).zip(high) {
            let value = ((byte >> (sub_block % 2 * 4)) & 0x0F) | (((high >> sub_block) & 1) << 4);
            *out = scale * f32::from(value) - min;
        }
    }
    out
}

fn q6_k(block: &[u8; 210]) -> [f32; 256] {
    let (low, high, scales) = (&block[..128], &block[128..192], &block[192..208]);
    let d = half_at(block, 208);
    let mut out = [0.0; 256];
    for (i, out) in out.iter_mut().enumerate() {
        let (half, within) = (i / 128, i % 128);
        let (row, column) = (within / 32, within % 32);
        let low = (low[half * 64 + within % 64] >> (row / 2 * 4)) & 0x0F;
        let high = (high[half * 32 + column] >> (row * 2)) & 0x03;
        let scale = d * f32::from(scales[i / 16] as i8);
        *out = scale * (f32::from(low | (high << 4)) - 32.0);
    }
    out
}
