//! Gradients of the operations: against differences of their results, and against those of the references.

#![cfg(feature = "autodiff")]
#![allow(clippy::unwrap_used)]

mod support;

use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use firebox_kernels::activation::Activation;
use firebox_kernels::attend::{
    Attending, Span, Stored, Visibility, attend, attend_sequences, merge, merge_with,
};
use firebox_kernels::convolution::{Convolving, convolve};
use firebox_kernels::cross_entropy::{self, cross_entropy, divergence};
use firebox_kernels::delta::{Forgetting, Heads, Tokens, delta_rule};
use firebox_kernels::linear::{
    self, BlockFormat, Weight, dequantize_blocks, multiply, multiply_blocks, multiply_each, multiply_grouped,
};
use firebox_kernels::{Grouping, attend as attention, gate, norm, rope};
use proptest::prelude::*;
use support::{grouped, in_eight_bits, numbers, random, random_blocks, values};

/// A function of some tensors, each given and taken as one row of numbers.
type Function<'a> = &'a dyn Fn(&[Tensor<1>]) -> Tensor<1>;

fn device() -> Device {
    Device::flex().autodiff()
}

fn row(numbers: &[f32], device: &Device) -> Tensor<1> {
    Tensor::from_data(TensorData::new(numbers.to_vec(), [numbers.len()]), device)
}

/// The results, and the gradients of their sum weighted with `slopes`.
fn with_gradients(inputs: &[Vec<f32>], function: Function<'_>, slopes: &[f32]) -> (Vec<f32>, Vec<Vec<f32>>) {
    let leaves: Vec<_> = inputs.iter().map(|input| row(input, &device()).require_grad()).collect();
    let results = function(&leaves);
    let gradients = results.clone().mul(row(slopes, &device())).sum().backward();
    let of = |leaf: &Tensor<1>| values(leaf.grad(&gradients).unwrap());
    (values(results), leaves.iter().map(of).collect())
}

fn dot(a: &[f32], b: &[f32]) -> f64 {
    a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum()
}

/// Compares with the reference where there is one, and with central differences along random directions, off by at
/// most `tolerance` times what is compared.
fn check(inputs: &[Vec<f32>], own: Function<'_>, reference: Option<Function<'_>>, tolerance: f64) {
    // Without the rounding of activations, which is no part of what gradients are of.
    let smooth = reference.unwrap_or(own);
    let plain = |inputs: &[Vec<f32>]| {
        let inputs: Vec<_> = inputs.iter().map(|input| row(input, &device())).collect();
        values(smooth(&inputs))
    };
    let slopes = numbers(plain(inputs).len(), 77);
    let (results, gradients) = with_gradients(inputs, own, &slopes);
    if let Some(reference) = reference {
        let (expected_results, expected) = with_gradients(inputs, reference, &slopes);
        near(&results, &expected_results, tolerance, "results");
        for (index, (found, expected)) in gradients.iter().zip(&expected).enumerate() {
            near(found, expected, tolerance, &format!("input {index}"));
        }
    }
    for (index, input) in inputs.iter().enumerate() {
        for seed in 0..3 {
            let direction = numbers(input.len(), 1000 + seed);
            const STEP: f32 = 4e-3;
            let moved = |step: f32| {
                let mut inputs = inputs.to_vec();
                for (number, direction) in inputs[index].iter_mut().zip(&direction) {
                    *number += step * direction;
                }
                dot(&plain(&inputs), &slopes)
            };
            let difference = (moved(STEP) - moved(-STEP)) / (2.0 * f64::from(STEP));
            let found = dot(&gradients[index], &direction);
            // Along a direction that changes little, what is compared is the rest of a cancellation.
            let size = dot(&gradients[index], &gradients[index]).sqrt() + 1.0;
            assert!(
                (found - difference).abs() <= 10.0 * tolerance * size,
                "input {index}: {found} instead of {difference}"
            );
        }
    }
}

fn near(found: &[f32], expected: &[f32], tolerance: f64, name: &str) {
    assert_eq!(found.len(), expected.len());
    let largest = expected.iter().fold(1.0, |largest: f64, number| largest.max(f64::from(number.abs())));
    for (index, (found, expected)) in found.iter().zip(expected).enumerate() {
        let off = f64::from((found - expected).abs());
        assert!(off <= tolerance * largest, "{name}, element {index}: {found} instead of {expected}");
    }
}

fn flat<const D: usize>(tensor: Tensor<D>) -> Tensor<1> {
    let count = tensor.shape().num_elements();
    tensor.reshape([count])
}

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
        // Uneven groups are multiplied as numbers, others as integers.
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

    #[test]
    fn rotations(
        rows in 1usize..10, heads in 1usize..5, pairs in 1usize..20, beyond in 0usize..9, interleaved: bool,
        seed in 0u64..1000,
    ) {
        let shape = [rows, heads, 2 * pairs + beyond];
        let angles = |seed| random([rows, 1, pairs], seed).autodiff();
        let (cos, sin) = (angles(seed + 1), angles(seed + 2));
        let of = |given: &[Tensor<1>]| given[0].clone().reshape(shape);
        check(
            &[numbers(shape.iter().product(), seed)],
            &|given| flat(rope::rotate(of(given), cos.clone(), sin.clone(), interleaved)),
            Some(&|given| flat(rope::reference::rotate(of(given), cos.clone(), sin.clone(), interleaved))),
            1e-5,
        );
    }

    #[test]
    fn norms(rows in 1usize..10, width in 2usize..300, offset in 0f32..2.0, seed in 0u64..1000) {
        let inputs = [numbers(rows * width, seed), numbers(rows * width, seed + 1), numbers(width, seed + 2)];
        let x = |given: &[Tensor<1>]| given[0].clone().reshape([rows, width]);
        let residual = |given: &[Tensor<1>]| given[1].clone().reshape([rows, width]);
        // What is added counts too, so that both results have gradients.
        check(
            &inputs,
            &|given| {
                let (sum, normed) =
                    norm::add_rms_norm(x(given), residual(given), given[2].clone(), 1e-5, offset);
                flat(sum.mul_scalar(0.5).add(normed))
            },
            Some(&|given| {
                let sum = x(given).add(residual(given));
                let normed = norm::reference::rms_norm(sum.clone(), given[2].clone(), 1e-5, offset);
                flat(sum.mul_scalar(0.5).add(normed))
            }),
            2e-4,
        );
        check(
            &[inputs[0].clone(), inputs[2].clone()],
            &|given| flat(norm::rms_norm(x(given), given[1].clone(), 1e-5, offset)),
            Some(&|given| flat(norm::reference::rms_norm(x(given), given[1].clone(), 1e-5, offset))),
            2e-4,
        );
    }

    #[test]
    fn gates(rows in 1usize..10, width in 1usize..70, which in 0usize..7, seed in 0u64..1000) {
        let activation = [
            Activation::Silu, Activation::Gelu, Activation::GeluTanh, Activation::GeluQuick, Activation::Relu,
            Activation::ReluSquared, Activation::Tanh,
        ][which];
        // Steps over the corner of a rectifier have no derivative.
        let away = |number: f32| if number.abs() < 0.01 { 0.5 } else { 3.0 * number };
        let gates: Vec<f32> = numbers(rows * width, seed).into_iter().map(away).collect();
        let ups = numbers(rows * width, seed + 1);
        let of = |given: &Tensor<1>| given.clone().reshape([rows, width]);
        check(
            &[gates.clone(), ups.clone()],
            &|given| flat(gate::gated(of(&given[0]), of(&given[1]), activation)),
            Some(&|given| flat(gate::reference(of(&given[0]), of(&given[1]), activation))),
            2e-4,
        );
        let both: Vec<f32> =
            gates.chunks(width).zip(ups.chunks(width)).flat_map(|(gate, up)| [gate, up].concat()).collect();
        let both_of = |given: &[Tensor<1>]| given[0].clone().reshape([rows, 2 * width]);
        check(
            &[both],
            &|given| flat(gate::gated_halves(both_of(given), activation)),
            Some(&|given| {
                let both = both_of(given);
                let (gates, ups) = (both.clone().narrow(1, 0, width), both.narrow(1, width, width));
                flat(gate::reference(gates, ups, activation))
            }),
            2e-4,
        );
    }

    #[test]
    fn convolutions(count in 1usize..12, channels in 1usize..9, kernel in 2usize..5, silu: bool, seed in 0u64..1000) {
        let inputs = [
            numbers(count * channels, seed),
            numbers((kernel - 1) * channels, seed + 1),
            numbers(channels * kernel, seed + 2),
        ];
        check(
            &inputs,
            &|given| {
                let (sums, _) = convolve(
                    given[0].clone().reshape([count, channels]),
                    Some(given[1].clone().reshape([kernel - 1, channels])),
                    given[2].clone().reshape([channels, kernel]),
                    Convolving { exact: false, silu },
                );
                flat(sums)
            },
            None,
            1e-4,
        );
    }

    #[test]
    fn delta_rules(
        count in 1usize..6, key_heads in 1usize..3, sharing in 1usize..3, width in 2usize..6, tiled: bool,
        logarithmic: bool, seed in 0u64..1000,
    ) {
        let value_heads = key_heads * sharing;
        let heads = Heads { key_heads, value_heads, key_width: width, value_width: width, tiled };
        let channels = (2 * key_heads + value_heads) * width;
        let inputs = [
            // Not near zero, where the direction of a key changes fast.
            numbers(count * channels, seed).into_iter().map(|number| number + number.signum()).collect(),
            numbers(count * value_heads, seed + 1),
            numbers(count * value_heads, seed + 2),
            numbers(value_heads, seed + 3).into_iter().map(|number| -number.abs() - 0.1).collect(),
            numbers(value_heads, seed + 4),
        ];
        check(
            &inputs,
            &|given| {
                let of = |index: usize, width: usize| given[index].clone().reshape([count, width]);
                let tokens = Tokens { mixed: of(0, channels), step: of(1, value_heads), decay: of(2, value_heads) };
                let forgetting =
                    Forgetting { rate: given[3].clone(), bias: given[4].clone(), logarithmic };
                flat(delta_rule(tokens, forgetting, heads, None).0)
            },
            None,
            1e-3,
        );
    }

    #[test]
    fn losses(rows in 1usize..10, vocabulary in 2usize..70, temperature in 0.5f32..3.0, seed in 0u64..1000) {
        let logits: Vec<f32> = numbers(rows * vocabulary, seed).into_iter().map(|number| 4.0 * number).collect();
        let of = |given: &[Tensor<1>]| given[0].clone().reshape([rows, vocabulary]);
        // Every third row is masked.
        let weights: Vec<f32> = numbers(rows, seed + 1)
            .into_iter()
            .enumerate()
            .map(|(row, weight)| if row % 3 == 1 { 0.0 } else { weight + 1.5 })
            .collect();
        let weights = row(&weights, &device());
        let targets: Vec<i32> = (0..rows).map(|row| ((row * 31 + seed as usize) % vocabulary) as i32).collect();
        let targets = Tensor::<1, Int>::from_data(TensorData::new(targets, [rows]), &device());
        check(
            std::slice::from_ref(&logits),
            &|given| cross_entropy(of(given), targets.clone(), weights.clone()),
            Some(&|given| cross_entropy::reference::cross_entropy(of(given), targets.clone(), weights.clone())),
            1e-4,
        );
        let teacher = random([rows, vocabulary], seed + 2).mul_scalar(3.0).autodiff();
        check(
            &[logits],
            &|given| divergence(of(given), teacher.clone(), weights.clone(), temperature),
            Some(&|given| {
                cross_entropy::reference::divergence(of(given), teacher.clone(), weights.clone(), temperature)
            }),
            1e-4,
        );
    }
}

/// An attention that training may have.
#[derive(Debug, Clone)]
struct Case {
    rows: usize,
    kv_heads: usize,
    sharing: usize,
    head_dim: usize,
    positions: usize,
    /// Positions before the first row's own.
    before: usize,
    window: Option<usize>,
    softcap: Option<f32>,
    hidden: bool,
    seed: u64,
}

impl Case {
    fn attending(&self) -> Attending {
        Attending { position: self.before, window: self.window, scale: 0.4, softcap: self.softcap }
    }

    fn inputs(&self) -> [Vec<f32>; 3] {
        let stored = self.kv_heads * self.positions * self.head_dim;
        let queries = self.rows * self.kv_heads * self.sharing * self.head_dim;
        [numbers(queries, self.seed), numbers(stored, self.seed + 1), numbers(stored, self.seed + 2)]
    }

    fn query(&self, given: &[Tensor<1>]) -> Tensor<3> {
        given[0].clone().reshape([self.rows, self.kv_heads * self.sharing, self.head_dim])
    }

    fn span(&self, given: &[Tensor<1>]) -> Span {
        // As projections give them: by position and then by head.
        let stored = |index: usize| {
            let given: Tensor<3> =
                given[index].clone().reshape([self.positions, self.kv_heads, self.head_dim]);
            Stored::Float(given.swap_dims(0, 1))
        };
        let visible = self.hidden.then(|| (0..self.positions).map(|index| index % 5 != 1).collect());
        Span { keys: stored(1), values: stored(2), position: 0, visible }
    }

    fn reference(&self, given: &[Tensor<1>]) -> Tensor<1> {
        let attended =
            attention::reference::attend_span(self.query(given), &self.span(given), self.attending());
        flat(attended.output)
    }
}

fn cases() -> impl Strategy<Value = Case> {
    let shape = (1usize..90, 1usize..3, 1usize..4, 1usize..40, 1usize..310, 0usize..20);
    let sight = (prop::option::of(1usize..60), prop::option::of(0.3f32..2.0), any::<bool>(), 0u64..1000);
    (shape, sight).prop_map(
        |((rows, kv_heads, sharing, head_dim, positions, before), (window, softcap, hidden, seed))| Case {
            rows,
            kv_heads,
            sharing,
            head_dim,
            positions,
            before,
            window,
            softcap,
            hidden,
            seed,
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    #[test]
    fn attentions(case in cases()) {
        check(
            &case.inputs(),
            &|given| flat(attend(case.query(given), &[case.span(given)], None, case.attending())),
            Some(&|given| case.reference(given)),
            1e-4,
        );
    }

    #[test]
    fn attentions_to_several_spans(case in cases(), cut in 0usize..300) {
        let cut = cut.min(case.positions);
        let split = |given: &[Tensor<1>]| {
            let Span { keys, values, .. } = case.span(given);
            let part = |from: usize, to: usize| Span {
                keys: keys.part(from..to), values: values.part(from..to), position: from, visible: None,
            };
            match cut {
                0 => vec![part(0, case.positions)],
                cut if cut == case.positions => vec![part(0, cut)],
                cut => vec![part(0, cut), part(cut, case.positions)],
            }
        };
        let whole = Case { hidden: false, ..case.clone() };
        check(
            &case.inputs(),
            &|given| flat(attend(case.query(given), &split(given), None, case.attending())),
            Some(&|given| whole.reference(given)),
            1e-4,
        );
    }
}

/// As one attention for each of them.
#[test]
fn attentions_of_several_sequences() {
    let (lengths, head_dim) = ([3, 70, 0, 1, 25], 12);
    let rows = lengths.iter().sum();
    for (kv_heads, sharing, window) in [(2, 1, None), (1, 3, Some(9)), (2, 2, None)] {
        let heads = kv_heads * sharing;
        let of_sequence = |length: usize, seed: u64| Case {
            rows: length,
            kv_heads,
            sharing,
            head_dim,
            positions: length,
            before: 0,
            window,
            softcap: Some(3.0),
            hidden: false,
            seed,
        };
        let attending = of_sequence(1, 0).attending();
        let inputs =
            [heads, kv_heads, kv_heads].map(|heads| numbers(rows * heads * head_dim, 3 + heads as u64));
        let tensor = |given: &[Tensor<1>], index: usize| -> Tensor<3> {
            given[index].clone().reshape([rows, if index == 0 { heads } else { kv_heads }, head_dim])
        };
        check(
            &inputs,
            &|given| {
                let [query, keys, values] = [0, 1, 2].map(|index| tensor(given, index));
                flat(attend_sequences(query, keys, values, &lengths, attending))
            },
            Some(&|given| {
                let mut first = 0;
                let mut parts = Vec::new();
                for length in lengths.into_iter().filter(|length| *length > 0) {
                    let part = |index| flat(tensor(given, index).narrow(0, first, length));
                    parts.push(of_sequence(length, 0).reference(&[part(0), part(1), part(2)]));
                    first += length;
                }
                Tensor::cat(parts, 0)
            }),
            1e-4,
        );
    }
}

/// Sequences on a device that records nothing.
#[test]
fn sequences_without_gradients() {
    let [query, keys, values_of] = [1, 2, 3].map(|seed| random([40, 2, 16], seed));
    let attending = Attending { position: 0, window: None, scale: 0.3, softcap: None };
    let of = |query: Tensor<3>| {
        values(attend_sequences(query, keys.clone(), values_of.clone(), &[10, 30], attending))
    };
    assert_eq!(of(query.clone()), of(query.autodiff()));
}

/// Rows far enough for several blocks of rows and of positions.
#[test]
fn long_attention() {
    for window in [None, Some(100)] {
        let case = Case {
            rows: 600,
            kv_heads: 2,
            sharing: 2,
            head_dim: 48,
            positions: 600,
            before: 0,
            window,
            softcap: None,
            hidden: false,
            seed: 5,
        };
        check(
            &case.inputs(),
            &|given| flat(attend(case.query(given), &[case.span(given)], None, case.attending())),
            Some(&|given| case.reference(given)),
            1e-4,
        );
    }
}

/// What is stored at a hidden position may be no number, and has no part in any gradient.
#[test]
fn hidden_positions() {
    let (rows, width) = (20, 16);
    let mut keys = numbers(rows * width, 2);
    keys[3 * width..4 * width].fill(f32::NAN);
    let visible: Visibility = (0..rows).map(|index| index != 3).collect();
    let query = random([rows, 1, width], 1).autodiff().require_grad();
    let keys = Tensor::<3>::from_data(TensorData::new(keys, [1, rows, width]), &device()).require_grad();
    let span = Span {
        keys: Stored::Float(keys.clone()),
        values: Stored::Float(keys.clone()),
        position: 0,
        visible: Some(visible),
    };
    let attending = Attending { position: 0, window: None, scale: 0.3, softcap: None };
    let gradients = attend(query.clone(), &[span], None, attending).sum().backward();
    assert!(values(query.grad(&gradients).unwrap()).iter().all(|number| number.is_finite()));
    let of_keys = values(keys.grad(&gradients).unwrap());
    assert!(of_keys[3 * width..4 * width].iter().all(|number| *number == 0.0));
    assert!(of_keys.iter().all(|number| number.is_finite()));
}

#[test]
fn attention_with_sinks() {
    let case = Case {
        rows: 7,
        kv_heads: 2,
        sharing: 2,
        head_dim: 8,
        positions: 7,
        before: 0,
        window: None,
        softcap: None,
        hidden: false,
        seed: 3,
    };
    let mut inputs = case.inputs().to_vec();
    inputs.push(numbers(4, 9));
    check(
        &inputs,
        &|given| {
            flat(attend(case.query(given), &[case.span(given)], Some(given[3].clone()), case.attending()))
        },
        Some(&|given| {
            let part =
                attention::reference::attend_span(case.query(given), &case.span(given), case.attending());
            flat(merge_with(vec![part], Some(given[3].clone())).output)
        }),
        1e-4,
    );
}

/// Keys alone may have gradients: those of queries that are cached are not wanted.
#[test]
fn attention_with_constant_queries() {
    let query = random([5, 2, 8], 1);
    let keys = random([2, 5, 8], 2).autodiff().require_grad();
    let values_of = random([2, 5, 8], 3);
    let span = |keys: Tensor<3>| Span {
        keys: Stored::Float(keys),
        values: Stored::Float(values_of.clone()),
        position: 0,
        visible: None,
    };
    let attending = Attending { position: 0, window: None, scale: 0.3, softcap: None };
    let gradients = attend(query.clone(), &[span(keys.clone())], None, attending).sum().backward();
    let found = values(keys.grad(&gradients).unwrap());
    let parts = vec![attention::attend_span(query, &span(keys.clone()), attending)];
    let gradients = merge(parts).output.sum().backward();
    near(&found, &values(keys.grad(&gradients).unwrap()), 1e-5, "keys");
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
    ] {
        let inputs = blocks * format.inputs();
        let bytes = random_blocks(format, outputs * blocks);
        let row_bytes = blocks * format.bytes();
        // Frozen weights of a model that was loaded for training are on the device that records.
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

/// So many outputs that not all are unpacked at once.
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

/// A weight that is trained in half precision has a gradient of its own dtype.
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

#[test]
#[should_panic(expected = "instead of")]
fn wrong_gradients_are_found() {
    // The number itself, with the opposite of its gradient.
    check(
        &[numbers(20, 1)],
        &|given| given[0].clone().detach().mul_scalar(2.0).sub(given[0].clone()),
        None,
        1e-3,
    );
}

/// Devices that recompute what is cheap give the same gradients.
#[test]
fn gradient_checkpointing() {
    let of = |device: &Device| {
        let tensor = |shape: [usize; 2], seed| {
            let values = numbers(shape[0] * shape[1], seed);
            Tensor::<2>::from_data(TensorData::new(values, shape), device)
        };
        let weight = tensor([32, 16], 1).require_grad();
        let scale = Tensor::<1>::ones([16], device).require_grad();
        let x = norm::rms_norm(tensor([6, 16], 2), scale.clone(), 1e-5, 0.0);
        let product = multiply(x.mul_scalar(2.0).exp(), weight.clone());
        let gradients = gate::gated_halves(product.exp(), Activation::Silu).sum().backward();
        (values(weight.grad(&gradients).unwrap()), values(scale.grad(&gradients).unwrap()))
    };
    assert_eq!(of(&device()), of(&device().gradient_checkpointing()));
}
