//! Attention compared with the reference, spans with the whole, and bits with and without other rows.

#![allow(clippy::unwrap_used)]

mod support;

use burn::tensor::{DType, Device, Tensor, TensorData};
use firebox_kernels::attention::{
    AttentionOutput, AttentionParams, BLOCK, KvTensor, Span, Visibility, attention, merge, merge_with_sinks,
    reference, span_attention,
};
use proptest::prelude::*;
use support::{assert_close, bits, numbers, random, values};

#[derive(Debug, Clone, Copy, PartialEq)]
enum Storage {
    F32,
    F16,
    Bytes,
}

impl Storage {
    fn store(self, values: Tensor<3>) -> KvTensor {
        match self {
            Self::F32 => KvTensor::Float(values),
            Self::F16 => KvTensor::Float(values.cast(DType::F16)),
            Self::Bytes => KvTensor::quantize(values),
        }
    }
}

/// A random attention.
#[derive(Debug, Clone)]
struct Case {
    rows: usize,
    kv_heads: usize,
    sharing: usize,
    head_dim: usize,
    /// First position of the span, number of its positions, and position of the first row.
    start: usize,
    positions: usize,
    position: usize,
    window: Option<usize>,
    softcap: Option<f32>,
    keys: Storage,
    values: Storage,
    /// Hidden positions out of eight.
    hidden: usize,
    seed: u64,
}

impl Case {
    fn params(&self) -> AttentionParams {
        AttentionParams { position: self.position, window: self.window, scale: 0.3, softcap: self.softcap }
    }

    fn query(&self) -> Tensor<3> {
        random([self.rows, self.kv_heads * self.sharing, self.head_dim], self.seed)
    }

    /// Whether a row sees a position of the span.
    fn sees(&self, span: &Span, row: usize, index: usize) -> bool {
        let (position, own) = (self.start + index, self.position + row);
        let too_early = self.window.is_some_and(|window| position + window <= own);
        let hidden = span.visible.as_ref().is_some_and(|visible| !visible.contains(index));
        position <= own && !too_early && !hidden
    }

    fn span(&self) -> Span {
        // A cache has spare positions, so the rows of different heads are not adjacent.
        let cached = |seed, storage: Storage| {
            let reserved = random([self.kv_heads, self.positions + 5, self.head_dim], seed);
            part(&storage.store(reserved), 3, self.positions)
        };
        let visible = (self.hidden > 0).then(|| {
            let bits = numbers(self.positions, self.seed + 3);
            bits.into_iter().map(|number| number >= self.hidden as f32 / 4.0 - 1.0).collect()
        });
        Span {
            keys: cached(self.seed + 1, self.keys),
            values: cached(self.seed + 2, self.values),
            position: self.start,
            visible,
        }
    }
}

/// Returns a slice of the positions.
fn part(stored: &KvTensor, from: usize, count: usize) -> KvTensor {
    match stored {
        KvTensor::Float(values) => KvTensor::Float(cut(values, from, count)),
        KvTensor::Bytes { words, scales } if count > 0 => KvTensor::Bytes {
            words: words.clone().narrow(1, from, count),
            scales: scales.clone().narrow(1, from, count),
        },
        KvTensor::Bytes { words, scales } => {
            let [heads, _, width] = words.dims();
            KvTensor::Bytes {
                words: Tensor::zeros([heads, 0, width], (&words.device(), words.dtype())),
                scales: Tensor::zeros([heads, 0], &scales.device()),
            }
        }
    }
}

/// Narrows positions, possibly to none.
fn cut(values: &Tensor<3>, from: usize, count: usize) -> Tensor<3> {
    let [heads, _, width] = values.dims();
    if count > 0 {
        values.clone().narrow(1, from, count)
    } else {
        Tensor::zeros([heads, 0, width], (&values.device(), values.dtype()))
    }
}

fn part_of_span(span: &Span, from: usize, count: usize) -> Span {
    Span {
        keys: part(&span.keys, from, count),
        values: part(&span.values, from, count),
        position: span.position + from,
        visible: span.visible.as_ref().map(|all| (from..from + count).map(|at| all.contains(at)).collect()),
    }
}

fn cases(most_positions: usize) -> impl Strategy<Value = Case> {
    let storage = || prop_oneof![Just(Storage::F32), Just(Storage::F16), Just(Storage::Bytes)];
    let window = prop_oneof![Just(None), (1usize..20).prop_map(Some), (1usize..600).prop_map(Some)];
    let softcap = prop_oneof![Just(None), Just(Some(0.5f32)), Just(Some(30.0))];
    let head_dim = prop_oneof![1usize..40, Just(64), Just(80), Just(128)];
    let shape = (1usize..40, 1usize..4, 1usize..6, head_dim);
    let place = (0usize..400, 1..=most_positions, 0usize..1000, 0usize..9);
    (shape, place, window, softcap, storage(), storage(), 0u64..1000).prop_map(
        |((rows, kv_heads, sharing, head_dim), place, window, softcap, keys, values, seed)| {
            let (start, positions, ahead, hidden) = place;
            // Mostly within or behind the span, sometimes before it.
            let position = (start + ahead * (positions + 10) / 1000).saturating_sub(8);
            Case {
                rows,
                kv_heads,
                sharing,
                head_dim,
                start,
                positions,
                position,
                window,
                softcap,
                keys,
                values,
                hidden,
                seed,
            }
        },
    )
}

fn assert_attended_close(found: AttentionOutput, expected: AttentionOutput, tolerance: f32) {
    assert_close(found.output, expected.output, tolerance);
    assert_logarithms_close(found.log_sum_exp, expected.log_sum_exp, tolerance);
}

/// Returns the output and the log-sum-exp in f64, or `None` if nothing is visible.
fn in_f64(case: &Case, span: &Span, row: usize, head: usize) -> Option<(Vec<f64>, f64)> {
    let stored = |stored: &KvTensor| values(stored.dequantize(case.head_dim));
    let (keys, values, query) = (stored(&span.keys), stored(&span.values), values(case.query()));
    let at = |numbers: &[f32], index: usize| -> Vec<f64> {
        numbers[index * case.head_dim..][..case.head_dim].iter().map(|number| f64::from(*number)).collect()
    };
    let query = at(&query, row * case.kv_heads * case.sharing + head);
    let (mut output, mut total) = (vec![0.0; case.head_dim], 0.0);
    for index in 0..case.positions {
        if !case.sees(span, row, index) {
            continue;
        }
        let index = head / case.sharing * case.positions + index;
        let score: f64 = query.iter().zip(at(&keys, index)).map(|(query, key)| query * key).sum();
        let score = match case.softcap.map(f64::from) {
            Some(cap) => cap * (score * 0.3 / cap).tanh(),
            None => score * 0.3,
        };
        total += score.exp();
        for (output, value) in output.iter_mut().zip(at(&values, index)) {
            *output += score.exp() * value;
        }
    }
    (total > 0.0).then(|| (output.into_iter().map(|output| output / total).collect(), total.ln()))
}

/// Where one is -inf, the other must be.
fn assert_logarithms_close(found: Tensor<2>, expected: Tensor<2>, tolerance: f32) {
    for (found, expected) in values(found).into_iter().zip(values(expected)) {
        let near = (found - expected).abs() <= tolerance * expected.abs().max(1.0);
        assert!(found == expected || near, "{found} instead of {expected}");
    }
}

fn assert_same(found: AttentionOutput, expected: AttentionOutput) {
    assert_eq!(bits(found.output), bits(expected.output));
    assert_eq!(bits(found.log_sum_exp), bits(expected.log_sum_exp));
}

fn rows_of(attended: &AttentionOutput, from: usize, count: usize) -> AttentionOutput {
    AttentionOutput {
        output: attended.output.clone().narrow(0, from, count),
        log_sum_exp: attended.log_sum_exp.clone().narrow(0, from, count),
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(192))]

    #[test]
    fn one_span(case in cases(700)) {
        let (query, span) = (case.query(), case.span());
        let expected = reference::span_attention(query.clone(), &span, case.params());
        assert_attended_close(span_attention(query, &span, case.params()), expected, 1e-5);
    }

    #[test]
    fn the_reference(case in cases(60), row in 0usize..40, head in 0usize..18) {
        let (row, head) = (row % case.rows, head % (case.kv_heads * case.sharing));
        let span = case.span();
        let expected = in_f64(&case, &span, row, head);
        let AttentionOutput { output, log_sum_exp } = reference::span_attention(case.query(), &span, case.params());
        let output = values(output.slice([row..row + 1, head..head + 1]));
        let sum = values(log_sum_exp.slice([row..row + 1, head..head + 1]))[0];
        match expected {
            Some((expected, expected_sum)) => {
                prop_assert!((f64::from(sum) - expected_sum).abs() < 1e-5);
                for (output, expected) in output.into_iter().zip(expected) {
                    prop_assert!((f64::from(output) - expected).abs() < 1e-5);
                }
            }
            None => {
                prop_assert_eq!(sum, f32::NEG_INFINITY);
                prop_assert!(output.into_iter().all(|output| output == 0.0));
            }
        }
    }

    /// Rows alone or a few at a time have the bits they have among others.
    #[test]
    fn some_rows(case in cases(700), from in 0usize..40, count in 1usize..40) {
        let from = from % case.rows;
        let count = count.min(case.rows - from);
        let (query, span) = (case.query(), case.span());
        let all = span_attention(query.clone(), &span, case.params());
        let some = AttentionParams { position: case.position + from, ..case.params() };
        assert_same(span_attention(query.narrow(0, from, count), &span, some), rows_of(&all, from, count));
    }

    /// Later positions and invisible blocks make no difference.
    #[test]
    fn more_positions_than_are_seen(case in cases(700)) {
        let (query, span) = (case.query(), case.span());
        let all = span_attention(query.clone(), &span, case.params());
        let end = (case.position + case.rows).saturating_sub(case.start).min(case.positions);
        let window = case.window.unwrap_or(usize::MAX);
        let start = (case.position + 1).saturating_sub(window).saturating_sub(case.start).min(end);
        let start = start / BLOCK * BLOCK;
        let seen = part_of_span(&span, start, end - start);
        assert_same(span_attention(query, &seen, case.params()), all);
    }

    #[test]
    fn any_split_merges_to_the_whole(
        case in cases(400), cuts in prop::collection::vec(0usize..400, 0..4), sinks: bool,
    ) {
        let (query, span) = (case.query(), case.span());
        let mut cuts: Vec<_> = cuts.into_iter().map(|cut| cut.min(case.positions)).collect();
        cuts.extend([0, case.positions]);
        cuts.sort_unstable();
        let spans: Vec<_> =
            cuts.windows(2).map(|cut| part_of_span(&span, cut[0], cut[1] - cut[0])).collect();
        let parts = || spans.iter().map(|span| span_attention(query.clone(), span, case.params())).collect();
        let whole = span_attention(query.clone(), &span, case.params());
        assert_attended_close(merge(parts()), whole.clone(), 1e-6);

        let heads = case.kv_heads * case.sharing;
        let sinks = sinks.then(|| random([heads], case.seed + 9));
        let (outputs, mut sums): (Vec<_>, Vec<_>) =
            [whole].into_iter().map(|part| (part.output, part.log_sum_exp)).unzip();
        if let Some(sinks) = &sinks {
            sums.push(sinks.clone().reshape([1, heads]).expand([case.rows, heads]));
        }
        let expected = reference::merge(outputs, sums);
        assert_attended_close(merge_with_sinks(parts(), sinks.clone()), expected.clone(), 2e-6);
        let output = expected.output.reshape([case.rows, heads * case.head_dim]);
        assert_close(attention(query, &spans, sinks, case.params()), output, 2e-6);
    }

    /// A sink acts like a key with that score and a value of zero.
    #[test]
    fn sinks(case in cases(60)) {
        let heads = case.kv_heads * case.sharing;
        let sinks = random([heads], case.seed + 9);
        let (query, span) = (case.query(), case.span());
        let attended = span_attention(query.clone(), &span, case.params());
        let found = values(attention(query, &[span], Some(sinks.clone()), case.params()));
        let (output, sums, sinks) = (values(attended.output), values(attended.log_sum_exp), values(sinks));
        for (index, found) in found.into_iter().enumerate() {
            let (sum, sink) = (sums[index / case.head_dim], sinks[index / case.head_dim % heads]);
            let expected = output[index] / (1.0 + (sink - sum).exp());
            prop_assert!((found - expected).abs() < 2e-6, "{} instead of {}", found, expected);
        }
    }

    /// Over two spans, against a plain softmax that the sinks are part of. Sinks outweigh the scores here, or the scores the sinks.
    #[test]
    fn sinks_in_a_plain_softmax(case in cases(60), by in -20f32..20.0) {
        let heads = case.kv_heads * case.sharing;
        let sinks = random([heads], case.seed + 9).add_scalar(by);
        let (span, cut) = (case.span(), case.positions / 2);
        let spans = [part_of_span(&span, 0, cut), part_of_span(&span, cut, case.positions - cut)];
        let found = values(attention(case.query(), &spans, Some(sinks.clone()), case.params()));
        let sinks = values(sinks);
        for (index, found) in found.chunks(case.head_dim).enumerate() {
            let (row, head) = (index / heads, index % heads);
            let (output, sum) = in_f64(&case, &span, row, head)
                .unwrap_or_else(|| (vec![0.0; case.head_dim], f64::NEG_INFINITY));
            let share = 1.0 / (1.0 + (f64::from(sinks[head]) - sum).exp());
            for (found, output) in found.iter().zip(output) {
                let expected = output * share;
                prop_assert!((f64::from(*found) - expected).abs() < 1e-5, "{} instead of {}", found, expected);
            }
        }
    }

    #[test]
    fn threads(case in cases(1100)) {
        let (query, span) = (case.query(), case.span());
        let compute = |threads: usize| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            pool.install(|| span_attention(query.clone(), &span, case.params()))
        };
        let alone = compute(1);
        for threads in [2, 3, 16] {
            assert_same(compute(threads), alone.clone());
        }
    }

    #[test]
    fn bytes(
        heads in 1usize..4, positions in 1usize..10, head_dim in 1usize..70, zeros: bool, seed in 0u64..1000,
    ) {
        let mut numbers = random([heads, positions, head_dim], seed);
        if zeros {
            numbers = numbers.slice_fill([0..1, 0..1, 0..head_dim], 0.0);
        }
        let (found, expected) = (KvTensor::quantize(numbers.clone()), reference::quantize(numbers.clone()));
        let (KvTensor::Bytes { words, scales }, KvTensor::Bytes { words: expected, scales: expected_scales }) =
            (found.clone(), expected) else { unreachable!() };
        prop_assert_eq!(bits(scales.clone()), bits(expected_scales));
        words.into_data().assert_eq(&expected.into_data(), true);
        let half_steps = scales.unsqueeze_dim::<3>(2).mul_scalar(0.5001);
        let off = found.dequantize(head_dim).sub(numbers).abs().sub(half_steps);
        prop_assert!(values(off).into_iter().all(|off| off <= 0.0));
    }

    /// Keys as a pass has them, over a tensor that may be shared.
    #[test]
    fn assign_equals_cast_and_slice_assign(
        heads in 1usize..4,
        head_dim in 1usize..70,
        from in 0usize..3,
        tokens in 1usize..6,
        at in 0usize..4,
        half: bool,
        held: bool,
        seed in 0u64..1000,
    ) {
        let room = at + tokens + seed as usize % 3;
        let storage = if half { Storage::F16 } else { Storage::F32 };
        // Some overflow f16.
        let pass = random([from + tokens, heads, head_dim], seed).mul_scalar(1e5);
        let dtype = if half { DType::F16 } else { DType::F32 };
        let added = pass.narrow(0, from, tokens).swap_dims(0, 1);
        let KvTensor::Float(before) = storage.store(random([heads, room, head_dim], seed + 1))
        else { unreachable!() };
        let slots = [0..heads, at..at + tokens, 0..head_dim];
        let expected = before.clone().slice_assign(slots, added.clone().cast(dtype));
        let untouched = values(before.clone().cast(DType::F32));
        let other = held.then(|| before.clone());
        let mut stored = KvTensor::Float(before);
        stored.assign(at, KvTensor::Float(added));
        let KvTensor::Float(found) = stored else { unreachable!() };
        found.into_data().assert_eq(&expected.into_data(), true);
        if let Some(other) = other {
            prop_assert_eq!(values(other.cast(DType::F32)), untouched);
        }
    }

    /// Rows that see NaN or infinity are not finite, and all others are.
    #[test]
    fn nan_reaches_only_rows_that_see_it(case in cases(300), what in 0usize..4, at in 0usize..1000) {
        let odd = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, f32::MAX][what];
        let place = |count: usize| at * (count - 1) / 1000;
        let put = |tensor: Tensor<3>| {
            let shape = tensor.dims();
            let mut numbers = values(tensor);
            let at = place(numbers.len());
            numbers[at] = odd;
            Tensor::<3>::from_data(TensorData::new(numbers, shape), &Device::flex())
        };
        let span = case.span();
        let odd_span = Span {
            keys: case.keys.store(put(span.keys.dequantize(case.head_dim))),
            values: case.values.store(put(span.values.dequantize(case.head_dim))),
            ..span.clone()
        };
        let found = values(attention(put(case.query()), &[span.clone(), odd_span], None, case.params()));
        let heads = case.kv_heads * case.sharing;
        prop_assert_eq!(found.len(), case.rows * heads * case.head_dim);
        let odd_query = place(found.len()) / case.head_dim;
        let stored = place(case.kv_heads * case.positions * case.head_dim) / case.head_dim;
        for (query, found) in found.chunks(case.head_dim).enumerate() {
            let (row, head) = (query / heads, query % heads);
            let reads_odd = head / case.sharing == stored / case.positions
                && case.sees(&span, row, stored % case.positions);
            let finite = found.iter().all(|number| number.is_finite());
            if query == odd_query || (reads_odd && !odd.is_nan()) {
                // A score of -inf has weight zero, and `f32::MAX` may stay finite.
                continue;
            }
            prop_assert_eq!(finite, !reads_odd, "row {}, head {}: {:?}", row, head, found);
        }
    }
}

fn case() -> Case {
    Case {
        rows: 2,
        kv_heads: 2,
        sharing: 3,
        head_dim: 24,
        start: 0,
        positions: 300,
        position: 298,
        window: None,
        softcap: None,
        keys: Storage::F32,
        values: Storage::F32,
        hidden: 0,
        seed: 5,
    }
}

/// Bytes cannot represent NaN, so the scale of the row does.
#[test]
fn quantized_bytes_preserve_nan() {
    const HEAD_DIM: usize = 10;
    let clean = random([2, 3, HEAD_DIM], 8);
    for odd in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let spoiled = clean.clone().slice_fill([1..2, 1..2, 7..8], odd);
        for quantize in [KvTensor::quantize as fn(Tensor<3>) -> KvTensor, reference::quantize] {
            let numbers = |from: &Tensor<3>| values(quantize(from.clone()).dequantize(HEAD_DIM));
            let (found, expected) = (numbers(&spoiled), numbers(&clean));
            let rows = found.chunks(HEAD_DIM).zip(expected.chunks(HEAD_DIM));
            for (row, (found, expected)) in rows.enumerate() {
                if row == 4 {
                    assert!(found.iter().all(|number| number.is_nan()), "{odd}: {found:?}");
                } else {
                    assert_eq!(found, expected, "{odd}");
                }
            }
        }
    }
}

#[test]
fn nothing_visible_gives_zeros() {
    let case = case();
    let nothing = Visibility::from_iter((0..case.positions).map(|_| false));
    let hidden = Span { visible: Some(nothing), ..case.span() };
    let later = Span { position: 300, ..case.span() };
    let empty = part_of_span(&case.span(), 0, 0);
    for span in [&hidden, &later, &empty] {
        let attended = span_attention(case.query(), span, case.params());
        assert!(values(attended.output).into_iter().all(|value| value == 0.0));
        assert!(values(attended.log_sum_exp).into_iter().all(|value| value == f32::NEG_INFINITY));
    }
    let spans = [hidden, later, empty];
    let all = |spans: &[Span], sinks| values(attention(case.query(), spans, sinks, case.params()));
    let sinks = random([6], 1);
    assert!(all(&spans, None).into_iter().all(|value| value == 0.0));
    assert!(all(&spans, Some(sinks.clone())).into_iter().all(|value| value == 0.0));
    assert!(all(&[], Some(sinks)).into_iter().all(|value| value == 0.0));
    // They make no difference beside a visible span.
    let alone = all(&[case.span()], None);
    let [hidden, later, empty] = spans;
    assert_eq!(all(&[hidden, case.span(), later, empty], None), alone);
}

#[test]
fn no_rows() {
    let case = Case { rows: 0, ..case() };
    assert_eq!(attention(case.query(), &[case.span()], None, case.params()).dims(), [0, 6 * 24]);
    assert_eq!(attention(case.query(), &[case.span(), case.span()], None, case.params()).dims(), [0, 6 * 24]);
}

/// Values at hidden positions do not matter, even if they are NaN.
#[test]
fn hidden_positions_hold_anything() {
    let case = case();
    let span = case.span();
    let spoil = |stored: &KvTensor| match stored {
        KvTensor::Float(values) => {
            let spoiled = values.clone().slice_fill([0..2, 7..8, 0..24], f32::NAN);
            KvTensor::Float(spoiled.slice_fill([0..2, 299..300, 0..24], f32::NAN))
        }
        _ => unreachable!(),
    };
    let visible: Visibility = (0..300).map(|index| index != 7).collect();
    let expected = Span { visible: Some(visible.clone()), ..span.clone() };
    let spoiled =
        Span { keys: spoil(&span.keys), values: spoil(&span.values), visible: Some(visible), ..span };
    let first = |span| rows_of(&span_attention(case.query(), span, case.params()), 0, 1);
    assert_same(first(&spoiled), first(&expected));
}

#[test]
fn a_long_prompt_in_pieces_of_any_length() {
    let case = Case { rows: 300, head_dim: 64, start: 0, position: 0, window: Some(190), ..case() };
    let (query, span) = (case.query(), case.span());
    let all = span_attention(query.clone(), &span, case.params());
    let mut at = 0;
    for count in [1, 2, 3, 1, 64, 65, 30, 127, 7] {
        let piece = AttentionParams { position: at, ..case.params() };
        let found =
            span_attention(query.clone().narrow(0, at, count), &part_of_span(&span, 0, at + count), piece);
        assert_same(found, rows_of(&all, at, count));
        at += count;
    }
    assert_eq!(at, case.rows);
}
