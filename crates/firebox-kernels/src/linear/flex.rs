use burn::backend::Flex;
use burn::backend::flex::FlexTensor;
use burn::tensor::{DType, Tensor, TensorData};

use super::activations::Activations;
use super::blocks::{BlockFormat, BlockRows, Q4_0, Q4_1, Q4K, Q5_0, Q5_1, Q5K, Q6K, Q8_0};
use super::panel::{CHUNK, IntegerRows, OUTPUTS};
use super::plain::{Bf16, F16, F32, PlainRows};
use super::product::{self, FloatWeight, IntegerWeight, Multiplicand};
use super::tiles::{Eight, Four, Tiles};
use super::uneven::UnevenRows;
use super::{BlockOps, Grouping, LinearOps, Weight};
use crate::flex::{bytes, dims, elements, ordered, tensor};

impl LinearOps for Flex {
    fn multiply(x: FlexTensor, weight: FlexTensor) -> FlexTensor {
        one(x, FlexWeight::Dense(weight))
    }

    fn multiply_grouped(
        x: FlexTensor,
        words: FlexTensor,
        scales: FlexTensor,
        grouping: Grouping,
    ) -> FlexTensor {
        one(x, FlexWeight::Grouped { words, scales, grouping })
    }
}

impl BlockOps for Flex {
    fn multiply_blocks(x: FlexTensor, bytes: FlexTensor, format: BlockFormat) -> FlexTensor {
        one(x, FlexWeight::Blocks { bytes, format })
    }

    fn dequantize_blocks(bytes: FlexTensor, format: BlockFormat) -> FlexTensor {
        let (outputs, inputs) = block_shape(&bytes, format);
        let bytes = whole_panels(bytes);
        let values = with_blocks(&bytes, format, Decode { outputs });
        tensor(values, [outputs, inputs])
    }
}

/// See [`multiply_each`](super::multiply_each).
///
/// # Panics
/// If the tensors are not all on Flex, as operations of Burn do for tensors of different devices.
pub(super) fn multiply_each(x: Tensor<2>, weights: Vec<Weight>) -> Vec<Tensor<2>> {
    let on_flex = "all tensors of a product are on one device";
    let weights = weights
        .into_iter()
        .map(|weight| match weight {
            Weight::Dense(weight) => FlexWeight::Dense(weight.try_into_primitive::<Flex>().expect(on_flex)),
            Weight::Grouped { words, scales, grouping } => FlexWeight::Grouped {
                words: words.try_into_primitive::<Flex>().expect(on_flex),
                scales: scales.try_into_primitive::<Flex>().expect(on_flex),
                grouping,
            },
            Weight::Blocks { bytes, format } => {
                FlexWeight::Blocks { bytes: bytes.try_into_primitive::<Flex>().expect(on_flex), format }
            }
        })
        .collect();
    let products = each(x.try_into_primitive::<Flex>().expect(on_flex), weights);
    products.into_iter().map(Tensor::from_primitive::<Flex>).collect()
}

/// A weight as Flex has it.
#[derive(Clone)]
pub(super) enum FlexWeight {
    Dense(FlexTensor),
    Grouped { words: FlexTensor, scales: FlexTensor, grouping: Grouping },
    Blocks { bytes: FlexTensor, format: BlockFormat },
}

impl FlexWeight {
    /// As the products read it.
    pub fn prepared(self) -> Self {
        match self {
            Self::Dense(weight) => Self::Dense(whole_panels(weight)),
            Self::Grouped { words, scales, grouping } if grouping.group.is_multiple_of(CHUNK) => {
                Self::Grouped { words: ordered(words), scales: ordered(scales), grouping }
            }
            Self::Grouped { words, scales, grouping } => {
                Self::Grouped { words: whole_panels(words), scales: whole_panels(scales), grouping }
            }
            Self::Blocks { bytes, format } => Self::Blocks { bytes: whole_panels(bytes), format },
        }
    }

    /// `[outputs, inputs]`
    pub fn shape(&self) -> (usize, usize) {
        match self {
            Self::Dense(weight) => {
                let [outputs, inputs] = dims(weight);
                (outputs, inputs)
            }
            Self::Grouped { words, grouping, .. } => (dims::<2>(words)[0], grouping.inputs),
            Self::Blocks { bytes, format } => block_shape(bytes, *format),
        }
    }

    /// # Panics
    /// If a dense weight is neither f32, f16 nor bf16.
    pub fn multiplicand(&self) -> Box<dyn Multiplicand + '_> {
        match self {
            Self::Dense(weight) => {
                let [_, inputs] = dims(weight);
                match weight.dtype() {
                    DType::F32 => Box::new(FloatWeight(PlainRows::<F32>::new(bytes(weight), inputs))),
                    DType::F16 => Box::new(FloatWeight(PlainRows::<F16>::new(bytes(weight), inputs))),
                    DType::BF16 => Box::new(FloatWeight(PlainRows::<Bf16>::new(bytes(weight), inputs))),
                    other => panic!("weights are f32, f16 or bf16, not {other:?}"),
                }
            }
            Self::Grouped { words, scales, grouping } => {
                let ([rows, row_words], [scaled_rows, groups]) = (dims(words), dims(scales));
                assert!(rows == scaled_rows && groups == grouping.groups(), "as many scales as groups");
                if !grouping.group.is_multiple_of(CHUNK) {
                    let stride = row_words * size_of::<u32>();
                    let rows = UnevenRows::new(bytes(words), stride, elements(scales), *grouping);
                    Box::new(FloatWeight(rows))
                } else if grouping.four_bits {
                    Box::new(Tiles::<Four>::new(elements(words), elements(scales), rows, *grouping))
                } else {
                    Box::new(Tiles::<Eight>::new(elements(words), elements(scales), rows, *grouping))
                }
            }
            Self::Blocks { bytes, format } => with_blocks(bytes, *format, Multiplicands),
        }
    }
}

/// A contiguous matrix with rows for at least one panel.
fn whole_panels(matrix: FlexTensor) -> FlexTensor {
    let matrix = ordered(matrix);
    let [rows, width] = dims(&matrix);
    if rows >= OUTPUTS {
        return matrix;
    }
    let mut padded = bytes(&matrix).to_vec();
    padded.resize(OUTPUTS * width * matrix.dtype().size(), 0);
    FlexTensor::from_data(TensorData::from_bytes_vec(padded, [OUTPUTS, width], matrix.dtype()))
}

pub(super) fn one(x: FlexTensor, weight: FlexWeight) -> FlexTensor {
    let mut products = each(x, vec![weight]);
    // One weight has one product.
    products.swap_remove(0)
}

/// # Panics
/// If x is not f32, the rows of x and of a weight differ in length, or a weight's tensors contradict each other.
pub(super) fn each(x: FlexTensor, weights: Vec<FlexWeight>) -> Vec<FlexTensor> {
    assert_eq!(x.dtype(), DType::F32, "activations are f32");
    let x = ordered(x);
    let [rows, inputs] = dims(&x);
    let mut outputs = Vec::with_capacity(weights.len());
    for weight in &weights {
        let (weight_outputs, weight_inputs) = weight.shape();
        assert_eq!(inputs, weight_inputs, "the rows of x and of the weight differ in length");
        outputs.push(weight_outputs);
    }
    let weights: Vec<FlexWeight> = weights.into_iter().map(FlexWeight::prepared).collect();
    let padded = inputs.next_multiple_of(CHUNK);
    let mut with_zeros = Vec::new();
    let mut values: &[f32] = elements(&x);
    if padded != inputs {
        with_zeros.resize(rows * padded, 0.0);
        for (to, from) in with_zeros.chunks_exact_mut(padded).zip(values.chunks_exact(inputs)) {
            to[..inputs].copy_from_slice(from);
        }
        values = &with_zeros;
    }
    let multiplicands: Vec<_> = weights.iter().map(FlexWeight::multiplicand).collect();
    let factors: Vec<(&dyn Multiplicand, usize)> =
        multiplicands.iter().zip(&outputs).map(|(weight, outputs)| (&**weight, *outputs)).collect();
    let products = product::multiply(&Activations { rows, padded, values }, &factors);
    products.into_iter().zip(outputs).map(|(values, outputs)| tensor(values, [rows, outputs])).collect()
}

fn block_shape(bytes: &FlexTensor, format: BlockFormat) -> (usize, usize) {
    let [outputs, row_bytes] = dims(bytes);
    assert!(row_bytes.is_multiple_of(format.bytes()), "rows are whole blocks");
    (outputs, row_bytes / format.bytes() * format.inputs())
}

/// Something to do with a weight of any block format.
trait WithRows<'a> {
    type Result;
    fn run(self, weight: impl IntegerRows + 'a) -> Self::Result;
}

struct Multiplicands;

impl<'a> WithRows<'a> for Multiplicands {
    type Result = Box<dyn Multiplicand + 'a>;

    fn run(self, weight: impl IntegerRows + 'a) -> Self::Result {
        Box::new(IntegerWeight(weight))
    }
}

struct Decode {
    outputs: usize,
}

impl<'a> WithRows<'a> for Decode {
    type Result = Vec<f32>;

    fn run(self, weight: impl IntegerRows + 'a) -> Vec<f32> {
        product::decode(&weight, self.outputs)
    }
}

fn with_blocks<'a, W: WithRows<'a>>(bytes: &'a FlexTensor, format: BlockFormat, work: W) -> W::Result {
    let (_, inputs) = block_shape(bytes, format);
    let bytes = elements(bytes);
    match format {
        BlockFormat::Q8_0 => work.run(BlockRows::<Q8_0>::new(bytes, inputs)),
        BlockFormat::Q4_0 => work.run(BlockRows::<Q4_0>::new(bytes, inputs)),
        BlockFormat::Q4_1 => work.run(BlockRows::<Q4_1>::new(bytes, inputs)),
        BlockFormat::Q5_0 => work.run(BlockRows::<Q5_0>::new(bytes, inputs)),
        BlockFormat::Q5_1 => work.run(BlockRows::<Q5_1>::new(bytes, inputs)),
        BlockFormat::Q4K => work.run(BlockRows::<Q4K>::new(bytes, inputs)),
        BlockFormat::Q5K => work.run(BlockRows::<Q5K>::new(bytes, inputs)),
        BlockFormat::Q6K => work.run(BlockRows::<Q6K>::new(bytes, inputs)),
    }
}
