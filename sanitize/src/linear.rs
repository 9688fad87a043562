//! Products, as `firebox-kernels` has them.

#[path = "../../crates/firebox-kernels/src/linear/activation_block.rs"]
mod activation_block;
#[path = "../../crates/firebox-kernels/src/linear/activations.rs"]
mod activations;
#[path = "../../crates/firebox-kernels/src/linear/arithmetic.rs"]
mod arithmetic;
#[path = "../../crates/firebox-kernels/src/linear/blocks.rs"]
mod blocks;
#[path = "../../crates/firebox-kernels/src/linear/decode.rs"]
mod decode;
#[path = "../../crates/firebox-kernels/src/linear/gemm.rs"]
mod gemm;
#[path = "../../crates/firebox-kernels/src/linear/gemv.rs"]
mod gemv;
#[path = "../../crates/firebox-kernels/src/linear/grouping.rs"]
mod grouping;
#[path = "../../crates/firebox-kernels/src/linear/integer_tile.rs"]
mod integer_tile;
#[path = "../../crates/firebox-kernels/src/linear/low_bit_blocks.rs"]
mod low_bit_blocks;
#[path = "../../crates/firebox-kernels/src/linear/multiplicand.rs"]
mod multiplicand;
#[path = "../../crates/firebox-kernels/src/linear/multiply.rs"]
mod multiply;
#[path = "../../crates/firebox-kernels/src/linear/panel.rs"]
mod panel;
#[path = "../../crates/firebox-kernels/src/linear/place.rs"]
mod place;
#[path = "../../crates/firebox-kernels/src/linear/plain.rs"]
mod plain;
#[path = "../../crates/firebox-kernels/src/linear/q6k.rs"]
mod q6k;
#[path = "../../crates/firebox-kernels/src/linear/row_block.rs"]
mod row_block;
#[path = "../../crates/firebox-kernels/src/linear/row_group.rs"]
mod row_group;
#[path = "../../crates/firebox-kernels/src/linear/tiles.rs"]
mod tiles;
#[path = "../../crates/firebox-kernels/src/linear/uneven.rs"]
mod uneven;

/// Products of weights in buffers that end where the weight does.
#[cfg(test)]
mod tests {
    use super::activations::Activations;
    use super::blocks::{Block, BlockRows, Q4_0, Q4_1, Q4K, Q5_0, Q5_1, Q5K, Q6K, Q8_0};
    use super::decode::decode;
    use super::gemm::{FloatWeight, IntegerWeight};
    use super::grouping::Grouping;
    use super::low_bit_blocks::{IQ4NL, IQ4XS, MXFP4, Q2K, Q3K};
    use super::multiplicand::Multiplicand;
    use super::multiply::multiply;
    use super::plain::{Bf16, F16, F32, PlainRows};
    use super::tiles::{EightBit, FourBit, Tiles};
    use super::uneven::UnevenRows;

    fn bytes(count: usize) -> Box<[u8]> {
        (0..count).map(|i| (i * 31 % 251) as u8).collect()
    }

    fn check(weight: &dyn Multiplicand, outputs: usize, inputs: usize) {
        let padded = inputs.next_multiple_of(32);
        for rows in [1, 2, 3, 5, 7, 13] {
            let number = |i: usize| if i % padded < inputs { (i % 17) as f32 - 8.0 } else { 0.0 };
            let values: Vec<f32> = (0..rows * padded).map(number).collect();
            let x = Activations { rows, padded, values: &values };
            std::hint::black_box(multiply(&x, &[(weight, outputs)]));
        }
    }

    /// From one panel on, which is what the operations pad smaller weights to.
    const OUTPUTS: [usize; 4] = [16, 17, 33, 40];
    const INPUTS: [usize; 10] = [1, 7, 16, 31, 32, 33, 250, 256, 300, 517];

    #[test]
    fn plain_weights() {
        for outputs in OUTPUTS {
            for inputs in INPUTS {
                let (single, half) = (bytes(4 * outputs * inputs), bytes(2 * outputs * inputs));
                check(&FloatWeight(PlainRows::<F32>::new(&single, inputs)), outputs, inputs);
                check(&FloatWeight(PlainRows::<F16>::new(&half, inputs)), outputs, inputs);
                check(&FloatWeight(PlainRows::<Bf16>::new(&half, inputs)), outputs, inputs);
            }
        }
    }

    #[test]
    fn grouped_weights() {
        for outputs in [1, 15, 16, 17, 33, 40] {
            for inputs in INPUTS {
                for (group, tiled) in
                    [32, 64, 96, 128].into_iter().flat_map(|group| [(group, false), (group, true)])
                {
                    for four_bits in [false, true] {
                        let grouping = Grouping { inputs, group, four_bits, tiled };
                        let scales: Box<[u16]> = vec![0x3C00; outputs * grouping.groups()].into();
                        let words: Box<[u32]> = (0..(outputs * grouping.row_words()) as u32).collect();
                        if four_bits {
                            check(
                                &Tiles::<FourBit>::new(&words, &scales, outputs, grouping),
                                outputs,
                                inputs,
                            );
                        } else {
                            check(
                                &Tiles::<EightBit>::new(&words, &scales, outputs, grouping),
                                outputs,
                                inputs,
                            );
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn uneven_weights() {
        for outputs in OUTPUTS {
            for inputs in INPUTS {
                for group in [48, 1000] {
                    for four_bits in [false, true] {
                        let grouping = Grouping { inputs, group, four_bits, tiled: false };
                        let scales: Box<[u16]> = vec![0x3C00; outputs * grouping.groups()].into();
                        let stride = 4 * grouping.row_words();
                        let bytes = bytes(outputs * stride);
                        let rows = UnevenRows::new(&bytes, stride, &scales, grouping);
                        check(&FloatWeight(rows), outputs, inputs);
                    }
                }
            }
        }
    }

    fn blocks_of<B: Block>() {
        for outputs in OUTPUTS {
            for blocks in [1, 2, 3, 9] {
                let inputs = blocks * B::CHUNKS * 32;
                let bytes = bytes(outputs * blocks * B::BYTES);
                std::hint::black_box(decode(&BlockRows::<B>::new(&bytes, inputs), outputs));
                check(&IntegerWeight(BlockRows::<B>::new(&bytes, inputs)), outputs, inputs);
            }
        }
    }

    #[test]
    fn block_weights() {
        blocks_of::<Q8_0>();
        blocks_of::<Q4_0>();
        blocks_of::<Q4_1>();
        blocks_of::<Q5_0>();
        blocks_of::<Q5_1>();
        blocks_of::<Q4K>();
        blocks_of::<Q5K>();
        blocks_of::<Q6K>();
        blocks_of::<MXFP4>();
        blocks_of::<IQ4NL>();
        blocks_of::<IQ4XS>();
        blocks_of::<Q3K>();
        blocks_of::<Q2K>();
    }
}
