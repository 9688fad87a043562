//! The traits of networks that are trained and of the sources of their batches.

use burn::Tensor;
use burn::module::Module;

use crate::error::TrainError;

/// A network that can be trained: a Burn module whose parameters with gradients switched on are the trainable ones.
///
/// A parameter is known by its path in the module, which is what checkpoints name it by. Trainable parameters are f32.
pub trait Network: Module {
    /// A batch, over which one loss is computed.
    type Batch;

    /// The mean loss over the batch's target tokens, and how many there were.
    ///
    /// It is called on a network with autodiff to train, and on what [`Module::valid`] makes of it to evaluate: tensors
    /// that are made inside belong on the parameters' own device, whichever that is. The same network and batch must give
    /// the same bits. What is random has to come from the device's generator, which is seeded before every step; a process
    /// has one for all devices of a kind, so that nothing else may draw from it or train beside.
    fn loss(&self, batch: &Self::Batch) -> Result<(Tensor<1>, usize), TrainError>;
}

/// Where batches come from. A batch is known by epoch and index alone: the same two give the same batch, in this process
/// and in any other, or a resumed run is another run.
pub trait Source {
    /// A batch, over which one loss is computed.
    type Batch;

    /// Returns the number of batches of an epoch.
    fn len(&mut self, epoch: u64) -> usize;

    /// One of them.
    fn batch(&mut self, epoch: u64, index: usize) -> Result<Self::Batch, TrainError>;

    /// Returns the number of held-out batches. With none there is no evaluation, no best checkpoint and no early stop.
    fn held_out_len(&self) -> usize {
        0
    }

    /// One of them.
    fn held_out(&mut self, index: usize) -> Result<Self::Batch, TrainError>;
}
