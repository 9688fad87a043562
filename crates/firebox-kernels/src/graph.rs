//! Operations on Flex that are recorded, so that gradients flow back through them.

use std::fmt;
use std::sync::Arc;

use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::NoCheckpointing;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::backend::flex::FlexTensor;
use burn::backend::tensor::FloatTensor;
use burn::backend::{
    Autodiff, AutodiffBackend, BackendTensor, DispatchAutodiffContext, DispatchDevice, DispatchTensor,
    DispatchTensorKind, Flex,
};
use burn::tensor::{Device, Int, Tensor};

/// Whether a device records operations on tensors of Flex.
pub(crate) fn records(device: &Device) -> bool {
    match device.as_dispatch() {
        DispatchDevice::Autodiff(device) => matches!(**device, DispatchDevice::Flex(_)),
        _ => false,
    }
}

/// Something that an operation reads, and that a gradient may be wanted of.
#[derive(Clone)]
pub(crate) struct Operand {
    tensor: FloatTensor<Autodiff<Flex>>,
    context: DispatchAutodiffContext,
}

impl Operand {
    /// Its numbers.
    pub fn numbers(&self) -> FlexTensor {
        self.tensor.primitive().clone()
    }

    /// Whether its gradient is wanted.
    pub fn is_tracked(&self) -> bool {
        self.tensor.is_tracked()
    }
}

/// A tensor as an operand: a constant if it is on Flex itself.
///
/// # Panics
/// If it is on another device, as operations of Burn do for tensors of different devices.
pub(crate) fn operand<const D: usize>(tensor: Tensor<D>) -> Operand {
    let DispatchTensor { kind, autodiff: context } = tensor.into_dispatch();
    let kind = match kind {
        DispatchTensorKind::Autodiff(inner) => *inner,
        kind => kind,
    };
    let tensor = match kind {
        DispatchTensorKind::Flex(BackendTensor::Autodiff(tensor)) => tensor,
        DispatchTensorKind::Flex(BackendTensor::Float(tensor)) => Autodiff::<Flex>::from_inner(tensor),
        _ => panic!("all tensors of an operation are on one device"),
    };
    Operand { tensor, context }
}

/// The numbers of a tensor of integers, which never have gradients.
///
/// # Panics
/// As [`operand`] does.
pub(crate) fn integers<const D: usize>(tensor: Tensor<D, Int>) -> FlexTensor {
    match tensor.into_dispatch().kind {
        DispatchTensorKind::Flex(BackendTensor::Int(tensor)) => tensor,
        _ => panic!("all tensors of an operation are on one device"),
    }
}

/// Which operands' gradients are wanted.
pub(crate) type Wanted<const N: usize> = [bool; N];

/// The result of an operation, and how its gradient becomes those of the operands: those that are wanted.
///
/// What `backward` holds is kept as long as the result, so it should hold the numbers of operands rather than copies.
pub(crate) fn record<const D: usize, const N: usize>(
    operands: [Operand; N],
    result: FlexTensor,
    backward: impl Fn(FlexTensor, Wanted<N>) -> [Option<FlexTensor>; N] + Send + Sync + 'static,
) -> Tensor<D> {
    let context = operands
        .iter()
        .fold(DispatchAutodiffContext::Disabled, |context, operand| context.merge(operand.context));
    if context == DispatchAutodiffContext::Disabled {
        return Tensor::from_primitive::<Flex>(result);
    }
    let guards = operands.each_ref().map(|operand| operand.tensor.node());
    // Recomputing what operations like these give would cost more than keeping it, so there is nothing to checkpoint.
    let result = match Recorded.prepare::<NoCheckpointing>(guards).compute_bound().stateful() {
        OpsKind::Tracked(preparation) => preparation.finish(Step(Arc::new(backward)), result),
        OpsKind::UnTracked(preparation) => preparation.finish(result),
    };
    let kind = DispatchTensorKind::Flex(BackendTensor::Autodiff(result));
    Tensor::from_dispatch(DispatchTensor {
        kind: DispatchTensorKind::Autodiff(Box::new(kind)),
        autodiff: context,
    })
}

type Work<const N: usize> = dyn Fn(FlexTensor, Wanted<N>) -> [Option<FlexTensor>; N] + Send + Sync;

/// The way back through one operation.
#[derive(Clone)]
struct Step<const N: usize>(Arc<Work<N>>);

impl<const N: usize> fmt::Debug for Step<N> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("Step")
    }
}

#[derive(Debug)]
struct Recorded;

impl<const N: usize> Backward<Flex, N> for Recorded {
    type State = Step<N>;

    fn backward(self, ops: Ops<Self::State, N>, grads: &mut Gradients, _checkpointer: &mut Checkpointer) {
        let gradient = grads.consume::<Flex>(&ops.node);
        let gradients = (ops.state.0)(gradient, ops.parents.each_ref().map(Option::is_some));
        for (parent, gradient) in ops.parents.into_iter().zip(gradients) {
            if let (Some(parent), Some(gradient)) = (parent, gradient) {
                grads.register::<Flex>(parent.id, gradient);
            }
        }
    }
}
