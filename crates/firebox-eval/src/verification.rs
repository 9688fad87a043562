//! Compares what a model computes with expected numbers.

use std::path::{Path, PathBuf};

use firebox_cache::KvType;
use firebox_model::Network;
use firebox_runtime::{Model, RuntimeError, likeliest, read_floats};
use safetensors::{Dtype, SafeTensors};
use serde::Serialize;

use crate::error::EvalError;

/// How a prompt is fed while it is checked.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Prefill {
    /// All at once.
    Whole,
    /// In chunks of seven tokens.
    Chunked,
    /// Token by token.
    Stepwise,
}

impl Prefill {
    /// Returns the chunk size.
    pub fn chunk(self) -> usize {
        match self {
            Self::Whole => usize::MAX,
            Self::Chunked => 7,
            Self::Stepwise => 1,
        }
    }
}

/// The differences between computed and expected numbers.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Verification {
    /// For a decoder: its logits.
    Logits(LogitVerification),
    /// For an encoder, or a decoder that embeds texts: its vectors.
    Embedding(EmbeddingVerification),
}

/// The differences of a decoder's logits from the expected ones.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct LogitVerification {
    /// The largest difference.
    pub max_difference: f64,
    /// The range of the expected logits.
    pub logit_range: f64,
    /// The largest difference as a fraction of the range.
    pub max_fraction: f64,
    /// The position of the largest difference. Positions after the prompt are those of the continuation.
    pub worst_position: usize,
    /// Whether every greedy token is the expected one; `None` if none are expected.
    pub greedy_equal: Option<bool>,
    /// The greedy tokens.
    pub greedy_ids: Vec<u32>,
    /// The expected greedy tokens.
    pub expected_greedy_ids: Vec<u32>,
}

/// The differences of an encoder's vectors from the expected ones.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct EmbeddingVerification {
    /// The largest difference of the text's vector.
    pub max_difference: f64,
    /// The largest difference of the tokens' hidden states.
    pub max_hidden_difference: f64,
}

impl Verification {
    /// Returns the number that is compared with the tolerance: the difference as a fraction of the logit range, or
    /// the difference of the text's vector.
    pub fn deviation(&self) -> f64 {
        match self {
            Self::Logits(logits) => logits.max_fraction,
            Self::Embedding(embedding) => embedding.max_difference,
        }
    }

    /// Returns whether the deviation is within `tolerance` and the greedy tokens are right.
    pub fn passes(&self, tolerance: f64) -> bool {
        let greedy = match self {
            Self::Logits(logits) => logits.greedy_equal != Some(false),
            Self::Embedding(_) => true,
        };
        greedy && self.deviation() <= tolerance
    }
}

/// Runs the prompt of a file of expected numbers through a model, and compares.
///
/// The file is a safetensors file with `input_ids [n]`, and for a decoder `logits [n, vocab]` and, if the
/// continuation is to be checked too, `greedy_ids [m]` and `greedy_logits [m, vocab]`, for an encoder or a decoder that embeds
/// texts `last_hidden_state [n, hidden]` and `embedding [width]`.
pub fn verify_against(model: &Model, expected: &Path, prefill: Prefill) -> Result<Verification, EvalError> {
    let bytes = read(expected)?;
    let tensors = SafeTensors::deserialize(&bytes).map_err(|error| fault(expected, "header", error))?;
    let file = ExpectedFile { path: expected, tensors };
    let ids = file.ids("input_ids")?;
    match model.decoder() {
        Ok(_) if !file.has("embedding") => {
            verify_logits(model, &file, &ids, prefill).map(Verification::Logits)
        }
        _ => verify_embedding(model, &file, &ids).map(Verification::Embedding),
    }
}

/// Reads the `input_ids` of a file of expected numbers.
pub fn expected_input_ids(path: &Path) -> Result<Vec<u32>, EvalError> {
    let bytes = read(path)?;
    let tensors = SafeTensors::deserialize(&bytes).map_err(|error| fault(path, "header", error))?;
    ExpectedFile { path, tensors }.ids("input_ids")
}

/// Reads a regular file. Reading a pipe or a device such as `/dev/zero` might never end.
fn read(path: &Path) -> Result<Vec<u8>, EvalError> {
    let metadata = std::fs::metadata(path).map_err(|error| fault(path, "file", error))?;
    if !metadata.is_file() {
        return Err(fault(path, "file", "is not an ordinary file"));
    }
    std::fs::read(path).map_err(|error| fault(path, "file", error))
}

fn verify_logits(
    model: &Model,
    file: &ExpectedFile<'_>,
    ids: &[u32],
    prefill: Prefill,
) -> Result<LogitVerification, EvalError> {
    let decoder = model.decoder()?;
    let vocab = decoder.config().vocab_size;
    let expected = file.matrix("logits", ids.len(), vocab)?;
    let (expected_greedy_ids, expected_greedy) = if file.has("greedy_ids") {
        let ids = file.ids("greedy_ids")?;
        let logits = file.matrix("greedy_logits", ids.len(), vocab)?;
        (ids, logits)
    } else {
        (Vec::new(), Vec::new())
    };
    let (lowest, highest) = expected
        .iter()
        .chain(&expected_greedy)
        .fold((f32::INFINITY, f32::NEG_INFINITY), |(low, high), &logit| (low.min(logit), high.max(logit)));
    let logit_range = f64::from(highest) - f64::from(lowest);

    let mut session = model.session()?.with_kv_type(KvType::F32).with_chunk(prefill.chunk());
    let mut worst = Worst::default();
    let mut last = Vec::new();
    let mut positions = expected.chunks(vocab).enumerate();
    session.feed_each_row(ids, |logits| {
        for (found, (position, expected)) in logits.chunks(vocab).zip(&mut positions) {
            worst.look(position, found, expected);
            last = found.to_vec();
        }
    })?;
    let mut greedy_ids = Vec::new();
    for (step, (&expected_id, expected)) in
        expected_greedy_ids.iter().zip(expected_greedy.chunks(vocab)).enumerate()
    {
        worst.look(ids.len() + step, &last, expected);
        let id = likeliest(&last);
        greedy_ids.push(id);
        if id != expected_id {
            // From here on the two texts differ.
            break;
        }
        if step + 1 < expected_greedy_ids.len() {
            last = session.feed(&[id])?;
        }
    }
    Ok(LogitVerification {
        max_difference: worst.difference,
        logit_range,
        max_fraction: if worst.difference == 0.0 { 0.0 } else { worst.difference / logit_range },
        worst_position: worst.position,
        greedy_equal: (!expected_greedy_ids.is_empty()).then(|| greedy_ids == expected_greedy_ids),
        greedy_ids,
        expected_greedy_ids,
    })
}

fn verify_embedding(
    model: &Model,
    file: &ExpectedFile<'_>,
    ids: &[u32],
) -> Result<EmbeddingVerification, EvalError> {
    let (states, width) = match model.network() {
        Network::Encoder(encoder) => (encoder.forward(ids), encoder.config().hidden_size),
        Network::Decoder(decoder) => {
            (decoder.states(&[ids]).map(|mut states| states.remove(0)), decoder.config().hidden_size)
        }
    };
    let mut hidden = Worst::default();
    let found = read_floats(states.map_err(RuntimeError::from)?)?;
    hidden.look(0, &found, &file.matrix("last_hidden_state", ids.len(), width)?);
    let mut embedding = Worst::default();
    let found = model.embed_tokens(ids)?;
    embedding.look(0, &found, &file.matrix("embedding", 1, found.len())?);
    Ok(EmbeddingVerification {
        max_difference: embedding.difference,
        max_hidden_difference: hidden.difference,
    })
}

#[derive(Debug, Default)]
struct Worst {
    difference: f64,
    position: usize,
}

impl Worst {
    fn look(&mut self, position: usize, found: &[f32], expected: &[f32]) {
        for (found, expected) in found.iter().zip(expected) {
            let difference = (f64::from(*found) - f64::from(*expected)).abs();
            // Comparisons do not find NaN, so it counts as an infinite difference.
            let difference = if difference.is_nan() { f64::INFINITY } else { difference };
            if difference > self.difference {
                (self.difference, self.position) = (difference, position);
            }
        }
    }
}

struct ExpectedFile<'a> {
    path: &'a Path,
    tensors: SafeTensors<'a>,
}

impl ExpectedFile<'_> {
    fn has(&self, name: &str) -> bool {
        self.tensors.names().contains(&name)
    }

    fn ids(&self, name: &str) -> Result<Vec<u32>, EvalError> {
        let tensor = self.tensors.tensor(name).map_err(|error| fault(self.path, name, error))?;
        let wide: Vec<i64> = match tensor.dtype() {
            Dtype::I64 => {
                tensor.data().as_chunks().0.iter().map(|bytes| i64::from_le_bytes(*bytes)).collect()
            }
            Dtype::I32 => {
                tensor.data().as_chunks().0.iter().map(|bytes| i32::from_le_bytes(*bytes).into()).collect()
            }
            other => return Err(fault(self.path, name, format!("should be I64 or I32, is {other:?}"))),
        };
        let ids: Option<Vec<u32>> = wide.into_iter().map(|id| u32::try_from(id).ok()).collect();
        match ids {
            Some(ids) if !ids.is_empty() => Ok(ids),
            _ => Err(fault(self.path, name, "should hold at least one token, and none below zero")),
        }
    }

    fn matrix(&self, name: &str, rows: usize, columns: usize) -> Result<Vec<f32>, EvalError> {
        let tensor = self.tensors.tensor(name).map_err(|error| fault(self.path, name, error))?;
        if tensor.dtype() != Dtype::F32 {
            return Err(fault(self.path, name, format!("should be F32, is {:?}", tensor.dtype())));
        }
        let elements: usize = tensor.shape().iter().product();
        if tensor.shape().last() != Some(&columns) || elements != rows * columns {
            return Err(fault(
                self.path,
                name,
                format!("should be {rows} × {columns}, is {:?}", tensor.shape()),
            ));
        }
        Ok(tensor.data().as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect())
    }
}

fn fault(path: &Path, field: &str, reason: impl ToString) -> EvalError {
    EvalError::Expected { path: PathBuf::from(path), field: field.into(), reason: reason.to_string() }
}
