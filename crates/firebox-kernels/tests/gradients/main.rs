//! Gradients of the operations compared with central differences and with the references' gradients.

#![cfg(feature = "autodiff")]
#![allow(clippy::unwrap_used)]

mod attention;
mod check;
mod linear;
#[path = "../support/mod.rs"]
mod support;

use burn::tensor::{Device, Int, Tensor, TensorData};
use firebox_kernels::activation::Activation;
use firebox_kernels::convolution::{ConvolutionParams, convolve};
use firebox_kernels::cross_entropy::{self, cross_entropy, divergence};
use firebox_kernels::delta::{DecayParams, Heads, Tokens, delta_rule};
use firebox_kernels::linear::multiply;
use firebox_kernels::state_space::{ScanParams, ScanTokens, StateSpace, scan};
use firebox_kernels::{gate, norm, rope};
use proptest::prelude::*;

use check::{check, device, flat, row};
use support::{numbers, random, values};

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

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
        // The sum is added, so that both results have gradients.
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
        // Away from the kink of a rectifier, where there is no derivative.
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
                    ConvolutionParams { exact: false, silu },
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
            // Away from zero, where the direction of a key changes fast.
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
                let decay_params =
                    DecayParams { rate: given[3].clone(), bias: given[4].clone(), logarithmic };
                flat(delta_rule(tokens, decay_params, heads, None).0)
            },
            None,
            1e-3,
        );
    }

    #[test]
    fn state_spaces(
        count in 1usize..6, groups in 1usize..3, sharing in 1usize..3, width in 1usize..5, states in 1usize..5,
        seed in 0u64..1000,
    ) {
        let heads = groups * sharing;
        let space = StateSpace { heads, width, groups, states, steps: [0.0, f32::INFINITY] };
        let inputs = [
            numbers(count * space.channels(), seed),
            numbers(count * heads, seed + 1),
            numbers(heads, seed + 2),
            numbers(heads, seed + 3),
            numbers(heads, seed + 4),
            numbers(heads * states * width, seed + 5),
        ];
        check(
            &inputs,
            &|given| {
                let of = |index: usize, width: usize| given[index].clone().reshape([count, width]);
                let tokens = ScanTokens { mixed: of(0, space.channels()), step: of(1, heads) };
                let [rate, bias, skip] = [2, 3, 4].map(|index: usize| given[index].clone());
                let memory = given[5].clone().reshape([heads, states, width]);
                let (read, after) = scan(tokens, ScanParams { rate, bias, skip }, space, Some(memory));
                Tensor::cat(vec![flat(read), flat(after)], 0)
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

/// Devices with gradient checkpointing give the same gradients.
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
