//! The operations of a decode step and of a prompt, with the bytes of weights or cache they read, or the multiplications
//! they make, per second. What the machine itself can do is measured beside them: reading and copying memory, and a
//! product of Burn's that stays in the cache.
//!
//! `cargo bench -- products/q4` runs a part; `RAYON_NUM_THREADS` sets the threads. `FIREBOX_BENCH_DEVICE=wgpu cargo bench
//! --features wgpu --bench operations` measures an accelerator, whose operations are asked for one after the other and
//! waited for together: the longer of asking and computing is what is measured.

use std::hint::black_box;
use std::sync::LazyLock;
use std::time::Instant;

use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use criterion::{BatchSize, Bencher, BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use firebox_kernels::activation::Activation;
use firebox_kernels::attention::{self, AttentionParams, KvTensor, Span};
use firebox_kernels::convolution::{ConvolutionParams, convolve};
use firebox_kernels::delta::{DecayParams, Heads, Tokens, delta_rule};
use firebox_kernels::linear::{Weight, multiplies_tiles, multiply_each};
use firebox_kernels::{Grouping, gate, norm, on_pool, rope};
use rayon::prelude::*;

/// More than any cache holds.
const BEYOND_CACHES: usize = 256 << 20;

/// Inputs and outputs of the projections of a small and of a middling model.
const SHAPES: [(usize, usize); 4] = [(1024, 3072), (3072, 1024), (4096, 4096), (4096, 14336)];

static DEVICE: LazyLock<Device> = LazyLock::new(|| match std::env::var("FIREBOX_BENCH_DEVICE") {
    Ok(name) => firebox::device(&name).unwrap_or_else(|error| panic!("{error}")),
    Err(_) => Device::flex(),
});

fn is_cpu() -> bool {
    *DEVICE == Device::flex()
}

fn numbers<const D: usize>(shape: [usize; D]) -> Tensor<D> {
    let count = shape.iter().product();
    let values: Vec<f32> = (0..count).map(|i: usize| (i * 37 % 199) as f32 / 100.0 - 1.0).collect();
    Tensor::from_data(TensorData::new(values, shape), &*DEVICE)
}

/// Numbers that an operation takes and on the CPU may write over, which is how a model hands them over.
fn taken<const D: usize>(shape: [usize; D]) -> impl Fn() -> Tensor<D> {
    let there = (!is_cpu()).then(|| numbers(shape));
    move || there.clone().unwrap_or_else(|| numbers(shape))
}

/// Measures an operation without what makes its arguments.
fn measure<I, O>(bencher: &mut Bencher<'_>, mut arguments: impl FnMut() -> I, mut work: impl FnMut(I) -> O) {
    if is_cpu() {
        return bencher.iter_batched(arguments, work, BatchSize::LargeInput);
    }
    let wait = || DEVICE.sync().unwrap_or_else(|error| panic!("{error}"));
    bencher.iter_custom(|times| {
        wait();
        let began = Instant::now();
        for _ in 0..times {
            black_box(work(arguments()));
        }
        wait();
        began.elapsed()
    });
}

/// A weight and the bytes it takes.
fn weight(format: &str, inputs: usize, outputs: usize) -> (Weight, usize) {
    if format == "f16" {
        return (Weight::Dense(numbers([outputs, inputs]).cast(DType::F16)), 2 * inputs * outputs);
    }
    let four_bits = format == "q4";
    let words = inputs / if four_bits { 8 } else { 4 };
    let bits: Vec<i32> = (0..outputs * words).map(|i| (i as i32).wrapping_mul(0x2C1B_3C6D)).collect();
    let data = TensorData::new(bits, [outputs, words]);
    let words_tensor = Tensor::<2, Int>::from_data(data, (&*DEVICE, DType::I32));
    let scales = numbers([outputs, inputs / 32]).cast(DType::F16);
    let grouping = Grouping { inputs, group: 32, four_bits, tiled: multiplies_tiles(&DEVICE) };
    let bytes = outputs * (4 * words + inputs / 16);
    (Weight::Grouped { words: words_tensor, scales, grouping }, bytes)
}

fn machine(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("machine");
    // A product of Burn's own of matrices that stay in the cache: what single precision reaches.
    let size = if is_cpu() { 512 } else { 4096 };
    let (a, b) = (numbers([size, size]), numbers([size, size]));
    group.throughput(Throughput::Elements(2 * (size as u64).pow(3)));
    group.bench_function("flops", |bencher| measure(bencher, || (), |()| a.clone().matmul(b.clone())));
    if !is_cpu() {
        let source = numbers([BEYOND_CACHES / 4]);
        group.throughput(Throughput::Bytes(2 * BEYOND_CACHES as u64));
        group.bench_function("copy", |bencher| measure(bencher, || (), |()| source.clone().add_scalar(1.0)));
        return group.finish();
    }
    let source = vec![1u64; BEYOND_CACHES / 8];
    let mut target = vec![0u64; BEYOND_CACHES / 8];
    let piece = source.len() / (4 * rayon::current_num_threads());
    group.throughput(Throughput::Bytes(BEYOND_CACHES as u64));
    group.bench_function("read", |bencher| {
        bencher.iter(|| -> u64 {
            source
                .par_chunks(piece)
                .map(|part| part.iter().fold(0, |sum, x| sum ^ x))
                .reduce(|| 0, |a, b| a ^ b)
        });
    });
    group.bench_function("copy", |bencher| {
        bencher.iter(|| {
            let parts = target.par_chunks_mut(piece).zip(source.par_chunks(piece));
            parts.for_each(|(to, from)| to.copy_from_slice(from));
        });
    });
    group.finish();
}

fn products(criterion: &mut Criterion) {
    for format in ["f16", "q8", "q4"] {
        let mut group = criterion.benchmark_group(format!("products/{format}"));
        for (inputs, outputs) in SHAPES {
            let (first, bytes) = weight(format, inputs, outputs);
            let mut weights = vec![first];
            // One after the other, so that none is in a cache when its turn comes again.
            weights.resize_with(BEYOND_CACHES.div_ceil(bytes).max(2), || weight(format, inputs, outputs).0);
            for rows in [1, 8, 512] {
                let x = numbers([rows, inputs]);
                let work = if rows == 512 {
                    Throughput::Elements((2 * rows * inputs * outputs) as u64)
                } else {
                    Throughput::Bytes(bytes as u64)
                };
                group.throughput(work);
                let mut next = 0;
                group.bench_function(
                    BenchmarkId::new(format!("{rows} rows"), format!("{inputs}x{outputs}")),
                    |bencher| {
                        let arguments = || {
                            next = (next + 1) % weights.len();
                            (x.clone(), weights[next].clone())
                        };
                        measure(bencher, arguments, |(x, weight)| {
                            on_pool(&DEVICE, || multiply_each(x, vec![weight]))
                        });
                    },
                );
            }
        }
        group.finish();
    }
}

fn attention(criterion: &mut Criterion) {
    let (heads, kv_heads, head_dim) = (16, 8, 128);
    let mut group = criterion.benchmark_group("attend");
    for (rows, positions) in [(1, 128), (1, 4096), (512, 512)] {
        let query = numbers([rows, heads, head_dim]);
        let params = AttentionParams { position: positions - rows, window: None, scale: 0.1, softcap: None };
        for format in ["f32", "f16", "8-bit"] {
            let values = numbers([kv_heads, positions, head_dim]);
            let (stored, size) = match format {
                "f32" => (KvTensor::Float(values), 4),
                "f16" => (KvTensor::Float(values.cast(DType::F16)), 2),
                _ => (KvTensor::quantize(values), 1),
            };
            let spans = [Span { keys: stored.clone(), values: stored, position: 0, visible: None }];
            group.throughput(if rows == 1 {
                Throughput::Bytes((2 * kv_heads * positions * head_dim * size) as u64)
            } else {
                // Two products with half the pairs of rows and positions.
                Throughput::Elements((2 * rows * positions * heads * head_dim) as u64)
            });
            group.bench_function(BenchmarkId::new(format, format!("{rows}x{positions}")), |bencher| {
                measure(
                    bencher,
                    || query.clone(),
                    |query| on_pool(&DEVICE, || attention::attention(query, &spans, None, params)),
                );
            });
        }
    }
    group.finish();
}

fn between(criterion: &mut Criterion) {
    for rows in [1, 512] {
        let mut group = criterion.benchmark_group(format!("between/{rows} rows"));
        let (hidden, weight) = (numbers([rows, 1024]), numbers([1024]));
        group.throughput(Throughput::Bytes((rows * 1024 * 4) as u64));
        group.bench_function("norm", |bencher| {
            measure(bencher, || hidden.clone(), |hidden| norm::rms_norm(hidden, weight.clone(), 1e-6, 0.0));
        });
        let (gate, up) = (taken([rows, 3072]), numbers([rows, 3072]));
        group.throughput(Throughput::Bytes((2 * rows * 3072 * 4) as u64));
        group.bench_function("gate", |bencher| {
            measure(bencher, &gate, |gate| gate::gated(gate, up.clone(), Activation::Silu));
        });
        let (query, angles) = (taken([rows, 16, 128]), numbers([rows, 1, 64]));
        group.throughput(Throughput::Bytes((rows * 16 * 128 * 4) as u64));
        group.bench_function("rotate", |bencher| {
            measure(bencher, &query, |query| rope::rotate(query, angles.clone(), angles.clone(), false));
        });
        let channels = numbers([rows, 6144]);
        group.throughput(Throughput::Bytes((rows * 6144 * 4) as u64));
        let taps = numbers([6144, 4]);
        group.bench_function("convolution", |bencher| {
            let params = ConvolutionParams { exact: is_cpu(), silu: true };
            measure(bencher, || channels.clone(), |channels| convolve(channels, None, taps.clone(), params));
        });
        let heads = Heads { key_heads: 16, value_heads: 16, key_width: 128, value_width: 128, tiled: false };
        // Recurrent layers are computed in double precision where the device has it.
        let exact = if is_cpu() { DType::F64 } else { DType::F32 };
        let tokens = Tokens {
            mixed: channels.clone().cast(exact),
            step: numbers([rows, 16]),
            decay: numbers([rows, 16]),
        };
        let decay_params = DecayParams { rate: numbers([16]), bias: numbers([16]), logarithmic: true };
        let memory = taken([16, 128, 128]);
        // A token reads and writes every number of the memory.
        group.throughput(Throughput::Bytes((rows * 16 * 128 * 128 * 8) as u64));
        group.bench_function("delta rule", |bencher| {
            measure(
                bencher,
                || (tokens.clone(), if is_cpu() { memory().cast(exact) } else { memory() }),
                |(tokens, memory)| {
                    on_pool(&DEVICE, || delta_rule(tokens, decay_params.clone(), heads, Some(memory)))
                },
            );
        });
        group.finish();
    }
}

criterion_group! {
    name = operations;
    config = Criterion::default().sample_size(20).measurement_time(std::time::Duration::from_secs(2));
    targets = machine, products, attention, between
}
criterion_main!(operations);
