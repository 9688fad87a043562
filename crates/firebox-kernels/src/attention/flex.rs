//! Attention on the CPU.

use std::ops::Range;

use burn::backend::Flex;
use burn::backend::flex::FlexTensor;
use burn::tensor::{DType, Shape, Tensor, TensorData};
use half::f16;
use half::slice::HalfFloatSliceExt;

use super::kernel::{Accumulator, Block, Problem, SpanRows, Tile};
use super::kv_tensor::{KvPrimitive, KvTensor};
use super::merge::PartialOutputs;
use super::ops::AttentionOps;
use super::output::AttentionOutput;
use super::params::AttentionParams;
use super::rows::{StoredRows, Strided, prefetch_bytes};
use super::span::{AttentionSequence, Span};
use super::visibility::Visibility;
use crate::flex::{compact, contiguous, dims, elements, tensor};
use crate::simd::{Kernel, Lanes, dispatch};
use crate::thread_pool::parallel_for_each;

const ON_FLEX: &str = "all tensors of an attention are on one device";

/// Multiplications below which a second thread costs more than it gains.
const SINGLE_THREAD_WORK: usize = 1 << 17;

/// Queries that read the same keys together: enough to make reading keys cheap beside multiplying them, few
/// enough to stay in the L2 cache with their accumulators.
const TILE_QUERIES: usize = 128;

/// Blocks that each thread processes before the accumulators are merged.
const BLOCKS_PER_THREAD: usize = 8;

/// Largest number of bytes of a head that are prefetched before they are overwritten.
const MAX_PREFETCH_BYTES: usize = 1024;

impl AttentionOps for Flex {
    fn span_attention(
        query: FlexTensor,
        keys: KvPrimitive<Flex>,
        values: KvPrimitive<Flex>,
        position: usize,
        visible: Option<Visibility>,
        params: AttentionParams,
    ) -> (FlexTensor, FlexTensor) {
        let span_rows = SpanRows::new(keys, values, position, visible);
        let query = contiguous(query);
        let [rows, heads, head_dim] = dims(&query);
        let problem = Problem::new(elements(&query), [heads, head_dim], vec![span_rows], params);
        let (output, log_sum_exp) = compute(&[(problem, rows)]);
        (tensor(output, [rows, heads, head_dim]), tensor(log_sum_exp, [rows, heads]))
    }

    fn merge(outputs: FlexTensor, log_sum_exps: FlexTensor, rows: usize) -> (FlexTensor, FlexTensor) {
        let (outputs, log_sum_exps) = (contiguous(outputs), contiguous(log_sum_exps));
        let [_, heads, head_dim] = dims(&outputs);
        let parts = PartialOutputs {
            outputs: elements(&outputs),
            log_sum_exps: elements(&log_sum_exps),
            queries: rows * heads,
            head_dim,
        };
        let (output, log_sum_exp) = parts.merge();
        (tensor(output, [rows, heads, head_dim]), tensor(log_sum_exp, [rows, heads]))
    }

    fn quantize(values: FlexTensor) -> (FlexTensor, FlexTensor) {
        let values = contiguous(values);
        let [heads, positions, head_dim] = dims(&values);
        let words_per_row = head_dim.div_ceil(4);
        let mut words = vec![0i32; heads * positions * words_per_row];
        let mut scales = vec![0.0; heads * positions];
        let bytes: &mut [i8] = bytemuck::cast_slice_mut(&mut words);
        let rows = bytes.chunks_exact_mut(4 * words_per_row).zip(&mut scales);
        for ((bytes, scale), values) in rows.zip(elements::<f32>(&values).chunks_exact(head_dim)) {
            // As integers, the bits of magnitudes compare as the magnitudes do, and NaN is the largest. Bytes
            // cannot represent NaN, so the scale does.
            let highest = values.iter().fold(0, |highest, value| value.abs().to_bits().max(highest));
            *scale = f32::from_bits(highest) / 127.0;
            let divisor = if *scale == 0.0 { 1.0 } else { *scale };
            for (byte, value) in bytes.iter_mut().zip(values) {
                *byte = (value / divisor).round_ties_even().clamp(-127.0, 127.0) as i8;
            }
        }
        let words = TensorData::new(words, Shape::new([heads, positions, words_per_row]));
        (FlexTensor::from_data(words), tensor(scales, [heads, positions]))
    }
}

/// See [`batch_attention`](super::batch_attention).
///
/// # Panics
/// If the tensors are not all on Flex, as Burn's operations do for tensors of different devices.
pub(super) fn batch_attention(query: Tensor<3>, parts: Vec<AttentionSequence>) -> AttentionOutput {
    let query = contiguous(query.try_into_primitive::<Flex>().expect(ON_FLEX));
    assert_eq!(query.dtype(), DType::F32, "queries are f32");
    let [rows, heads, head_dim] = dims(&query);
    let mut queries = elements(&query);
    let mut problems = Vec::with_capacity(parts.len());
    for AttentionSequence { rows, spans, params, .. } in parts {
        let (of_part, rest) = queries.split_at(rows * heads * head_dim);
        queries = rest;
        let places = spans.into_iter().map(SpanRows::from_span).collect();
        problems.push((Problem::new(of_part, [heads, head_dim], places, params), rows));
    }
    let (output, log_sum_exp) = compute(&problems);
    AttentionOutput {
        output: Tensor::from_primitive::<Flex>(tensor(output, [rows, heads, head_dim])),
        log_sum_exp: Tensor::from_primitive::<Flex>(tensor(log_sum_exp, [rows, heads])),
    }
}

/// Writes f32 values over the positions from `at` on, as f32 or f16. Shapes have been checked.
///
/// # Panics
/// If the tensors are not on Flex.
pub(super) fn assign(stored: Tensor<3>, at: usize, added: Tensor<3>) -> Tensor<3> {
    let mut stored = compact(stored.try_into_primitive::<Flex>().expect(ON_FLEX));
    let added = added.try_into_primitive::<Flex>().expect(ON_FLEX);
    let ([heads, positions, width], [_, count, _]) = (dims(&stored), dims(&added));
    let added = Strided::rows(added);
    let row = width * stored.dtype().size();
    // Prefetching more than fits the cache would evict what was prefetched first.
    if (1..=MAX_PREFETCH_BYTES).contains(&(count * row)) {
        let (bytes, every, part) = (stored.bytes(), positions * row, at * row..(at + count) * row);
        dispatch(PrefetchHeads { bytes, every, part });
    }
    let places = (0..heads).flat_map(|head| (0..count).map(move |index| (head, index)));
    let span_rows =
        |(head, index)| ((head * positions + at + index) * width, added.starting_at::<f32>(head, index));
    match stored.dtype() {
        DType::F32 => {
            let numbers = stored.storage_mut::<f32>();
            for (to, row) in places.map(span_rows) {
                numbers[to..to + width].copy_from_slice(&row[..width]);
            }
        }
        DType::F16 => {
            let numbers = stored.storage_mut::<f16>();
            for (to, row) in places.map(span_rows) {
                numbers[to..to + width].convert_from_f32_slice(&row[..width]);
            }
        }
        other => unreachable!("{other:?} is not written over"),
    }
    Tensor::from_primitive::<Flex>(stored)
}

/// Prefetches the bytes of every head that are about to be overwritten. Without it each write would wait for
/// the memory.
struct PrefetchHeads<'a> {
    bytes: &'a [u8],
    /// Bytes of a head.
    every: usize,
    part: Range<usize>,
}

impl Kernel for PrefetchHeads<'_> {
    #[inline(always)]
    fn run<L: Lanes>(self) {
        for head in self.bytes.chunks_exact(self.every) {
            prefetch_bytes::<L>(&head[self.part.clone()]);
        }
    }
}

impl SpanRows {
    fn from_span(span: Span) -> Self {
        let held = |stored| match stored {
            KvTensor::Float(values) => {
                KvPrimitive::Float(values.try_into_primitive::<Flex>().expect(ON_FLEX))
            }
            KvTensor::Bytes { words, scales } => KvPrimitive::Bytes {
                words: words.try_into_primitive::<Flex>().expect(ON_FLEX),
                scales: scales.try_into_primitive::<Flex>().expect(ON_FLEX),
            },
        };
        Self::new(held(span.keys), held(span.values), span.position, span.visible)
    }

    fn new(
        keys: KvPrimitive<Flex>,
        values: KvPrimitive<Flex>,
        position: usize,
        visible: Option<Visibility>,
    ) -> Self {
        let [_, positions, _] = match &keys {
            KvPrimitive::Float(keys) => dims(keys),
            KvPrimitive::Bytes { words, .. } => dims(words),
        };
        Self { keys: StoredRows::new(keys), values: StoredRows::new(values), positions, position, visible }
    }
}

impl<'a> Problem<'a> {
    fn new(
        queries: &'a [f32],
        [heads, head_dim]: [usize; 2],
        spans: Vec<SpanRows>,
        params: AttentionParams,
    ) -> Self {
        let kv_heads = spans.first().map_or(heads, |span| span.keys.heads());
        Self { queries, heads, kv_heads, head_dim, spans, params }
    }
}

/// Some rows of one key head, and a slice of the results for every row.
struct Task<'a> {
    kv_head: usize,
    rows: Range<usize>,
    outputs: Vec<&'a mut [f32]>,
    log_sum_exps: Vec<&'a mut [f32]>,
}

impl Task<'_> {
    #[inline(always)]
    fn finish(&mut self, accumulator: &Accumulator, head_dim: usize) {
        let mut query = 0;
        for (outputs, sums) in self.outputs.iter_mut().zip(&mut self.log_sum_exps) {
            for (output, sum) in outputs.chunks_exact_mut(head_dim).zip(sums.iter_mut()) {
                *sum = accumulator.finish(query, output);
                query += 1;
            }
        }
    }
}

/// Returns the outputs and log-sum-exps of the given number of rows of each problem, one problem after the
/// other. All have the same heads.
fn compute(problems: &[(Problem<'_>, usize)]) -> (Vec<f32>, Vec<f32>) {
    let elements = |(problem, rows): &(Problem<'_>, usize)| rows * problem.heads * problem.head_dim;
    let positions = |problem: &Problem<'_>| problem.spans.iter().map(|span| span.positions).sum::<usize>();
    let mut output = vec![0.0; problems.iter().map(elements).sum()];
    let mut log_sum_exp = vec![0.0; problems.iter().map(|(problem, rows)| rows * problem.heads).sum()];
    let (mut outputs, mut sums) = (&mut output[..], &mut log_sum_exp[..]);
    let mut all = Vec::new();
    for part in problems {
        let (problem, rows) = part;
        let (problem_outputs, others) = outputs.split_at_mut(elements(part));
        let (problem_sums, other_sums) = sums.split_at_mut(rows * problem.heads);
        all.extend(
            tasks(problem, *rows, problem_outputs, problem_sums).into_iter().map(|task| (problem, task)),
        );
        (outputs, sums) = (others, other_sums);
    }
    let work: usize = problems.iter().map(|part| elements(part) * positions(&part.0)).sum();
    let threads = if work < SINGLE_THREAD_WORK { 1 } else { rayon::current_num_threads() };
    if threads == 1 {
        for (problem, task) in &mut all {
            dispatch(AllBlocks { problem, task });
        }
    } else if all.len() >= 2 * threads {
        parallel_for_each(&mut all, |(problem, task)| dispatch(AllBlocks { problem, task }));
    } else {
        // Too few tasks for all threads: threads share the blocks of a task and merge them in order.
        for (problem, task) in &mut all {
            compute_in_waves(problem, task, threads);
        }
    }
    drop(all);
    (output, log_sum_exp)
}

/// Splits the rows into tiles for every key head.
fn tasks<'a>(
    problem: &Problem<'_>,
    rows: usize,
    output: &'a mut [f32],
    log_sum_exp: &'a mut [f32],
) -> Vec<Task<'a>> {
    let Problem { kv_heads, head_dim, .. } = *problem;
    let sharing = problem.sharing();
    let tile_rows = (TILE_QUERIES / sharing).max(1);
    let tiles = rows.div_ceil(tile_rows);
    let mut tasks = Vec::with_capacity(tiles * kv_heads);
    // Tiles of the same keys follow each other and find them in the cache.
    for kv_head in 0..kv_heads {
        for tile in 0..tiles {
            let rows = tile * tile_rows..rows.min((tile + 1) * tile_rows);
            let (outputs, log_sum_exps) = (Vec::with_capacity(rows.len()), Vec::with_capacity(rows.len()));
            tasks.push(Task { kv_head, rows, outputs, log_sum_exps });
        }
    }
    let outputs = output.chunks_exact_mut(sharing * head_dim).zip(log_sum_exp.chunks_exact_mut(sharing));
    for (index, (output, sums)) in outputs.enumerate() {
        let (row, kv_head) = (index / kv_heads, index % kv_heads);
        let task = &mut tasks[kv_head * tiles + row / tile_rows];
        task.outputs.push(output);
        task.log_sum_exps.push(sums);
    }
    tasks
}

/// Runs a whole task on one thread.
struct AllBlocks<'a, 'b> {
    problem: &'a Problem<'a>,
    task: &'a mut Task<'b>,
}

impl Kernel for AllBlocks<'_, '_> {
    #[inline(always)]
    fn run<L: Lanes>(self) {
        let Self { problem, task } = self;
        let rows = task.rows.clone();
        let mut tile = Tile::new(problem, task.kv_head, rows.clone());
        let mut blocks = problem.blocks(&rows).peekable();
        if let Some(first) = blocks.peek() {
            tile.prefetch_keys::<L>(*first);
        }
        let (mut all, mut next) = (problem.new_accumulator(&rows), problem.new_accumulator(&rows));
        while let Some(block) = blocks.next() {
            L::call(OneBlock {
                tile: &mut tile,
                block,
                next: blocks.peek().copied(),
                accumulator: &mut next,
            });
            all.add(&next);
        }
        task.finish(&all, problem.head_dim);
    }
}

/// Runs one task on all threads, in waves of as many blocks as keep them busy: memory for accumulators does
/// not grow with the length of the spans.
fn compute_in_waves(problem: &Problem<'_>, task: &mut Task<'_>, threads: usize) {
    let blocks: Vec<Block> = problem.blocks(&task.rows).collect();
    let mut tiles: Vec<_> = (0..blocks.len().min(threads * BLOCKS_PER_THREAD))
        .map(|_| (Tile::new(problem, task.kv_head, task.rows.clone()), problem.new_accumulator(&task.rows)))
        .collect();
    let mut all = problem.new_accumulator(&task.rows);
    for wave in blocks.chunks(tiles.len().max(1)) {
        parallel_for_each(tiles.iter_mut().zip(wave), |((tile, accumulator), block)| {
            dispatch(OneBlock { tile, block: *block, next: None, accumulator });
        });
        dispatch(MergeBlocks { parts: &tiles[..wave.len()], all: &mut all });
    }
    task.finish(&all, problem.head_dim);
}

/// Attends to one block.
struct OneBlock<'a, 'b> {
    tile: &'a mut Tile<'b>,
    block: Block,
    /// The block whose keys are prefetched.
    next: Option<Block>,
    accumulator: &'a mut Accumulator,
}

impl Kernel for OneBlock<'_, '_> {
    #[inline(always)]
    fn run<L: Lanes>(self) {
        self.tile.process_block::<L>(self.block, self.next, self.accumulator);
    }
}

/// Merges the accumulators of a wave in order.
struct MergeBlocks<'a, 'b> {
    parts: &'a [(Tile<'b>, Accumulator)],
    all: &'a mut Accumulator,
}

impl Kernel for MergeBlocks<'_, '_> {
    #[inline(always)]
    fn run<L: Lanes>(self) {
        for (_, part) in self.parts {
            self.all.add(part);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simd::on_each_instruction_set;

    const HEADS: usize = 6;
    const KV_HEADS: usize = 2;
    const POSITIONS: usize = 290;
    const ROWS: usize = 5;

    fn ramp(count: usize, step: usize) -> Vec<f32> {
        (0..count).map(|i| (i * step % 23) as f32 / 11.0 - 1.0).collect()
    }

    /// Expected output and log-sum-exp of a query, computed in f64.
    fn expected(
        problem: &Problem<'_>,
        values: &[f32],
        keys: &[f32],
        row: usize,
        head: usize,
    ) -> (Vec<f64>, f64) {
        let head_dim = problem.head_dim;
        let of = |numbers: &[f32], at: usize| -> Vec<f64> {
            numbers[at * head_dim..][..head_dim].iter().map(|number| f64::from(*number)).collect()
        };
        let query = of(problem.queries, row * HEADS + head);
        let (mut output, mut total) = (vec![0.0; head_dim], 0.0);
        let span_rows = &problem.spans[0];
        for index in problem.params.visible(row, span_rows.position, POSITIONS) {
            if !span_rows.visible.as_ref().is_none_or(|visible| visible.contains(index)) {
                continue;
            }
            let at = head / (HEADS / KV_HEADS) * POSITIONS + index;
            let score: f64 = query.iter().zip(of(keys, at)).map(|(q, k)| q * k).sum();
            let mut score = score * f64::from(problem.params.scale);
            if let Some(cap) = problem.params.softcap.map(f64::from) {
                score = cap * (score / cap).tanh();
            }
            total += score.exp();
            for (output, value) in output.iter_mut().zip(of(values, at)) {
                *output += score.exp() * value;
            }
        }
        (output.into_iter().map(|value| value / total).collect(), total.ln())
    }

    /// Test machines use the widest instruction set; the others must be right too.
    #[test]
    fn every_instruction_set_attends() {
        for head_dim in [16, 80, 83] {
            let queries = ramp(ROWS * HEADS * head_dim, 5);
            let keys = ramp(KV_HEADS * POSITIONS * head_dim, 7);
            let values = ramp(KV_HEADS * POSITIONS * head_dim, 3);
            let held = |numbers: &[f32]| {
                KvPrimitive::Float(tensor(numbers.to_vec(), [KV_HEADS, POSITIONS, head_dim]))
            };
            let visible: Visibility = (0..POSITIONS).map(|index| index % 7 != 2).collect();
            for (softcap, visible, window) in
                [(None, None, None), (Some(0.7), Some(&visible), None), (None, Some(&visible), Some(50))]
            {
                let problem = Problem {
                    queries: &queries,
                    heads: HEADS,
                    kv_heads: KV_HEADS,
                    head_dim,
                    spans: vec![SpanRows::new(held(&keys), held(&values), 3, visible.cloned())],
                    params: AttentionParams { position: POSITIONS - 2, window, scale: 0.2, softcap },
                };
                let kinds = std::cell::RefCell::new(Vec::new());
                on_each_instruction_set(|name| Check { problem: &problem, name, results: &kinds });
                for (name, output, sums) in kinds.into_inner() {
                    for query in 0..ROWS * HEADS {
                        let (row, head) = (query / HEADS, query % HEADS);
                        let (expected, sum) = expected(&problem, &values, &keys, row, head);
                        assert!((f64::from(sums[query]) - sum).abs() < 1e-5, "{name}, {head_dim} wide");
                        for (found, expected) in output[query * head_dim..].iter().zip(expected) {
                            let off = (f64::from(*found) - expected).abs();
                            assert!(off < 1e-5, "{name}, {head_dim} wide: {found} instead of {expected}");
                        }
                    }
                }
            }
        }
    }

    /// The number of queries decides whether rows are converted before or while they are read.
    #[test]
    fn a_row_alone_has_the_same_bits() {
        for head_dim in [16, 80, 83] {
            let queries = ramp(ROWS * HEADS * head_dim, 5);
            let shape = [KV_HEADS, POSITIONS, head_dim];
            let numbers = |step| ramp(KV_HEADS * POSITIONS * head_dim, step);
            let single = |step| KvPrimitive::<Flex>::Float(tensor(numbers(step), shape));
            let half = |step| {
                let halves: Vec<f16> = numbers(step).into_iter().map(f16::from_f32).collect();
                KvPrimitive::<Flex>::Float(tensor(halves, shape))
            };
            let bytes = |step| {
                let (words, scales) = <Flex as AttentionOps>::quantize(tensor(numbers(step), shape));
                KvPrimitive::<Flex>::Bytes { words, scales }
            };
            for (keys, values) in [(single(7), single(3)), (half(7), half(3)), (bytes(7), bytes(3))] {
                let problem = Problem {
                    queries: &queries,
                    heads: HEADS,
                    kv_heads: KV_HEADS,
                    head_dim,
                    spans: vec![SpanRows::new(keys, values, 3, None)],
                    params: AttentionParams {
                        position: POSITIONS - 2,
                        window: None,
                        scale: 0.2,
                        softcap: None,
                    },
                };
                on_each_instruction_set(|name| Alone { problem: &problem, name });
            }
        }
    }

    struct Alone<'a> {
        problem: &'a Problem<'a>,
        name: &'static str,
    }

    impl Kernel for Alone<'_> {
        #[inline(always)]
        fn run<L: Lanes>(self) {
            let Self { problem, name } = self;
            let (sharing, head_dim) = (problem.sharing(), problem.head_dim);
            let mut output = vec![0.0; ROWS * HEADS * head_dim];
            let mut sums = vec![0.0; ROWS * HEADS];
            for task in &mut tasks(problem, ROWS, &mut output, &mut sums) {
                L::call(AllBlocks { problem, task });
            }
            let bits = |numbers: &[f32]| numbers.iter().map(|number| number.to_bits()).collect::<Vec<_>>();
            for (row, kv_head) in (0..ROWS).flat_map(|row| (0..KV_HEADS).map(move |head| (row, head))) {
                let mut alone = vec![0.0; sharing * head_dim];
                let mut sums_alone = vec![0.0; sharing];
                let mut task = Task {
                    kv_head,
                    rows: row..row + 1,
                    outputs: vec![&mut alone[..]],
                    log_sum_exps: vec![&mut sums_alone[..]],
                };
                L::call(AllBlocks { problem, task: &mut task });
                drop(task);
                let from = row * HEADS + kv_head * sharing;
                let together = &output[from * head_dim..][..sharing * head_dim];
                assert_eq!(bits(&alone), bits(together), "{name}, {head_dim} wide, row {row}");
                assert_eq!(bits(&sums_alone), bits(&sums[from..][..sharing]), "{name}, {head_dim} wide");
            }
        }
    }

    type Results = std::cell::RefCell<Vec<(&'static str, Vec<f32>, Vec<f32>)>>;

    struct Check<'a> {
        problem: &'a Problem<'a>,
        name: &'static str,
        results: &'a Results,
    }

    impl Kernel for Check<'_> {
        #[inline(always)]
        fn run<L: Lanes>(self) {
            let Self { problem, name, results } = self;
            let mut output = vec![0.0; ROWS * HEADS * problem.head_dim];
            let mut sums = vec![0.0; ROWS * HEADS];
            for task in &mut tasks(problem, ROWS, &mut output, &mut sums) {
                L::call(AllBlocks { problem, task });
            }
            results.borrow_mut().push((name, output, sums));
        }
    }
}
