//! A linear layer that changes a pooled vector, as sentence-transformers puts it behind the pooling.

use std::cell::RefCell;

use burn::tensor::{Device, Tensor};
use firebox_store::{Checkpoint, TensorInfo};

use crate::ModelError;
use crate::config::Activation;
use crate::fields::Fields;
use crate::linear::Linear;
use crate::weights::Weights;

/// A linear layer with an optional nonlinearity.
#[derive(Debug)]
pub struct DenseLayer {
    linear: Linear,
    activation: Option<Activation>,
    inputs: usize,
    outputs: usize,
}

impl DenseLayer {
    /// Loads the layer from the folder that sentence-transformers wrote for it, opened as a checkpoint.
    pub fn load(folder: &Checkpoint, device: &Device) -> Result<Self, ModelError> {
        let fields = Fields::new(folder.config())?;
        let path = fields.text("activation_function")?.unwrap_or("Tanh");
        let activation = match path.rsplit('.').next() {
            Some("Identity") => None,
            Some("Tanh") => Some(Activation::Tanh),
            Some("ReLU") => Some(Activation::Relu),
            Some("GELU") => Some(Activation::Gelu),
            Some("SiLU") => Some(Activation::Silu),
            _ => {
                let reason = format!("{path:?} is none of Identity, Tanh, ReLU, GELU and SiLU");
                return Err(fields.error("activation_function", reason));
            }
        };
        if fields.flag("use_residual")?.unwrap_or(false) {
            return Err(fields.error("use_residual", "is set; dense layers without it are supported"));
        }
        for name in ["module_input_name", "module_output_name"] {
            if let Some(other) = fields.text(name)?.filter(|name| *name != "sentence_embedding") {
                return Err(
                    fields.error(name, format!("is {other:?}; layers of the pooled vector are supported"))
                );
            }
        }
        let [inputs, outputs] =
            [fields.required_count("in_features")?, fields.required_count("out_features")?];
        let taken = RefCell::default();
        let weights = Weights::new(folder, device, &taken);
        let bias = fields.flag("bias")?.unwrap_or(true);
        let linear = Linear::load(&weights, "linear", inputs, outputs, bias)?;
        weights.all_taken(|_| false)?;
        Ok(Self { linear, activation, inputs, outputs })
    }

    /// Loads the layers that a GGUF file holds beside its encoder.
    pub fn beside_encoder(checkpoint: &Checkpoint, device: &Device) -> Result<Vec<Self>, ModelError> {
        let taken = RefCell::default();
        let weights = Weights::new(checkpoint, device, &taken);
        let names = ["dense_2", "dense_3"];
        let present =
            names.into_iter().filter_map(|name| Some((name, checkpoint.info(&format!("{name}.weight"))?)));
        let layer = |(name, info): (&str, &TensorInfo)| {
            let [outputs, inputs] = info.shape[..] else {
                let (name, found) = (info.name.clone(), info.shape.clone());
                return Err(ModelError::Shape { name, expected: vec![0, 0], found });
            };
            let linear = Linear::load(&weights, name, inputs, outputs, false)?;
            Ok(Self { linear, activation: None, inputs, outputs })
        };
        present.map(layer).collect()
    }

    /// Returns the number of elements of what it takes.
    pub fn inputs(&self) -> usize {
        self.inputs
    }

    /// Returns the number of elements of its vectors.
    pub fn outputs(&self) -> usize {
        self.outputs
    }

    /// From `[inputs]` to `[outputs]`.
    pub fn forward(&self, vector: Tensor<1>) -> Tensor<1> {
        let product = self.linear.forward(vector.unsqueeze());
        let product = match self.activation {
            Some(activation) => activation.forward(product),
            None => product,
        };
        product.reshape([self.outputs])
    }
}
