//! The likeliest tokens of rows of logits, found where the logits are.
//!
//! Reading a row of a large vocabulary from an accelerator takes longer than finding its highest logits there. Tokens are
//! ordered by logit, equal ones by index, and both zeros are equal. Logits that are no number or negative infinity are never
//! among them.

// Without accelerators there is no buffer, and what follows from one is unreachable.
#![cfg_attr(not(any(feature = "wgpu", feature = "cuda")), allow(unreachable_code, unused_variables))]

#[cfg(any(feature = "wgpu", feature = "cuda"))]
mod cube;
#[cfg(not(any(feature = "wgpu", feature = "cuda")))]
mod none;

use burn::tensor::{Device, Tensor};

#[cfg(any(feature = "wgpu", feature = "cuda"))]
use cube as backend;
#[cfg(not(any(feature = "wgpu", feature = "cuda")))]
use none as backend;

use crate::transfers;

/// Tokens of a row at most: finding one more takes every unit of a device once around.
pub const MAX_LIKELIEST: usize = 64;

/// The index that stands for no token.
const NONE: u32 = u32::MAX;
/// The bit that is set in ranks of logits from zero on.
const POSITIVE: u32 = 1 << 31;

/// A token and its logit.
pub type Scored = (u32, f32);

/// The likeliest tokens of some rows, on the device.
#[derive(Debug)]
pub struct Likeliest {
    buffer: backend::Buffer,
    rows: usize,
    most: usize,
}

/// The likeliest tokens could not be read from the device.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the likeliest tokens could not be read from the device: {reason}")]
pub struct LikeliestError {
    /// The device's message.
    pub reason: String,
}

/// Returns whether a device finds the likeliest tokens itself.
pub fn supports(device: &Device) -> bool {
    backend::supports(device)
}

/// Finds the likeliest `most` tokens of each row of logits `[rows, vocab]`, at most [`MAX_LIKELIEST`]. A row's result does not
/// depend on the other rows. Returns `None` unless the device [finds them itself](supports).
pub fn likeliest(logits: Tensor<2>, most: usize) -> Option<Likeliest> {
    let most = most.clamp(1, MAX_LIKELIEST);
    if !supports(&logits.device()) {
        return None;
    }
    let [rows, _] = logits.dims();
    Some(Likeliest { buffer: backend::likeliest(logits, most), rows, most })
}

/// Returns the likeliest `most` tokens of one row, likeliest first.
pub fn reference(logits: &[f32], most: usize) -> Vec<Scored> {
    let mut ranked: Vec<(u32, u32)> =
        (0..).zip(logits).map(|(token, logit)| (token, rank(*logit))).filter(|(_, rank)| *rank > 0).collect();
    ranked.sort_unstable_by(|a, b| b.1.cmp(&a.1).then(a.0.cmp(&b.0)));
    ranked.truncate(most);
    ranked.into_iter().map(|(token, rank)| (token, logit(rank))).collect()
}

impl Likeliest {
    /// Returns how many tokens of each row it has at most.
    pub fn most(&self) -> usize {
        self.most
    }

    /// Reads the likeliest `most` tokens of each row, likeliest first: eight bytes a token and row.
    pub fn read(&self, most: usize) -> Result<Vec<Vec<Scored>>, LikeliestError> {
        let words = self.rows * 2 * most.min(self.most);
        let read = if words == 0 { Vec::new() } else { backend::read(&self.buffer, words)? };
        transfers::count_read(words * size_of::<u32>());
        let mut rows = vec![Vec::with_capacity(most.min(self.most)); self.rows];
        // The likeliest tokens of all rows come first, so that fewer tokens are the beginning of more.
        for (index, pair) in read.as_chunks::<2>().0.iter().enumerate() {
            let [token, rank] = *pair;
            if token != NONE {
                rows[index % self.rows].push((token, logit(rank)));
            }
        }
        Ok(rows)
    }
}

/// Returns a number that is larger for a higher logit; 0 for one that is never chosen.
fn rank(logit: f32) -> u32 {
    match logit.to_bits() {
        _ if logit.is_nan() || logit == f32::NEG_INFINITY => 0,
        _ if logit == 0.0 => POSITIVE,
        bits if bits < POSITIVE => bits | POSITIVE,
        bits => !bits,
    }
}

/// Returns the logit of a rank.
fn logit(rank: u32) -> f32 {
    f32::from_bits(if rank >= POSITIVE { rank ^ POSITIVE } else { !rank })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_order_as_logits_do() {
        let ascending =
            [f32::MIN, -1.5, -f32::MIN_POSITIVE, -1e-45, 0.0, 1e-45, 1.5, f32::MAX, f32::INFINITY];
        for pair in ascending.windows(2) {
            assert!(rank(pair[0]) < rank(pair[1]), "{pair:?}");
        }
        for logit in ascending {
            assert!(rank(logit) > 0 && super::logit(rank(logit)) == logit, "{logit}");
        }
        assert_eq!(rank(-0.0), rank(0.0));
        assert_eq!([f32::NAN, -f32::NAN, f32::NEG_INFINITY].map(rank), [0; 3]);
    }
}
