//! Rotation and norms compared with Burn's operations, and rotation with itself.

#![allow(clippy::unwrap_used)]

mod support;

use burn::tensor::{Device, Tensor, TensorData};
use firebox_kernels::{norm, rope};
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
        let expected = rope::reference::rotate(x.clone(), cos.clone(), sin.clone(), interleaved);
        assert_close(rope::rotate(x, cos, sin, interleaved), expected, 1e-6);
    }

    #[test]
    fn rotation_by_a_delta(
        heads in 1usize..5, positions in 1usize..10, pairs in 1usize..20, beyond in 0usize..9,
        interleaved: bool, seed in 0u64..1000,
    ) {
        // A slice of a larger buffer, as in a cache.
        let keys = random([heads, positions + 3, 2 * pairs + beyond], seed).narrow(1, 2, positions);
        let (cos, sin) = (random([pairs], seed + 1), random([pairs], seed + 2));
        let rotated = rope::rotate_by(keys.clone(), cos.clone(), sin.clone(), interleaved);
        assert_close(rotated, rope::reference::rotate_by(keys, cos, sin, interleaved), 1e-6);
    }

    /// Rotating a key to a position and then by a delta equals rotating it to the sum.
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

    #[test]
    fn root_mean_square(rows in 1usize..10, width in 1usize..300, offset in 0f32..2.0, seed in 0u64..1000) {
        let (x, weight) = (random([rows, width], seed), random([width], seed + 1));
        let expected = norm::reference::rms_norm(x.clone(), weight.clone(), 1e-5, offset);
        assert_close(norm::rms_norm(x, weight, 1e-5, offset), expected, 2e-5);
    }
}
