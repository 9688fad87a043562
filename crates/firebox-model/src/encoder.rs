//! Sentence encoders and classifiers.

use std::cell::RefCell;

use burn::module::{Module, Param};
use burn::tensor::{Device, Int, Tensor, TensorData};
use firebox_store::Checkpoint;

use crate::ModelError;
use crate::block::Block;
use crate::config::{Activation, NormConfig};
use crate::encoder_config::{ClassifierConfig, EncoderConfig};
use crate::families::Architecture;
use crate::linear::Linear;
use crate::matrix::Matrix;
use crate::norm::Norm;
use crate::pooling::Pooling;
use crate::rows::{Rows, Span};
use crate::weights::{Weights, param};

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
    positions: Option<Param<Tensor<2>>>,
    token_types: Option<Param<Tensor<2>>>,
    norm: Option<Norm>,
    blocks: Vec<Block>,
    final_norm: Option<Norm>,
    classifier: Option<Classifier>,
    #[module(skip)]
    config: EncoderConfig,
    #[module(skip)]
    device: Device,
}

/// Classifies a text or a pair.
#[derive(Module, Debug)]
struct Classifier {
    dense: Linear,
    norm: Option<Norm>,
    scores: Linear,
    #[module(skip)]
    activation: Activation,
    #[module(skip)]
    pooling: Pooling,
    #[module(skip)]
    labels: usize,
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
        let EncoderConfig { vocab_size, hidden_size, .. } = config;
        let names = &config.names;
        let word_table = format!("{}.weight", names.embedding);
        // Checkpoints with a task's head have the encoder under a prefix.
        let prefix = [names.prefix.as_str(), "bert."]
            .into_iter()
            .find(|prefix| root.has(&format!("{prefix}{word_table}")))
            .unwrap_or_default();
        let weights = root.within(prefix);
        let norm =
            |norm: &Option<NormConfig>| norm.as_ref().map(|norm| Norm::load(norm, &weights)).transpose();
        let table = |name: &str, rows| {
            let name = format!("embeddings.{name}_embeddings.weight");
            Ok::<_, ModelError>(param(weights.plain(&name, [rows, hidden_size])?))
        };
        let positions = config.first_position.map(|first| table("position", first + config.max_positions));
        let token_types = (config.token_types > 0).then(|| table("token_type", config.token_types));
        let block = |(index, block)| {
            let weights = weights.within(&format!("{}.{index}.", names.layers));
            Block::load(block, &weights.laid_out(names.renamed, names.transposed), None)
        };
        let classifier = config.classifier.as_ref();
        let classifier = classifier
            .filter(|classifier| root.has(&format!("{}.weight", classifier.scores)))
            .map(|classifier| Classifier::load(classifier, hidden_size, &root, &weights))
            .transpose()?;
        let encoder = Self {
            words: weights.matrix(&word_table, vocab_size, hidden_size)?,
            positions: positions.transpose()?,
            token_types: token_types.transpose()?,
            norm: norm(&config.embedding_norm)?,
            blocks: config.blocks.iter().enumerate().map(block).collect::<Result<_, _>>()?,
            final_norm: norm(&config.final_norm)?,
            classifier,
            device: device.clone(),
            config: config.clone(),
        };
        // Poolers, other task heads, layers behind the pooling, and buffers of older libraries.
        let foreign = |name: &str| {
            let name = name.strip_prefix(prefix).unwrap_or(name);
            let heads =
                ["pooler.", "cls.", "classifier.", "lm_head.", "head.", "decoder.", "dense_2.", "dense_3."];
            heads.iter().any(|head| name.starts_with(head))
                || name == "embeddings.position_ids"
                || name.ends_with(".rotary_emb.inv_freq")
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
        let first_position = self.config.first_position.unwrap_or(0);
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
                positions.push((first_position + position) as i32);
                types.push(i32::from(position >= *second && token_types > 1));
            }
        }
        if inputs.is_empty() {
            return Err(ModelError::NoTokens);
        }
        let count = words.len();
        let indices = |of| Tensor::<1, Int>::from_data(TensorData::new(of, [count]), &self.device);
        let mut hidden = self.words.gather(indices(words));
        if let Some(scale) = self.config.embedding_scale {
            hidden = hidden.mul_scalar(scale);
        }
        for (table, rows) in [(&self.positions, positions), (&self.token_types, types)] {
            if let Some(table) = table {
                hidden = hidden.add(table.val().select(0, indices(rows)));
            }
        }
        if let Some(norm) = &self.norm {
            hidden = norm.forward(hidden);
        }
        let span = |input: &EncoderInput<'_>| {
            let length = input.tokens.len();
            Span { rows: length, position: 0, length }
        };
        let rows = Rows::new(&self.config.ropes, inputs.iter().map(span), &self.device);
        for block in &self.blocks {
            hidden = block.forward_both_ways(hidden, &rows)?;
        }
        Ok(match &self.final_norm {
            Some(norm) => norm.forward(hidden),
            None => hidden,
        })
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
        let pooled = inputs.iter().map(|input| {
            let states = hidden.clone().narrow(0, row, input.tokens.len());
            row += input.tokens.len();
            classifier.pooling.pool(states).unsqueeze::<2>()
        });
        Ok(Some(classifier.forward(Tensor::cat(pooled.collect(), 0))))
    }
}

impl Classifier {
    /// Builds the module from tensors of a checkpoint, or those of the encoder within it.
    fn load(
        config: &ClassifierConfig,
        width: usize,
        root: &Weights<'_>,
        encoder: &Weights<'_>,
    ) -> Result<Self, ModelError> {
        let outside = root.has(&format!("{}.weight", config.dense));
        let weights = if outside { root } else { encoder };
        let scores = format!("{}.weight", config.scores);
        let labels = root.rows_of(&scores).unwrap_or_default();
        if labels == 0 {
            return Err(ModelError::Shape { name: scores, expected: vec![1, width], found: vec![0, width] });
        }
        Ok(Self {
            dense: Linear::load(weights, config.dense, width, width, config.bias)?,
            norm: config.norm.as_ref().map(|norm| Norm::load(norm, weights)).transpose()?,
            scores: Linear::load(root, config.scores, width, labels, true)?,
            activation: config.activation,
            pooling: config.pooling,
            labels,
        })
    }

    /// From `[texts, hidden_size]` to `[texts, labels]`.
    fn forward(&self, pooled: Tensor<2>) -> Tensor<2> {
        let x = self.activation.forward(self.dense.forward(pooled));
        self.scores.forward(match &self.norm {
            Some(norm) => norm.forward(x),
            None => x,
        })
    }
}
