//! Computing behind a shield: a panic or a lost device becomes an error of the requests involved.

use std::panic::{AssertUnwindSafe, catch_unwind};

use burn::tensor::{Device, Tensor};
use firebox_kernels::on_pool;
use firebox_model::{Decoder, ModelError};
use firebox_runtime::{RuntimeError, read_floats};
use firebox_text::panic_message;

use crate::error::EngineError;

/// Computes on the thread pool if the device is a CPU.
pub(crate) fn computed<R: Send>(
    decoder: &Decoder,
    work: impl FnOnce() -> Result<R, EngineError> + Send,
) -> Result<R, EngineError> {
    let device = decoder.device();
    on_pool(device, || shielded(device, work))
}

/// Computes on a device that may be lost, or with a custom component that may panic. Either is returned as an error, so
/// that only the requests involved fail.
pub(crate) fn shielded<R>(
    device: &Device,
    work: impl FnOnce() -> Result<R, EngineError>,
) -> Result<R, EngineError> {
    // Unwind safety: intermediate results are dropped, and sessions are rolled back.
    let done = catch_unwind(AssertUnwindSafe(work))
        .unwrap_or_else(|panic| Err(EngineError::Panicked { reason: panic_message(&*panic).to_owned() }));
    match done {
        // An operation on a lost device fails with an error that says little about the cause.
        Err(
            error @ (EngineError::Panicked { .. }
            | EngineError::Runtime(
                RuntimeError::Readback { .. } | RuntimeError::Model(ModelError::Readback { .. }),
            )),
        ) => Err(lost(device).unwrap_or(error)),
        done => done,
    }
}

/// Returns why a device is lost, if it is: it does not return the result of a small addition.
fn lost(device: &Device) -> Option<EngineError> {
    let counted = || read_floats(Tensor::<1>::zeros([1], device).add_scalar(1.0));
    let reason = match catch_unwind(AssertUnwindSafe(counted)) {
        Ok(Ok(number)) if number == [1.0] => return None,
        Ok(Ok(number)) => format!("it says that 0 + 1 is {number:?}"),
        Ok(Err(error)) => error.to_string(),
        Err(panic) => panic_message(&*panic).to_owned(),
    };
    Some(EngineError::DeviceLost { reason })
}
