//! What layers get of every token beside the hidden state: rows of a table, and projections of the embeddings.

use std::f64::consts::FRAC_1_SQRT_2;
use std::sync::Arc;

use burn::module::Module;
use burn::tensor::{Device, Tensor};
use firebox_cache::LayerLayout;
use firebox_kernels::gate::gated;
use firebox_store::{Checkpoint, ReadAt};

use crate::ModelError;
use crate::config::{Activation, BlockConfig, DecoderConfig, LayerInputConfig, LayerInputsConfig};
use crate::linear::Linear;
use crate::matrix::Matrix;
use crate::norm::RmsNorm;
use crate::rows::{Rows, indices};
use crate::weights::{Weights, matrix};

/// Name of the table within the model's prefix.
const TABLE: &str = "embed_tokens_per_layer.weight";

/// Computes the inputs of all layers from the rows of the table and the embeddings.
#[derive(Module, Debug)]
pub(crate) struct LayerInputs {
    projection: Matrix,
    norm: RmsNorm,
    width: usize,
    hidden_size: usize,
}

impl LayerInputs {
    /// Builds the module. `weights` are those within the model's prefix.
    pub fn load(
        config: &LayerInputsConfig,
        model: &DecoderConfig,
        weights: &Weights<'_>,
    ) -> Result<Self, ModelError> {
        let all = config.width * model.blocks.len();
        Ok(Self {
            projection: weights.matrix("per_layer_model_projection.weight", all, model.hidden_size)?,
            norm: RmsNorm::load(&config.norm, weights)?,
            width: config.width,
            hidden_size: model.hidden_size,
        })
    }

    /// Width of one layer's input.
    pub fn width(&self) -> usize {
        self.width
    }

    /// Takes the tokens' rows of the table and their embeddings, and returns `[rows, layers * width]`.
    pub fn forward(&self, rows: Tensor<2>, embedded: Tensor<2>) -> Tensor<2> {
        let [count, all] = rows.dims();
        let scale = (self.hidden_size as f64).powf(-0.5);
        let projected = self.projection.multiply(embedded).mul_scalar(scale);
        let projected = self.norm.forward(projected.reshape([count * all / self.width, self.width]));
        let rows = rows.mul_scalar((self.width as f64).sqrt());
        projected.reshape([count, all]).add(rows).mul_scalar(FRAC_1_SQRT_2)
    }
}

impl DecoderConfig {
    /// The name and the shape of the table, if the model has one.
    pub(crate) fn layer_table(&self) -> Option<(String, [usize; 2])> {
        let inputs = self.layer_inputs.as_ref()?;
        let shape = [inputs.vocab_size, inputs.width * self.blocks.len()];
        Some((format!("{}{TABLE}", self.names.prefix), shape))
    }

    /// Whether layers from `first` on read more than the hidden state before them: inputs of their own, or what earlier layers
    /// store.
    pub(crate) fn reads_more_than_states(&self, first: usize) -> bool {
        let before =
            |block: &BlockConfig| matches!(block.layout(), LayerLayout::Shared { layer } if layer < first);
        self.layer_inputs.is_some() || self.blocks.iter().skip(first).any(before)
    }
}

/// Adds a layer's own input to its hidden state: gated, projected and normalised.
#[derive(Module, Debug)]
pub(crate) struct LayerInput {
    gate: Linear,
    projection: Linear,
    norm: RmsNorm,
    #[module(skip)]
    activation: Activation,
    layer: usize,
    width: usize,
}

impl LayerInput {
    pub fn load(config: &LayerInputConfig, weights: &Weights<'_>) -> Result<Self, ModelError> {
        let LayerInputConfig { layer, hidden_size, width, activation, ref norm } = *config;
        Ok(Self {
            gate: Linear::load(weights, "per_layer_input_gate", hidden_size, width, false)?,
            projection: Linear::load(weights, "per_layer_projection", width, hidden_size, false)?,
            norm: RmsNorm::load(norm, weights)?,
            activation,
            layer,
            width,
        })
    }

    pub fn add(&self, hidden: Tensor<2>, rows: &Rows) -> Result<Tensor<2>, ModelError> {
        let Some(inputs) = &rows.layer_inputs else { return Err(no_inputs()) };
        let input = inputs.clone().narrow(1, self.layer * self.width, self.width);
        let gate = self.gate.forward(hidden.clone());
        let added = self.projection.forward(gated(gate, input, self.activation));
        Ok(hidden.add(self.norm.forward(added)))
    }
}

/// The error of layers that run on hidden states alone, but read more of their tokens.
pub(crate) fn no_inputs() -> ModelError {
    ModelError::Config {
        field: "split".into(),
        reason: "layers of this model read more of a token than the hidden state before them, so a head with layers cannot \
                 be trained; train a bridge, a classifier or the whole model"
            .into(),
    }
}

/// Rows of a matrix that are read from disk when they are asked for, so that the matrix is never in memory.
#[derive(Debug, Clone)]
pub(crate) struct DiskRows {
    pub checkpoint: Checkpoint,
    pub name: String,
    /// Should read through the page cache, because the same rows are read again and again.
    pub disk: Arc<dyn ReadAt>,
}

impl DiskRows {
    /// Returns rows of `width` numbers in f32.
    pub fn gather(&self, rows: &[u32], width: usize, device: &Device) -> Result<Tensor<2>, ModelError> {
        let places: Vec<usize> = rows.iter().map(|&row| row as usize).collect();
        let weight = self.checkpoint.gather(&self.name, &places, &*self.disk)?;
        let all: Vec<u32> = (0..rows.len() as u32).collect();
        Ok(matrix(weight, [rows.len(), width], device)?.gather(indices(&all, device)))
    }
}
