//! Predictions of decoding speed.

use serde::Serialize;

use super::pipeline::{PassCosts, pass_time};
use super::{Rates, Shape};
use crate::MemoryError;

/// The predicted decoding speed with some parts resident, and the memory it takes.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Prediction {
    /// Seconds for one token in the steady state.
    pub seconds_per_token: f64,
    /// Tokens per second.
    pub tokens_per_second: f64,
    /// Bytes of weights, buffers and fixed memory; in a [`Plan`](super::Plan) also of keys, values and activations.
    pub peak_bytes: u64,
    /// Seconds for one token in which the computation waits for a read.
    pub waiting: f64,
}

impl Prediction {
    /// Returns whether this is faster by more than `share` of the other's time.
    pub(super) fn is_faster(&self, other: &Self, share: f64) -> bool {
        self.seconds_per_token < other.seconds_per_token * (1.0 - share)
    }
}

/// Predicts how a model decodes with some parts resident and the others streamed through `buffers`. Without buffers a part is
/// read when it is needed, as pages of a mapped file are.
///
/// The prediction simulates some passes, read by read and part by part.
pub fn predict(
    shape: &Shape,
    rates: &Rates,
    kept: &[bool],
    buffers: usize,
) -> Result<Prediction, MemoryError> {
    rates.check(shape)?;
    if kept.len() != shape.parts.len() {
        return Err(MemoryError::Setting {
            setting: "kept",
            value: format!("{} of {} parts", kept.len(), shape.parts.len()),
            reason: "say of every part of the model whether it is kept",
        });
    }
    let parts = shape.parts.iter().zip(kept).zip(&rates.compute);
    let work = PassCosts {
        parts: parts
            .map(|((part, &kept), &compute)| (compute, (!kept).then(|| rates.read_seconds(part.bytes))))
            .collect(),
        overhead: rates.overhead,
        contention: rates.contention,
        hindrance: rates.hindrance,
    };
    let pace = pass_time(&work, buffers);
    let weights: u64 =
        shape.parts.iter().zip(kept).filter(|(_, kept)| **kept).map(|(part, _)| part.kept_bytes).sum();
    Ok(Prediction {
        seconds_per_token: pace.seconds,
        tokens_per_second: 1.0 / pace.seconds,
        peak_bytes: shape.fixed_bytes + weights + shape.ring_bytes(buffers),
        waiting: pace.waiting,
    })
}

#[cfg(test)]
mod tests {
    use super::super::Part;
    use super::*;
    use proptest::prelude::*;

    fn machine() -> impl Strategy<Value = (Shape, Rates, Vec<bool>, usize)> {
        let part = (1u64..1 << 20, 0.0..0.01, any::<bool>(), any::<bool>());
        (prop::collection::vec(part, 1..20), 1e7..1e9, 0.0..0.001, 0usize..5).prop_map(
            |(parts, read_bytes_per_second, read_latency, buffers)| {
                let compute = parts.iter().map(|part| part.1).collect();
                let kept = parts.iter().map(|part| part.2).collect();
                let part = |&(bytes, _, _, is_layer)| Part { bytes, kept_bytes: 2 * bytes, is_layer };
                let shape = Shape {
                    parts: parts.iter().map(part).collect(),
                    kv_bytes_per_token: 0,
                    activation_bytes_per_row: 0,
                    fixed_bytes: 1000,
                };
                let overhead = 0.001;
                let (contention, hindrance) = (1.0, 1.0);
                let rates =
                    Rates { read_bytes_per_second, read_latency, compute, overhead, contention, hindrance };
                (shape, rates, kept, buffers)
            },
        )
    }

    proptest! {
        #[test]
        fn keeping_more_takes_memory_and_saves_time((shape, rates, mut kept, buffers) in machine()) {
            let mut before = predict(&shape, &rates, &kept, buffers).unwrap();
            for part in 0..kept.len() {
                kept[part] = true;
                let after = predict(&shape, &rates, &kept, buffers).unwrap();
                prop_assert!(after.seconds_per_token <= before.seconds_per_token + 1e-9);
                prop_assert!(after.peak_bytes >= before.peak_bytes);
                before = after;
            }
            let computing = rates.overhead + rates.compute.iter().sum::<f64>();
            prop_assert!((before.seconds_per_token - computing).abs() < 1e-9 && before.waiting == 0.0);
        }
    }

    #[test]
    fn rates_of_another_model_are_refused() {
        let part = Part { bytes: 1, kept_bytes: 1, is_layer: true };
        let shape =
            Shape { parts: vec![part], kv_bytes_per_token: 0, activation_bytes_per_row: 0, fixed_bytes: 0 };
        let rates = Rates {
            read_bytes_per_second: 1.0,
            read_latency: 0.0,
            compute: vec![1.0, 1.0],
            overhead: 0.0,
            contention: 1.0,
            hindrance: 1.0,
        };
        let error = predict(&shape, &rates, &[true], 2).unwrap_err().to_string();
        assert!(error.contains("2 times for 1 parts"), "{error}");
        let rates = Rates { compute: vec![1.0], ..rates };
        assert!(predict(&shape, &rates, &[], 2).unwrap_err().to_string().contains("kept"));
    }
}
