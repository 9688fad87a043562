//! The mean squares of the inputs of matrices.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use crate::matrix::{Matrix, MeasuredMatrix};
use crate::matrix_inputs::MatrixInputs;

/// The mean squares of the inputs of a model's matrices, summed up while it computes. A model
/// [measures](crate::Decoder::measuring_inputs) them to learn what a quantization may lose.
#[derive(Debug, Default)]
pub struct InputMoments(Mutex<BTreeMap<String, Arc<MatrixInputs>>>);

impl InputMoments {
    /// Returns the mean squares of the matrices that were multiplied so far, by name.
    pub fn means(&self) -> Vec<(String, Vec<f32>)> {
        let matrices = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        matrices.iter().filter_map(|(name, inputs)| Some((name.clone(), inputs.means()?))).collect()
    }

    /// Returns a matrix whose inputs are measured under its name.
    pub(crate) fn measure(&self, name: String, matrix: Matrix) -> Matrix {
        let mut matrices = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let inputs = matrices.entry(name).or_default().clone();
        Matrix::Measured(MeasuredMatrix::new(matrix, inputs))
    }
}
