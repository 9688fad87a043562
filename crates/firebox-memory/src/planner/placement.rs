//! The choice of the layers that stay resident.

use std::fmt;

use serde::Serialize;

use super::{Prediction, Rates, Shape, predict};
use crate::MemoryError;

/// Speeds that differ by less are equal; the simplest of equal placements is chosen.
const SAME_SPEED: f64 = 0.002;

/// The choice of the resident layers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Placement {
    /// The first ones.
    FirstN,
    /// The last ones.
    LastN,
    /// Spread evenly, so that a resident layer computes while a streamed one is read.
    Interleaved,
    /// The fastest of these by prediction.
    Auto,
    /// These, in this order.
    Exactly(Vec<usize>),
}

impl Placement {
    /// Returns the placements to compare.
    fn candidates(&self) -> Vec<Self> {
        match self {
            Self::Auto => vec![Self::FirstN, Self::LastN, Self::Interleaved],
            chosen => vec![chosen.clone()],
        }
    }

    /// Returns the layers to keep, ordered so that every prefix of the list is a sensible placement, too.
    fn layers(&self, count: usize, total: usize) -> Vec<usize> {
        let count = count.min(total);
        match self {
            // `Auto` was replaced by its candidates before.
            Self::FirstN | Self::Auto => (0..count).collect(),
            Self::LastN => (total - count..total).rev().collect(),
            Self::Interleaved => spread(count).map(|at| (2 * at + 1) * total / (2 * count)).collect(),
            Self::Exactly(layers) => layers.iter().copied().take(count).collect(),
        }
    }

    /// Returns the advantage of the placement.
    fn merit(&self) -> Option<&'static str> {
        match self {
            Self::FirstN => {
                Some("what was read during the layers before them is at hand when the others follow")
            }
            Self::LastN => Some("the first layers of the next token are read while the kept ones compute"),
            Self::Interleaved => Some("a kept layer computes while a streamed one is read"),
            Self::Auto | Self::Exactly(_) => None,
        }
    }
}

impl fmt::Display for Placement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::FirstN => "the first layers",
            Self::LastN => "the last layers",
            Self::Interleaved => "layers spread evenly",
            Self::Auto => "whichever layers are fastest",
            Self::Exactly(_) => "the layers asked for",
        })
    }
}

/// Returns the numbers below `count` in an order in which those of every prefix lie far apart in a circle: halves, then
/// quarters, and so on.
pub fn spread(count: usize) -> impl Iterator<Item = usize> {
    let bits = count.next_power_of_two().trailing_zeros();
    let reversed = move |at: usize| (0..bits).fold(0, |number, bit| number << 1 | (at >> bit & 1));
    let mut seen = vec![false; count];
    (0..count.next_power_of_two())
        .map(move |at| (reversed(at) * count) >> bits)
        .filter(move |&at| seen.get_mut(at).is_some_and(|seen| !std::mem::replace(seen, true)))
}

/// A placement and its predicted speed.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Compared {
    /// The placement.
    pub placement: Placement,
    /// Its predicted speed.
    pub tokens_per_second: f64,
}

/// The resident layers, and the reason for them.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Explanation {
    /// The chosen placement.
    pub placement: Placement,
    /// The layers, in the order in which they are loaded.
    pub layers: Vec<usize>,
    /// The predicted speed.
    pub prediction: Prediction,
    /// All placements that were compared.
    pub compared: Vec<Compared>,
}

impl fmt::Display for Explanation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.placement.fmt(f)?;
        let speed = self.prediction.tokens_per_second;
        let others = || self.compared.iter().filter(|other| other.placement != self.placement);
        let is_slower = |other: &&Compared| other.tokens_per_second < speed * (1.0 - SAME_SPEED);
        let slower: Vec<_> = others().filter(is_slower).collect();
        if slower.is_empty() && others().next().is_some() {
            return f.write_str(": others are no faster");
        }
        if let Some(merit) = self.placement.merit() {
            write!(f, ": {merit}")?;
        }
        if slower.is_empty() {
            return Ok(());
        }
        write!(f, " ({speed:.2} tok/s")?;
        for other in slower {
            write!(f, "; with {} {:.2}", other.placement, other.tokens_per_second)?;
        }
        f.write_str(")")
    }
}

/// Chooses `count` resident layers, with the other parts streamed through `buffers`.
pub fn place(
    placement: &Placement,
    shape: &Shape,
    rates: &Rates,
    count: usize,
    keep_unembedding: bool,
    buffers: usize,
) -> Result<Explanation, MemoryError> {
    let total = shape.layers();
    if let Placement::Exactly(layers) = placement {
        check_layers(layers, total)?;
    }
    let mut compared = Vec::new();
    let mut best: Option<(Placement, Vec<usize>, Prediction)> = None;
    for candidate in placement.candidates() {
        let layers = candidate.layers(count, total);
        let prediction = predict(shape, rates, &shape.kept_parts(&layers, keep_unembedding), buffers)?;
        let tokens_per_second = prediction.tokens_per_second;
        compared.push(Compared { placement: candidate.clone(), tokens_per_second });
        if best.as_ref().is_none_or(|(.., best)| prediction.is_faster(best, SAME_SPEED)) {
            best = Some((candidate, layers, prediction));
        }
    }
    let Some((placement, layers, prediction)) = best else {
        unreachable!("every placement has a candidate, itself if no other")
    };
    Ok(Explanation { placement, layers, prediction, compared })
}

/// Returns the most bytes that `count` layers take, however they are placed.
pub(super) fn most_bytes(shape: &Shape, count: usize) -> u64 {
    let placements = Placement::Auto.candidates().into_iter();
    let bytes = placements.map(|placement| shape.layer_bytes(&placement.layers(count, shape.layers())));
    bytes.max().unwrap_or(0)
}

fn check_layers(layers: &[usize], total: usize) -> Result<(), MemoryError> {
    let repeated = |(at, layer): (usize, &usize)| layers[..at].contains(layer);
    let bad =
        |reason| MemoryError::Setting { setting: "layers to keep", value: format!("{layers:?}"), reason };
    if layers.iter().any(|&layer| layer >= total) {
        return Err(bad("name only layers that the model has, counted from 0"));
    }
    if layers.iter().enumerate().any(repeated) {
        return Err(bad("name every layer once"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::Part;
    use super::*;

    fn machine(read: f64, compute: f64) -> (Shape, Rates) {
        let part = Part { bytes: 1 << 20, kept_bytes: 1 << 20, is_layer: true };
        let shape = Shape {
            parts: vec![part; 16],
            kv_bytes_per_token: 0,
            activation_bytes_per_row: 0,
            fixed_bytes: 0,
        };
        let rates = Rates {
            read_bytes_per_second: f64::from(1 << 20) / read,
            read_latency: 0.0,
            compute: vec![compute; 16],
            overhead: 0.0,
            contention: 1.0,
            hindrance: 1.0,
        };
        (shape, rates)
    }

    #[test]
    fn layers_are_as_many_as_asked_for_and_distinct() {
        for placement in Placement::Auto.candidates() {
            for count in 0..=17 {
                let mut layers = placement.layers(count, 16);
                layers.sort_unstable();
                layers.dedup();
                assert_eq!(layers.len(), count.min(16), "{placement} {count}");
                assert!(layers.iter().all(|&layer| layer < 16));
            }
        }
        assert_eq!(Placement::LastN.layers(3, 16), [15, 14, 13]);
        assert_eq!(Placement::Interleaved.layers(4, 16), [2, 10, 6, 14]);
        assert_eq!(Placement::Exactly(vec![7, 3]).layers(1, 16), [7]);
    }

    #[test]
    fn every_prefix_of_a_spread_is_far_apart() {
        for count in 0..70 {
            let spread: Vec<usize> = spread(count).collect();
            let mut sorted = spread.clone();
            sorted.sort_unstable();
            assert!(sorted.into_iter().eq(0..count), "{spread:?}");
            for few in 2..=count / 2 {
                let mut first = spread[..few].to_vec();
                first.sort_unstable();
                first.push(first[0] + count);
                let nearest = first.windows(2).map(|pair| pair[1] - pair[0]).min().unwrap();
                assert!(nearest >= count / few.next_power_of_two(), "{few} of {count}: {first:?}");
            }
        }
    }

    #[test]
    fn layers_are_spread_where_computing_hides_reading() {
        let (shape, rates) = machine(2.0, 1.0);
        let chosen = place(&Placement::Auto, &shape, &rates, 8, false, 2).unwrap();
        assert_eq!(chosen.placement, Placement::Interleaved);
        assert!((chosen.prediction.seconds_per_token - 16.0).abs() < 1e-9, "{chosen:?}");
        let words = chosen.to_string();
        assert!(words.contains("spread evenly") && words.contains("with the first layers"), "{words}");
    }

    #[test]
    fn the_first_layers_are_kept_where_placement_does_not_matter() {
        let (shape, rates) = machine(2.0, 0.001);
        let chosen = place(&Placement::Auto, &shape, &rates, 8, false, 2).unwrap();
        assert_eq!(chosen.placement, Placement::FirstN);
        assert_eq!(chosen.to_string(), "the first layers: others are no faster");
    }

    #[test]
    fn invalid_layers_are_refused() {
        let (shape, rates) = machine(1.0, 1.0);
        for layers in [vec![16], vec![1, 1]] {
            let placement = Placement::Exactly(layers);
            assert!(place(&placement, &shape, &rates, 2, true, 2).is_err(), "{placement:?}");
        }
        let asked = place(&Placement::Exactly(vec![5, 2]), &shape, &rates, 2, true, 2).unwrap();
        assert_eq!(asked.layers, [5, 2]);
        assert_eq!(asked.to_string(), "the layers asked for");
    }
}
