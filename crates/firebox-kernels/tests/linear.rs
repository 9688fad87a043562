//! Products compared with Burn's operations for any shape, and bits with and without other rows and weights.

#![allow(clippy::unwrap_used)]

mod support;

use burn::tensor::{AllocationProperty, Bytes, DType, Device, Int, Tensor, TensorData};
use firebox_kernels::Grouping;
use firebox_kernels::linear::{
    Weight, gather_grouped, multiply, multiply_each, multiply_grouped, multiply_heads, reference,
};
use proptest::prelude::*;
use support::{assert_close, bits, grouped, random, values};

fn matrix(rows: usize, columns: usize, seed: u64) -> Tensor<2> {
    random([rows, columns], seed)
}

/// Bound on the difference between two orders of summing `inputs` products of numbers up to `magnitude`.
fn tolerance(inputs: usize, magnitude: f32) -> f32 {
    magnitude * 1e-6 * (inputs as f32).max(8.0)
}

/// 8-bit weights meet activations rounded to 16 bits: half a step is 1/65,534 of the largest, and the errors
/// of `inputs` products add up like a random walk, here bounded by six deviations. 4-bit weights meet
/// activations of 8 bits.
fn integer_tolerance(inputs: usize, magnitude: f32) -> f32 {
    magnitude * 4e-5 * (inputs as f32).sqrt() + tolerance(inputs, magnitude)
}

fn grouping() -> impl Strategy<Value = Grouping> {
    // Some are longer than what a single row reads at once.
    (
        prop_oneof![3 => 1usize..300, 1 => 300usize..1300],
        prop_oneof![Just(32usize), Just(64), Just(128), Just(48), Just(1000)],
        any::<bool>(),
        any::<bool>(),
    )
        .prop_map(|(inputs, group, four_bits, tiled)| {
            // Groups of tiles are whole chunks.
            Grouping { inputs, group, four_bits, tiled: tiled && group.is_multiple_of(32) }
        })
}

/// Returns the elements at offset `at` of a buffer.
fn placed(data: TensorData, at: usize) -> TensorData {
    let offset = at * data.dtype().size();
    let buffer: bytes::Bytes = [&vec![0xA5; offset][..], data.as_bytes()].concat().into();
    let shared = Bytes::from_shared(buffer.slice(offset..), AllocationProperty::File);
    TensorData::from_bytes(shared, data.shape().clone(), data.dtype())
}

fn mapped(data: TensorData, at: usize) -> Tensor<2> {
    let dtype = data.dtype();
    Tensor::from_data(placed(data, at), (&Device::flex(), dtype))
}

fn mapped_words(data: TensorData, at: usize) -> Tensor<2, Int> {
    let dtype = data.dtype();
    Tensor::from_data(placed(data, at), (&Device::flex(), dtype))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    #[test]
    fn plain_weights(
        rows in 1usize..80, inputs in 1usize..300, outputs in 1usize..40, seed in 0u64..1000,
        dtype in prop_oneof![Just(DType::F32), Just(DType::F16), Just(DType::BF16)],
    ) {
        let (x, weight) = (matrix(rows, inputs, seed), matrix(outputs, inputs, seed + 7).cast(dtype));
        let expected = reference::multiply(x.clone(), weight.clone());
        assert_close(multiply(x, weight), expected, tolerance(inputs, 1.0));
    }

    #[test]
    fn grouped_weights(rows in 1usize..80, outputs in 1usize..40, grouping in grouping(), seed in 0u64..1000) {
        let (words, scales) = grouped(outputs, grouping, seed + 7);
        let magnitude = if grouping.four_bits { 8.0 } else { 128.0 };
        let within = |x: Tensor<2>, tolerance| {
            let expected = reference::multiply_grouped(x.clone(), words.clone(), scales.clone(), grouping);
            assert_close(multiply_grouped(x, words.clone(), scales.clone(), grouping), expected, tolerance);
        };
        let tolerance = integer_tolerance(grouping.inputs, magnitude);
        within(support::activations(rows, grouping.inputs, grouping.four_bits, seed), tolerance);
        // The error of 8 bits is 257 times as large.
        within(matrix(rows, grouping.inputs, seed), if grouping.four_bits { 257.0 * tolerance } else { tolerance });
    }

    #[test]
    fn gathered_rows(
        outputs in 1usize..70, grouping in grouping(), seed in 0u64..1000, picks in prop::collection::vec(0usize..1000, 1..9),
    ) {
        let (words, scales) = grouped(outputs, grouping, seed);
        let picks: Vec<i64> = picks.into_iter().map(|pick| (pick % outputs) as i64).collect();
        let indices = Tensor::<1, Int>::from_data(picks.as_slice(), &Device::flex());
        let expected = reference::dequantize(words.clone(), scales.clone(), grouping).select(0, indices.clone());
        let expected = bits(expected);
        // Scales of f32 use the version for devices without a native one.
        let otherwise = gather_grouped(words.clone(), scales.clone().cast(DType::F32), grouping, indices.clone());
        prop_assert_eq!((bits(gather_grouped(words, scales, grouping, indices)), bits(otherwise)), (expected.clone(), expected));
    }

    /// Weights in a mapped file have any alignment of their elements.
    #[test]
    fn weights_anywhere(
        rows in 1usize..20, outputs in 1usize..40, grouping in grouping(), seed in 0u64..1000, at in 1usize..40,
        dtype in prop_oneof![Just(DType::F32), Just(DType::F16), Just(DType::BF16)],
    ) {
        let x = matrix(rows, grouping.inputs, seed);
        let weight = matrix(outputs, grouping.inputs, seed + 7).cast(dtype);
        let expected = bits(multiply(x.clone(), weight.clone()));
        prop_assert_eq!(bits(multiply(x.clone(), mapped(weight.into_data(), at))), expected);
        let (words, scales) = grouped(outputs, grouping, seed + 7);
        let expected = bits(multiply_grouped(x.clone(), words.clone(), scales.clone(), grouping));
        let (words, scales) = (mapped_words(words.into_data(), at), mapped(scales.into_data(), at + 1));
        prop_assert_eq!(bits(multiply_grouped(x, words, scales, grouping)), expected);
    }

    /// A row has the same bits alone and among others, in any order.
    #[test]
    fn rows_are_independent(
        rows in 1usize..140, outputs in 1usize..40, grouping in grouping(), seed in 0u64..1000,
        from in 0usize..140, count in 1usize..140,
    ) {
        let x = matrix(rows, grouping.inputs, seed);
        let from = from % rows;
        let count = count.min(rows - from);
        let some = |tensor: Tensor<2>| tensor.narrow(0, from, count);
        let (words, scales) = grouped(outputs, grouping, seed + 7);
        let all = multiply_grouped(x.clone(), words.clone(), scales.clone(), grouping);
        prop_assert_eq!(bits(some(all)), bits(multiply_grouped(some(x.clone()), words, scales, grouping)));
        let weight = matrix(outputs, grouping.inputs, seed + 9).cast(DType::BF16);
        prop_assert_eq!(bits(some(multiply(x.clone(), weight.clone()))), bits(multiply(some(x), weight)));
    }
}

/// Large enough for several threads.
#[test]
fn threads_do_not_change_a_bit() {
    let grouping = Grouping { inputs: 1024, group: 32, four_bits: true, tiled: true };
    let (words, scales) = grouped(1500, grouping, 3);
    let x = matrix(17, grouping.inputs, 5);
    let weight = matrix(1500, grouping.inputs, 11).cast(DType::F16);
    let compute = |threads: usize| {
        let (x, words, scales, weight) = (x.clone(), words.clone(), scales.clone(), weight.clone());
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        pool.install(move || {
            (bits(multiply_grouped(x.clone(), words, scales, grouping)), bits(multiply(x, weight)))
        })
    };
    let alone = compute(1);
    for threads in [2, 3, 8] {
        assert_eq!(compute(threads), alone, "{threads} threads");
    }
}

#[test]
fn nan_stays_in_its_row() {
    let weight = matrix(33, 70, 1);
    let clean = matrix(3, 70, 2);
    for bad in [f32::NAN, f32::INFINITY] {
        let x = clean.clone().slice_fill([1..2, 4..5], bad);
        let (found, expected) = (multiply(x, weight.clone()), multiply(clean.clone(), weight.clone()));
        assert!(values(found.clone().narrow(0, 1, 1)).iter().all(|value| !value.is_finite()));
        for row in [0, 2] {
            assert_eq!(bits(found.clone().narrow(0, row, 1)), bits(expected.clone().narrow(0, row, 1)));
        }
    }
}

#[test]
fn no_rows_give_no_rows() {
    let x = Tensor::<2>::zeros([0, 40], &Device::flex());
    assert_eq!(multiply(x, matrix(5, 40, 1)).dims(), [0, 5]);
}

#[test]
fn strided_tensors_are_supported() {
    let (x, weight) = (matrix(40, 6, 1), matrix(64, 40, 2));
    let expected = reference::multiply(x.clone().transpose(), weight.clone().narrow(0, 8, 20));
    assert_close(multiply(x.transpose(), weight.narrow(0, 8, 20)), expected, tolerance(40, 1.0));
}

/// Several weights at once have the bits of one after the other, including weights without outputs.
#[test]
fn weights_are_independent() {
    for rows in [1, 3, 20] {
        let grouping = |four_bits| Grouping { inputs: 320, group: 32, four_bits, tiled: true };
        let x = matrix(rows, 320, 1);
        let (four, four_scales) = grouped(33, grouping(true), 2);
        let (eight, eight_scales) = grouped(1500, grouping(false), 3);
        let dense = matrix(5, 320, 4).cast(DType::F16);
        let expected = [
            multiply_grouped(x.clone(), four.clone(), four_scales.clone(), grouping(true)),
            multiply_grouped(x.clone(), eight.clone(), eight_scales.clone(), grouping(false)),
            multiply(x.clone(), dense.clone()),
        ];
        let weights = vec![
            Weight::Grouped { words: four, scales: four_scales, grouping: grouping(true) },
            Weight::Grouped { words: eight, scales: eight_scales, grouping: grouping(false) },
            Weight::Dense(dense),
            Weight::Dense(Tensor::zeros([0, 320], &Device::flex())),
        ];
        let mut found = multiply_each(x, weights);
        assert_eq!(found.pop().unwrap().dims(), [rows, 0]);
        for (found, expected) in found.into_iter().zip(expected) {
            assert_eq!(bits(found), bits(expected), "{rows} rows");
        }
    }
}

/// The same bits as a product for each head, also of rows that are views, with weights of all formats and sizes.
#[test]
fn heads_multiply_with_weights_of_their_own() {
    for (rows, heads, inputs, outputs) in [(1, 3, 37, 5), (7, 2, 64, 40), (3, 20, 96, 512), (0, 2, 8, 8)] {
        let x = random([rows, heads, inputs + 2], 3).narrow(2, 1, inputs);
        let dense = |head: usize| Weight::Dense(matrix(outputs, inputs, head as u64));
        let packed = |head: usize| {
            let grouping = Grouping { inputs, group: 32, four_bits: false, tiled: false };
            let (words, scales) = grouped(outputs, grouping, head as u64);
            Weight::Grouped { words, scales, grouping }
        };
        let kinds: [&dyn Fn(usize) -> Weight; 2] = [&dense, &packed];
        for weight in kinds {
            let prepared: Vec<_> = (0..heads).map(|head| weight(head).prepare().unwrap()).collect();
            let found = multiply_heads(x.clone(), &prepared.iter().collect::<Vec<_>>());
            for head in 0..heads {
                let of_head = |all: &Tensor<3>| all.clone().narrow(1, head, 1).squeeze_dim::<2>(1);
                assert_eq!(bits(of_head(&found)), bits(weight(head).multiply(of_head(&x))));
            }
        }
    }
}

#[test]
fn a_weight_without_outputs_has_no_products() {
    let weight = Tensor::<2>::zeros([0, 40], &Device::flex());
    assert_eq!(multiply(matrix(3, 40, 1), weight).dims(), [3, 0]);
}
