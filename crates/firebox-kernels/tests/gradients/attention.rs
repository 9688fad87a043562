//! Gradients of attention.

use burn::tensor::{Tensor, TensorData};
use firebox_kernels::attention::{
    AttentionParams, KvTensor, Span, Visibility, attention, merge, merge_with_sinks, reference,
    span_attention,
};
use proptest::prelude::*;

use crate::check::{check, device, flat, near};
use crate::support::{numbers, random, values};

/// A random attention as in training.
#[derive(Debug, Clone)]
struct Case {
    rows: usize,
    kv_heads: usize,
    sharing: usize,
    head_dim: usize,
    positions: usize,
    /// Positions before the first row.
    before: usize,
    window: Option<usize>,
    softcap: Option<f32>,
    hidden: bool,
    seed: u64,
}

impl Case {
    fn params(&self) -> AttentionParams {
        AttentionParams { position: self.before, window: self.window, scale: 0.4, softcap: self.softcap }
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
        // In the layout of projections: by position, then by head.
        let stored = |index: usize| {
            let given: Tensor<3> =
                given[index].clone().reshape([self.positions, self.kv_heads, self.head_dim]);
            KvTensor::Float(given.swap_dims(0, 1))
        };
        let visible = self.hidden.then(|| (0..self.positions).map(|index| index % 5 != 1).collect());
        Span { keys: stored(1), values: stored(2), position: 0, visible }
    }

    fn reference(&self, given: &[Tensor<1>]) -> Tensor<1> {
        let attended = reference::span_attention(self.query(given), &self.span(given), self.params());
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
            &|given| flat(attention(case.query(given), &[case.span(given)], None, case.params())),
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
            &|given| flat(attention(case.query(given), &split(given), None, case.params())),
            Some(&|given| whole.reference(given)),
            1e-4,
        );
    }
}

/// Several blocks of rows and of positions.
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
            &|given| flat(attention(case.query(given), &[case.span(given)], None, case.params())),
            Some(&|given| case.reference(given)),
            1e-4,
        );
    }
}

/// Hidden positions may hold NaN and have no part in any gradient.
#[test]
fn hidden_positions() {
    let (rows, width) = (20, 16);
    let mut keys = numbers(rows * width, 2);
    keys[3 * width..4 * width].fill(f32::NAN);
    let visible: Visibility = (0..rows).map(|index| index != 3).collect();
    let query = random([rows, 1, width], 1).autodiff().require_grad();
    let keys = Tensor::<3>::from_data(TensorData::new(keys, [1, rows, width]), &device()).require_grad();
    let span = Span {
        keys: KvTensor::Float(keys.clone()),
        values: KvTensor::Float(keys.clone()),
        position: 0,
        visible: Some(visible),
    };
    let params = AttentionParams { position: 0, window: None, scale: 0.3, softcap: None };
    let gradients = attention(query.clone(), &[span], None, params).sum().backward();
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
            flat(attention(case.query(given), &[case.span(given)], Some(given[3].clone()), case.params()))
        },
        Some(&|given| {
            let part = reference::span_attention(case.query(given), &case.span(given), case.params());
            flat(merge_with_sinks(vec![part], Some(given[3].clone())).output)
        }),
        1e-4,
    );
}

/// Keys have gradients and queries do not.
#[test]
fn attention_with_constant_queries() {
    let query = random([5, 2, 8], 1);
    let keys = random([2, 5, 8], 2).autodiff().require_grad();
    let values_of = random([2, 5, 8], 3);
    let span = |keys: Tensor<3>| Span {
        keys: KvTensor::Float(keys),
        values: KvTensor::Float(values_of.clone()),
        position: 0,
        visible: None,
    };
    let params = AttentionParams { position: 0, window: None, scale: 0.3, softcap: None };
    let gradients = attention(query.clone(), &[span(keys.clone())], None, params).sum().backward();
    let found = values(keys.grad(&gradients).unwrap());
    let parts = vec![span_attention(query, &span(keys.clone()), params)];
    let gradients = merge(parts).output.sum().backward();
    near(&found, &values(keys.grad(&gradients).unwrap()), 1e-5, "keys");
}
