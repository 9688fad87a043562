//! Attention, rotation and norms against Burn's own operations, and attention the same to the last bit
//! whatever else is computed beside it.

#![allow(clippy::unwrap_used)]

mod support;

use burn::tensor::Tensor;
use firebox_kernels::attend::{Attending, attend, reference};
use firebox_kernels::{norm, rope};
use proptest::prelude::*;
use support::{assert_close, bits, random};

/// Heads and positions of an attention that may happen.
#[derive(Debug, Clone)]
struct Case {
    rows: usize,
    kv_heads: usize,
    sharing: usize,
    head_dim: usize,
    earlier: usize,
    window: Option<usize>,
    softcap: Option<f32>,
    seed: u64,
}

impl Case {
    fn attending(&self) -> Attending {
        let first = self.window.map_or(0, |window| (self.earlier + 1).saturating_sub(window));
        Attending { position: self.earlier, first, window: self.window, scale: 0.3, softcap: self.softcap }
    }

    fn tensors(&self) -> (Tensor<3>, Tensor<3>, Tensor<3>) {
        let positions = self.earlier + self.rows - self.attending().first;
        // A cache has room beyond its positions, so rows of different heads do not follow each other.
        let cached = |seed| {
            let reserved = random([self.kv_heads, positions + 5, self.head_dim], seed);
            reserved.narrow(1, 0, positions)
        };
        let query = random([self.rows, self.kv_heads * self.sharing, self.head_dim], self.seed);
        (query, cached(self.seed + 1), cached(self.seed + 2))
    }
}

fn cases() -> impl Strategy<Value = Case> {
    let window = prop_oneof![Just(None), (1usize..20).prop_map(Some)];
    let softcap = prop_oneof![Just(None), Just(Some(0.5f32))];
    (1usize..24, 1usize..4, 1usize..4, 1usize..40, 0usize..40, window, softcap, 0u64..1000).prop_map(
        |(rows, kv_heads, sharing, head_dim, earlier, window, softcap, seed)| Case {
            rows,
            kv_heads,
            sharing,
            head_dim,
            earlier,
            window,
            softcap,
            seed,
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    #[test]
    fn attention(case in cases()) {
        let (query, keys, values) = case.tensors();
        let expected = reference::attend(query.clone(), keys.clone(), values.clone(), case.attending());
        assert_close(attend(query, keys, values, case.attending()), expected, 1e-5);
    }

    /// A row alone gathers what it gathers among others, to the last bit.
    #[test]
    fn attention_row_by_row(case in cases(), row in 0usize..24) {
        let (query, keys, values) = case.tensors();
        let row = row % case.rows;
        let all = attend(query.clone(), keys.clone(), values.clone(), case.attending());
        let alone = Attending { position: case.earlier + row, ..case.attending() };
        let positions = case.earlier + row + 1 - alone.first;
        let cut = |tensor: Tensor<3>| tensor.narrow(1, 0, positions);
        let found = attend(query.narrow(0, row, 1), cut(keys), cut(values), alone);
        prop_assert_eq!(bits(found), bits(all.narrow(0, row, 1)));
    }

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
    fn root_mean_square(rows in 1usize..10, width in 1usize..300, offset in 0f32..2.0, seed in 0u64..1000) {
        let (x, weight) = (random([rows, width], seed), random([width], seed + 1));
        let expected = norm::reference(x.clone(), weight.clone(), 1e-5, offset);
        assert_close(norm::rms_norm(x, weight, 1e-5, offset), expected, 2e-5);
    }
}

#[test]
fn attention_with_many_threads_is_the_same() {
    let case = Case {
        rows: 60,
        kv_heads: 2,
        sharing: 3,
        head_dim: 64,
        earlier: 200,
        window: Some(150),
        softcap: None,
        seed: 5,
    };
    let compute = |threads: usize| {
        let (query, keys, values) = case.tensors();
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        pool.install(|| bits(attend(query, keys, values, case.attending())))
    };
    assert_eq!(compute(1), compute(5));
}
