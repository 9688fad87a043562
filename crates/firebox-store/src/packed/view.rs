//! Elements of a stored tensor, read one at a time.

use half::{bf16, f16};

use crate::encoding::Dtype;
use crate::weight::e4m3;

/// A stored tensor whose elements are read by index. Its length has been checked against its shape.
#[derive(Clone, Copy)]
pub(super) struct View<'a> {
    pub bytes: &'a [u8],
    pub dtype: Dtype,
}

impl View<'_> {
    fn array<const N: usize>(&self, index: usize) -> [u8; N] {
        let mut array = [0; N];
        array.copy_from_slice(&self.bytes[index * N..][..N]);
        array
    }

    /// An element of a tensor of floats or small integers.
    pub fn number(&self, index: usize) -> f32 {
        match self.dtype {
            Dtype::F32 => f32::from_le_bytes(self.array(index)),
            Dtype::F16 => f16::from_le_bytes(self.array(index)).to_f32(),
            Dtype::BF16 => bf16::from_le_bytes(self.array(index)).to_f32(),
            Dtype::F8E4M3 => e4m3(self.bytes[index]),
            Dtype::I8 => f32::from(self.bytes[index] as i8),
            _ => f32::from(self.bytes[index]),
        }
    }

    /// A word of packed integers.
    pub fn word(&self, index: usize) -> u32 {
        u32::from_le_bytes(self.array(index))
    }

    /// An integer of so many bits, of those packed from the lowest bits of every word on.
    pub fn packed(&self, index: usize, bits: usize) -> u32 {
        let each = 32 / bits;
        (self.word(index / each) >> (index % each * bits)) & ((1 << bits) - 1)
    }
}
