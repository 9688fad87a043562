//! Rotation, norms and the delta rule against Burn's own operations.

#![allow(clippy::unwrap_used)]

mod support;

use burn::tensor::{DType, Device, Tensor, TensorData};
use firebox_kernels::delta::{Tokens, delta_rule};
use firebox_kernels::{delta, norm, rope};
use proptest::prelude::*;
use support::{assert_close, random};

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    #[test]
    fn rotation(
        rows in 1usize..10, heads in 1usize..5, pairs in 1usize..20, beyond in 0usize..9,
        interleaved: bool, seed in 0u64..1000,
    ) {
        let x = random([rows, heads, 2 * pairs + beyond], seed);
        let (cos, sin) = (random([rows, 1, pairs], seed + 1), random([rows, 1, pairs], seed + 2));
        let expected = rope::reference(x.clone(), cos.clone(), sin.clone(), interleaved);
        assert_close(rope::rotate(x, cos, sin, interleaved), expected, 1e-6);
    }

    #[test]
    fn rotation_by_a_delta(
        heads in 1usize..5, positions in 1usize..10, pairs in 1usize..20, beyond in 0usize..9,
        interleaved: bool, seed in 0u64..1000,
    ) {
        // Part of a larger buffer, as a cache is.
        let keys = random([heads, positions + 3, 2 * pairs + beyond], seed).narrow(1, 2, positions);
        let (cos, sin) = (random([pairs], seed + 1), random([pairs], seed + 2));
        let rotated = rope::rotate_by(keys.clone(), cos.clone(), sin.clone(), interleaved);
        assert_close(rotated, rope::reference_by(keys, cos, sin, interleaved), 1e-6);
    }

    /// A key rotated to its position and then by a delta is the key rotated to the sum of both.
    #[test]
    fn rotation_to_another_position(
        heads in 1usize..4, positions in 1usize..6, pairs in 1usize..20, beyond in 0usize..5,
        first in 0usize..100, delta in -100i32..100, interleaved: bool, seed in 0u64..1000,
    ) {
        let angle = |position: f64, pair: usize| position * 1e4f64.powf(-(pair as f64) / pairs as f64);
        let table = |position: f64, of: fn(f64) -> f64| -> Vec<f32> {
            (0..pairs).map(|pair| of(angle(position, pair)) as f32).collect()
        };
        let tables = |shift: i32, of: fn(f64) -> f64| {
            let rows: Vec<f32> = (first..first + positions)
                .flat_map(|position| table(position as f64 + f64::from(shift), of))
                .collect();
            Tensor::from_data(TensorData::new(rows, [positions, 1, pairs]), &Device::flex())
        };
        let keys = random([positions, heads, 2 * pairs + beyond], seed);
        let at = |shift| rope::rotate(keys.clone(), tables(shift, f64::cos), tables(shift, f64::sin), interleaved);
        let of_delta = |of| Tensor::from_floats(table(f64::from(delta), of).as_slice(), &Device::flex());
        let moved = rope::rotate_by(at(0).swap_dims(0, 1), of_delta(f64::cos), of_delta(f64::sin), interleaved);
        assert_close(moved, at(delta).swap_dims(0, 1), 1e-5);
    }

    /// In one piece and in two, whatever the widths.
    #[test]
    fn the_delta_rule(
        heads in 1usize..4, count in 2usize..12, key in 1usize..20, value in 1usize..20, cut in 1usize..12,
        seed in 0u64..1000,
    ) {
        let wide = |shape: [usize; 3], seed| random(shape, seed).cast(DType::F64);
        let tokens = Tokens {
            query: wide([heads, count, key], seed),
            key: wide([heads, count, key], seed + 1).div_scalar((key as f64).sqrt()),
            value: wide([heads, count, value], seed + 2),
            decay: wide([heads, count, 1], seed + 3).abs(),
            step: wide([heads, count, 1], seed + 4).abs(),
        };
        let part = |from: usize, to: usize| {
            let of = |tensor: &Tensor<3>| tensor.clone().narrow(1, from, to - from);
            Tokens {
                query: of(&tokens.query),
                key: of(&tokens.key),
                value: of(&tokens.value),
                decay: of(&tokens.decay),
                step: of(&tokens.step),
            }
        };
        let memory = wide([heads, key, value], seed + 5);
        let cut = cut.min(count - 1);
        let (first, between) = delta_rule(part(0, cut), memory.clone());
        let (second, after) = delta_rule(part(cut, count), between);
        let (whole, whole_after) = delta_rule(tokens.clone(), memory.clone());
        let doubles = |tensor: Tensor<3>| tensor.into_data().try_to_vec::<f64>().unwrap();
        prop_assert_eq!(doubles(Tensor::cat(vec![first, second], 1)), doubles(whole.clone()));
        prop_assert_eq!(doubles(after), doubles(whole_after.clone()));
        let (read, memory) = delta::reference(tokens.clone(), memory);
        for (found, expected) in [(whole, read), (whole_after, memory)] {
            for (found, expected) in doubles(found).into_iter().zip(doubles(expected)) {
                prop_assert!((found - expected).abs() < 1e-12, "{} instead of {}", found, expected);
            }
        }
    }

    #[test]
    fn root_mean_square(rows in 1usize..10, width in 1usize..300, offset in 0f32..2.0, seed in 0u64..1000) {
        let (x, weight) = (random([rows, width], seed), random([width], seed + 1));
        let expected = norm::reference(x.clone(), weight.clone(), 1e-5, offset);
        assert_close(norm::rms_norm(x, weight, 1e-5, offset), expected, 2e-5);
    }
}
