//! The importance of inputs, by which a quantization decides what it may lose.

use std::collections::BTreeMap;

/// How large the inputs of matrices are on a text: the mean square of each, by the matrix's name.
///
/// An error in a weight changes a product by as much as its input is large, so a quantization that knows of that errs where
/// inputs are small.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Importance(BTreeMap<String, Vec<f32>>);

impl Importance {
    /// Returns the mean squares of a matrix's inputs.
    pub fn of(&self, name: &str) -> Option<&[f32]> {
        self.0.get(name).map(Vec::as_slice)
    }

    /// The number of matrices.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether no matrix is known.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl FromIterator<(String, Vec<f32>)> for Importance {
    fn from_iter<T: IntoIterator<Item = (String, Vec<f32>)>>(matrices: T) -> Self {
        Self(matrices.into_iter().collect())
    }
}
