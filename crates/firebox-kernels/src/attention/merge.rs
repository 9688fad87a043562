//! Merges the outputs of attention over several spans.

use rayon::prelude::*;

use crate::simd::{Kernel, Lanes, dispatch};

/// Elements below which a second thread costs more than it gains.
const SINGLE_THREAD_WORK: usize = 1 << 16;

/// Outputs of the same rows over different spans.
pub(super) struct PartialOutputs<'a> {
    /// `[parts, rows * heads, head_dim]`
    pub outputs: &'a [f32],
    /// `[parts, rows * heads]`, and one more entry for sinks if there are any.
    pub log_sum_exps: &'a [f32],
    /// Rows times heads.
    pub queries: usize,
    pub head_dim: usize,
}

impl PartialOutputs<'_> {
    /// Returns the merged outputs and log-sum-exps.
    pub fn merge(&self) -> (Vec<f32>, Vec<f32>) {
        let mut outputs = vec![0.0; self.queries * self.head_dim];
        let mut log_sum_exps = vec![0.0; self.queries];
        let threads = if self.outputs.len() < SINGLE_THREAD_WORK { 1 } else { rayon::current_num_threads() };
        let piece = self.queries.div_ceil(4 * threads).max(1);
        let pieces = outputs.chunks_mut((piece * self.head_dim).max(1)).zip(log_sum_exps.chunks_mut(piece));
        let pieces: Vec<_> = pieces.enumerate().collect();
        let compute = |(index, (outputs, log_sum_exps)): (usize, (&mut [f32], &mut [f32]))| {
            dispatch(Merge { parts: self, first: index * piece, outputs, log_sum_exps });
        };
        if threads == 1 {
            pieces.into_iter().for_each(compute);
        } else {
            pieces.into_par_iter().for_each(compute);
        }
        (outputs, log_sum_exps)
    }
}

/// Merges some consecutive queries.
struct Merge<'a> {
    parts: &'a PartialOutputs<'a>,
    first: usize,
    outputs: &'a mut [f32],
    log_sum_exps: &'a mut [f32],
}

impl Kernel for Merge<'_> {
    #[inline(always)]
    fn run<L: Lanes>(self) {
        let PartialOutputs { outputs, log_sum_exps, queries, head_dim } = *self.parts;
        for (index, merged) in self.log_sum_exps.iter_mut().enumerate() {
            let query = self.first + index;
            let mut highest = f32::NEG_INFINITY;
            for sums in log_sum_exps.chunks_exact(queries) {
                highest = highest.max(sums[query]);
            }
            // Where nothing was visible, any finite base works.
            let base = if highest == f32::NEG_INFINITY { 0.0 } else { highest };
            let mut total = 0.0;
            for sums in log_sum_exps.chunks_exact(queries) {
                total += (sums[query] - base).exp();
            }
            *merged = if total == 0.0 { f32::NEG_INFINITY } else { base + total.ln() };
            let output = &mut self.outputs[index * head_dim..][..head_dim];
            let parts = outputs.chunks_exact(queries * head_dim).zip(log_sum_exps.chunks_exact(queries));
            for (part, sums) in parts {
                let weight = (sums[query] - base).exp() / total;
                // A part without weight may hold NaN.
                if sums[query] == f32::NEG_INFINITY {
                    continue;
                }
                for (output, part) in output.iter_mut().zip(&part[query * head_dim..][..head_dim]) {
                    *output += weight * part;
                }
            }
        }
    }
}
