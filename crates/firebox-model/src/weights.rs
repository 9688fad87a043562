//! Looking up a checkpoint's tensors for modules.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};

use burn::module::{Param, ParamId};
use burn::tensor::{AllocationProperty, Bytes, DType, Device, Int, Tensor, TensorData};
use firebox_kernels::Grouping;
use firebox_kernels::linear::{self, BlockFormat};
use firebox_store::{Bits, BlockType, Dtype, Encoding, Tensors, Weight, encode};

use crate::ModelError;
use crate::adapter_plan::AdapterPlan;
use crate::initial::Initial;
use crate::input_moments::InputMoments;
use crate::matrix::{BlockMatrix, DenseMatrix, GroupedMatrix, Matrix};

/// Tensors of a checkpoint on their way into modules: looked up by name within a scope, checked against the
/// configured shape, and counted, so that unused tensors are detected.
#[derive(Clone)]
pub(crate) struct Weights<'a> {
    tensors: &'a dyn Tensors,
    device: Device,
    scope: String,
    taken: &'a RefCell<BTreeSet<String>>,
    adapter_scale: f32,
    /// Offset of a norm's weight: initial values are lower by it.
    added: f32,
    renamed: &'static [(&'static str, &'static str)],
    transposed: bool,
    learning: Option<Learning<'a>>,
    moments: Option<&'a InputMoments>,
}

/// The training mode, and the trained parameters by name.
#[derive(Clone, Copy)]
pub(crate) struct Learning<'a> {
    pub what: Learned,
    pub parameters: &'a RefCell<BTreeMap<String, ParamId>>,
    /// Creates initial values of missing tensors.
    pub initial: &'a RefCell<Initial>,
    /// Whether a tensor of this name may be missing.
    pub may_begin: fn(&str) -> bool,
    /// Adapters to add.
    pub adapters: Option<&'a AdapterPlan>,
}

/// Tensors that are trained.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Learned {
    /// All of them.
    All,
    /// Adapters only; the weights they adapt are frozen.
    Adapters,
}

impl<'a> Weights<'a> {
    pub fn new(tensors: &'a dyn Tensors, device: &Device, taken: &'a RefCell<BTreeSet<String>>) -> Self {
        Self {
            tensors,
            device: device.clone(),
            scope: String::new(),
            taken,
            adapter_scale: 1.0,
            added: 0.0,
            renamed: &[],
            transposed: false,
            learning: None,
            moments: None,
        }
    }

    /// Returns the tensors with a scale for adapters.
    pub fn adapted(self, adapter_scale: f32) -> Self {
        Self { adapter_scale, ..self }
    }

    /// Returns the tensors for a norm with a weight offset.
    pub fn added_to(&self, added: f32) -> Self {
        Self { added, ..self.clone() }
    }

    /// Returns the tensors of a checkpoint that calls parts of the names otherwise, and whose matrices may lie as
    /// `[inputs, outputs]`.
    pub fn laid_out(self, renamed: &'static [(&'static str, &'static str)], transposed: bool) -> Self {
        Self { renamed, transposed, ..self }
    }

    /// Returns the scale of adapters.
    pub fn adapter_scale(&self) -> f32 {
        self.adapter_scale
    }

    /// Returns the tensors as trainable parameters.
    pub fn learning(self, learning: Learning<'a>) -> Self {
        Self { learning: Some(learning), ..self }
    }

    /// Returns the tensors as matrices whose inputs are measured.
    pub fn measuring(self, moments: &'a InputMoments) -> Self {
        Self { moments: Some(moments), ..self }
    }

    /// Returns the tensors below a prefix.
    pub fn within(&self, prefix: &str) -> Self {
        Self { scope: format!("{}{prefix}", self.scope), ..self.clone() }
    }

    /// Returns the tensors for another device.
    pub fn on(&self, device: Device) -> Self {
        Self { device, ..self.clone() }
    }

    /// Returns the device that tensors are put on.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Whether the checkpoint has a tensor.
    pub fn has(&self, name: &str) -> bool {
        self.tensors.info(&self.full(name)).is_some()
    }

    /// Returns the number of rows of a tensor, if it exists.
    pub fn rows_of(&self, name: &str) -> Option<usize> {
        self.tensors.info(&self.full(name))?.shape.first().copied()
    }

    /// Returns the rank of a weight's adapter, if it has or gets one.
    pub fn adapter_rank(&self, name: &str, inward: &str) -> Option<usize> {
        let planned = || {
            let plan = self.learning?.adapters?;
            plan.targets.iter().any(|target| target == name).then_some(plan.rank)
        };
        self.rows_of(inward).or_else(planned)
    }

    /// Returns a vector in f32, whatever the file's dtype is.
    pub fn vector(&self, name: &str, length: usize) -> Result<Param<Tensor<1>>, ModelError> {
        self.learned(name, [length], Learned::All)
    }

    /// Returns a matrix of an adapter in f32, whatever the file's dtype is.
    pub fn parameter(&self, name: &str, shape: [usize; 2]) -> Result<Param<Tensor<2>>, ModelError> {
        self.learned(name, shape, Learned::Adapters)
    }

    /// Returns a small tensor in f32, whatever the file's dtype is.
    pub fn plain<const D: usize>(&self, name: &str, shape: [usize; D]) -> Result<Tensor<D>, ModelError> {
        Ok(Tensor::from_data(TensorData::new(self.numbers(name, &shape)?, shape), &self.device))
    }

    /// Returns a tensor in f32, trainable if tensors of its kind are trained.
    pub fn learned<const D: usize>(
        &self,
        name: &str,
        shape: [usize; D],
        kind: Learned,
    ) -> Result<Param<Tensor<D>>, ModelError> {
        let tensor = self.plain(name, shape)?;
        let learning =
            self.learning.filter(|learning| learning.what == Learned::All || learning.what == kind);
        let Some(learning) = learning else { return Ok(param(tensor)) };
        let name = self.full(name);
        let id = named_id(&name);
        learning.parameters.borrow_mut().insert(name, id);
        Ok(Param::initialized(id, tensor.autodiff().require_grad()))
    }

    fn numbers(&self, name: &str, shape: &[usize]) -> Result<Vec<f32>, ModelError> {
        let full = self.full(name);
        match self.learning {
            Some(learning) if self.tensors.info(&full).is_none() && (learning.may_begin)(&full) => {
                self.taken.borrow_mut().insert(full.clone());
                let mut numbers = learning.initial.borrow_mut().numbers(&full, shape);
                numbers.iter_mut().for_each(|number| *number -= self.added);
                Ok(numbers)
            }
            _ => Ok(self.take(name, shape)?.to_f32()?),
        }
    }

    /// Returns a weight of `[outputs, inputs]`. If the device computes with the file's dtype and shares the
    /// machine's memory, the tensor refers to the mapped file. One whose name lacks `.weight` lies as `[inputs, outputs]`.
    pub fn matrix(&self, name: &str, outputs: usize, inputs: usize) -> Result<Matrix, ModelError> {
        if self.transposed {
            return self.transposed_matrix(name, outputs, inputs);
        }
        if let Some(name) = name.strip_suffix(".weight").filter(|name| self.has(name)) {
            return self.transposed_matrix(name, outputs, inputs);
        }
        if self.learning.is_some_and(|learning| learning.what == Learned::All) {
            let weight = self.learned(name, [outputs, inputs], Learned::All)?;
            return Ok(Matrix::Dense(DenseMatrix::new(weight)));
        }
        let matrix = matrix(self.take(name, &[outputs, inputs])?, [outputs, inputs], &self.device)?;
        Ok(match self.moments {
            Some(moments) => moments.measure(self.full(name), matrix),
            None => matrix,
        })
    }

    /// Returns a weight of `[outputs, inputs]` as numbers whatever its format is, for parts that do not multiply with it as a whole. On
    /// the CPU it keeps a dtype that its file has; elsewhere, and where it is packed, it is in f32.
    pub fn unpacked(
        &self,
        name: &str,
        [outputs, inputs]: [usize; 2],
    ) -> Result<Param<Tensor<2>>, ModelError> {
        let shape = [outputs, inputs];
        if self.learning.is_some_and(|learning| learning.what == Learned::All) {
            return self.learned(name, shape, Learned::All);
        }
        let weight = self.take(name, &shape)?;
        let dtype = match weight.encoding {
            Encoding::Plain(dtype) if linear::accepts_prepared(&self.device) => float_dtype(dtype),
            _ => None,
        };
        Ok(param(match dtype {
            Some(dtype) => Tensor::from_data(data(weight.data, shape, dtype), (&self.device, dtype)),
            None => widened(&weight, shape, &self.device)?,
        }))
    }

    /// Returns a weight that lies as `[inputs, outputs]`, in the file's dtype if that is one of floats.
    fn transposed_matrix(&self, name: &str, outputs: usize, inputs: usize) -> Result<Matrix, ModelError> {
        if self.learning.is_some_and(|learning| learning.what == Learned::All) {
            let weight = self.learned(name, [inputs, outputs], Learned::All)?;
            return Ok(Matrix::Dense(DenseMatrix::transposed(weight)));
        }
        let stored = self.take(name, &[inputs, outputs])?;
        let dtype = match stored.encoding {
            Encoding::Plain(dtype @ (Dtype::F16 | Dtype::BF16)) => dtype,
            _ => Dtype::F32,
        };
        let mut weight = vec![0.0; outputs * inputs];
        for (input, row) in stored.to_f32()?.chunks(outputs).enumerate() {
            for (output, value) in row.iter().enumerate() {
                weight[output * inputs + input] = *value;
            }
        }
        let weight = encode(name, &weight, &[outputs, inputs], Encoding::Plain(dtype))?;
        matrix(weight, [outputs, inputs], &self.device)
    }

    /// Checks that every tensor has been used, except for `foreign` ones.
    pub fn all_taken(&self, is_foreign: impl Fn(&str) -> bool) -> Result<(), ModelError> {
        let taken = self.taken.borrow();
        let names = self.tensors.names().filter(|name| !taken.contains(*name) && !is_foreign(name));
        let names: Vec<String> = names.map(str::to_owned).collect();
        if names.is_empty() {
            Ok(())
        } else {
            Err(ModelError::ExtraTensors { names, path: self.tensors.path().to_path_buf() })
        }
    }

    fn full(&self, name: &str) -> String {
        let full = format!("{}{name}", self.scope);
        self.renamed.iter().fold(full, |full, (ours, theirs)| full.replace(ours, theirs))
    }

    /// Checks that a tensor of floats exists with a shape, and counts it as used.
    pub fn check(&self, name: &str, shape: &[usize]) -> Result<(), ModelError> {
        let name = self.full(name);
        let Some(info) = self.tensors.info(&name) else {
            let path = self.tensors.path().to_path_buf();
            return Err(ModelError::MissingTensor { name, shape: shape.to_vec(), path });
        };
        if info.shape != shape {
            return Err(ModelError::Shape { name, expected: shape.to_vec(), found: info.shape.clone() });
        }
        if let Encoding::Plain(dtype) = info.encoding
            && !dtype.is_float()
        {
            return Err(ModelError::Encoding {
                name,
                encoding: info.encoding.to_string(),
                remedy: "weights are floating-point numbers, or quantized by `firebox import --quantize`",
            });
        }
        self.taken.borrow_mut().insert(name);
        Ok(())
    }

    fn take(&self, name: &str, shape: &[usize]) -> Result<Weight, ModelError> {
        self.check(name, shape)?;
        Ok(self.tensors.weight(&self.full(name))?)
    }
}

/// Returns a weight of `[outputs, inputs]` from the checkpoint.
pub(crate) fn matrix(
    weight: Weight,
    [outputs, inputs]: [usize; 2],
    device: &Device,
) -> Result<Matrix, ModelError> {
    match weight.encoding {
        Encoding::Plain(dtype) => {
            let kept = float_dtype(dtype).filter(|dtype| linear::supports_weight(device, *dtype, inputs));
            let tensor = match kept {
                Some(dtype) => {
                    Tensor::from_data(data(weight.data, [outputs, inputs], dtype), (device, dtype))
                }
                None => widened(&weight, [outputs, inputs], device)?,
            };
            Ok(Matrix::Dense(DenseMatrix::new(param(tensor))))
        }
        Encoding::Grouped(quantization) => {
            let scales = weight.scales.clone().unwrap_or_default();
            let groups = quantization.row_scales(inputs);
            let scales: Tensor<2> = if device.supports_dtype(DType::F16) {
                Tensor::from_data(data(scales, [outputs, groups], DType::F16), (device, DType::F16))
            } else {
                let widened: Vec<f32> =
                    scales.as_chunks().0.iter().map(|b| half::f16::from_le_bytes(*b).to_f32()).collect();
                Tensor::from_data(TensorData::new(widened, [outputs, groups]), device)
            };
            let grouping = Grouping {
                inputs,
                group: quantization.group,
                four_bits: quantization.bits == Bits::Q4,
                tiled: true,
            };
            let words = words(weight, outputs, device);
            let (words, scales, grouping) = if linear::multiplies_tiles(device) {
                (words, scales, grouping)
            } else {
                linear::in_rows(words, scales, grouping)
            };
            Ok(Matrix::Grouped(GroupedMatrix::new(words, scales, grouping)))
        }
        Encoding::Block(block) => match block_format(block) {
            Some(format) if linear::multiplies_blocks(device) => {
                let row_bytes = inputs / block.block_len() * block.block_bytes();
                let bytes = data(weight.data, [outputs, row_bytes], DType::U8);
                let bytes = Tensor::from_data(bytes, (device, DType::U8));
                Ok(Matrix::Blocks(BlockMatrix::new(bytes, format)))
            }
            _ => {
                let widened = widened(&weight, [outputs, inputs], device)?;
                Ok(Matrix::Dense(DenseMatrix::new(param(widened))))
            }
        },
    }
}

fn widened<const D: usize>(
    weight: &Weight,
    shape: [usize; D],
    device: &Device,
) -> Result<Tensor<D>, ModelError> {
    Ok(Tensor::from_data(TensorData::new(weight.to_f32()?, shape), device))
}

/// Returns packed bytes as 32-bit words, because few devices have 8-bit tensors.
fn words(weight: Weight, rows: usize, device: &Device) -> Tensor<2, Int> {
    const WORD: usize = size_of::<u32>();
    let shape = [rows, weight.data.len() / WORD / rows.max(1)];
    let words = if weight.data.as_ptr().cast::<u32>().is_aligned() {
        data(weight.data, shape, DType::I32)
    } else {
        let words: Vec<i32> =
            weight.data.as_chunks().0.iter().map(|word| i32::from_ne_bytes(*word)).collect();
        TensorData::new(words, shape)
    };
    Tensor::from_data(words, (device, DType::I32))
}

// Kernels multiply integers in the order in which the store has them.
const _: () = assert!(firebox_store::Q4_CHUNK == linear::NIBBLE_CHUNK);
const _: () = assert!(firebox_store::TILE_ROWS == linear::TILE_ROWS);

/// Returns a parameter that training can make trainable, without a copy.
pub(crate) fn param<const D: usize>(tensor: Tensor<D>) -> Param<Tensor<D>> {
    Param::initialized(ParamId::new(), tensor)
}

/// Returns an identifier that depends only on the name, so that an optimizer's state finds its parameter in
/// another process.
fn named_id(name: &str) -> ParamId {
    const PRIME: u64 = 0x0100_0000_01b3;
    let hash = |hash: u64, byte: u8| (hash ^ u64::from(byte)).wrapping_mul(PRIME);
    ParamId::from(name.bytes().fold(0xcbf2_9ce4_8422_2325, hash))
}

fn data<const D: usize>(bytes: bytes::Bytes, shape: [usize; D], dtype: DType) -> TensorData {
    TensorData::from_bytes(Bytes::from_shared(bytes, AllocationProperty::File), shape, dtype)
}

/// Returns the format that kernels multiply, or `None` for blocks that are unpacked when they are loaded.
pub(crate) fn block_format(block: BlockType) -> Option<BlockFormat> {
    Some(match block {
        BlockType::Q8_0 => BlockFormat::Q8_0,
        BlockType::Q4_0 => BlockFormat::Q4_0,
        BlockType::Q4_1 => BlockFormat::Q4_1,
        BlockType::Q5_0 => BlockFormat::Q5_0,
        BlockType::Q5_1 => BlockFormat::Q5_1,
        BlockType::Q4K => BlockFormat::Q4K,
        BlockType::Q5K => BlockFormat::Q5K,
        BlockType::Q6K => BlockFormat::Q6K,
        BlockType::MXFP4 => BlockFormat::MXFP4,
        BlockType::IQ4NL => BlockFormat::IQ4NL,
        BlockType::IQ4XS => BlockFormat::IQ4XS,
        BlockType::Q3K => BlockFormat::Q3K,
        BlockType::Q2K => BlockFormat::Q2K,
        BlockType::Q8_1
        | BlockType::TQ1_0
        | BlockType::TQ2_0
        | BlockType::IQ1S
        | BlockType::IQ1M
        | BlockType::IQ2XXS
        | BlockType::IQ2XS
        | BlockType::IQ2S
        | BlockType::IQ3XXS
        | BlockType::IQ3S => return None,
    })
}

pub(crate) fn float_dtype(dtype: Dtype) -> Option<DType> {
    match dtype {
        Dtype::F32 => Some(DType::F32),
        Dtype::F16 => Some(DType::F16),
        Dtype::BF16 => Some(DType::BF16),
        _ => None,
    }
}
