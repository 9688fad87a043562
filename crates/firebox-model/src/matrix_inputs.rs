//! The mean squares of a matrix's inputs.

use std::sync::{Mutex, PoisonError};

use burn::tensor::Tensor;

/// The inputs of one matrix.
#[derive(Debug, Default)]
pub(crate) struct MatrixInputs(Mutex<Sums>);

#[derive(Debug, Default)]
struct Sums {
    rows: usize,
    squares: Vec<f64>,
}

impl MatrixInputs {
    /// Adds `[rows, inputs]`.
    pub fn add(&self, x: &Tensor<2>) {
        let [rows, inputs] = x.dims();
        if rows == 0 {
            return;
        }
        let squares = x.clone().square().sum_dim(0).try_into_vec_as::<f32>().unwrap_or_default();
        let mut sums = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        sums.rows += rows;
        sums.squares.resize(inputs, 0.0);
        for (sum, square) in sums.squares.iter_mut().zip(squares) {
            *sum += f64::from(square);
        }
    }

    /// Returns the means, if there were any rows.
    pub fn means(&self) -> Option<Vec<f32>> {
        let sums = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let mean = |square: &f64| (square / sums.rows as f64) as f32;
        (sums.rows > 0).then(|| sums.squares.iter().map(mean).collect())
    }
}
