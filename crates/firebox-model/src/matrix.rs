//! Weight matrices in any storage format.

use std::sync::Arc;

use burn::module::{Module, Param, ParamId};
use burn::tensor::{Int, Tensor};
use firebox_kernels::Grouping;
use firebox_kernels::linear::{self, BlockFormat, PreparedWeight, Weight};

use crate::matrix_inputs::MatrixInputs;
use crate::prepared::LazyPreparedWeight;

/// A weight of `[outputs, inputs]` in any storage format.
#[derive(Module, Debug)]
pub enum Matrix {
    /// Floating-point numbers.
    Dense(DenseMatrix),
    /// Small integers with a scale for every group of inputs.
    Grouped(GroupedMatrix),
    /// The blocks of a GGUF file.
    Blocks(BlockMatrix),
    /// Any of them, whose inputs are measured.
    Measured(MeasuredMatrix),
}

impl Matrix {
    /// Returns `x · weightᵀ`, from `[rows, inputs]` to `[rows, outputs]` in f32.
    pub fn multiply(&self, x: Tensor<2>) -> Tensor<2> {
        let mut products = Self::multiply_each(x, &[self]);
        // There is one weight, so there is one product.
        products.swap_remove(0)
    }

    /// Returns the products of the same activations with several matrices.
    pub(crate) fn multiply_each(x: Tensor<2>, matrices: &[&Self]) -> Vec<Tensor<2>> {
        if matrices.iter().any(|matrix| matrix.is_measured()) {
            let matrices: Vec<&Self> = matrices.iter().map(|matrix| matrix.measuring(&x)).collect();
            return Self::multiply_each(x, &matrices);
        }
        if linear::accepts_prepared(&x.device()) {
            let prepared: Option<Vec<&PreparedWeight>> =
                matrices.iter().map(|matrix| matrix.prepared()).collect();
            if let Some(prepared) = prepared {
                return linear::multiply_prepared(x, &prepared);
            }
        }
        linear::multiply_each(x, matrices.iter().map(|matrix| matrix.weight()).collect())
    }

    fn prepared(&self) -> Option<&PreparedWeight> {
        let prepared = match self {
            Self::Dense(dense) => &dense.prepared,
            Self::Grouped(grouped) => &grouped.prepared,
            Self::Blocks(blocks) => &blocks.prepared,
            Self::Measured(measured) => return measured.matrix.prepared(),
        };
        prepared.get_or_prepare(|| self.weight())
    }

    /// Returns the weight as kernels take it.
    pub(crate) fn weight(&self) -> Weight {
        match self {
            Self::Dense(dense) => Weight::Dense(dense.tensor()),
            Self::Grouped(grouped) => Weight::Grouped {
                words: grouped.words.val(),
                scales: grouped.scales.val(),
                grouping: grouped.grouping,
            },
            Self::Blocks(blocks) => Weight::Blocks { bytes: blocks.bytes.val(), format: blocks.format },
            Self::Measured(measured) => measured.matrix.weight(),
        }
    }

    /// Returns whether inputs are measured.
    pub(crate) fn is_measured(&self) -> bool {
        matches!(self, Self::Measured(_))
    }

    /// Measures inputs if they are to be, and returns the matrix that multiplies them.
    fn measuring(&self, x: &Tensor<2>) -> &Self {
        let Self::Measured(measured) = self else { return self };
        measured.inputs.add(x);
        &measured.matrix
    }

    /// Returns the rows of the given indices, `[indices, inputs]` in f32.
    pub fn gather(&self, indices: Tensor<1, Int>) -> Tensor<2> {
        match self {
            Self::Dense(dense) => linear::gather(dense.tensor(), indices),
            Self::Grouped(grouped) => {
                linear::gather_grouped(grouped.words.val(), grouped.scales.val(), grouped.grouping, indices)
            }
            Self::Blocks(blocks) => {
                linear::dequantize_blocks(blocks.bytes.val().select(0, indices), blocks.format)
            }
            Self::Measured(measured) => measured.matrix.gather(indices),
        }
    }
}

/// A weight of floats, in the dtype of its file if the device supports it.
#[derive(Module, Debug)]
pub struct DenseMatrix {
    weight: Param<Tensor<2>>,
    /// Whether it lies as `[inputs, outputs]`.
    transposed: bool,
    prepared: LazyPreparedWeight,
}

impl DenseMatrix {
    /// Takes `[inputs, outputs]`.
    pub fn transposed(weight: Param<Tensor<2>>) -> Self {
        Self { transposed: true, ..Self::new(weight) }
    }

    fn tensor(&self) -> Tensor<2> {
        let weight = self.weight.val();
        if self.transposed { weight.transpose() } else { weight }
    }

    /// Takes `[outputs, inputs]`.
    pub fn new(weight: Param<Tensor<2>>) -> Self {
        Self { weight, transposed: false, prepared: LazyPreparedWeight::default() }
    }
}

/// A weight of 8-bit or 4-bit integers, packed into 32-bit words: in tiles, as the store has them, on devices
/// that multiply with tiles, and with contiguous rows elsewhere.
#[derive(Module, Debug)]
pub struct GroupedMatrix {
    /// `[outputs, words]`
    words: Param<Tensor<2, Int>>,
    /// `[outputs, groups]`
    scales: Param<Tensor<2>>,
    #[module(skip)]
    grouping: Grouping,
    prepared: LazyPreparedWeight,
}

impl GroupedMatrix {
    pub(crate) fn new(words: Tensor<2, Int>, scales: Tensor<2>, grouping: Grouping) -> Self {
        Self {
            words: Param::initialized(ParamId::new(), words),
            scales: Param::initialized(ParamId::new(), scales),
            grouping,
            prepared: LazyPreparedWeight::default(),
        }
    }
}

/// A weight in a GGUF block format, as stored in the file, on devices that support it.
#[derive(Module, Debug)]
pub struct BlockMatrix {
    /// `[outputs, bytes of a row]`
    bytes: Param<Tensor<2, Int>>,
    #[module(skip)]
    format: BlockFormat,
    prepared: LazyPreparedWeight,
}

impl BlockMatrix {
    pub(crate) fn new(bytes: Tensor<2, Int>, format: BlockFormat) -> Self {
        Self {
            bytes: Param::initialized(ParamId::new(), bytes),
            format,
            prepared: LazyPreparedWeight::default(),
        }
    }
}

/// A weight whose inputs are measured.
#[derive(Module, Debug)]
pub struct MeasuredMatrix {
    #[module(skip)]
    matrix: Arc<Matrix>,
    #[module(skip)]
    inputs: Arc<MatrixInputs>,
}

impl MeasuredMatrix {
    pub(crate) fn new(matrix: Matrix, inputs: Arc<MatrixInputs>) -> Self {
        Self { matrix: Arc::new(matrix), inputs }
    }
}

#[cfg(test)]
mod tests {
    use burn::module::ModuleMapper;
    use burn::tensor::Device;

    use super::*;

    struct Doubles;

    impl ModuleMapper for Doubles {
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
            param.map(|tensor| tensor.mul_scalar(2.0))
        }
    }

    #[test]
    fn a_weight_is_prepared_again_after_its_tensors_change() {
        let device = Device::flex();
        let weight = Tensor::from_floats([[1.0, 2.0], [3.0, 4.0]], &device);
        let matrix = Matrix::Dense(DenseMatrix::new(Param::initialized(ParamId::new(), weight)));
        let product = |matrix: &Matrix| {
            matrix
                .multiply(Tensor::from_floats([[1.0, 1.0]], &device))
                .into_data()
                .try_to_vec::<f32>()
                .unwrap()
        };
        assert_eq!(product(&matrix), [3.0, 7.0]);
        assert!(matrix.prepared().is_some(), "a product has made it ready");
        let doubled = matrix.clone().map(&mut Doubles);
        assert_eq!((product(&matrix), product(&doubled)), (vec![3.0, 7.0], vec![6.0, 14.0]));
        let trained = matrix.train();
        assert_eq!(product(&trained.map(&mut Doubles).valid()), [6.0, 14.0]);
    }
}
