//! Products, as `firebox-kernels` has them.

/// As in `firebox-kernels`, whose own file reaches for Burn.
#[derive(Debug, Clone, Copy)]
pub struct Grouping {
    pub inputs: usize,
    pub group: usize,
    pub four_bits: bool,
}

#[path = "../../crates/firebox-kernels/src/linear/activations.rs"]
mod activations;
#[path = "../../crates/firebox-kernels/src/linear/blocks.rs"]
mod blocks;
#[path = "../../crates/firebox-kernels/src/linear/direct.rs"]
mod direct;
#[path = "../../crates/firebox-kernels/src/linear/few.rs"]
mod few;
#[path = "../../crates/firebox-kernels/src/linear/grouped.rs"]
mod grouped;
#[path = "../../crates/firebox-kernels/src/linear/line.rs"]
mod line;
#[path = "../../crates/firebox-kernels/src/linear/panel.rs"]
mod panel;
#[path = "../../crates/firebox-kernels/src/linear/plain.rs"]
mod plain;
#[path = "../../crates/firebox-kernels/src/linear/product.rs"]
mod product;

/// Products of weights in buffers that end where the weight does.
#[cfg(test)]
mod tests {
    use super::Grouping;
    use super::activations::Activations;
    use super::blocks::{Block, BlockRows, Q4_0, Q4_1, Q4K, Q5_0, Q5_1, Q5K, Q6K, Q8_0};
    use super::grouped::{ByteRows, GroupedRows, NibbleRows, UnevenRows};
    use super::plain::{Bf16, F16, F32, PlainRows};
    use super::product::{FloatWeight, IntegerWeight, Multiplicand, decode, multiply};

    fn bytes(count: usize) -> Box<[u8]> {
        (0..count).map(|i| (i * 31 % 251) as u8).collect()
    }

    fn check(weight: &dyn Multiplicand, outputs: usize, inputs: usize) {
        let padded = inputs.next_multiple_of(32);
        for rows in [1, 2, 3, 7, 13] {
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
        for outputs in OUTPUTS {
            for inputs in INPUTS {
                for group in [32, 48, 64, 128, 1000] {
                    let groups = inputs.div_ceil(group);
                    let scales: Box<[u16]> = vec![0x3C00; outputs * groups].into();
                    let strides = (inputs.next_multiple_of(4), inputs.div_ceil(32) * 16);
                    let (eight, four) = (bytes(outputs * strides.0), bytes(outputs * strides.1));
                    let rows = |bytes, stride, four_bits| {
                        let grouping = Grouping { inputs, group, four_bits };
                        GroupedRows::new(bytes, stride, &scales, groups, grouping)
                    };
                    let (eight, four) = (rows(&eight, strides.0, false), rows(&four, strides.1, true));
                    if group % 32 == 0 {
                        check(&IntegerWeight(ByteRows(eight)), outputs, inputs);
                        check(&IntegerWeight(NibbleRows(four)), outputs, inputs);
                    } else {
                        check(&FloatWeight(UnevenRows(eight)), outputs, inputs);
                        check(&FloatWeight(UnevenRows(four)), outputs, inputs);
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
    }
}
