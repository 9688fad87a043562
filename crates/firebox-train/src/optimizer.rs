//! AdamW over the trainable parameters, their gradients clipped together.

use burn::Tensor;
use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
use burn::optim::Optimizer as _;
use burn::optim::{AdamW, AdamWConfig, AdamWState, AdaptiveMomentumState, GradientsParams};
use burn::tensor::container::TensorContainer;
use burn::tensor::{DType, TensorData};
use firebox_store::{Dtype, NewTensor, NewTensorFile, TensorFile};

use crate::error::TrainError;
use crate::parameters::{Parameter, Path, bytes, stored};
use crate::settings::AdamSettings;

/// The number that is added to the norm before dividing by it, as in PyTorch.
const NORM_EPSILON: f64 = 1e-6;

/// Names of what a checkpoint has beside each parameter.
const MOMENTS: [&str; 2] = ["moment_1", "moment_2"];
const TIME: &str = "time";

/// AdamW, as Burn computes it, with three differences from Burn's optimizer of modules. Gradients are clipped by the norm
/// of all of them together, where Burn clips every tensor by its own. Vectors do not decay. And the state is known by the
/// parameters' paths, not by their ids, which are others in every process.
pub struct Optimizer {
    matrices: AdamW,
    vectors: AdamW,
    states: TensorContainer<String>,
}

impl Optimizer {
    /// One that has not taken a step.
    pub fn new(settings: &AdamSettings) -> Self {
        let config = AdamWConfig::new()
            .with_beta_1(settings.beta_1)
            .with_beta_2(settings.beta_2)
            .with_epsilon(settings.epsilon);
        Self {
            matrices: config.clone().with_weight_decay(settings.weight_decay).build(),
            vectors: config.with_weight_decay(0.0).build(),
            states: TensorContainer::new(),
        }
    }

    /// Moves the network against its gradients, each multiplied by `factor` first.
    pub fn step<M: Module>(&mut self, network: M, gradients: GradientsParams, rate: f64, factor: f64) -> M {
        network.map(&mut Stepper { at: Path::default(), optimizer: self, gradients, rate, factor })
    }

    pub(crate) fn plan(parameters: &[Parameter]) -> Vec<NewTensor> {
        let tensors = parameters.iter().flat_map(|parameter| {
            let moments = MOMENTS.map(|name| NewTensor {
                name: beside(&parameter.path, name),
                dtype: Dtype::F32,
                shape: parameter.shape.clone(),
            });
            let time = NewTensor { name: beside(&parameter.path, TIME), dtype: Dtype::U64, shape: vec![1] };
            moments.into_iter().chain([time])
        });
        tensors.collect()
    }

    /// Writes the state, as planned. A parameter that never had a gradient has zeros.
    pub(crate) fn write<M: Module>(&self, network: &M, file: &mut NewTensorFile) -> Result<(), TrainError> {
        let mut writer = Writer { at: Path::default(), states: &self.states, file, done: Ok(()) };
        network.visit(&mut writer);
        writer.done
    }

    /// Takes up the state of a file.
    pub(crate) fn read<M: Module>(&mut self, network: &M, file: &TensorFile) -> Result<(), TrainError> {
        let mut reader = Reader { at: Path::default(), states: TensorContainer::new(), file, done: Ok(()) };
        network.visit(&mut reader);
        reader.done?;
        self.states = reader.states;
        Ok(())
    }
}

fn beside(path: &str, name: &str) -> String {
    format!("{path}.{name}")
}

/// The norm of all gradients together.
pub(crate) fn global_norm<M: Module>(network: &M, gradients: &GradientsParams) -> Result<f64, TrainError> {
    struct Squares<'a> {
        gradients: &'a GradientsParams,
        sums: Vec<Tensor<1>>,
    }

    impl ModuleVisitor for Squares<'_> {
        fn visit_float<const D: usize>(&mut self, parameter: &Param<Tensor<D>>) {
            if let Some(gradient) = self.gradients.get::<D>(parameter.id) {
                self.sums.push(gradient.square().sum());
            }
        }
    }

    let mut squares = Squares { gradients, sums: Vec::new() };
    network.visit(&mut squares);
    if squares.sums.is_empty() {
        return Ok(0.0);
    }
    // One read for all of them: on an accelerator every read waits for the device.
    let sums = bytes(Tensor::cat(squares.sums, 0))?;
    Ok(sums.iter::<f64>().sum::<f64>().sqrt())
}

/// Returns the factor that scales gradients of this norm down to at most `most`.
pub(crate) fn clipping(norm: f64, most: Option<f64>) -> f64 {
    most.map_or(1.0, |most| (most / (norm + NORM_EPSILON)).min(1.0))
}

struct Stepper<'a> {
    at: Path,
    optimizer: &'a mut Optimizer,
    gradients: GradientsParams,
    rate: f64,
    factor: f64,
}

impl ModuleMapper for Stepper<'_> {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.at.enter(name);
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.at.exit();
    }

    fn map_float<const D: usize>(&mut self, parameter: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let Some(mut gradient) = self.gradients.remove::<D>(parameter.id) else { return parameter };
        if self.factor != 1.0 {
            gradient = gradient.mul_scalar(self.factor);
        }
        let (id, tensor, mapper) = parameter.consume();
        let strategy = tensor.gradient_checkpointing_strategy();
        let path = self.at.joined();
        let state = self.optimizer.states.remove::<AdamWState<D>>(&path);
        let adam = if D < 2 { &self.optimizer.vectors } else { &self.optimizer.matrices };
        let (tensor, state) = adam.step(self.rate, tensor.inner(), gradient, state);
        if let Some(state) = state {
            self.optimizer.states.register(path, state);
        }
        let mut tensor = Tensor::from_inner(tensor);
        if let Some(strategy) = strategy {
            tensor = tensor.with_gradient_checkpointing_strategy(strategy);
        }
        Param::from_mapped_value(id, tensor.require_grad(), mapper)
    }
}

struct Writer<'a> {
    at: Path,
    states: &'a TensorContainer<String>,
    file: &'a mut NewTensorFile,
    done: Result<(), TrainError>,
}

impl Writer<'_> {
    fn write<const D: usize>(&mut self, shape: [usize; D]) -> Result<(), TrainError> {
        let Some(state) = self.states.get::<AdamWState<D>>(&self.at.joined()) else {
            let zeros = vec![0; shape.iter().product::<usize>() * Dtype::F32.size()];
            self.file.write(&zeros)?;
            self.file.write(&zeros)?;
            return Ok(self.file.write(&0u64.to_le_bytes())?);
        };
        let AdaptiveMomentumState { time, moment_1, moment_2, .. } = state.momentum;
        self.file.write(bytes(moment_1)?.as_bytes())?;
        self.file.write(bytes(moment_2)?.as_bytes())?;
        Ok(self.file.write(&(time as u64).to_le_bytes())?)
    }
}

impl ModuleVisitor for Writer<'_> {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.at.enter(name);
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.at.exit();
    }

    fn visit_float<const D: usize>(&mut self, parameter: &Param<Tensor<D>>) {
        if self.done.is_ok() && parameter.is_require_grad() {
            self.done = self.write(parameter.dims());
        }
    }
}

struct Reader<'a> {
    at: Path,
    states: TensorContainer<String>,
    file: &'a TensorFile,
    done: Result<(), TrainError>,
}

impl Reader<'_> {
    fn read<const D: usize>(&mut self, parameter: &Param<Tensor<D>>) -> Result<(), TrainError> {
        let path = self.at.joined();
        let time = self.file.shaped(&beside(&path, TIME), Dtype::U64, &[1])?;
        let time = time.first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes));
        if time == 0 {
            return Ok(());
        }
        let device = parameter.val().inner().device();
        let [moment_1, moment_2] = MOMENTS.map(|name| {
            let data: TensorData = stored(self.file, &beside(&path, name), &parameter.dims())?;
            Ok::<_, TrainError>(Tensor::<D>::from_data(data, (&device, DType::F32)))
        });
        let momentum = AdaptiveMomentumState {
            time: time as usize,
            moment_1: moment_1?,
            moment_2: moment_2?,
            max_moment_2: None,
        };
        self.states.register(path, AdamWState::new(momentum));
        Ok(())
    }
}

impl ModuleVisitor for Reader<'_> {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.at.enter(name);
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.at.exit();
    }

    fn visit_float<const D: usize>(&mut self, parameter: &Param<Tensor<D>>) {
        if self.done.is_ok() && parameter.is_require_grad() {
            self.done = self.read(parameter);
        }
    }
}

impl std::fmt::Debug for Optimizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Optimizer").field("states", &self.states.len()).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_norms_above_are_clipped() {
        assert_eq!(clipping(0.5, Some(1.0)), 1.0);
        assert_eq!(clipping(1e9, None), 1.0);
        assert!((clipping(4.0, Some(1.0)) - 0.25).abs() < 1e-6);
    }
}
