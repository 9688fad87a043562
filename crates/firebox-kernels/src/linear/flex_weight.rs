//! Weights as tensors of Flex.

use burn::backend::Flex;
use burn::backend::flex::FlexTensor;

use super::blocks::BlockFormat;
use super::grouping::Grouping;
use super::weight::Weight;
use crate::flex::dims;

pub(super) const ON_FLEX: &str = "all tensors of a product are on one device";

/// A weight as tensors of Flex.
#[derive(Clone)]
pub(super) enum FlexWeight {
    Dense(FlexTensor),
    Grouped { words: FlexTensor, scales: FlexTensor, grouping: Grouping },
    Blocks { bytes: FlexTensor, format: BlockFormat },
}

impl From<Weight> for FlexWeight {
    /// # Panics
    /// If the tensors are not on Flex.
    fn from(weight: Weight) -> Self {
        match weight {
            Weight::Dense(weight) => Self::Dense(weight.try_into_primitive::<Flex>().expect(ON_FLEX)),
            Weight::Grouped { words, scales, grouping } => Self::Grouped {
                words: words.try_into_primitive::<Flex>().expect(ON_FLEX),
                scales: scales.try_into_primitive::<Flex>().expect(ON_FLEX),
                grouping,
            },
            Weight::Blocks { bytes, format } => {
                Self::Blocks { bytes: bytes.try_into_primitive::<Flex>().expect(ON_FLEX), format }
            }
        }
    }
}

impl FlexWeight {
    /// `[outputs, inputs]`
    pub fn shape(&self) -> (usize, usize) {
        match self {
            Self::Dense(weight) => {
                let [outputs, inputs] = dims(weight);
                (outputs, inputs)
            }
            Self::Grouped { words, grouping, .. } => (dims::<2>(words)[0], grouping.inputs),
            Self::Blocks { bytes, format } => {
                let [outputs, row_bytes] = dims(bytes);
                assert!(row_bytes.is_multiple_of(format.bytes()), "rows are whole blocks");
                (outputs, row_bytes / format.bytes() * format.inputs())
            }
        }
    }
}
