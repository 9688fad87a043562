//! Gates, norms, rotation, convolution, the delta rule and the state space compared with Burn's operations, and bits with and
//! without other rows.

#![allow(clippy::unwrap_used)]

mod support;

use burn::tensor::{DType, Tensor};
use firebox_kernels::convolution::{self, ConvolutionParams, convolve};
use firebox_kernels::delta::{self, DecayParams, Heads, Tokens, delta_rule};
use firebox_kernels::gate::{self, gated, gated_halves};
use firebox_kernels::state_space::{self, ScanParams, ScanTokens, StateSpace, scan};
use firebox_kernels::{Activation, norm, rope};
use proptest::prelude::*;
use support::{ACTIVATIONS, assert_close, bits, random, values};

fn doubles<const D: usize>(tensor: Tensor<D>) -> Vec<f64> {
    tensor.cast(DType::F64).into_data().try_to_vec::<f64>().unwrap()
}

fn double_bits<const D: usize>(tensor: Tensor<D>) -> Vec<u64> {
    assert_eq!(tensor.dtype(), DType::F64);
    doubles(tensor).into_iter().map(f64::to_bits).collect()
}

fn assert_near<const D: usize>(found: Tensor<D>, expected: Tensor<D>, tolerance: f64) {
    assert_eq!((found.dims(), found.dtype()), (expected.dims(), expected.dtype()));
    for (index, (found, expected)) in doubles(found).into_iter().zip(doubles(expected)).enumerate() {
        let close = (found - expected).abs() <= tolerance * expected.abs().max(1.0);
        assert!(close, "element {index}: {found} instead of {expected}");
    }
}

/// Returns a tensor that is stored as its transpose.
fn by_column(tensor: Tensor<2>) -> Tensor<2> {
    let [rows, width] = tensor.dims();
    let transposed: Tensor<2> = Tensor::zeros([width, rows], &tensor.device());
    transposed.add(tensor.transpose()).transpose()
}

/// Returns rows, possibly none; Burn slices at least one.
fn rows_of(tensor: &Tensor<2>, from: usize, to: usize) -> Tensor<2> {
    if from < to {
        return tensor.clone().narrow(0, from, to - from);
    }
    Tensor::zeros([0, tensor.dims()[1]], (&tensor.device(), tensor.dtype()))
}

/// Runs with one thread and with several.
fn with_threads<T>(work: impl Fn() -> T + Sync) -> (T, T)
where
    T: Send,
{
    let run = |threads| rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap().install(&work);
    (run(1), run(5))
}

/// A random convolution.
#[derive(Debug, Clone)]
struct Convolved {
    count: usize,
    channels: usize,
    kernel: usize,
    wide: bool,
    follows: bool,
    params: ConvolutionParams,
    seed: u64,
}

impl Convolved {
    fn tensors(&self) -> (Tensor<2>, Option<Tensor<2>>, Tensor<2>) {
        let dtype = if self.wide { DType::F64 } else { DType::F32 };
        let tensor = |shape, seed| random(shape, seed).mul_scalar(3.0).cast(dtype);
        let earlier =
            self.follows.then(|| tensor([self.kernel - 1, self.channels], self.seed.wrapping_add(1)));
        let taps = tensor([self.channels, self.kernel], self.seed.wrapping_add(2));
        (tensor([self.count, self.channels], self.seed), earlier, taps)
    }

    /// Rounding error of sums over numbers of several magnitudes.
    fn tolerance(&self) -> f64 {
        if self.wide || self.params.exact { 1e-13 } else { 3e-6 }
    }
}

fn convolved() -> impl Strategy<Value = Convolved> {
    let params = (any::<bool>(), any::<bool>()).prop_map(|(exact, silu)| ConvolutionParams { exact, silu });
    (0usize..40, 1usize..140, 1usize..7, any::<bool>(), any::<bool>(), params, 0u64..1000).prop_map(
        |(count, channels, kernel, wide, follows, params, seed)| Convolved {
            count,
            channels,
            kernel,
            wide,
            follows,
            params,
            seed,
        },
    )
}

/// A random state space.
#[derive(Debug, Clone)]
struct Scan {
    space: StateSpace,
    count: usize,
    seed: u64,
}

impl Scan {
    fn tokens(&self) -> ScanTokens {
        let step = by_column(random([self.count, self.space.heads], self.seed + 1).mul_scalar(4.0));
        ScanTokens { mixed: random([self.count, self.space.channels()], self.seed), step }
    }

    fn params(&self) -> ScanParams {
        let of = |index| random([self.space.heads], self.seed + index);
        ScanParams { rate: of(2), bias: of(3), skip: of(4) }
    }

    fn memory(&self) -> Tensor<3> {
        random([self.space.heads, self.space.states, self.space.width], self.seed + 5)
    }

    /// Runs it from each cut to the next.
    fn in_pieces(&self, cuts: &[usize]) -> (Vec<u32>, Vec<u32>) {
        let tokens = self.tokens();
        let (mut read, mut memory) = (Vec::new(), self.memory());
        for cut in cuts.windows(2) {
            let part = |tensor: &Tensor<2>| rows_of(tensor, cut[0], cut[1]);
            let part = ScanTokens { mixed: part(&tokens.mixed), step: part(&tokens.step) };
            let (found, after) = scan(part, self.params(), self.space, Some(memory));
            read.extend(bits(found));
            memory = after;
        }
        (read, bits(memory))
    }
}

fn scans() -> impl Strategy<Value = Scan> {
    let steps = prop_oneof![Just([0.0, f32::INFINITY]), Just([0.05, 1.5])];
    (0usize..150, 1usize..3, 1usize..4, 1usize..70, 1usize..20, steps, 0u64..1000).prop_map(
        |(count, groups, sharing, width, states, steps, seed)| {
            let space = StateSpace { heads: groups * sharing, width, groups, states, steps };
            Scan { space, count, seed }
        },
    )
}

/// A random delta rule.
#[derive(Debug, Clone)]
struct Rule {
    heads: Heads,
    count: usize,
    logarithmic: bool,
    seed: u64,
}

impl Rule {
    fn tokens(&self) -> Tokens {
        let Heads { key_heads, value_heads, key_width, value_width, .. } = self.heads;
        let channels = 2 * key_heads * key_width + value_heads * value_width;
        let seed = self.seed;
        Tokens {
            mixed: random([self.count, channels], seed).cast(DType::F64),
            step: by_column(random([self.count, value_heads], seed + 1).mul_scalar(4.0)),
            decay: by_column(random([self.count, value_heads], seed + 2).mul_scalar(30.0)),
        }
    }

    fn decay_params(&self) -> DecayParams {
        let rate = random([self.heads.value_heads], self.seed + 3);
        DecayParams {
            rate: if self.logarithmic { rate.sub_scalar(2.0) } else { rate.abs().neg() },
            bias: random([self.heads.value_heads], self.seed + 4),
            logarithmic: self.logarithmic,
        }
    }

    fn memory(&self) -> Tensor<3> {
        let Heads { value_heads, key_width, value_width, .. } = self.heads;
        random([value_heads, key_width, value_width], self.seed + 5).cast(DType::F64)
    }

    /// Runs the rule from each cut to the next.
    fn in_pieces(&self, cuts: &[usize]) -> (Vec<u32>, Vec<u64>) {
        let tokens = self.tokens();
        let (mut read, mut memory) = (Vec::new(), self.memory());
        for cut in cuts.windows(2) {
            let part = |tensor: &Tensor<2>| rows_of(tensor, cut[0], cut[1]);
            let part =
                Tokens { mixed: part(&tokens.mixed), step: part(&tokens.step), decay: part(&tokens.decay) };
            let (found, after) = delta_rule(part, self.decay_params(), self.heads, Some(memory));
            read.extend(bits(found));
            memory = after;
        }
        (read, double_bits(memory))
    }
}

fn rules() -> impl Strategy<Value = Rule> {
    let heads = (1usize..4, 1usize..4, 1usize..20, 1usize..150, any::<bool>()).prop_map(
        |(key_heads, sharing, key_width, value_width, tiled)| Heads {
            key_heads,
            value_heads: key_heads * sharing,
            key_width,
            value_width,
            tiled,
        },
    );
    (heads, 0usize..70, any::<bool>(), 0u64..1000).prop_map(|(heads, count, logarithmic, seed)| Rule {
        heads,
        count,
        logarithmic,
        seed,
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    /// With any layout, and as halves of one tensor.
    #[test]
    fn gates(rows in 0usize..12, width in 1usize..70, which in 0usize..7, seed in 0u64..1000) {
        let activation = ACTIVATIONS[which];
        let gate = random([rows, width], seed).mul_scalar(8.0);
        let up = random([rows, width], seed + 1);
        let expected = gate::reference(gate.clone(), up.clone(), activation);
        let found = gated(gate.clone(), up.clone(), activation);
        // Burn's approximations cancel where the curves approach zero.
        assert_near(found.clone(), expected, 2e-6);
        let columns = gated(by_column(gate.clone()), by_column(up.clone()), activation);
        prop_assert_eq!(bits(columns), bits(found.clone()));
        let one_of_each = gated(by_column(gate.clone()), up.clone(), activation);
        prop_assert_eq!(bits(one_of_each), bits(found.clone()));
        let halves = gated_halves(Tensor::cat(vec![gate.clone(), up.clone()], 1), activation);
        prop_assert_eq!(bits(halves), bits(found.clone()));
        for row in 0..rows {
            let of = |tensor: &Tensor<2>| tensor.clone().narrow(0, row, 1);
            let alone = gated(of(&gate), of(&up), activation);
            prop_assert_eq!(bits(alone), bits(of(&found)));
        }
    }

    #[test]
    fn sums_and_norms(rows in 0usize..12, width in 1usize..300, offset in 0f32..2.0, seed in 0u64..1000) {
        let (x, residual) = (random([rows, width], seed), random([rows, width], seed + 1));
        let weight = random([width], seed + 2);
        let (sum, normed) = norm::add_rms_norm(x.clone(), residual.clone(), weight.clone(), 1e-5, offset);
        prop_assert_eq!(bits(sum.clone()), bits(x.clone().add(residual.clone())));
        assert_close(normed.clone(), norm::reference::rms_norm(sum.clone(), weight.clone(), 1e-5, offset), 2e-5);
        prop_assert_eq!(bits(normed.clone()), bits(norm::rms_norm(sum.clone(), weight.clone(), 1e-5, offset)));
        for row in 0..rows {
            let of = |tensor: &Tensor<2>| tensor.clone().narrow(0, row, 1);
            let alone = norm::add_rms_norm(of(&x), of(&residual), weight.clone(), 1e-5, offset);
            prop_assert_eq!((bits(alone.0), bits(alone.1)), (bits(of(&sum)), bits(of(&normed))));
        }
    }

    #[test]
    fn convolutions(case in convolved(), cut in 0usize..40) {
        let (x, earlier, taps) = case.tensors();
        let (sums, kept) = convolve(x.clone(), earlier.clone(), taps.clone(), case.params);
        let before = earlier.clone().unwrap_or_else(|| {
            Tensor::zeros([case.kernel - 1, case.channels], (&x.device(), x.dtype()))
        });
        let expected = convolution::reference(x.clone(), before, taps.clone(), case.params);
        assert_near(sums.clone(), expected.0, case.tolerance());
        prop_assert_eq!(doubles(kept.clone()), doubles(expected.1));

        let cut = cut.min(case.count);
        let part = |from, to| rows_of(&x, from, to);
        let (first, between) = convolve(part(0, cut), earlier.clone(), taps.clone(), case.params);
        let (second, after) = convolve(part(cut, case.count), Some(between), taps.clone(), case.params);
        prop_assert_eq!([doubles(first), doubles(second)].concat(), doubles(sums.clone()));
        prop_assert_eq!(doubles(after), doubles(kept.clone()));

        let (mut one_by_one, mut state) = (Vec::new(), earlier);
        for token in 0..case.count {
            let (sum, after) = convolve(part(token, token + 1), state, taps.clone(), case.params);
            one_by_one.extend(doubles(sum));
            state = Some(after);
        }
        prop_assert_eq!(one_by_one, doubles(sums));
        if let Some(state) = state {
            prop_assert_eq!(doubles(state), doubles(kept));
        }
    }

    #[test]
    fn delta_rules(rule in rules()) {
        let (read, memory) = delta_rule(rule.tokens(), rule.decay_params(), rule.heads, Some(rule.memory()));
        let expected = delta::reference::delta_rule(rule.tokens(), rule.decay_params(), rule.heads, rule.memory());
        assert_near(read, expected.0, 2e-7);
        assert_near(memory, expected.1, 1e-12);
    }

    /// In one call, in two, and token by token.
    #[test]
    fn delta_rules_in_pieces(rule in rules(), cut in 0usize..70) {
        let whole = rule.in_pieces(&[0, rule.count]);
        prop_assert_eq!(&rule.in_pieces(&[0, cut.min(rule.count), rule.count]), &whole);
        let every: Vec<usize> = (0..=rule.count).collect();
        prop_assert_eq!(&rule.in_pieces(&every).1, &whole.1);
        prop_assert_eq!(&rule.in_pieces(&every).0, &whole.0);
    }

    #[test]
    fn state_spaces(case in scans()) {
        let (read, memory) = scan(case.tokens(), case.params(), case.space, Some(case.memory()));
        let expected = state_space::reference::scan(case.tokens(), case.params(), case.space, case.memory());
        assert_near(read, expected.0, 1e-5);
        assert_near(memory, expected.1, 1e-5);
    }

    /// In one call, in two, and token by token.
    #[test]
    fn state_spaces_in_pieces(case in scans(), cut in 0usize..150) {
        let whole = case.in_pieces(&[0, case.count]);
        prop_assert_eq!(&case.in_pieces(&[0, cut.min(case.count), case.count]), &whole);
        let every: Vec<usize> = (0..=case.count).collect();
        prop_assert_eq!(&case.in_pieces(&every), &whole);
    }
}

#[test]
fn a_new_memory_is_zero() {
    let heads = Heads { key_heads: 2, value_heads: 4, key_width: 9, value_width: 17, tiled: false };
    let rule = Rule { heads, count: 5, logarithmic: true, seed: 3 };
    let (read, memory) = delta_rule(rule.tokens(), rule.decay_params(), heads, None);
    let zero = rule.memory().zeros_like();
    let (same_read, same_memory) = delta_rule(rule.tokens(), rule.decay_params(), heads, Some(zero));
    assert_eq!((bits(read), double_bits(memory)), (bits(same_read), double_bits(same_memory)));
}

/// Large enough for several threads.
#[test]
fn many_threads_compute_the_same() {
    let (rows, width) = (150, 1024);
    let (x, y) = (random([rows, width], 1), random([rows, width], 2));
    let weight = random([width], 3);
    let (one, five) = with_threads(|| {
        let (sum, normed) = norm::add_rms_norm(x.clone(), y.clone(), weight.clone(), 1e-6, 0.0);
        (bits(sum), bits(normed), bits(norm::rms_norm(x.clone(), weight.clone(), 1e-6, 0.0)))
    });
    assert_eq!(one, five);
    assert_close(
        norm::rms_norm(x.clone(), weight.clone(), 1e-6, 0.5),
        norm::reference::rms_norm(x.clone(), weight, 1e-6, 0.5),
        2e-5,
    );

    let heads = x.clone().reshape([rows, 8, 128]);
    for interleaved in [false, true] {
        let (cos, sin) = (random([rows, 1, 60], 4), random([rows, 1, 60], 5));
        let (one, five) =
            with_threads(|| bits(rope::rotate(heads.clone(), cos.clone(), sin.clone(), interleaved)));
        assert_eq!(one, five);
        let expected = rope::reference::rotate(heads.clone(), cos.clone(), sin.clone(), interleaved);
        assert_close(rope::rotate(heads.clone(), cos, sin, interleaved), expected, 1e-6);
    }

    let (one, five) = with_threads(|| {
        let both = Tensor::cat(vec![x.clone(), y.clone()], 1);
        (
            bits(gated(x.clone(), y.clone(), Activation::GeluTanh)),
            bits(gated_halves(both, Activation::GeluTanh)),
        )
    });
    assert_eq!(one, five);
    assert_eq!(one.0, one.1);

    let taps = random([width, 4], 6);
    let params = ConvolutionParams { exact: true, silu: true };
    let (one, five) = with_threads(|| double_bits(convolve(x.clone(), None, taps.clone(), params).0));
    assert_eq!(one, five);

    let heads = Heads { key_heads: 2, value_heads: 6, key_width: 24, value_width: 40, tiled: true };
    let rule = Rule { heads, count: 100, logarithmic: true, seed: 8 };
    let (one, five) = with_threads(|| rule.in_pieces(&[0, 100]));
    assert_eq!(one, five);
}

/// Operations may overwrite their inputs, but not shared ones.
#[test]
fn operations_leave_held_inputs_unchanged() {
    let (x, y) = (random([4, 32], 1), random([4, 32], 2));
    let (x_before, y_before) = (values(x.clone()), values(y.clone()));
    let _ = gated(x.clone(), y.clone(), Activation::Silu);
    let _ = norm::add_rms_norm(x.clone(), y.clone(), random([32], 3), 1e-6, 0.0);
    let angles = random([4, 1, 8], 4);
    let _ = rope::rotate(x.clone().reshape([4, 2, 16]), angles.clone(), angles, false);
    // A slice of a larger tensor that is still held.
    let _ = gated(x.clone().narrow(0, 1, 2), y.clone().narrow(0, 1, 2), Activation::Silu);
    assert_eq!((values(x), values(y)), (x_before, y_before));

    let heads = Heads { key_heads: 1, value_heads: 2, key_width: 8, value_width: 8, tiled: false };
    let rule = Rule { heads, count: 3, logarithmic: false, seed: 4 };
    let memory = rule.memory();
    let before = double_bits(memory.clone());
    let _ = delta_rule(rule.tokens(), rule.decay_params(), heads, Some(memory.clone()));
    assert_eq!(double_bits(memory), before);
}

/// NaN spreads within its row only and does not panic.
#[test]
fn numbers_that_are_none() {
    for special in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let spoiled = random([3, 40], 1).slice_fill([1..2, 0..40], special);
        let (x, residual, weight) = (spoiled.clone(), random([3, 40], 2), random([40], 3));
        for activation in ACTIVATIONS {
            let found = values(gated(spoiled.clone(), residual.clone(), activation));
            assert!(found[..40].iter().chain(&found[80..]).all(|value| value.is_finite()));
            assert_eq!(
                found[40].is_nan(),
                special.is_nan()
                    || values(gate::reference(spoiled.clone(), residual.clone(), activation))[40].is_nan(),
                "{activation:?} of {special}"
            );
        }
        let (_, normed) = norm::add_rms_norm(x.clone(), residual, weight, 1e-6, 0.0);
        assert!(values(normed)[80..].iter().all(|value| value.is_finite()));
        let params = ConvolutionParams { exact: true, silu: true };
        let (sums, _) = convolve(x.clone(), None, random([40, 2], 4), params);
        assert!(doubles(sums)[..40].iter().all(|value| value.is_finite()));
        let heads = Heads { key_heads: 1, value_heads: 1, key_width: 10, value_width: 20, tiled: false };
        let tokens = Tokens {
            mixed: x.cast(DType::F64),
            step: spoiled.clone().narrow(1, 0, 1),
            decay: spoiled.narrow(1, 0, 1),
        };
        let decay_params = DecayParams { rate: random([1], 5), bias: random([1], 6), logarithmic: true };
        let (read, _) = delta_rule(tokens, decay_params, heads, None);
        assert!(values(read)[..20].iter().all(|value| value.is_finite()));
    }
}
