//! Attention and rotary positions of the replay.

use super::Met;
use super::arithmetic::{Matrix, Norm, dot, sigmoid};

/// Rotary positions: pairs of a head's elements are rotated by an angle that grows with the position.
#[derive(Debug)]
pub struct Rope {
    /// Radians per position of each pair; element `i` pairs with element `i + frequencies.len()`.
    pub frequencies: Vec<f32>,
}

/// Cosine and sine of each pair's angle at one position.
#[derive(Debug)]
pub struct Turn(Vec<(f64, f64)>);

impl Rope {
    /// Returns a key as a query meets it, from the key before its rotation.
    pub fn seen(&self, met: &Met, stored: Stored) -> Seen {
        let &Met { step, position, ref before } = met;
        let turns = if stored != Stored::Exact {
            let way = before.iter().chain([&position]);
            let first = self.turn(*before.first().unwrap_or(&position));
            let moves = before.iter().zip(way.skip(1)).map(|(&from, &to)| self.turn(from - to).back());
            std::iter::once(first).chain(moves).collect()
        } else {
            vec![self.turn(position)]
        };
        Seen { step, position, turns, stored }
    }

    fn turn(&self, position: usize) -> Turn {
        // Products are in f32, as in the implementation that models are trained with: at large positions their rounding
        // changes the angle by more than any tolerance.
        let angles = self.frequencies.iter().map(|frequency| f64::from(position as f32 * frequency));
        Turn(angles.map(|angle| (angle.cos(), angle.sin())).collect())
    }
}

impl Turn {
    /// Returns the inverse rotation.
    fn back(self) -> Self {
        Self(self.0.into_iter().map(|(cos, sin)| (cos, -sin)).collect())
    }

    /// Rotates a head; elements beyond the pairs stay.
    fn of(&self, head: &[f64]) -> Vec<f64> {
        let mut turned = head.to_vec();
        let half = self.0.len();
        for (pair, (cos, sin)) in self.0.iter().enumerate() {
            let (a, b) = (head[pair], head[pair + half]);
            turned[pair] = a * cos - b * sin;
            turned[pair + half] = b * cos + a * sin;
        }
        turned
    }
}

/// Grouped-query attention.
#[derive(Debug)]
pub struct Attention {
    pub query: Matrix,
    pub key: Matrix,
    pub value: Matrix,
    pub output: Matrix,
    pub query_norm: Option<Norm>,
    pub key_norm: Option<Norm>,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    /// The number of positions that a query sees, including its own.
    pub window: Option<usize>,
    /// Whether every head's query comes with a gate for its output.
    pub gated: bool,
}

/// Key and value of one step, for all heads, with the key before its rotation.
#[derive(Debug, Clone)]
pub struct Kept {
    key: Vec<f64>,
    value: Vec<f64>,
}

/// A step as a query meets it.
#[derive(Debug)]
pub struct Seen {
    pub step: usize,
    pub position: usize,
    /// The rotations by which its key came to its position.
    turns: Vec<Turn>,
    /// How the key was rounded after each rotation.
    stored: Stored,
}

impl Seen {
    fn key(&self, unturned: &[f64]) -> Vec<f64> {
        self.turns.iter().fold(unturned.to_vec(), |key, turn| self.stored.round(turn.of(&key)))
    }
}

impl Attention {
    pub fn keep(&self, x: &[f64], stored: Stored) -> Kept {
        let key = self.key.times(x);
        let key = match &self.key_norm {
            Some(norm) => norm.of_heads(&key),
            None => key,
        };
        Kept { key, value: stored.round(self.value.times(x)) }
    }

    /// Returns the attention output of the query of the last of `seen`.
    pub fn read(&self, x: &[f64], kept: &[Kept], seen: &[Seen]) -> Vec<f64> {
        let own = seen.last().expect("a query sees at least itself");
        let within_window =
            |seen: &&Seen| self.window.is_none_or(|window| seen.position + window > own.position);
        let seen: Vec<&Seen> = seen.iter().filter(within_window).collect();
        let (queries, gates) = self.queries(x);
        let mut gathered = Vec::new();
        for kv_head in 0..self.kv_heads {
            let of_head = kv_head * self.head_dim..(kv_head + 1) * self.head_dim;
            let key = |seen: &&Seen| seen.key(&kept[seen.step].key[of_head.clone()]);
            let keys: Vec<Vec<f64>> = seen.iter().map(key).collect();
            let sharing = self.heads / self.kv_heads;
            for query in &queries[kv_head * sharing..(kv_head + 1) * sharing] {
                // The first rotation alone: nothing has moved the query yet.
                let query = own.turns[0].of(query);
                let scale = 1.0 / (self.head_dim as f64).sqrt();
                let scores: Vec<f64> = keys.iter().map(|key| dot(&query, key) * scale).collect();
                let weights = softmax(&scores);
                let mut sum = vec![0.0; self.head_dim];
                for (weight, seen) in weights.iter().zip(&seen) {
                    for (sum, value) in sum.iter_mut().zip(&kept[seen.step].value[of_head.clone()]) {
                        *sum += weight * value;
                    }
                }
                gathered.extend(sum);
            }
        }
        for (gathered, gate) in gathered.iter_mut().zip(gates) {
            *gathered *= sigmoid(gate);
        }
        self.output.times(&gathered)
    }

    /// Returns the queries of all heads before their rotation, and the gate of the output, which is empty if there is
    /// none.
    fn queries(&self, x: &[f64]) -> (Vec<Vec<f64>>, Vec<f64>) {
        let projected = self.query.times(x);
        let (mut queries, mut gates) = (Vec::new(), Vec::new());
        for head in projected.chunks(projected.len() / self.heads) {
            let query = &head[..self.head_dim];
            queries.push(match &self.query_norm {
                Some(norm) => norm.of(query),
                None => query.to_vec(),
            });
            if self.gated {
                gates.extend_from_slice(&head[self.head_dim..]);
            }
        }
        (queries, gates)
    }
}

/// How keys and values are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stored {
    Exact,
    /// As the nearest half-precision numbers.
    Half,
    /// The same, but numbers so close to the middle of two half-precision numbers that f32 cannot tell which is nearer
    /// become the farther one.
    HalfOtherWay,
}

impl Stored {
    /// The distance from the middle of two half-precision numbers, as a fraction of theirs, that the error of an f32 sum
    /// can be as large as: eight times the precision of f32, which is 2^-13 of that of half precision.
    const UNCERTAIN: f64 = 1.0 / 1024.0;

    fn round(self, numbers: Vec<f64>) -> Vec<f64> {
        match self {
            Self::Exact => numbers,
            Self::Half => numbers.into_iter().map(|number| Self::to_half(number, false)).collect(),
            Self::HalfOtherWay => numbers.into_iter().map(|number| Self::to_half(number, true)).collect(),
        }
    }

    fn to_half(number: f64, other_way: bool) -> f64 {
        let last = number.abs().log2().floor().max(-14.0) - 10.0;
        let step = last.exp2();
        let steps = number / step;
        let nearest = steps.round_ties_even();
        let from_middle = 0.5 - (steps - nearest).abs();
        if other_way && from_middle < Self::UNCERTAIN {
            return (steps.floor() + steps.ceil() - nearest) * step;
        }
        nearest * step
    }
}

fn softmax(scores: &[f64]) -> Vec<f64> {
    let highest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let powers: Vec<f64> = scores.iter().map(|score| (score - highest).exp()).collect();
    let sum: f64 = powers.iter().sum();
    powers.iter().map(|power| power / sum).collect()
}
