//! Products of queries with keys, and of weights with values, in registers.
//!
//! Each score is one vector accumulator that runs over the head dimension in order and is summed by a fixed
//! tree. Each output element is one sum over the visible positions of a block in order. The number of queries
//! that share registers therefore does not change a bit of the result.

use std::ops::Range;

use super::params::BLOCK;
use super::rows::{PrefetchRows, Row, Rows};
use crate::simd::{LANES, Lanes};

/// Keys that are multiplied with the same queries while both are in registers.
const KEYS_PER_STEP: usize = 4;

/// Queries, and the slots of a block whose keys they are multiplied with.
pub(super) struct QueryKeyProducts<'a> {
    /// `[queries, width]`
    pub queries: &'a [f32],
    /// Slots that each query sees.
    pub seen: &'a [Range<usize>],
    pub slots: Range<usize>,
    /// Head dimension in whole vectors.
    pub width: usize,
    /// Rows to prefetch meanwhile, unless reading the rows prefetches those behind them.
    pub prefetch: Option<PrefetchRows<'a>>,
}

impl QueryKeyProducts<'_> {
    /// Writes the products with the visible keys to `[queries, BLOCK]`.
    #[inline(always)]
    pub fn score<L: Lanes, R: Rows>(&self, keys: &R, scores: &mut [f32]) {
        let count = self.seen.len();
        let mut query = 0;
        while L::TILE_ROWS >= 4 && query + 4 <= count {
            self.score_queries::<L, R, 4>(query, keys, scores);
            query += 4;
        }
        while L::TILE_ROWS >= 2 && query + 2 <= count {
            self.score_queries::<L, R, 2>(query, keys, scores);
            query += 2;
        }
        while query < count {
            self.score_queries::<L, R, 1>(query, keys, scores);
            query += 1;
        }
    }

    #[inline(always)]
    #[allow(clippy::needless_range_loop)] // A chunk is of all rows at once.
    fn score_queries<L: Lanes, R: Rows, const QUERIES: usize>(
        &self,
        first: usize,
        keys: &R,
        scores: &mut [f32],
    ) {
        let Self { queries, seen, slots, width, prefetch } = self;
        if let Some(prefetch) = prefetch {
            prefetch.issue::<L>(first..first + QUERIES, seen.len());
        }
        let chunks = width / LANES;
        let (mut start, mut end) = (usize::MAX, 0);
        let mut query: [&[[f32; LANES]]; QUERIES] = [&[]; QUERIES];
        for i in 0..QUERIES {
            let seen = &seen[first + i];
            if !seen.is_empty() {
                start = start.min(seen.start);
                end = end.max(seen.end);
            }
            query[i] = &queries[(first + i) * width..].as_chunks().0[..chunks];
        }
        let (start, end) = (start.max(slots.start), end.min(slots.end));
        if start >= end {
            return;
        }
        let last = slots.len() - 1;
        let mut key = (start - slots.start) / KEYS_PER_STEP * KEYS_PER_STEP;
        while slots.start + key < end {
            // Past the last key, the last one is repeated and its scores are ignored.
            let key0 = keys.row(key, chunks);
            let key1 = keys.row((key + 1).min(last), chunks);
            let key2 = keys.row((key + 2).min(last), chunks);
            let key3 = keys.row((key + 3).min(last), chunks);
            // Four arrays instead of an array of arrays, so that the compiler keeps them in registers.
            let mut sums0 = [L::zero(); QUERIES];
            let mut sums1 = [L::zero(); QUERIES];
            let mut sums2 = [L::zero(); QUERIES];
            let mut sums3 = [L::zero(); QUERIES];
            for chunk in 0..chunks {
                if first == 0 {
                    // Later queries find the keys in the cache.
                    key0.prefetch::<L>(chunk);
                    key1.prefetch::<L>(chunk);
                    key2.prefetch::<L>(chunk);
                    key3.prefetch::<L>(chunk);
                }
                let (k0, k1): (L, L) = (key0.chunk(chunk), key1.chunk(chunk));
                let (k2, k3): (L, L) = (key2.chunk(chunk), key3.chunk(chunk));
                for i in 0..QUERIES {
                    let q = L::load(&query[i][chunk]);
                    sums0[i] = sums0[i].mul_add(q, k0);
                    sums1[i] = sums1[i].mul_add(q, k1);
                    sums2[i] = sums2[i].mul_add(q, k2);
                    sums3[i] = sums3[i].mul_add(q, k3);
                }
            }
            for i in 0..QUERIES {
                let sums = L::sums([sums0[i], sums1[i], sums2[i], sums3[i]]);
                scores[(first + i) * BLOCK + slots.start + key..][..KEYS_PER_STEP].copy_from_slice(&sums);
            }
            key += KEYS_PER_STEP;
        }
    }
}

/// Weights, and the slots of a block whose values they are multiplied with.
pub(super) struct WeightedValues<'a> {
    /// `[queries, BLOCK]`
    pub weights: &'a [f32],
    /// Slots that each query sees.
    pub seen: &'a [Range<usize>],
    pub slots: Range<usize>,
    /// Head dimension in whole vectors.
    pub width: usize,
    /// Rows to prefetch meanwhile, unless reading the rows prefetches those behind them.
    pub prefetch: Option<PrefetchRows<'a>>,
}

impl WeightedValues<'_> {
    /// Adds the weighted values of the visible slots to `[queries, width]`.
    #[inline(always)]
    pub fn sum<L: Lanes, R: Rows>(&self, values: &R, sums: &mut [f32]) {
        let count = self.seen.len();
        let mut query = 0;
        while L::TILE_ROWS >= 4 && query + 4 <= count {
            self.sum_queries::<L, R, 4>(query, values, sums);
            query += 4;
        }
        while L::TILE_ROWS >= 2 && query + 2 <= count {
            self.sum_queries::<L, R, 2>(query, values, sums);
            query += 2;
        }
        while query < count {
            self.sum_queries::<L, R, 1>(query, values, sums);
            query += 1;
        }
    }

    #[inline(always)]
    #[allow(clippy::needless_range_loop)] // A query is of starts, ends and sums at once.
    fn sum_queries<L: Lanes, R: Rows, const QUERIES: usize>(
        &self,
        first: usize,
        values: &R,
        sums: &mut [f32],
    ) {
        if let Some(prefetch) = &self.prefetch {
            prefetch.issue::<L>(first..first + QUERIES, self.seen.len());
        }
        let mut starts = [0; QUERIES];
        let mut ends = [0; QUERIES];
        let (mut start, mut end) = (0, usize::MAX);
        for i in 0..QUERIES {
            let seen = &self.seen[first + i];
            starts[i] = seen.start.max(self.slots.start);
            ends[i] = seen.end.min(self.slots.end).max(starts[i]);
            start = start.max(starts[i]);
            end = end.min(ends[i]);
        }
        // Slots that all queries see are processed together, and those that only some see one query at a
        // time.
        let common = start < end;
        for i in 0..QUERIES {
            let before = if common { start } else { ends[i] };
            self.sum_slots::<L, R, 1>(first + i, starts[i]..before, values, sums);
        }
        if common {
            self.sum_slots::<L, R, QUERIES>(first, start..end, values, sums);
            for i in 0..QUERIES {
                self.sum_slots::<L, R, 1>(first + i, end..ends[i], values, sums);
            }
        }
    }

    /// Adds the values of slots that all `QUERIES` queries see.
    #[inline(always)]
    fn sum_slots<L: Lanes, R: Rows, const QUERIES: usize>(
        &self,
        first: usize,
        seen: Range<usize>,
        values: &R,
        sums: &mut [f32],
    ) {
        if seen.is_empty() {
            return;
        }
        let chunks = self.width / LANES;
        let mut chunk = 0;
        while chunk + 4 <= chunks {
            self.sum_columns::<L, R, QUERIES, 4>(first, seen.clone(), values, sums, chunk);
            chunk += 4;
        }
        while chunk < chunks {
            self.sum_columns::<L, R, QUERIES, 1>(first, seen.clone(), values, sums, chunk);
            chunk += 1;
        }
    }

    /// [`sum_slots`](Self::sum_slots) for one or four vectors of the head dimension.
    #[inline(always)]
    #[allow(clippy::needless_range_loop)] // A position is of all weights at once.
    fn sum_columns<L: Lanes, R: Rows, const QUERIES: usize, const COLUMNS: usize>(
        &self,
        first: usize,
        seen: Range<usize>,
        values: &R,
        sums: &mut [f32],
        chunk: usize,
    ) {
        let (count, chunks) = (seen.len(), self.width / LANES);
        let index = seen.start - self.slots.start;
        let mut weights: [&[f32]; QUERIES] = [&[]; QUERIES];
        // Four arrays instead of an array of arrays, so that the compiler keeps them in registers.
        let mut sums0 = [L::zero(); QUERIES];
        let mut sums1 = [L::zero(); QUERIES];
        let mut sums2 = [L::zero(); QUERIES];
        let mut sums3 = [L::zero(); QUERIES];
        for i in 0..QUERIES {
            weights[i] = &self.weights[(first + i) * BLOCK + seen.start..][..count];
            let sums = &sums[(first + i) * self.width + chunk * LANES..].as_chunks::<LANES>().0[..COLUMNS];
            sums0[i] = L::load(&sums[0]);
            if COLUMNS == 4 {
                sums1[i] = L::load(&sums[1]);
                sums2[i] = L::load(&sums[2]);
                sums3[i] = L::load(&sums[3]);
            }
        }
        for at in 0..count {
            if first == 0 && chunk == 0 {
                // Later queries and columns find the values in the cache.
                let row = values.row(index + at, chunks);
                for chunk in 0..chunks {
                    row.prefetch::<L>(chunk);
                }
            }
            let row = values.row(index + at, chunk + COLUMNS);
            let v0: L = row.chunk(chunk);
            if COLUMNS == 4 {
                let (v1, v2, v3): (L, L, L) =
                    (row.chunk(chunk + 1), row.chunk(chunk + 2), row.chunk(chunk + 3));
                for i in 0..QUERIES {
                    let weight = L::splat(weights[i][at]);
                    sums0[i] = sums0[i].mul_add(weight, v0);
                    sums1[i] = sums1[i].mul_add(weight, v1);
                    sums2[i] = sums2[i].mul_add(weight, v2);
                    sums3[i] = sums3[i].mul_add(weight, v3);
                }
            } else {
                for i in 0..QUERIES {
                    sums0[i] = sums0[i].mul_add(L::splat(weights[i][at]), v0);
                }
            }
        }
        for i in 0..QUERIES {
            let sums =
                &mut sums[(first + i) * self.width + chunk * LANES..].as_chunks_mut::<LANES>().0[..COLUMNS];
            sums[0] = sums0[i].store();
            if COLUMNS == 4 {
                sums[1] = sums1[i].store();
                sums[2] = sums2[i].store();
                sums[3] = sums3[i].store();
            }
        }
    }
}
