//! The trainable parameters of a network, by their paths in it.

use std::collections::HashMap;

use burn::Tensor;
use burn::module::{Module, ModuleMapper, ModuleVisitor, Param, ParamId};
use burn::tensor::{DType, TensorData};
use firebox_store::{Dtype, NewTensor, NewTensorFile, TensorFile};

use crate::error::TrainError;

/// Where a traversal is.
#[derive(Debug, Default)]
pub(crate) struct Path(Vec<String>);

impl Path {
    pub(crate) fn enter(&mut self, name: &str) {
        self.0.push(name.to_owned());
    }

    pub(crate) fn exit(&mut self) {
        self.0.pop();
    }

    pub(crate) fn joined(&self) -> String {
        self.0.join(".")
    }
}

/// A trainable parameter.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Parameter {
    pub(crate) path: String,
    pub(crate) id: ParamId,
    pub(crate) shape: Vec<usize>,
}

impl Parameter {
    pub(crate) fn plan(&self) -> NewTensor {
        NewTensor { name: self.path.clone(), dtype: Dtype::F32, shape: self.shape.clone() }
    }
}

/// The trainable parameters, in the order of the network.
pub(crate) fn trainable<M: Module>(network: &M) -> Result<Vec<Parameter>, TrainError> {
    let mut visitor = Lister { at: Path::default(), found: Ok(Vec::new()) };
    network.visit(&mut visitor);
    let found = visitor.found?;
    if found.is_empty() {
        return Err(TrainError::NothingToTrain);
    }
    let mut known = HashMap::new();
    for parameter in &found {
        if let Some(first) = known.insert(parameter.id, parameter.path.clone()) {
            return Err(TrainError::SharedParameter { first, second: parameter.path.clone() });
        }
    }
    Ok(found)
}

struct Lister {
    at: Path,
    found: Result<Vec<Parameter>, TrainError>,
}

impl ModuleVisitor for Lister {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.at.enter(name);
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.at.exit();
    }

    fn visit_float<const D: usize>(&mut self, parameter: &Param<Tensor<D>>) {
        let Ok(found) = &mut self.found else { return };
        if !parameter.is_require_grad() {
            return;
        }
        let (path, dtype) = (self.at.joined(), parameter.dtype());
        if dtype != DType::F32 {
            self.found = Err(TrainError::ParameterType { parameter: path, dtype: format!("{dtype:?}") });
            return;
        }
        found.push(Parameter { path, id: parameter.id, shape: parameter.dims().to_vec() });
    }
}

/// Writes the trainable parameters, which the file has been planned for.
pub(crate) fn write<M: Module>(network: &M, file: &mut NewTensorFile) -> Result<(), TrainError> {
    struct Writer<'a> {
        file: &'a mut NewTensorFile,
        done: Result<(), TrainError>,
    }

    impl ModuleVisitor for Writer<'_> {
        fn visit_float<const D: usize>(&mut self, parameter: &Param<Tensor<D>>) {
            if self.done.is_ok() && parameter.is_require_grad() {
                self.done =
                    bytes(parameter.val().inner()).and_then(|data| Ok(self.file.write(data.as_bytes())?));
            }
        }
    }

    let mut writer = Writer { file, done: Ok(()) };
    network.visit(&mut writer);
    writer.done
}

/// The network with the trainable parameters of a file.
pub(crate) fn read<M: Module>(network: M, file: &TensorFile) -> Result<M, TrainError> {
    struct Reader<'a> {
        at: Path,
        file: &'a TensorFile,
        done: Result<(), TrainError>,
    }

    impl ModuleMapper for Reader<'_> {
        fn enter_module(&mut self, name: &str, _: &str) {
            self.at.enter(name);
        }

        fn exit_module(&mut self, _: &str, _: &str) {
            self.at.exit();
        }

        fn map_float<const D: usize>(&mut self, parameter: Param<Tensor<D>>) -> Param<Tensor<D>> {
            if self.done.is_err() || !parameter.is_require_grad() {
                return parameter;
            }
            let data = match stored(self.file, &self.at.joined(), &parameter.dims()) {
                Ok(data) => data,
                Err(error) => {
                    self.done = Err(error);
                    return parameter;
                }
            };
            let (id, tensor, mapper) = parameter.consume();
            Param::from_mapped_value(id, replaced(&tensor, data), mapper)
        }
    }

    let mut reader = Reader { at: Path::default(), file, done: Ok(()) };
    let network = network.map(&mut reader);
    reader.done.map(|()| network)
}

/// A tensor of the same device and state of autodiff, and other numbers.
fn replaced<const D: usize>(tensor: &Tensor<D>, data: TensorData) -> Tensor<D> {
    let strategy = tensor.gradient_checkpointing_strategy();
    let device = tensor.clone().inner().device();
    let mut new = Tensor::from_inner(Tensor::from_data(data, (&device, DType::F32)));
    if let Some(strategy) = strategy {
        new = new.with_gradient_checkpointing_strategy(strategy);
    }
    new.require_grad()
}

/// A tensor of a checkpoint, which has to fit a parameter.
pub(crate) fn stored(file: &TensorFile, name: &str, shape: &[usize]) -> Result<TensorData, TrainError> {
    let bytes = file.shaped(name, Dtype::F32, shape).map_err(|error| TrainError::OtherNetwork {
        file: file.path().to_owned(),
        parameter: name.to_owned(),
        reason: error.to_string(),
    })?;
    // A copy: the optimizer changes what it is given, and the file may be removed meanwhile.
    Ok(TensorData::from_bytes_vec(bytes.to_vec(), shape.to_vec(), DType::F32))
}

/// Reads a tensor's data back from the device.
pub(crate) fn bytes<const D: usize>(tensor: Tensor<D>) -> Result<TensorData, TrainError> {
    tensor.try_into_data().map_err(|error| TrainError::Readback { reason: error.to_string() })
}

/// The one number of a tensor.
pub(crate) fn number(tensor: Tensor<1>) -> Result<f64, TrainError> {
    let data = bytes(tensor)?;
    let number = data.iter::<f64>().next();
    number.ok_or_else(|| TrainError::Readback { reason: "a number is missing".into() })
}
