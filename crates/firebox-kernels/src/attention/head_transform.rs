//! The steps between projections and attention.

use burn::tensor::Tensor;

use crate::linear::RowNorm;
use crate::step::StepCounter;

/// The steps between projections and attention.
#[derive(Debug, Clone)]
pub struct HeadTransform {
    /// The norm of query heads.
    pub query_norm: Option<RowNorm>,
    /// The norm of key heads.
    pub key_norm: Option<RowNorm>,
    /// Cosines and sines `[rows, 1, pairs]` of the [rotation](crate::rope::rotate) of both.
    pub angles: Option<[Tensor<3>; 2]>,
    /// Rotated pairs are interleaved.
    pub interleaved: bool,
    /// The counter of a recorded step, which adds to the slots that rows are written to. Every page gets one row then.
    pub steps: Option<StepCounter>,
}
