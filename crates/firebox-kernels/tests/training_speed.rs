//! Speed of the operations and their gradients beside the references, measured in turns on the same work.
//!
//! `cargo test --release --test training_speed -- --ignored --nocapture`; `RAYON_NUM_THREADS` sets the
//! threads.

#![cfg(feature = "autodiff")]
#![allow(clippy::unwrap_used, clippy::print_stdout)]

mod support;

use std::hint::black_box;
use std::time::Instant;

use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use firebox_kernels::activation::Activation;
use firebox_kernels::attention::{AttentionParams, KvTensor, Span, attention, reference};
use firebox_kernels::cross_entropy::{self, cross_entropy};
use firebox_kernels::{Grouping, gate, linear, norm, on_pool, rope};
use support::{grouped, random};

const WIDTH: usize = 192;
const HEADS: usize = 4;
const HEAD: usize = 48;
const INNER: usize = 512;
const SEQUENCES: usize = 16;
const LENGTH: usize = 128;
const ROWS: usize = SEQUENCES * LENGTH;

/// Returns the shortest times of some works, measured in turns.
fn seconds<const N: usize>(works: [&(dyn Fn() + Sync); N]) -> [f64; N] {
    let mut best = [f64::MAX; N];
    on_pool(&Device::flex(), || {
        for _ in 0..30 {
            for (best, work) in best.iter_mut().zip(works) {
                let start = Instant::now();
                work();
                *best = best.min(start.elapsed().as_secs_f64());
            }
        }
    });
    best
}

fn leaf<const D: usize>(shape: [usize; D], seed: u64) -> Tensor<D> {
    random(shape, seed).autodiff().require_grad()
}

/// The operations of a block, of this crate or of Burn.
#[derive(Clone, Copy)]
struct Operations {
    multiply: fn(Tensor<2>, Tensor<2>) -> Tensor<2>,
    norm: fn(Tensor<2>, Tensor<1>, f64, f32) -> Tensor<2>,
    rotate: fn(Tensor<3>, Tensor<3>, Tensor<3>, bool) -> Tensor<3>,
    gate: fn(Tensor<2>, Tensor<2>, Activation) -> Tensor<2>,
    /// Of the queries, keys and values of several sequences.
    attend: fn([Tensor<3>; 3], usize, AttentionParams) -> Tensor<2>,
}

const OWN: Operations = Operations {
    multiply: linear::multiply,
    norm: norm::rms_norm,
    rotate: rope::rotate,
    gate: gate::gated,
    attend: |tensors, sequences, params| {
        in_turn(tensors, sequences, params, |query, span, params| attention(query, &[span], None, params))
    },
};

const REFERENCE: Operations = Operations {
    multiply: linear::reference::multiply,
    norm: norm::reference::rms_norm,
    rotate: rope::reference::rotate,
    gate: gate::reference,
    attend: |tensors, sequences, params| {
        in_turn(tensors, sequences, params, |query, span, params| {
            let [rows, heads, width] = query.dims();
            reference::span_attention(query, &span, params).output.reshape([rows, heads * width])
        })
    },
};

/// One sequence after the other.
fn in_turn(
    tensors: [Tensor<3>; 3],
    sequences: usize,
    params: AttentionParams,
    attend: fn(Tensor<3>, Span, AttentionParams) -> Tensor<2>,
) -> Tensor<2> {
    let length = tensors[0].dims()[0] / sequences;
    let outputs = (0..sequences)
        .map(|index| {
            let [query, keys, values] =
                tensors.each_ref().map(|all| all.clone().narrow(0, index * length, length));
            let stored = |all: Tensor<3>| KvTensor::Float(all.swap_dims(0, 1));
            let span = Span { keys: stored(keys), values: stored(values), position: 0, visible: None };
            attend(query, span, params)
        })
        .collect();
    Tensor::cat(outputs, 0)
}

struct Block {
    norms: [Tensor<1>; 2],
    /// Queries, keys, values, output, gate, up, down.
    weights: [Tensor<2>; 7],
    angles: [Tensor<3>; 2],
}

impl Block {
    fn new() -> Self {
        let weight =
            |outputs, inputs, seed| leaf([outputs, inputs], seed).mul_scalar(0.05).detach().require_grad();
        let all = HEADS * HEAD;
        Self {
            norms: [leaf([WIDTH], 1), leaf([WIDTH], 2)],
            weights: [
                weight(all, WIDTH, 3),
                weight(all, WIDTH, 4),
                weight(all, WIDTH, 5),
                weight(WIDTH, all, 6),
                weight(INNER, WIDTH, 7),
                weight(INNER, WIDTH, 8),
                weight(WIDTH, INNER, 9),
            ],
            angles: [random([ROWS, 1, HEAD / 2], 10).autodiff(), random([ROWS, 1, HEAD / 2], 11).autodiff()],
        }
    }

    fn forward(&self, x: Tensor<2>, operations: Operations) -> Tensor<2> {
        let Operations { multiply, norm, rotate, gate, attend } = operations;
        let [query, key, value, output, opened, up, down] = self.weights.clone();
        let [cos, sin] = self.angles.clone();
        let normed = norm(x.clone(), self.norms[0].clone(), 1e-5, 0.0);
        let heads = |weight| multiply(normed.clone(), weight).reshape([ROWS, HEADS, HEAD]);
        let query = rotate(heads(query), cos.clone(), sin.clone(), false);
        let key = rotate(heads(key), cos, sin, false);
        let value = heads(value);
        let params =
            AttentionParams { position: 0, window: None, scale: 1.0 / (HEAD as f32).sqrt(), softcap: None };
        let attended = attend([query, key, value], SEQUENCES, params);
        let x = x.add(multiply(attended, output));
        let normed = norm(x.clone(), self.norms[1].clone(), 1e-5, 0.0);
        let product = gate(multiply(normed.clone(), opened), multiply(normed, up), Activation::Silu);
        x.add(multiply(product, down))
    }
}

#[test]
#[ignore = "measure: cargo test --release --test training_speed -- --ignored --nocapture"]
fn blocks() {
    let (block, x) = (Block::new(), leaf([ROWS, WIDTH], 20));
    let products: usize = 4 * WIDTH * HEADS * HEAD + 3 * WIDTH * INNER;
    let flops = 6e-9 * (ROWS * products) as f64;
    let forward = |operations| drop(black_box(block.forward(x.clone(), operations)));
    let both = |operations| drop(black_box(block.forward(x.clone(), operations).sum().backward()));
    let plain = random::<2>([1024, 1024], 1);
    let peak = || drop(black_box(linear::multiply(plain.clone(), plain.clone())));
    let [reference, own, reference_forward, own_forward, peak] =
        seconds([&|| both(REFERENCE), &|| both(OWN), &|| forward(REFERENCE), &|| forward(OWN), &peak]);
    let peak = 2e-9 * f64::from(1 << 30) / peak;
    println!(
        "block, {ROWS} rows: references {:.1} ms, own {:.1} ms ({:.1} times); forward alone {:.1} and {:.1} ms",
        1e3 * reference,
        1e3 * own,
        reference / own,
        1e3 * reference_forward,
        1e3 * own_forward,
    );
    println!(
        "products' share: references {:.0}, own {:.0} GFLOP/s of {peak:.0} ({:.0} %)",
        flops / reference,
        flops / own,
        100.0 * flops / own / peak,
    );
}

#[test]
#[ignore = "measure: cargo test --release --test training_speed -- --ignored --nocapture"]
fn parts() {
    let compare = |name: &str, reference: &(dyn Fn() + Sync), own: &(dyn Fn() + Sync)| {
        let [reference, own] = seconds([reference, own]);
        let (times, reference, own) = (reference / own, 1e3 * reference, 1e3 * own);
        println!("{name}: references {reference:.2} ms, own {own:.2} ms, {times:.1} times");
        own
    };
    for (inputs, outputs) in [(WIDTH, WIDTH), (WIDTH, INNER), (INNER, WIDTH), (WIDTH, 4096)] {
        let (x, weight) = (leaf([ROWS, inputs], 1), leaf([outputs, inputs], 2));
        let of = |multiply: fn(Tensor<2>, Tensor<2>) -> Tensor<2>| {
            drop(black_box(multiply(x.clone(), weight.clone()).sum().backward()));
        };
        let name = format!("product {inputs} to {outputs}");
        let own = compare(&name, &|| of(linear::reference::multiply), &|| of(linear::multiply));
        let constant = |tensor: &Tensor<2>| tensor.clone().without_autodiff().autodiff();
        let backward = |x: Tensor<2>, weight: Tensor<2>| {
            drop(black_box(linear::multiply(x, weight).sum().backward()));
        };
        let [forward, of_x, of_weight] = seconds([
            &|| drop(black_box(linear::multiply(constant(&x), constant(&weight)))),
            &|| backward(x.clone(), constant(&weight)),
            &|| backward(constant(&x), weight.clone()),
        ]);
        let flops = 2e-9 * (ROWS * inputs * outputs) as f64;
        println!(
            "    {:.0} GFLOP/s; forward {:.0}, with the gradient of x {:.0}, with that of the weight {:.0}",
            3e3 * flops / own,
            flops / forward,
            2.0 * flops / of_x,
            2.0 * flops / of_weight,
        );
    }
    let (x, weight) = (leaf([512, 1024], 1), random([1024, 1024], 2));
    for four_bits in [false, true] {
        let grouping = Grouping { inputs: 1024, group: 32, four_bits, tiled: true };
        let (words, scales) = grouped(1024, grouping, 1);
        compare(
            &format!("frozen product, four bits {four_bits}"),
            &|| {
                let (words, scales) = (words.clone(), scales.clone());
                let weight = linear::reference::dequantize(words, scales, grouping).autodiff();
                drop(black_box(linear::reference::multiply(x.clone(), weight).sum().backward()));
            },
            &|| {
                let product = linear::multiply_grouped(x.clone(), words.clone(), scales.clone(), grouping);
                drop(black_box(product.sum().backward()));
            },
        );
    }
    let half = weight.cast(DType::BF16).autodiff();
    compare(
        "frozen product, bf16",
        &|| drop(black_box(linear::reference::multiply(x.clone(), half.clone()).sum().backward())),
        &|| drop(black_box(linear::multiply(x.clone(), half.clone()).sum().backward())),
    );
    for length in [128, 512, 1024] {
        let query = leaf([length, HEADS, HEAD], 1);
        let (keys, values) = (leaf([length, HEADS, HEAD], 2), leaf([length, HEADS, HEAD], 3));
        let params = AttentionParams { position: 0, window: None, scale: 0.2, softcap: None };
        let of = |operations: Operations, back: bool| {
            let output = (operations.attend)([query.clone(), keys.clone(), values.clone()], 1, params);
            if back {
                drop(black_box(output.sum().backward()));
            }
        };
        compare(&format!("attention, {length} rows, forward"), &|| of(REFERENCE, false), &|| of(OWN, false));
        compare(&format!("attention, {length} rows"), &|| of(REFERENCE, true), &|| of(OWN, true));
    }
    let (x, weight) = (leaf([ROWS, WIDTH], 1), leaf([WIDTH], 2));
    let of = |norm: fn(Tensor<2>, Tensor<1>, f64, f32) -> Tensor<2>| {
        drop(black_box(norm(x.clone(), weight.clone(), 1e-5, 0.0).sum().backward()));
    };
    compare("norm", &|| of(norm::reference::rms_norm), &|| of(norm::rms_norm));
    let (gates, ups) = (leaf([ROWS, INNER], 1), leaf([ROWS, INNER], 2));
    let of = |gate: fn(Tensor<2>, Tensor<2>, Activation) -> Tensor<2>| {
        drop(black_box(gate(gates.clone(), ups.clone(), Activation::Silu).sum().backward()));
    };
    compare("gate", &|| of(gate::reference), &|| of(gate::gated));
    let heads = leaf([ROWS, HEADS, HEAD], 1);
    let angles = random::<3>([ROWS, 1, HEAD / 2], 2).autodiff();
    let of = |rotate: fn(Tensor<3>, Tensor<3>, Tensor<3>, bool) -> Tensor<3>| {
        drop(black_box(rotate(heads.clone(), angles.clone(), angles.clone(), false).sum().backward()));
    };
    compare("rotation", &|| of(rope::reference::rotate), &|| of(rope::rotate));
    let logits = leaf([ROWS, 2048], 1);
    let targets: Vec<i32> = (0..ROWS as i32).map(|row| row * 31 % 2048).collect();
    let targets = Tensor::<1, Int>::from_data(TensorData::new(targets, [ROWS]), &Device::flex().autodiff());
    let weights = Tensor::<1>::ones([ROWS], &Device::flex().autodiff());
    let of = |loss: fn(Tensor<2>, Tensor<1, Int>, Tensor<1>) -> Tensor<1>| {
        drop(black_box(loss(logits.clone(), targets.clone(), weights.clone()).backward()));
    };
    compare("cross entropy", &|| of(cross_entropy::reference::cross_entropy), &|| of(cross_entropy));
}

/// The cost of asking a tensor whether it is recorded.
#[test]
#[ignore = "measure: cargo test --release --test training_speed -- --ignored --nocapture"]
fn questions() {
    let x = random::<2>([1, 64], 1);
    let weight = random::<2>([64, 64], 2);
    let [ask, multiply] = seconds([&|| (0..1000).for_each(|_| drop(black_box(x.device()))), &|| {
        (0..1000).for_each(|_| drop(black_box(linear::multiply(x.clone(), weight.clone()))))
    }]);
    println!("device of a tensor {:.0} ns, small product {:.0} ns", 1e6 * ask, 1e6 * multiply);
}
