//! Weights prepared for repeated products on the CPU.

use std::fmt;

use burn::backend::flex::FlexTensor;
use burn::tensor::{DType, TensorData};
use bytes::Bytes;

use super::blocks::{BlockFormat, BlockRows, Q4_0, Q4_1, Q4K, Q5_0, Q5_1, Q5K, Q6K, Q8_0};
use super::decode;
use super::flex_weight::FlexWeight;
use super::gemm::{FloatWeight, IntegerWeight};
use super::grouping::Grouping;
use super::low_bit_blocks::{IQ4NL, IQ4XS, MXFP4, Q2K, Q3K};
use super::multiplicand::Multiplicand;
use super::panel::{CHUNK, IntegerRows, OUTPUTS};
use super::plain::{Bf16, F16, F32, PlainRows};
use super::tiles::{EightBit, FourBit, Tiles};
use super::uneven::UnevenRows;
use crate::flex::{bytes, contiguous, dims};

/// A weight prepared for repeated products. The metadata of its tensors is spread over a dozen allocations,
/// which the weights of each token evict from the caches; here it is in one place.
#[derive(Clone)]
pub struct PreparedWeight {
    outputs: usize,
    inputs: usize,
    form: Form,
}

/// The bytes of all forms are contiguous and hold at least one panel of rows, except in tiles.
#[derive(Clone)]
enum Form {
    Dense {
        numbers: Bytes,
        dtype: DType,
    },
    /// Groups are whole chunks.
    Tiled {
        words: Bytes,
        scales: Bytes,
        grouping: Grouping,
    },
    Uneven {
        words: Bytes,
        stride: usize,
        scales: Bytes,
        grouping: Grouping,
    },
    Blocks {
        bytes: Bytes,
        format: BlockFormat,
    },
}

impl fmt::Debug for PreparedWeight {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("PreparedWeight")
            .field("outputs", &self.outputs)
            .field("inputs", &self.inputs)
            .finish()
    }
}

impl From<FlexWeight> for PreparedWeight {
    /// # Panics
    /// If the weight's tensors contradict each other.
    fn from(weight: FlexWeight) -> Self {
        let (outputs, inputs) = weight.shape();
        let form = match weight {
            FlexWeight::Dense(weight) => {
                Form::Dense { dtype: weight.dtype(), numbers: tensor_bytes(pad_to_panel(weight)) }
            }
            FlexWeight::Grouped { words, scales, grouping } => {
                let ([rows, row_words], [scaled_rows, groups]) = (dims(&words), dims(&scales));
                assert!(
                    rows == scaled_rows && groups == grouping.groups(),
                    "words and scales differ in rows, or groups and scales in number"
                );
                if grouping.group.is_multiple_of(CHUNK) {
                    Form::Tiled {
                        words: tensor_bytes(contiguous(words)),
                        scales: tensor_bytes(contiguous(scales)),
                        grouping,
                    }
                } else {
                    let stride = row_words * size_of::<u32>();
                    let (words, scales) =
                        (tensor_bytes(pad_to_panel(words)), tensor_bytes(pad_to_panel(scales)));
                    Form::Uneven { words, stride, scales, grouping }
                }
            }
            FlexWeight::Blocks { bytes, format } => {
                Form::Blocks { bytes: tensor_bytes(pad_to_panel(bytes)), format }
            }
        };
        Self { outputs, inputs, form }
    }
}

impl PreparedWeight {
    /// `[outputs, inputs]`
    pub(super) fn shape(&self) -> (usize, usize) {
        (self.outputs, self.inputs)
    }

    /// # Panics
    /// If a dense weight is not f32, f16 or bf16.
    pub(super) fn multiplicand(&self) -> Box<dyn Multiplicand + '_> {
        match &self.form {
            Form::Dense { numbers, dtype } => match dtype {
                DType::F32 => Box::new(FloatWeight(PlainRows::<F32>::new(numbers, self.inputs))),
                DType::F16 => Box::new(FloatWeight(PlainRows::<F16>::new(numbers, self.inputs))),
                DType::BF16 => Box::new(FloatWeight(PlainRows::<Bf16>::new(numbers, self.inputs))),
                other => panic!("weights are f32, f16 or bf16, not {other:?}"),
            },
            Form::Tiled { words, scales, grouping } => {
                let (words, scales) = (bytemuck::cast_slice(words), bytemuck::cast_slice(scales));
                if grouping.four_bits {
                    Box::new(Tiles::<FourBit>::new(words, scales, self.outputs, *grouping))
                } else {
                    Box::new(Tiles::<EightBit>::new(words, scales, self.outputs, *grouping))
                }
            }
            Form::Uneven { words, stride, scales, grouping } => {
                let rows = UnevenRows::new(words, *stride, bytemuck::cast_slice(scales), *grouping);
                Box::new(FloatWeight(rows))
            }
            Form::Blocks { bytes, format } => visit_blocks(bytes, *format, self.inputs, BoxMultiplicand),
        }
    }

    /// Decodes GGUF blocks to `[outputs, inputs]`; `None` for other formats.
    pub(super) fn decode_blocks(&self) -> Option<Vec<f32>> {
        let Form::Blocks { bytes, format } = &self.form else { return None };
        Some(visit_blocks(bytes, *format, self.inputs, DecodeBlocks { outputs: self.outputs }))
    }
}

/// Keeps a contiguous tensor alive as the owner of its bytes.
struct TensorBytes(FlexTensor);

impl AsRef<[u8]> for TensorBytes {
    fn as_ref(&self) -> &[u8] {
        bytes(&self.0)
    }
}

/// Returns the bytes of a contiguous tensor without a copy.
fn tensor_bytes(tensor: FlexTensor) -> Bytes {
    Bytes::from_owner(TensorBytes(tensor))
}

/// Returns a contiguous matrix with at least one panel of rows.
fn pad_to_panel(matrix: FlexTensor) -> FlexTensor {
    let matrix = contiguous(matrix);
    let [rows, width] = dims(&matrix);
    if rows >= OUTPUTS {
        return matrix;
    }
    let mut padded = bytes(&matrix).to_vec();
    padded.resize(OUTPUTS * width * matrix.dtype().size(), 0);
    FlexTensor::from_data(TensorData::from_bytes_vec(padded, [OUTPUTS, width], matrix.dtype()))
}

/// An operation on a weight of any block format.
trait BlockFormatVisitor<'a> {
    type Result;
    fn run(self, weight: impl IntegerRows + 'a) -> Self::Result;
}

struct BoxMultiplicand;

impl<'a> BlockFormatVisitor<'a> for BoxMultiplicand {
    type Result = Box<dyn Multiplicand + 'a>;

    fn run(self, weight: impl IntegerRows + 'a) -> Self::Result {
        Box::new(IntegerWeight(weight))
    }
}

struct DecodeBlocks {
    outputs: usize,
}

impl<'a> BlockFormatVisitor<'a> for DecodeBlocks {
    type Result = Vec<f32>;

    fn run(self, weight: impl IntegerRows + 'a) -> Vec<f32> {
        decode::decode(&weight, self.outputs)
    }
}

fn visit_blocks<'a, W: BlockFormatVisitor<'a>>(
    bytes: &'a [u8],
    format: BlockFormat,
    inputs: usize,
    work: W,
) -> W::Result {
    match format {
        BlockFormat::Q8_0 => work.run(BlockRows::<Q8_0>::new(bytes, inputs)),
        BlockFormat::Q4_0 => work.run(BlockRows::<Q4_0>::new(bytes, inputs)),
        BlockFormat::Q4_1 => work.run(BlockRows::<Q4_1>::new(bytes, inputs)),
        BlockFormat::Q5_0 => work.run(BlockRows::<Q5_0>::new(bytes, inputs)),
        BlockFormat::Q5_1 => work.run(BlockRows::<Q5_1>::new(bytes, inputs)),
        BlockFormat::Q4K => work.run(BlockRows::<Q4K>::new(bytes, inputs)),
        BlockFormat::Q5K => work.run(BlockRows::<Q5K>::new(bytes, inputs)),
        BlockFormat::Q6K => work.run(BlockRows::<Q6K>::new(bytes, inputs)),
        BlockFormat::MXFP4 => work.run(BlockRows::<MXFP4>::new(bytes, inputs)),
        BlockFormat::IQ4NL => work.run(BlockRows::<IQ4NL>::new(bytes, inputs)),
        BlockFormat::IQ4XS => work.run(BlockRows::<IQ4XS>::new(bytes, inputs)),
        BlockFormat::Q3K => work.run(BlockRows::<Q3K>::new(bytes, inputs)),
        BlockFormat::Q2K => work.run(BlockRows::<Q2K>::new(bytes, inputs)),
    }
}
