//! Sentence encoders and classifiers.

use std::cell::RefCell;

use burn::module::{Module, Param};
use burn::tensor::{Device, Int, Tensor, TensorData, activation};
use firebox_store::Checkpoint;

use crate::ModelError;
use crate::encoder_config::EncoderConfig;
use crate::families::Architecture;
use crate::linear::Linear;
use crate::matrix::Matrix;
use crate::norm::LayerNorm;
use crate::pooling::{Pooling, of_length_one};
use crate::weights::Weights;

/// Input of an encoder: a text, or a pair of texts that are read together.
#[derive(Debug, Clone, Copy)]
pub struct EncoderInput<'a> {
    /// All tokens, including special ones.
    pub tokens: &'a [u32],
    /// Index of the second text's first token.
    pub second: usize,
}

impl<'a> EncoderInput<'a> {
    /// Returns the input of a single text.
    pub fn new(tokens: &'a [u32]) -> Self {
        Self { tokens, second: tokens.len() }
    }
}

/// A bidirectional encoder that turns a text into a vector.
#[derive(Module, Debug)]
pub struct Encoder {
    words: Matrix,
    positions: Param<Tensor<2>>,
    token_types: Param<Tensor<2>>,
    norm: LayerNorm,
    layers: Vec<EncoderLayer>,
    classifier: Option<Classifier>,
    #[module(skip)]
    config: EncoderConfig,
    #[module(skip)]
    device: Device,
}

/// Classifies a text or a pair.
#[derive(Module, Debug)]
struct Classifier {
    pooler: Linear,
    scores: Linear,
    #[module(skip)]
    labels: usize,
}

#[derive(Module, Debug)]
struct EncoderLayer {
    query: Linear,
    key: Linear,
    value: Linear,
    attention_output: Linear,
    attention_norm: LayerNorm,
    inner: Linear,
    outer: Linear,
    output_norm: LayerNorm,
}

impl Encoder {
    /// Loads the encoder from a checkpoint.
    pub fn load(checkpoint: &Checkpoint, device: &Device) -> Result<Self, ModelError> {
        let config = match Architecture::from_json(checkpoint.config())? {
            Architecture::Encoder(config) => config,
            Architecture::Decoder(config) => {
                return Err(ModelError::Kind {
                    model_type: config.family.into(),
                    found: "a decoder",
                    wanted: "an encoder",
                    remedy: "use a sentence encoder such as bert",
                });
            }
        };
        let taken = RefCell::default();
        let root = Weights::new(checkpoint, device, &taken);
        // Checkpoints of larger models have the encoder under a prefix.
        let prefix = if root.has("bert.embeddings.word_embeddings.weight") { "bert." } else { "" };
        let weights = root.within(prefix);
        let width = config.hidden_size;
        let embeddings = weights.within("embeddings.");
        let layers = (0..config.layers)
            .map(|layer| EncoderLayer::load(&config, &weights.within(&format!("encoder.layer.{layer}."))))
            .collect::<Result<_, _>>()?;
        let table =
            |name, rows| Ok::<_, ModelError>(crate::weights::param(embeddings.plain(name, [rows, width])?));
        let classifies = checkpoint.config()["architectures"]
            .as_array()
            .is_some_and(|names| names.iter().any(|name| name == "BertForSequenceClassification"));
        let classifier = match root.rows_of("classifier.weight").filter(|_| classifies) {
            Some(labels) => Some(Classifier {
                pooler: Linear::load(&weights, "pooler.dense", width, width, true)?,
                scores: Linear::load(&root, "classifier", width, labels, true)?,
                labels,
            }),
            None => None,
        };
        let encoder = Self {
            classifier,
            words: embeddings.matrix("word_embeddings.weight", config.vocab_size, width)?,
            positions: table("position_embeddings.weight", config.max_positions)?,
            token_types: table("token_type_embeddings.weight", config.token_types)?,
            norm: LayerNorm::load(&embeddings, "LayerNorm", width, config.epsilon, true)?,
            layers,
            device: device.clone(),
            config,
        };
        // Poolers, other task heads, and an index buffer of older libraries.
        let foreign = |name: &str| {
            let name = name.strip_prefix(prefix).unwrap_or(name);
            ["pooler.", "cls.", "classifier."].iter().any(|head| name.starts_with(head))
                || name == "embeddings.position_ids"
        };
        root.all_taken(foreign)?;
        Ok(encoder)
    }

    /// Returns the configuration.
    pub fn config(&self) -> &EncoderConfig {
        &self.config
    }

    /// Returns the hidden state of every token, `[tokens, hidden_size]`.
    pub fn forward(&self, tokens: &[u32]) -> Result<Tensor<2>, ModelError> {
        self.forward_together(&[EncoderInput::new(tokens)])
    }

    /// [`forward`](Self::forward) for several independent inputs, one after the other.
    pub fn forward_together(&self, inputs: &[EncoderInput<'_>]) -> Result<Tensor<2>, ModelError> {
        let EncoderConfig { vocab_size, max_positions, token_types, .. } = self.config;
        let (mut words, mut positions, mut types) = (Vec::new(), Vec::new(), Vec::new());
        for EncoderInput { tokens, second } in inputs {
            if tokens.is_empty() {
                return Err(ModelError::NoTokens);
            }
            if tokens.len() > max_positions {
                return Err(ModelError::TooLong { tokens: tokens.len(), longest: max_positions });
            }
            for (position, &token) in tokens.iter().enumerate() {
                match i32::try_from(token) {
                    Ok(index) if (token as usize) < vocab_size => words.push(index),
                    _ => return Err(ModelError::Token { token, vocab_size }),
                }
                positions.push(position as i32);
                types.push(i32::from(position >= *second && token_types > 1));
            }
        }
        if inputs.is_empty() {
            return Err(ModelError::NoTokens);
        }
        let count = words.len();
        let indices = |of| Tensor::<1, Int>::from_data(TensorData::new(of, [count]), &self.device);
        let embedded = self
            .words
            .gather(indices(words))
            .add(self.positions.val().select(0, indices(positions)))
            .add(self.token_types.val().select(0, indices(types)));
        let lengths: Vec<usize> = inputs.iter().map(|input| input.tokens.len()).collect();
        let mut hidden = self.norm.forward(embedded);
        for layer in &self.layers {
            hidden = layer.forward(hidden, &lengths, &self.config);
        }
        Ok(hidden)
    }

    /// Returns the mean of the hidden states, normalised to length one: `[hidden_size]`.
    pub fn embed(&self, tokens: &[u32]) -> Result<Tensor<1>, ModelError> {
        Ok(of_length_one(Pooling::Mean.pool(self.forward(tokens)?)))
    }

    /// Returns the number of labels, or `None` without a classifier.
    pub fn labels(&self) -> Option<usize> {
        self.classifier.as_ref().map(|classifier| classifier.labels)
    }

    /// Returns the label scores of each input, `[inputs, labels]`, or `None` without a classifier.
    pub fn classify(&self, inputs: &[EncoderInput<'_>]) -> Result<Option<Tensor<2>>, ModelError> {
        let Some(classifier) = &self.classifier else { return Ok(None) };
        let hidden = self.forward_together(inputs)?;
        let mut row = 0;
        let firsts: Vec<i32> = inputs
            .iter()
            .map(|input| {
                row += input.tokens.len() as i32;
                row - input.tokens.len() as i32
            })
            .collect();
        let firsts = Tensor::<1, Int>::from_data(TensorData::new(firsts, [inputs.len()]), &self.device);
        let pooled = classifier.pooler.forward(hidden.select(0, firsts)).tanh();
        Ok(Some(classifier.scores.forward(pooled)))
    }
}

impl EncoderLayer {
    fn load(config: &EncoderConfig, weights: &Weights<'_>) -> Result<Self, ModelError> {
        let EncoderConfig { hidden_size, inner_size, .. } = *config;
        let norm = |name| LayerNorm::load(weights, name, hidden_size, config.epsilon, true);
        let square = |name| Linear::load(weights, name, hidden_size, hidden_size, true);
        Ok(Self {
            query: square("attention.self.query")?,
            key: square("attention.self.key")?,
            value: square("attention.self.value")?,
            attention_output: square("attention.output.dense")?,
            attention_norm: norm("attention.output.LayerNorm")?,
            inner: Linear::load(weights, "intermediate.dense", hidden_size, inner_size, true)?,
            outer: Linear::load(weights, "output.dense", inner_size, hidden_size, true)?,
            output_norm: norm("output.LayerNorm")?,
        })
    }

    fn forward(&self, hidden: Tensor<2>, lengths: &[usize], config: &EncoderConfig) -> Tensor<2> {
        let [count, width] = hidden.dims();
        let head_dim = width / config.heads;
        let heads = |linear: &Linear| {
            linear.forward(hidden.clone()).reshape([count, config.heads, head_dim]).swap_dims(0, 1)
        };
        let (query, key, value) = (heads(&self.query), heads(&self.key), heads(&self.value));
        let mut row = 0;
        let attended = lengths.iter().map(|&length| {
            let [query, key, value] =
                [&query, &key, &value].map(|all: &Tensor<3>| all.clone().narrow(1, row, length));
            row += length;
            let scores = query.matmul(key.transpose()).mul_scalar((head_dim as f32).powf(-0.5));
            activation::softmax(scores, 2).matmul(value).swap_dims(0, 1).reshape([length, width])
        });
        let attended = Tensor::cat(attended.collect(), 0);
        let hidden = self.attention_norm.forward(self.attention_output.forward(attended).add(hidden));
        let inner = config.activation.forward(self.inner.forward(hidden.clone()));
        self.output_norm.forward(self.outer.forward(inner).add(hidden))
    }
}
