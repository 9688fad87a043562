//! Which numbers the loss is computed with.

use burn::Tensor;
use burn::module::{Module, ModuleMapper, Param};
use burn::tensor::{DType, FloatDType};
use serde::{Deserialize, Serialize};

use crate::error::TrainError;

/// Which numbers the loss is computed with. The weights themselves, their gradients and the optimizer's state are f32
/// either way, and so are checkpoints.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Precision {
    /// The weights as they are.
    #[default]
    F32,
    /// Trainable weights rounded to bf16, so that the loss is that of the model which is stored in bf16 afterwards. The
    /// rounded weights are f32 numbers again before anything is multiplied: this costs a copy of the weights per step
    /// and saves neither time nor memory, on the CPU or elsewhere.
    Bf16,
}

impl Precision {
    pub(crate) fn check<M: Module>(self, network: &M) -> Result<(), TrainError> {
        match self {
            Self::Bf16 if network.devices().iter().any(|device| !device.supports_dtype(DType::BF16)) => {
                Err(TrainError::PrecisionUnsupported { precision: "bf16" })
            }
            _ => Ok(()),
        }
    }

    /// The network whose loss is computed. Its parameters have the ids of the network's own, so that its gradients are
    /// theirs.
    pub(crate) fn of<M: Module>(self, network: &M) -> M {
        match self {
            Self::F32 => network.clone(),
            Self::Bf16 => network.clone().map(&mut Rounded),
        }
    }
}

struct Rounded;

impl ModuleMapper for Rounded {
    fn map_float<const D: usize>(&mut self, parameter: Param<Tensor<D>>) -> Param<Tensor<D>> {
        if !parameter.is_require_grad() {
            return parameter;
        }
        let (id, tensor, mapper) = parameter.consume();
        let strategy = tensor.gradient_checkpointing_strategy();
        let rounded = tensor.inner().cast(FloatDType::BF16).cast(FloatDType::F32);
        let mut rounded = Tensor::from_inner(rounded);
        if let Some(strategy) = strategy {
            rounded = rounded.with_gradient_checkpointing_strategy(strategy);
        }
        Param::from_mapped_value(id, rounded.require_grad(), mapper)
    }
}
