//! Gradients of products with dense and packed weights.

use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use firebox_kernels::Grouping;
use firebox_kernels::linear::{
    self, BlockFormat, Weight, dequantize_blocks, multiply, multiply_blocks, multiply_each, multiply_grouped,
};
use proptest::prelude::*;

use crate::check::{check, device, flat, near};
use crate::support::{grouped, in_eight_bits, numbers, random, random_blocks, values};

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn products(rows in 1usize..40, inputs in 1usize..300, outputs in 1usize..70, seed in 0u64..1000) {
        let numbers = [numbers(rows * inputs, seed), numbers(outputs * inputs, seed + 1)];
        let shaped = |given: &[Tensor<1>]| {
            (given[0].clone().reshape([rows, inputs]), given[1].clone().reshape([outputs, inputs]))
        };
        check(
            &numbers,
            &|given| { let (x, weight) = shaped(given); flat(multiply(x, weight)) },
            Some(&|given| { let (x, weight) = shaped(given); flat(linear::reference::multiply(x, weight)) }),
            1e-4,
        );
    }

    #[test]
    fn products_with_frozen_weights(
        rows in 1usize..20, chunks in 1usize..10, beyond in 0usize..9, outputs in 1usize..70, kind in 0usize..6,
        seed in 0u64..1000,
    ) {
        let inputs = 32 * chunks + beyond;
        // Uneven groups are multiplied as floats, others as integers.
        let grouping = |group: usize, four_bits| {
            let tiled = group.is_multiple_of(32) && seed.is_multiple_of(2);
            Grouping { inputs, group, four_bits, tiled }
        };
        let dense = |dtype| Weight::Dense(random([outputs, inputs], seed).cast(dtype));
        let weight = match kind {
            0 => dense(DType::F32),
            1 => dense(DType::F16),
            2 => dense(DType::BF16),
            other => {
                let grouping = grouping(if other == 5 { 24 } else { 32 }, other == 4);
                let (words, scales) = grouped(outputs, grouping, seed);
                Weight::Grouped { words, scales: scales.mul_scalar(0.02), grouping }
            }
        };
        let reference = |x: Tensor<2>| match weight.clone() {
            Weight::Dense(weight) => linear::reference::multiply(x, weight.autodiff()),
            Weight::Grouped { words, scales, grouping } => {
                let weight = linear::reference::dequantize(words, scales, grouping);
                linear::reference::multiply(x, weight.autodiff())
            }
            Weight::Blocks { .. } => unreachable!(),
        };
        let four_bits = matches!(&weight, Weight::Grouped { grouping, .. } if grouping.four_bits);
        let x = numbers(rows * inputs, seed + 1);
        check(
            &[if four_bits { in_eight_bits(x, inputs) } else { x }],
            &|given| flat(weight.clone().multiply(given[0].clone().reshape([rows, inputs]))),
            Some(&|given| flat(reference(given[0].clone().reshape([rows, inputs])))),
            1e-3,
        );
    }
}

#[test]
fn products_with_blocks() {
    for (format, outputs, blocks) in [
        (BlockFormat::Q8_0, 7, 3),
        (BlockFormat::Q4_0, 20, 1),
        (BlockFormat::Q4_1, 33, 2),
        (BlockFormat::Q5_0, 17, 9),
        (BlockFormat::Q5_1, 16, 2),
        (BlockFormat::Q4K, 21, 2),
        (BlockFormat::Q5K, 40, 1),
        (BlockFormat::Q6K, 3, 2),
        (BlockFormat::MXFP4, 19, 3),
        (BlockFormat::IQ4NL, 5, 2),
        (BlockFormat::IQ4XS, 34, 1),
        (BlockFormat::Q3K, 18, 2),
        (BlockFormat::Q2K, 9, 2),
    ] {
        let inputs = blocks * format.inputs();
        let bytes = random_blocks(format, outputs * blocks);
        let row_bytes = blocks * format.bytes();
        // Frozen weights of a model loaded for training are on the device that records.
        let bytes = TensorData::new(bytes, [outputs, row_bytes]);
        let bytes = Tensor::<2, Int>::from_data(bytes, (&device(), DType::U8));
        let weight = dequantize_blocks(bytes.clone(), format);
        check(
            &[in_eight_bits(numbers(5 * inputs, 4), inputs)],
            &|given| flat(multiply_blocks(given[0].clone().reshape([5, inputs]), bytes.clone(), format)),
            Some(&|given| {
                flat(linear::reference::multiply(given[0].clone().reshape([5, inputs]), weight.clone()))
            }),
            1e-3,
        );
    }
}

/// More outputs than are unpacked at once.
#[test]
fn products_with_a_large_frozen_weight() {
    let grouping = Grouping { inputs: 4096, group: 32, four_bits: true, tiled: true };
    let (words, scales) = grouped(700, grouping, 1);
    let weight = linear::reference::dequantize(words.clone(), scales.clone(), grouping).autodiff();
    let x = random([3, 4096], 2).autodiff().require_grad();
    let slopes = random([3, 700], 3).autodiff();
    let of = |product: Tensor<2>| {
        let gradients = product.mul(slopes.clone()).sum().backward();
        values(x.grad(&gradients).unwrap())
    };
    let found = of(multiply_grouped(x.clone(), words, scales, grouping));
    near(&found, &of(linear::reference::multiply(x.clone(), weight)), 1e-4, "x");
}

#[test]
fn products_with_several_weights() {
    let grouping = Grouping { inputs: 64, group: 32, four_bits: false, tiled: true };
    let (words, scales) = grouped(9, grouping, 5);
    let scales = scales.mul_scalar(0.02);
    let blocks = random_blocks(BlockFormat::Q8_0, 11 * 2);
    let bytes = TensorData::new(blocks, [11, 2 * BlockFormat::Q8_0.bytes()]);
    let bytes = Tensor::<2, Int>::from_data(bytes, (&Device::flex(), DType::U8));
    let inputs = [numbers(6 * 64, 1), numbers(13 * 64, 2)];
    let shaped =
        |given: &[Tensor<1>]| (given[0].clone().reshape([6, 64]), given[1].clone().reshape([13, 64]));
    check(
        &inputs,
        &|given| {
            let (x, weight) = shaped(given);
            let weights = vec![
                Weight::Dense(weight),
                Weight::Grouped { words: words.clone(), scales: scales.clone(), grouping },
                Weight::Blocks { bytes: bytes.clone(), format: BlockFormat::Q8_0 },
            ];
            flat(Tensor::cat(multiply_each(x, weights), 1))
        },
        Some(&|given| {
            let (x, weight) = shaped(given);
            let grouped = linear::reference::dequantize(words.clone(), scales.clone(), grouping);
            let blocks = dequantize_blocks(bytes.clone(), BlockFormat::Q8_0);
            let weights = [weight, grouped.autodiff(), blocks.autodiff()];
            let products = weights.map(|weight| linear::reference::multiply(x.clone(), weight));
            flat(Tensor::cat(products.to_vec(), 1))
        }),
        1e-3,
    );
}

/// An f16 weight has a gradient in f16.
#[test]
fn products_with_a_trained_half_weight() {
    let x = random([4, 24], 1);
    let weight = random([5, 24], 2).cast(DType::F16).autodiff().require_grad();
    let gradients = multiply(x.clone(), weight.clone()).sum().backward();
    let found = weight.grad(&gradients).unwrap();
    assert_eq!(found.dtype(), DType::F16);
    let sums = values(x.sum_dim(0));
    near(&values(found.cast(DType::F32)), &sums.repeat(5), 1e-3, "weight");
}
