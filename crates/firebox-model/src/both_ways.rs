//! Attention of every token of a text to the tokens on both sides.

use std::ops::Range;

use burn::tensor::{Tensor, TensorData, activation};

use crate::config::AttentionConfig;
use crate::rows::Rows;

/// Queries that attend together. Each needs a score for every token of the text.
pub const QUERIES_AT_ONCE: usize = 512;

/// Attention of queries, keys and values `[rows, heads, head_dim]`, each text on its own. Returns `[rows, heads * head_dim]`.
/// A window is the number of visible tokens on either side, the query's own included.
pub(crate) fn attend(
    [query, key, value]: [Tensor<3>; 3],
    rows: &Rows,
    config: &AttentionConfig,
) -> Tensor<2> {
    let mut attended = Vec::new();
    for group in &rows.groups {
        let in_heads = |all: &Tensor<3>, rows: Range<usize>| {
            all.clone().narrow(0, group.rows.start + rows.start, rows.len()).swap_dims(0, 1)
        };
        let count = group.rows.len();
        for first in (0..count).step_by(QUERIES_AT_ONCE) {
            let queries = first..count.min(first + QUERIES_AT_ONCE);
            let keys = match config.window {
                Some(window) => (first + 1).saturating_sub(window)..count.min(queries.end + window - 1),
                None => 0..count,
            };
            let (key, value) = (in_heads(&key, keys.clone()), in_heads(&value, keys.clone()));
            attended.push(attend_to(in_heads(&query, queries.clone()), key, value, (queries, keys), config));
        }
    }
    Tensor::cat(attended, 0)
}

/// Attention of queries to keys and values, all `[heads, tokens, head_dim]`, with their places in the text.
fn attend_to(
    query: Tensor<3>,
    key: Tensor<3>,
    value: Tensor<3>,
    (queries, keys): (Range<usize>, Range<usize>),
    config: &AttentionConfig,
) -> Tensor<2> {
    let AttentionConfig { heads, kv_heads, head_dim, .. } = *config;
    let (count, seen) = (queries.len(), keys.len());
    // The queries that share a head of keys are the rows of one product.
    let shared = [kv_heads, heads / kv_heads * count, head_dim];
    let scores = query.reshape(shared).matmul(key.transpose()).mul_scalar(config.scale);
    let scores = match config.window.and_then(|window| hidden(queries, keys, window)) {
        Some(mask) => {
            let mask = Tensor::<3>::from_data(TensorData::new(mask, [1, count, seen]), &scores.device());
            scores.reshape([heads, count, seen]).add(mask).reshape([shared[0], shared[1], seen])
        }
        None => scores,
    };
    let attended = activation::softmax(scores, 2).matmul(value);
    attended.reshape([heads, count, head_dim]).swap_dims(0, 1).reshape([count, heads * head_dim])
}

/// Returns what hides the keys outside each query's window, or `None` if all are inside.
fn hidden(queries: Range<usize>, keys: Range<usize>, window: usize) -> Option<Vec<f32>> {
    let outside = |query: usize, key: usize| query.abs_diff(key) >= window;
    let furthest = [(queries.start, keys.end - 1), (queries.end - 1, keys.start)];
    if !furthest.iter().any(|(query, key)| outside(*query, *key)) {
        return None;
    }
    let places = queries.flat_map(|query| keys.clone().map(move |key| (query, key)));
    Some(places.map(|(query, key)| if outside(query, key) { f32::NEG_INFINITY } else { 0.0 }).collect())
}

#[cfg(test)]
mod tests {
    use burn::tensor::Device;

    use super::*;
    use crate::config::{AttentionProjections, HeadNormPlace};
    use crate::rows::Span;

    /// Attention of one query after the other, by plain loops.
    fn by_hand(
        query: &[f32],
        key: &[f32],
        value: &[f32],
        lengths: &[usize],
        config: &AttentionConfig,
    ) -> Vec<f32> {
        let AttentionConfig { heads, kv_heads, head_dim, .. } = *config;
        let mut attended = Vec::new();
        let mut first = 0;
        for &length in lengths {
            for (row, head) in (0..length).flat_map(|row| (0..heads).map(move |head| (row, head))) {
                let at = |row, head, heads| ((first + row) * heads + head) * head_dim;
                let of_head = |all: &[f32], row| {
                    let from = at(row, head * kv_heads / heads, kv_heads);
                    all[from..from + head_dim].to_vec()
                };
                let query = &query[at(row, head, heads)..][..head_dim];
                let seen = (0..length)
                    .filter(|other| config.window.is_none_or(|window| row.abs_diff(*other) < window));
                let weights: Vec<(usize, f32)> = seen
                    .map(|row| {
                        let product: f32 = query.iter().zip(of_head(key, row)).map(|(a, b)| a * b).sum();
                        (row, (product * config.scale).exp())
                    })
                    .collect();
                let sum: f32 = weights.iter().map(|(_, weight)| weight).sum();
                attended.extend((0..head_dim).map(|at| {
                    weights.iter().map(|(row, weight)| weight / sum * of_head(value, *row)[at]).sum::<f32>()
                }));
            }
            first += length;
        }
        attended
    }

    #[test]
    fn long_texts_attend_in_pieces_as_in_one() {
        let device = Device::flex();
        let lengths = [3, 2 * QUERIES_AT_ONCE + 7, 1, 90];
        let rows: usize = lengths.iter().sum();
        for (kv_heads, window) in [(2, None), (1, Some(1)), (2, Some(40)), (1, Some(700))] {
            let config = AttentionConfig {
                hidden_size: 8,
                heads: 2,
                kv_heads,
                head_dim: 4,
                scale: 0.5,
                window,
                softcap: None,
                rope: None,
                head_norm: None,
                head_norm_place: HeadNormPlace::Heads,
                query_growth: None,
                gated: false,
                projections: AttentionProjections::Separate,
                input_bias: false,
                output_bias: false,
                sinks: false,
                keys_as_values: false,
                value_norm: None,
                kv_layer: None,
            };
            let numbers = |seed: usize, heads: usize| -> Vec<f32> {
                (0..rows * heads * 4).map(|at| ((at * 37 + seed * 11) % 101) as f32 / 50.0 - 1.0).collect()
            };
            let parts = [numbers(1, 2), numbers(2, kv_heads), numbers(3, kv_heads)];
            let tensors = [0, 1, 2].map(|part| {
                let heads = if part == 0 { 2 } else { kv_heads };
                Tensor::from_data(TensorData::new(parts[part].clone(), [rows, heads, 4]), &device)
            });
            let spans = lengths.iter().map(|&length| Span { rows: length, position: 0, length });
            let found = attend(tensors, &Rows::new(&[], spans, &device), &config);
            assert_eq!(found.dims(), [rows, 8]);
            let found = found.into_data().try_to_vec::<f32>().unwrap();
            let expected = by_hand(&parts[0], &parts[1], &parts[2], &lengths, &config);
            for (at, (found, expected)) in found.iter().zip(&expected).enumerate() {
                assert!(
                    (found - expected).abs() < 1e-5,
                    "{window:?}, row {}: {found}, not {expected}",
                    at / 8
                );
            }
        }
    }
}
