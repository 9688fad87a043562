//! Attention on every device of this build against the reference in f32 on the CPU: what is gathered within
//! `2e-5`, logarithms of sums within `1e-4`.

#![allow(clippy::unwrap_used)]

mod support;

use burn::tensor::{DType, Device, Tensor};
use firebox_kernels::attention::{
    AttentionOutput, AttentionParams, AttentionSequence, KvTensor, Span, Visibility, attention,
    batch_attention, merge_with_sinks, reference, span_attention,
};
use proptest::prelude::*;
use support::{assert_close, bits, devices, devices_with_own, numbers, random, values};

#[derive(Debug, Clone, Copy)]
enum Storage {
    F32,
    F16,
    Bytes,
}

#[derive(Debug, Clone)]
struct Case {
    rows: usize,
    kv_heads: usize,
    sharing: usize,
    head_dim: usize,
    /// Positions of the span, the first of them, and the position of the first row.
    positions: usize,
    first: usize,
    own: usize,
    window: Option<usize>,
    softcap: Option<f32>,
    masked: bool,
    keys: Storage,
    values: Storage,
    seed: u64,
}

impl Case {
    fn params(&self) -> AttentionParams {
        AttentionParams { position: self.own, window: self.window, scale: 0.3, softcap: self.softcap }
    }

    fn query(&self) -> Tensor<3> {
        random([self.rows, self.kv_heads * self.sharing, self.head_dim], self.seed)
    }

    /// Keys and values. A cache has room beyond its positions, so rows of different heads do not follow each other.
    fn reserved(&self) -> [Tensor<3>; 2] {
        let shape = [self.kv_heads, self.positions + 5, self.head_dim];
        [random(shape, self.seed + 1), random(shape, self.seed + 2)]
    }

    fn span(&self) -> Span {
        self.span_of(self.reserved())
    }

    /// On the CPU.
    fn span_of(&self, [keys, values]: [Tensor<3>; 2]) -> Span {
        let stored = |storage, reserved: Tensor<3>| match storage {
            Storage::F32 => KvTensor::Float(reserved.narrow(1, 0, self.positions)),
            Storage::F16 => KvTensor::Float(reserved.cast(DType::F16).narrow(1, 0, self.positions)),
            Storage::Bytes => match reference::quantize(reserved) {
                KvTensor::Bytes { words, scales } => KvTensor::Bytes {
                    words: words.narrow(1, 0, self.positions),
                    scales: scales.narrow(1, 0, self.positions),
                },
                float => float,
            },
        };
        let visible = self.masked.then(|| {
            numbers(self.positions, self.seed + 3)
                .into_iter()
                .map(|number| number > -0.5)
                .collect::<Visibility>()
        });
        Span {
            keys: stored(self.keys, keys),
            values: stored(self.values, values),
            position: self.first,
            visible,
        }
    }

    /// Whether the device has what the case is stored in.
    fn is_for(&self, device: &Device) -> bool {
        let halves = [self.keys, self.values].iter().any(|storage| matches!(storage, Storage::F16));
        !halves || device.supports_dtype(DType::F16)
    }
}

/// With a number at a place instead of the one that was there.
fn with_number(tensor: Tensor<3>, [first, second, third]: [usize; 3], number: f32) -> Tensor<3> {
    tensor.slice_fill([first..first + 1, second..second + 1, third..third + 1], number)
}

fn moved(stored: &KvTensor, device: &Device) -> KvTensor {
    match stored.clone() {
        KvTensor::Float(numbers) => KvTensor::Float(numbers.to_device(device)),
        KvTensor::Bytes { words, scales } => {
            KvTensor::Bytes { words: words.to_device(device), scales: scales.to_device(device) }
        }
    }
}

fn assert_same(found: AttentionOutput, expected: &AttentionOutput) {
    assert_alike(found.output, &expected.output, 2e-5);
    assert_alike(found.log_sum_exp, &expected.log_sum_exp, 1e-4);
}

/// As near as that, or the same infinity, or neither a number.
fn assert_alike<const D: usize>(found: Tensor<D>, expected: &Tensor<D>, tolerance: f32) {
    assert_eq!(found.dims(), expected.dims());
    let pairs = values(found.to_device(&Device::flex())).into_iter().zip(values(expected.clone()));
    for (index, (found, expected)) in pairs.enumerate() {
        let near = found == expected || (found - expected).abs() <= tolerance;
        let alike = near || found.is_nan() && expected.is_nan();
        assert!(alike, "element {index}: {found} instead of {expected}");
    }
}

fn check(case: &Case) {
    let (query, span) = (case.query(), case.span());
    let expected = reference::span_attention(query.clone(), &span, case.params());
    for device in devices() {
        if !case.is_for(&device) {
            continue;
        }
        let there =
            Span { keys: moved(&span.keys, &device), values: moved(&span.values, &device), ..span.clone() };
        assert_same(span_attention(query.clone().to_device(&device), &there, case.params()), &expected);
    }
}

fn storages() -> impl Strategy<Value = Storage> {
    prop_oneof![Just(Storage::F32), Just(Storage::F16), Just(Storage::Bytes)]
}

fn cases() -> impl Strategy<Value = Case> {
    let shape = (1usize..24, 1usize..4, 1usize..4, prop_oneof![1usize..40, Just(64usize)]);
    let places = (1usize..300, 0usize..40, 0usize..300);
    let window = prop_oneof![Just(None), (1usize..20).prop_map(Some)];
    let softcap = prop_oneof![Just(None), Just(Some(0.5f32))];
    let scores = (window, softcap, any::<bool>(), storages(), storages(), 0u64..1000);
    (shape, places, scores).prop_map(|(shape, places, scores)| {
        let (rows, kv_heads, sharing, head_dim) = shape;
        let (positions, first, own) = places;
        let (window, softcap, masked, keys, values, seed) = scores;
        Case {
            rows,
            kv_heads,
            sharing,
            head_dim,
            positions,
            first,
            own,
            window,
            softcap,
            masked,
            keys,
            values,
            seed,
        }
    })
}

fn usual() -> Case {
    Case {
        rows: 1,
        kv_heads: 2,
        sharing: 4,
        head_dim: 128,
        positions: 700,
        first: 0,
        own: 699,
        window: None,
        softcap: None,
        masked: false,
        keys: Storage::F16,
        values: Storage::F16,
        seed: 1,
    }
}

proptest! {
    #![proptest_config(ProptestConfig { max_shrink_iters: 16, ..ProptestConfig::with_cases(20) })]

    #[test]
    fn one_span(case in cases()) {
        check(&case);
    }

    /// As on the CPU, of which other tests say who sees what. The reference multiplies what is hidden as well.
    #[test]
    fn nan_reaches_only_rows_that_see_it(
        case in cases(), odd in odd_numbers(), what in 0usize..3, at in 0usize..1000, element in 0usize..1000,
    ) {
        let place = |shape: [usize; 3]| [element % shape[0], at * (shape[1] - 1) / 999, element % shape[2]];
        let (mut query, mut sides) = (case.query(), case.reserved());
        match what {
            0 => query = with_number(query.clone(), place(query.dims()), odd),
            side => {
                let place = place([case.kv_heads, case.positions, case.head_dim]);
                sides[side - 1] = with_number(sides[side - 1].clone(), place, odd);
            }
        }
        let span = case.span_of(sides);
        let expected = span_attention(query.clone(), &span, case.params());
        for device in devices_with_own().iter().filter(|device| case.is_for(device)) {
            let (keys, values) = (moved(&span.keys, device), moved(&span.values, device));
            let there = Span { keys, values, ..span.clone() };
            assert_same(span_attention(query.clone().to_device(device), &there, case.params()), &expected);
        }
    }
}

/// Attention of a sequence of few rows in a batch, which accelerators compute otherwise than that of a span. One head size, because every
/// size compiles kernels of its own.
fn check_few_rows(case: &Case, odd: Option<(f32, usize, [usize; 3])>) {
    let (mut query, mut sides) = (case.query(), case.reserved());
    match odd {
        Some((odd, 0, place)) => query = with_number(query, place, odd),
        Some((odd, side, place)) => sides[side - 1] = with_number(sides[side - 1].clone(), place, odd),
        None => {}
    }
    let span = case.span_of(sides);
    let expected = span_attention(query.clone(), &span, case.params()).output;
    for device in devices_with_own().iter().filter(|device| case.is_for(device)) {
        let (keys, values) = (moved(&span.keys, device), moved(&span.values, device));
        let spans = vec![Span { keys, values, ..span.clone() }];
        let sequence = AttentionSequence { rows: case.rows, spans, params: case.params(), steps: None };
        let found = batch_attention(query.clone().to_device(device), vec![sequence]);
        assert_alike(found.reshape(expected.dims()), &expected, 2e-5);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { max_shrink_iters: 16, ..ProptestConfig::with_cases(20) })]

    #[test]
    fn few_rows(case in cases(), odd in prop::option::of(odd_numbers()), what in 0usize..3, at in 0usize..1000) {
        let [rows, heads] = [1 + case.rows % 8, 2];
        let storage = if case.masked { Storage::F16 } else { Storage::F32 };
        let (keys, values) = (storage, storage);
        let case = Case { rows, kv_heads: heads, sharing: 3, head_dim: 48, keys, values, ..case };
        let of = |side: usize| if side == 0 { [rows, 6] } else { [heads, case.positions] };
        let place = |[first, second]: [usize; 2]| [at % first, at % second, at % 48];
        check_few_rows(&case, odd.map(|odd| (odd, what, place(of(what)))));
    }
}

fn odd_numbers() -> impl Strategy<Value = f32> {
    prop_oneof![Just(f32::NAN), Just(f32::INFINITY), Just(f32::NEG_INFINITY)]
}

/// As the reference has it of a row that sees everything, on devices that split the span among cubes as well.
#[test]
fn parts_of_a_span_preserve_nan() {
    for (storage, softcap) in [
        (Storage::F32, None),
        (Storage::F16, Some(20.0)),
        (Storage::Bytes, None),
        (Storage::Bytes, Some(20.0)),
    ] {
        let case = Case { positions: 1500, own: 1499, keys: storage, values: storage, softcap, ..usual() };
        for (odd, side) in [(f32::NAN, 0), (f32::NAN, 1), (f32::INFINITY, 0), (f32::NEG_INFINITY, 1)] {
            let mut sides = case.reserved();
            sides[side] = with_number(sides[side].clone(), [1, 700, 5], odd);
            let (query, span) = (case.query(), case.span_of(sides));
            let expected = reference::span_attention(query.clone(), &span, case.params());
            for device in devices_with_own().iter().filter(|device| case.is_for(device)) {
                let (keys, values) = (moved(&span.keys, device), moved(&span.values, device));
                let there = Span { keys, values, ..span.clone() };
                let found = span_attention(query.clone().to_device(device), &there, case.params());
                assert_same(found, &expected);
            }
        }
    }
}

/// A long span under one row is split among cubes; wide heads take fewer queries to a cube.
#[test]
fn sizes_of_models() {
    check(&usual());
    check(&Case { positions: 1500, own: 1499, window: Some(1024), softcap: Some(20.0), ..usual() });
    check(&Case { rows: 40, own: 660, keys: Storage::Bytes, values: Storage::Bytes, ..usual() });
    check(&Case { head_dim: 256, rows: 3, own: 500, keys: Storage::F32, values: Storage::F32, ..usual() });
    check(&Case { head_dim: 512, sharing: 1, masked: true, ..usual() });
}

/// Rows before the span see nothing of it.
#[test]
fn nothing_visible_gives_zeros() {
    let floats = Storage::F32;
    let case = Case { rows: 3, first: 10, own: 8, positions: 5, keys: floats, values: floats, ..usual() };
    for device in devices_with_own() {
        let span = case.span();
        let span = Span { keys: moved(&span.keys, &device), values: moved(&span.values, &device), ..span };
        let found = span_attention(case.query().to_device(&device), &span, case.params());
        let sums = values(found.log_sum_exp.narrow(0, 0, 2).to_device(&Device::flex()));
        assert!(sums.iter().all(|sum| *sum == f32::NEG_INFINITY), "{device:?}: {sums:?}");
        let gathered = values(found.output.narrow(0, 0, 2).to_device(&Device::flex()));
        assert!(gathered.iter().all(|value| *value == 0.0), "{device:?}");
    }
}

/// Not with the reference, which multiplies everything.
#[test]
fn hidden_positions_hold_anything() {
    let floats = Storage::F32;
    let case = Case {
        rows: 3,
        positions: 140,
        own: 130,
        window: Some(100),
        keys: floats,
        values: floats,
        ..usual()
    };
    let span = case.span();
    let hidden = 60;
    let visible: Visibility = (0..case.positions).map(|index| index != hidden).collect();
    let bad = |stored: &KvTensor, device: &Device| {
        let numbers = stored.dequantize(case.head_dim).to_device(device);
        // Before the window, hidden by its bit, and after the last row.
        [10, hidden, 135].into_iter().fold(numbers, |numbers, index| {
            numbers.slice_fill([0..2, index..index + 1, 0..case.head_dim], f32::NAN)
        })
    };
    for device in devices_with_own() {
        let clean = Span {
            keys: moved(&span.keys, &device),
            values: moved(&span.values, &device),
            visible: Some(visible.clone()),
            ..span.clone()
        };
        let dirty = Span {
            keys: KvTensor::Float(bad(&span.keys, &device)),
            values: KvTensor::Float(bad(&span.values, &device)),
            ..clean.clone()
        };
        let gathered =
            |span| values(span_attention(case.query().to_device(&device), span, case.params()).output);
        assert_eq!(gathered(&clean), gathered(&dirty), "{device:?}");
    }
}

/// As long as the span is not split: a row gathers the same to the last bit alone and among others.
#[test]
fn rows_are_independent() {
    let case =
        Case { rows: 9, positions: 300, own: 250, keys: Storage::F32, values: Storage::F32, ..usual() };
    let span = case.span();
    for device in devices_with_own() {
        let span =
            Span { keys: moved(&span.keys, &device), values: moved(&span.values, &device), ..span.clone() };
        let query = case.query().to_device(&device);
        let all = span_attention(query.clone(), &span, case.params()).output;
        for row in [0, 4, 8] {
            let params = AttentionParams { position: case.own + row, ..case.params() };
            let alone = span_attention(query.clone().narrow(0, row, 1), &span, params).output;
            let cpu = Device::flex();
            let among = all.clone().narrow(0, row, 1);
            assert_eq!(bits(alone.to_device(&cpu)), bits(among.to_device(&cpu)), "row {row} on {device:?}");
        }
    }
}

#[test]
fn parts_merge() {
    let (rows, heads, head_dim) = (5, 3, 12);
    let sums: Vec<f32> = numbers(rows * heads, 9).into_iter().map(|number| number * 20.0).collect();
    let mut some = sums.clone();
    some[4] = f32::NEG_INFINITY;
    let part = |seed, sums: &Vec<f32>, device: &Device| AttentionOutput {
        output: random([rows, heads, head_dim], seed).to_device(device),
        log_sum_exp: Tensor::<1>::from_floats(sums.as_slice(), device).reshape([rows, heads]),
    };
    let parts =
        |device: &Device| vec![part(1, &sums, device), part(2, &some, device), part(3, &some, device)];
    for sinks in [None, Some(random([heads], 5))] {
        let cpu = Device::flex();
        let expected = merge_with_sinks(parts(&cpu), sinks.clone());
        for device in devices() {
            let sinks = sinks.clone().map(|sinks| sinks.to_device(&device));
            assert_same(merge_with_sinks(parts(&device), sinks), &expected);
        }
    }
}

/// Several sequences, with spans in several places, one of which is worth several cubes: every sequence as the reference has
/// it alone, with sinks and without, and one that has nothing to see gathers nothing.
#[test]
fn sequences_beside_each_other() {
    let case = usual();
    let sequences = [
        (1, vec![5, 1300, 128]),
        (3, vec![30]),
        (2, vec![]),
        (1, vec![16]),
        (2, vec![128, 7]),
        (1, vec![5, 9, 128, 7, 40]),
    ];
    let parts: Vec<(usize, Vec<Span>, AttentionParams)> = sequences
        .into_iter()
        .enumerate()
        .map(|(index, (rows, lengths))| {
            let mut first = 0;
            let spans: Vec<Span> = lengths
                .into_iter()
                .map(|positions| {
                    let seed = case.seed + (10 * index + first) as u64;
                    let span = Case { positions, first, seed, ..case.clone() }.span();
                    first += positions;
                    span
                })
                .collect();
            let position = first.saturating_sub(rows);
            (rows, spans, AttentionParams { position, ..case.params() })
        })
        .collect();
    let rows = parts.iter().map(|(rows, ..)| rows).sum();
    let query = Case { rows, ..case.clone() }.query();
    let [_, heads, _] = query.dims();
    let expected = |sinks: &Option<Tensor<1>>| {
        let mut from = 0;
        let expected = parts.iter().map(|(rows, spans, params)| {
            let query = query.clone().narrow(0, from, *rows);
            from += rows;
            let gathered = spans.iter().map(|span| reference::span_attention(query.clone(), span, *params));
            let (outputs, mut sums): (Vec<_>, Vec<_>) =
                gathered.map(|gathered| (gathered.output, gathered.log_sum_exp)).unzip();
            sums.extend(sinks.as_ref().map(|sinks| sinks.clone().reshape([1, heads]).expand([*rows, heads])));
            if outputs.is_empty() { query.zeros_like() } else { reference::merge(outputs, sums).output }
        });
        Tensor::cat(expected.collect(), 0).reshape([rows as i32, -1])
    };
    for device in devices() {
        if !case.is_for(&device) {
            continue;
        }
        let there = parts.iter().map(|(rows, spans, params)| AttentionSequence {
            rows: *rows,
            steps: None,
            spans: spans
                .iter()
                .map(|span| Span {
                    keys: moved(&span.keys, &device),
                    values: moved(&span.values, &device),
                    ..span.clone()
                })
                .collect(),
            params: *params,
        });
        let (there, query): (Vec<_>, _) = (there.collect(), query.clone().to_device(&device));
        assert_alike(batch_attention(query.clone(), there.clone()), &expected(&None), 2e-5);
        let (sinks, mut from) = (random([heads], 5), 0);
        let found = there.iter().map(|AttentionSequence { rows, spans, params, .. }| {
            from += rows;
            let query = query.clone().narrow(0, from - rows, *rows);
            attention(query, spans, Some(sinks.clone().to_device(&device)), *params)
        });
        assert_alike(Tensor::cat(found.collect(), 0), &expected(&Some(sinks.clone())), 2e-5);
    }
}

/// Keys and values can overwrite others, even if those are shared.
#[test]
fn keys_and_values_are_kept_together() {
    let shape = [3, 20, 10];
    for (dtype, held) in [(DType::F32, false), (DType::F32, true), (DType::F16, false), (DType::F16, true)] {
        for device in devices() {
            if !device.supports_dtype(dtype) {
                continue;
            }
            let before = [1, 2].map(|seed| random(shape, seed).cast(dtype).to_device(&device));
            // As projections make them: heads of a token after each other.
            let added = [3, 4].map(|seed| random([4, 3, 10], seed).to_device(&device).swap_dims(0, 1));
            let [mut keys, mut values] = before.clone().map(KvTensor::Float);
            let holder = held.then(|| (keys.clone(), values.clone()));
            let expected = [0, 1].map(|side| {
                let added = added[side].clone().cast(dtype);
                before[side].clone().slice_assign([0..3, 13..17, 0..10], added)
            });
            let unchanged = before.clone().map(values_of);
            if !held {
                drop(before);
            }
            KvTensor::assign_both([&mut keys, &mut values], 13, added.map(KvTensor::Float));
            for (kept, expected) in [keys, values].into_iter().zip(expected) {
                assert_eq!(values_of(kept.dequantize(10)), values_of(expected), "{dtype:?} on {device:?}");
            }
            if let Some((keys, values)) = holder {
                assert_eq!([keys, values].map(|side| values_of(side.dequantize(10))), unchanged);
            }
        }
    }
}

fn values_of(tensor: Tensor<3>) -> Vec<f32> {
    values(tensor.cast(DType::F32).to_device(&Device::flex()))
}

/// A part whose weight is no number is not one that weighs nothing.
#[test]
fn nan_of_a_part_shows_in_the_merged_output() {
    let (rows, heads, head_dim) = (3, 2, 4);
    let sums = random([rows, heads], 9);
    let (no_sum, no_output) = (sums.clone().slice_fill([1..2, 1..2], f32::NAN), [2, 0, 1]);
    let parts = |device: &Device| {
        let outputs = [1, 2].map(|seed| random([rows, heads, head_dim], seed));
        let [plain, spoiled] = outputs.map(|output| output.to_device(device));
        vec![
            AttentionOutput { output: plain, log_sum_exp: no_sum.clone().to_device(device) },
            AttentionOutput {
                output: with_number(spoiled, no_output, f32::NAN),
                log_sum_exp: sums.clone().to_device(device),
            },
        ]
    };
    let of_one_head = Tensor::<1>::from_floats([f32::NAN, 0.5], &Device::flex());
    for (sinks, count) in [(None, 1), (Some(of_one_head), 1 + rows)] {
        let expected = merge_with_sinks(parts(&Device::flex()), sinks.clone());
        let sums = values(expected.log_sum_exp.clone());
        assert_eq!(sums.iter().filter(|sum| sum.is_nan()).count(), count, "{sums:?}");
        for device in devices_with_own() {
            let sinks = sinks.clone().map(|sinks| sinks.to_device(&device));
            assert_same(merge_with_sinks(parts(&device), sinks), &expected);
        }
    }
}

/// Bytes are always numbers, so a row's scale says that there was one that is none.
#[test]
fn quantized_bytes_preserve_nan() {
    for head_dim in [1, 6, 64] {
        let clean = random([2, 3, head_dim], 8);
        for odd in [f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let spoiled = with_number(clean.clone(), [1, 1, head_dim / 2], odd);
            for device in devices() {
                let numbers = |given: &Tensor<3>| {
                    let kept = KvTensor::quantize(given.clone().to_device(&device)).dequantize(head_dim);
                    values(kept.to_device(&Device::flex()))
                };
                let (found, expected) = (numbers(&spoiled), numbers(&clean));
                let rows = found.chunks(head_dim).zip(expected.chunks(head_dim));
                for (row, (found, expected)) in rows.enumerate() {
                    if row == 4 {
                        let none = found.iter().all(|number| number.is_nan());
                        assert!(none, "{odd} on {device:?}: {found:?}");
                    } else {
                        assert_eq!(found, expected, "{odd} on {device:?}");
                    }
                }
            }
        }
    }
}

/// Rounding may go either way at a half.
#[test]
fn quantizing() {
    for head_dim in [1, 6, 64] {
        let mut numbers = numbers(3 * 70 * head_dim, 4);
        numbers[..head_dim].fill(0.0);
        let given = Tensor::<1>::from_floats(numbers.as_slice(), &Device::flex()).reshape([3, 70, head_dim]);
        for device in devices() {
            let found = KvTensor::quantize(given.clone().to_device(&device)).dequantize(head_dim);
            assert_close(found.to_device(&Device::flex()), given.clone(), 0.51 / 127.0);
        }
    }
}
