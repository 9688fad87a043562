//! Attention of a tile of queries over one block of positions.
//!
//! Hidden positions are skipped, not multiplied by zero: they may hold NaN.

use std::ops::Range;

use super::params::{AttentionParams, BLOCK};
use super::products::{QueryKeyProducts, WeightedValues};
use super::rows::{ConvertedRows, PrefetchRows, StoredRows};
use super::visibility::Visibility;
use crate::simd::{LANES, Lanes, exp, tanh};

/// Positions whose keys or values stay in the L1 cache together.
const PANEL_POSITIONS: usize = 32;

/// Most groups of queries that convert stored rows on the fly. With more groups, converting a row once into
/// the cache is faster.
const MAX_IN_PLACE_GROUPS: usize = 3;

/// One attention over several spans.
pub(super) struct Problem<'a> {
    /// `[rows, heads, head_dim]`
    pub queries: &'a [f32],
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub spans: Vec<SpanRows>,
    pub params: AttentionParams,
}

/// A span as the kernel reads it.
pub(super) struct SpanRows {
    pub keys: StoredRows,
    pub values: StoredRows,
    pub positions: usize,
    /// Position of the first key.
    pub position: usize,
    pub visible: Option<Visibility>,
}

/// Up to [`BLOCK`] positions of a span.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Block {
    pub span: usize,
    /// Index of the block within its span.
    pub index: usize,
}

impl Problem<'_> {
    /// Query heads per key head.
    pub fn sharing(&self) -> usize {
        self.heads / self.kv_heads
    }

    /// Head dimension, padded to whole vectors.
    fn width(&self) -> usize {
        self.head_dim.next_multiple_of(LANES)
    }

    /// Returns the blocks that any of `rows` may see, in order.
    pub fn blocks(&self, rows: &Range<usize>) -> impl Iterator<Item = Block> {
        self.spans.iter().enumerate().flat_map(|(span, span_rows)| {
            let seen = |row| self.params.visible(row, span_rows.position, span_rows.positions);
            let blocks = seen(rows.start).start / BLOCK..seen(rows.end - 1).end.div_ceil(BLOCK);
            blocks.map(move |index| Block { span, index })
        })
    }

    /// Returns a zeroed accumulator for the queries of `rows` that share a key head.
    pub fn new_accumulator(&self, rows: &Range<usize>) -> Accumulator {
        let queries = rows.len() * self.sharing();
        Accumulator {
            sums: vec![0.0; queries * self.width()],
            highest: vec![f32::NEG_INFINITY; queries],
            totals: vec![0.0; queries],
        }
    }
}

/// Running softmax of some queries: sums of weighted values, not yet divided by the sums of weights.
pub(super) struct Accumulator {
    /// `[queries, width]`
    pub sums: Vec<f32>,
    /// Highest score of each query; weights are relative to it.
    pub highest: Vec<f32>,
    /// Sum of the weights of each query; zero where nothing was visible.
    pub totals: Vec<f32>,
}

impl Accumulator {
    /// Length of a row of `sums`.
    #[inline(always)]
    fn width(&self) -> usize {
        self.sums.len() / self.totals.len().max(1)
    }

    /// Merges the accumulator of the next block.
    #[inline(always)]
    pub fn add(&mut self, next: &Self) {
        let width = self.width();
        for query in 0..self.totals.len() {
            if next.totals[query] == 0.0 {
                continue;
            }
            let sums = &mut self.sums[query * width..][..width];
            let next_sums = &next.sums[query * width..][..width];
            if self.totals[query] == 0.0 {
                sums.copy_from_slice(next_sums);
                self.highest[query] = next.highest[query];
                self.totals[query] = next.totals[query];
                continue;
            }
            let highest = self.highest[query].max(next.highest[query]);
            let weight = (self.highest[query] - highest).exp();
            let next_weight = (next.highest[query] - highest).exp();
            for (sum, next) in sums.iter_mut().zip(next_sums) {
                *sum = *sum * weight + next * next_weight;
            }
            self.totals[query] = self.totals[query] * weight + next.totals[query] * next_weight;
            self.highest[query] = highest;
        }
    }

    /// Writes a query's output and returns its log-sum-exp.
    #[inline(always)]
    pub fn finish(&self, query: usize, output: &mut [f32]) -> f32 {
        let total = self.totals[query];
        if total == 0.0 {
            output.fill(0.0);
            return f32::NEG_INFINITY;
        }
        let width = self.width();
        for (output, sum) in output.iter_mut().zip(&self.sums[query * width..]) {
            *output = sum / total;
        }
        self.highest[query] + total.ln()
    }
}

/// The queries of consecutive rows that share a key head, with scratch space.
pub(super) struct Tile<'a> {
    problem: &'a Problem<'a>,
    kv_head: usize,
    rows: Range<usize>,
    width: usize,
    /// `[queries, width]`: row by row, the query heads that share the key head, padded with zeros.
    queries: Vec<f32>,
    /// `[queries, BLOCK]`: scores, then weights, of the visible positions of a block.
    scores: Vec<f32>,
    /// The slots that each query sees.
    seen: Vec<Range<usize>>,
    /// `[PANEL_POSITIONS, width]`: scratch for converted keys or values; empty until it is needed.
    panel: Vec<f32>,
    /// The visible positions of a block, as indices from the start of its span.
    slots: Vec<usize>,
}

impl<'a> Tile<'a> {
    pub fn new(problem: &'a Problem<'a>, kv_head: usize, rows: Range<usize>) -> Self {
        let (sharing, head_dim, width) = (problem.sharing(), problem.head_dim, problem.width());
        let count = rows.len() * sharing;
        let mut queries = vec![0.0; count * width];
        for (index, query) in queries.chunks_exact_mut(width).enumerate() {
            let (row, head) = (rows.start + index / sharing, kv_head * sharing + index % sharing);
            let from = (row * problem.heads + head) * head_dim;
            query[..head_dim].copy_from_slice(&problem.queries[from..from + head_dim]);
        }
        Self {
            problem,
            kv_head,
            rows,
            width,
            queries,
            scores: vec![0.0; count * BLOCK],
            seen: vec![0..0; count],
            panel: Vec::new(),
            slots: Vec::with_capacity(BLOCK),
        }
    }

    /// Overwrites `accumulator` with the attention of the queries to one block, and prefetches the keys of
    /// the next.
    #[inline(always)]
    pub fn process_block<L: Lanes>(
        &mut self,
        block: Block,
        next: Option<Block>,
        accumulator: &mut Accumulator,
    ) {
        accumulator.sums.fill(0.0);
        accumulator.highest.fill(f32::NEG_INFINITY);
        accumulator.totals.fill(0.0);
        let span_rows = &self.problem.spans[block.span];
        let all = self.find_visible(span_rows, block.index);
        let start = all.start / PANEL_POSITIONS * PANEL_POSITIONS;
        for at in (start..all.end).step_by(PANEL_POSITIONS) {
            self.score_panel::<L>(span_rows, at..(at + PANEL_POSITIONS).min(all.end), at == start);
        }
        for query in 0..self.seen.len() {
            let (highest, total) = self.softmax::<L>(query);
            accumulator.highest[query] = highest;
            accumulator.totals[query] = total;
        }
        for at in (start..all.end).step_by(PANEL_POSITIONS) {
            let slots = at..(at + PANEL_POSITIONS).min(all.end);
            self.sum_panel::<L>(span_rows, slots, at == start, next, &mut accumulator.sums);
        }
    }

    /// Finds the visible positions of a block and the slots that each query sees. Returns the slots that any
    /// query sees.
    #[inline(always)]
    fn find_visible(&mut self, span_rows: &SpanRows, block: usize) -> Range<usize> {
        let problem = self.problem;
        let start = block * BLOCK;
        let end = span_rows.positions.min(start + BLOCK);
        self.slots.clear();
        match &span_rows.visible {
            None => self.slots.extend(start..end),
            Some(visible) => self.slots.extend((start..end).filter(|index| visible.contains(*index))),
        }
        let (mut from, mut to) = (usize::MAX, 0);
        for (row, seen) in self.rows.clone().zip(self.seen.chunks_exact_mut(problem.sharing())) {
            let visible = problem.params.visible(row, span_rows.position, span_rows.positions);
            let (first, last) = match &span_rows.visible {
                None => (visible.start.clamp(start, end) - start, visible.end.clamp(start, end) - start),
                Some(_) => (
                    self.slots.partition_point(|slot| *slot < visible.start),
                    self.slots.partition_point(|slot| *slot < visible.end),
                ),
            };
            seen.fill(first..last);
            if first < last {
                from = from.min(first);
                to = to.max(last);
            }
        }
        from.min(to)..to
    }

    /// Computes the unscaled scores of some slots. `first` is whether they are the first of the block.
    #[inline(always)]
    fn score_panel<L: Lanes>(&mut self, span_rows: &SpanRows, slots: Range<usize>, first: bool) {
        let (problem, head, width) = (self.problem, self.kv_head, self.width);
        let at = &self.slots[slots.clone()];
        let prefetch = self.prefetch::<L>(&span_rows.values, at[0]..at[0] + at.len(), first);
        let products = QueryKeyProducts { queries: &self.queries, seen: &self.seen, slots, width, prefetch };
        if in_place::<L>(&span_rows.keys, self.seen.len()) && width == problem.head_dim {
            match &span_rows.keys {
                StoredRows::F32(rows) => {
                    products.score::<L, _>(&rows.in_place::<f32>(head, at), &mut self.scores)
                }
                StoredRows::F16(rows) => {
                    products.score::<L, _>(&rows.in_place::<u16>(head, at), &mut self.scores)
                }
                StoredRows::Bytes { bytes, scales } => {
                    products.score::<L, _>(&bytes.bytes_in_place(scales, head, at), &mut self.scores);
                }
            }
        } else {
            let converted = convert::<L>(&span_rows.keys, head, at, problem.head_dim, &mut self.panel, width);
            products.score::<L, _>(&converted, &mut self.scores);
        }
    }

    /// Turns the scores of a query into weights relative to the highest. Returns the highest score and the
    /// sum of the weights.
    #[inline(always)]
    fn softmax<L: Lanes>(&mut self, query: usize) -> (f32, f32) {
        let AttentionParams { scale, softcap, .. } = self.problem.params;
        let seen = self.seen[query].clone();
        if seen.is_empty() {
            return (f32::NEG_INFINITY, 0.0);
        }
        // Vectors start at the same slots for every query, so that weights are always summed in one order.
        let vectors = seen.start / LANES..seen.end.div_ceil(LANES);
        let scores = &mut self.scores[query * BLOCK..][..BLOCK];
        for scores in &mut scores.as_chunks_mut::<LANES>().0[vectors.clone()] {
            let score = L::load(scores);
            let score = match softcap {
                None => score.mul(L::splat(scale)),
                Some(cap) => tanh(score.mul(L::splat(scale / cap))).mul(L::splat(cap)),
            };
            *scores = score.store();
        }
        scores[vectors.start * LANES..seen.start].fill(f32::NEG_INFINITY);
        scores[seen.end..vectors.end * LANES].fill(f32::NEG_INFINITY);
        let scores = &mut scores.as_chunks_mut::<LANES>().0[vectors];
        let mut highest = L::splat(f32::NEG_INFINITY);
        for scores in scores.iter() {
            highest = highest.max(L::load(scores));
        }
        let mut highest_score = f32::NEG_INFINITY;
        for score in highest.store() {
            highest_score = highest_score.max(score);
        }
        // Where all scores are -inf, any finite base works.
        let base = if highest_score == f32::NEG_INFINITY { 0.0 } else { highest_score };
        let mut total = L::zero();
        for scores in scores.iter_mut() {
            let weights = exp(L::load(scores).sub(L::splat(base)));
            total = total.add(weights);
            *scores = weights.store();
        }
        (highest_score, total.sum())
    }

    /// Prefetches the first keys of a block.
    #[inline(always)]
    pub fn prefetch_keys<L: Lanes>(&self, block: Block) {
        let span_rows = &self.problem.spans[block.span];
        let start = block.index * BLOCK;
        if let Some(prefetch) =
            self.prefetch::<L>(&span_rows.keys, start..span_rows.positions.min(start + PANEL_POSITIONS), true)
        {
            prefetch.issue::<L>(0..1, 1);
        }
    }

    /// Returns the rows to prefetch during a computation. Rows that are read in place prefetch those behind
    /// them, so only the first ones are left.
    #[inline(always)]
    fn prefetch<'s, L: Lanes>(
        &self,
        stored: &'s StoredRows,
        mut positions: Range<usize>,
        first: bool,
    ) -> Option<PrefetchRows<'s>> {
        let (head, head_dim) = (self.kv_head, self.problem.head_dim);
        if in_place::<L>(stored, self.seen.len()) {
            if !first {
                return None;
            }
            positions.end = positions.end.min(positions.start + stored.rows_within_prefetch(head_dim));
        }
        Some(PrefetchRows { stored, head, positions, head_dim })
    }

    /// Adds the weighted values of some slots. `next` is the following block.
    #[inline(always)]
    fn sum_panel<L: Lanes>(
        &mut self,
        span_rows: &SpanRows,
        slots: Range<usize>,
        first: bool,
        next: Option<Block>,
        sums: &mut [f32],
    ) {
        let (problem, head, width) = (self.problem, self.kv_head, self.width);
        let at = &self.slots[slots.clone()];
        let prefetch = next.and_then(|next| {
            let span_rows = &problem.spans[next.span];
            let start = next.index * BLOCK;
            let upto = |slot: usize| (start + slot).min(span_rows.positions);
            self.prefetch::<L>(&span_rows.keys, upto(slots.start)..upto(slots.end), first)
        });
        let weighted = WeightedValues { weights: &self.scores, seen: &self.seen, slots, width, prefetch };
        if in_place::<L>(&span_rows.values, self.seen.len()) && width == problem.head_dim {
            match &span_rows.values {
                StoredRows::F32(rows) => weighted.sum::<L, _>(&rows.in_place::<f32>(head, at), sums),
                StoredRows::F16(rows) => weighted.sum::<L, _>(&rows.in_place::<u16>(head, at), sums),
                StoredRows::Bytes { bytes, scales } => {
                    weighted.sum::<L, _>(&bytes.bytes_in_place(scales, head, at), sums);
                }
            }
        } else {
            let converted =
                convert::<L>(&span_rows.values, head, at, problem.head_dim, &mut self.panel, width);
            weighted.sum::<L, _>(&converted, sums);
        }
    }
}

/// Whether rows are read in place for this number of queries.
#[inline(always)]
fn in_place<L: Lanes>(stored: &StoredRows, queries: usize) -> bool {
    matches!(stored, StoredRows::F32(_)) || queries <= MAX_IN_PLACE_GROUPS * L::TILE_ROWS
}

/// Converts the rows of some slots, padded with zeros.
#[inline(always)]
fn convert<'a, L: Lanes>(
    stored: &StoredRows,
    head: usize,
    slots: &[usize],
    head_dim: usize,
    panel: &'a mut Vec<f32>,
    width: usize,
) -> ConvertedRows<'a> {
    panel.resize(PANEL_POSITIONS * width, 0.0);
    for (row, slot) in panel.chunks_exact_mut(width).zip(slots) {
        stored.convert::<L>(head, *slot, &mut row[..head_dim]);
    }
    ConvertedRows { values: panel, width }
}
