//! Compares what a model computes on two devices.

use std::f64::consts::LN_2;

use firebox_cache::KvType;
use firebox_runtime::{Model, RuntimeError, Session};
use serde::Serialize;

use crate::perplexity::{log_softmax, top};

/// Tokens of the prompt that go through the layers together.
const TOGETHER: usize = 64;

/// The difference between the predictions of a model on one device and those on another.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct DeviceComparison {
    /// The number of positions that were compared.
    pub positions: usize,
    /// The mean of KL(other ‖ this) over all positions, in bits.
    pub mean_kl_bits: f64,
    /// The largest divergence of a position, in bits.
    pub max_kl_bits: f64,
    /// The position of the largest divergence.
    pub worst_position: usize,
    /// The number of positions at which both find the same token likeliest.
    pub same_greedy: usize,
}

/// Compares the predictions of a model with those of the same model on another device, over these tokens. The first half goes
/// through the layers in pieces and the second token by token, as prompts and answers do.
pub fn compare_devices(
    model: &Model,
    other: &Model,
    tokens: &[u32],
) -> Result<DeviceComparison, RuntimeError> {
    let vocab = model.decoder()?.config().vocab_size;
    model.session()?.check_tokens(tokens)?;
    let open = |model: &Model| {
        Ok::<_, RuntimeError>(model.session()?.with_kv_type(KvType::F32).with_expected_length(tokens.len()))
    };
    let (mut session, mut reference) = (open(model)?, open(other)?);
    let (prompt, answer) = tokens.split_at(tokens.len() / 2);
    let mut found = DeviceComparison {
        positions: 0,
        mean_kl_bits: 0.0,
        max_kl_bits: 0.0,
        worst_position: 0,
        same_greedy: 0,
    };
    for piece in prompt.chunks(TOGETHER).chain(answer.chunks(1)) {
        let (these, others) = (logits(&mut session, piece)?, logits(&mut reference, piece)?);
        for (these, others) in these.chunks(vocab).zip(others.chunks(vocab)) {
            found.add(&log_softmax(these), &log_softmax(others));
        }
    }
    found.mean_kl_bits /= found.positions.max(1) as f64;
    Ok(found)
}

impl DeviceComparison {
    fn add(&mut self, these: &[f64], others: &[f64]) {
        let kl: f64 = others.iter().zip(these).map(|(other, this)| other.exp() * (other - this)).sum();
        // Comparisons do not find NaN, so it counts as an infinite difference.
        let bits = if kl.is_nan() { f64::INFINITY } else { kl / LN_2 };
        if bits > self.max_kl_bits {
            (self.max_kl_bits, self.worst_position) = (bits, self.positions);
        }
        self.mean_kl_bits += bits;
        self.same_greedy += usize::from(top(these) == top(others));
        self.positions += 1;
    }
}

fn logits(session: &mut Session, tokens: &[u32]) -> Result<Vec<f32>, RuntimeError> {
    let mut all = Vec::new();
    session.feed_each_row(tokens, |rows| all.extend_from_slice(rows))?;
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_model_does_not_differ_from_itself() {
        let fixture = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fixtures/reference/llama");
        let model = Model::open(fixture, &firebox_runtime::device("cpu").unwrap()).unwrap();
        let tokens: Vec<u32> = (3..43).collect();
        let found = compare_devices(&model, &model, &tokens).unwrap();
        assert_eq!((found.positions, found.same_greedy), (40, 40));
        assert_eq!((found.mean_kl_bits, found.max_kl_bits), (0.0, 0.0));
    }
}
