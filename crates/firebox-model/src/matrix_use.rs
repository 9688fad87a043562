//! How a device uses stored matrices.

use burn::tensor::Device;
use firebox_kernels::linear;
use firebox_store::Encoding;

use crate::weights::{block_format, float_dtype};

/// What becomes of a stored matrix when a model is loaded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum MatrixUse {
    /// It is multiplied in its own format.
    InPlace,
    /// It is unpacked to f32, four bytes a weight.
    Unpacked,
}

impl MatrixUse {
    /// Returns the use of a matrix of so many inputs on a device.
    pub fn of(encoding: Encoding, inputs: usize, device: &Device) -> Self {
        let in_place = match encoding {
            Encoding::Plain(dtype) => {
                float_dtype(dtype).is_some_and(|dtype| linear::supports_weight(device, dtype, inputs))
            }
            Encoding::Grouped(_) => true,
            Encoding::Block(block) => block_format(block).is_some() && linear::multiplies_blocks(device),
        };
        if in_place { Self::InPlace } else { Self::Unpacked }
    }
}

#[cfg(test)]
mod tests {
    use firebox_store::{BlockType, Dtype};

    use super::*;

    #[test]
    fn kinds_without_a_kernel_are_unpacked() {
        let device = Device::flex();
        let of = |encoding| MatrixUse::of(encoding, 256, &device);
        let unpacked = |block: &&BlockType| of(Encoding::Block(**block)) == MatrixUse::Unpacked;
        let names: Vec<&str> = BlockType::ALL.iter().filter(unpacked).map(|block| block.name()).collect();
        let expected =
            ["Q8_1", "TQ1_0", "TQ2_0", "IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"];
        assert_eq!(names, expected);
        assert_eq!(of(Encoding::Plain(Dtype::BF16)), MatrixUse::InPlace);
        assert_eq!(of(Encoding::Plain(Dtype::F8E4M3)), MatrixUse::Unpacked);
    }
}
