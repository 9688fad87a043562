//! Buffers and graphs of recorded steps in CubeCL.

use std::fmt;

use burn::tensor::{Bytes, DType, Device, Int, Shape, Tensor};
use burn_cubecl::CubeBackend;
use burn_cubecl::cubecl::client::{Client, Graph as ClientGraph};
use burn_cubecl::cubecl::ir::ElemType;
use burn_cubecl::cubecl::{self, prelude::*};
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;

use super::{StepCounter, StepError};
use crate::cube;

/// Units of a cube.
const UNITS: u32 = 128;

/// A buffer of words.
pub(crate) type Buffer = CubeTensor;

/// A recorded sequence of launches.
pub(super) struct Graph(ClientGraph);

impl fmt::Debug for Graph {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Graph").finish_non_exhaustive()
    }
}

impl Graph {
    /// See [`StepGraph::run`](super::StepGraph::run).
    ///
    /// # Safety
    /// As there.
    pub unsafe fn run(&self) -> Result<(), StepError> {
        // SAFETY: the caller keeps the buffers alive and unshared, and calls from the thread that recorded.
        unsafe { self.0.replay() }.map_err(failed)
    }
}

fn failed(error: impl fmt::Display) -> StepError {
    StepError::Failed { reason: error.to_string() }
}

fn unsupported(error: impl fmt::Display) -> StepError {
    StepError::Unsupported { reason: error.to_string() }
}

pub(super) fn supports(device: &Device) -> bool {
    cube::is_cube(device)
}

pub(super) fn copy(logits: &Tensor<2>) -> Tensor<2> {
    Tensor::from_primitive::<CubeBackend>(cube::primitive(logits.clone()).copy())
}

pub(super) fn write_row(
    kept: Tensor<3>,
    at: usize,
    rows: Tensor<2>,
    row: usize,
    steps: &StepCounter,
) -> Tensor<3> {
    let kept = into_contiguous(cube::primitive(kept));
    // A copy may have room between its rows.
    let kept = if kept.can_mut() { kept } else { into_contiguous(kept.copy()) };
    let rows = cube::floats(cube::primitive(rows));
    let [_, width] = cube::dims(&rows);
    let kind = cube::element(&kept);
    copy_row::launch(
        &kept.client.clone(),
        cube::cubes(width.div_ceil(UNITS as usize)),
        CubeDim::new_1d(UNITS),
        rows.into_buffer_arg(),
        steps.counter.clone().into_buffer_arg(),
        kept.clone().into_buffer_arg(),
        width as u32,
        row as u32,
        at as u32,
        kind,
    );
    Tensor::from_primitive::<CubeBackend>(kept)
}

/// A unit for every number of the row.
#[cube(launch)]
fn copy_row<F: Float>(
    rows: &[f32],
    steps: &[u32],
    kept: &mut [F],
    width: u32,
    row: u32,
    at: u32,
    #[define(F)] _kept: ElemType,
) {
    let element = CUBE_POS as u32 * UNITS + UNIT_POS;
    if element < width {
        let number = rows[(row * width + element) as usize];
        kept[((at + steps[0]) * width + element) as usize] = F::cast_from(number);
    }
}

/// Allocates `words` zeros, if the device is an accelerator.
pub(super) fn allocate(device: &Device, words: usize) -> Option<Buffer> {
    cube::is_cube(device).then(|| cube::integers(Tensor::<1, Int>::zeros([words], (device, DType::I32))))
}

/// Returns the words from `start` on in this shape.
pub(super) fn view<const D: usize>(buffer: &Buffer, start: usize, shape: [usize; D]) -> Buffer {
    let shape = Shape::new(shape);
    let [all] = cube::dims(buffer);
    let bytes = |words: usize| (words * size_of::<u32>()) as u64;
    let rest = bytes(all - start - shape.num_elements());
    let handle = buffer.handle.clone().offset_start(bytes(start)).offset_end(rest);
    CubeTensor::new_contiguous(buffer.client.clone(), buffer.device.clone(), shape, handle, buffer.dtype)
}

pub(super) fn integers(view: Buffer) -> Tensor<1, Int> {
    Tensor::from_primitive::<CubeBackend>(view)
}

/// Returns the words as the floats that they are the bits of.
pub(super) fn floats<const D: usize>(view: Buffer) -> Tensor<D> {
    Tensor::from_primitive::<CubeBackend>(CubeTensor { dtype: DType::F32, ..view })
}

/// Overwrites the whole buffer.
pub(super) fn write(buffer: &Buffer, words: Vec<u32>) {
    buffer.client.write(&buffer.handle, Bytes::from_elems(words));
}

/// See [`StepInput::record`](super::StepInput::record).
pub(super) fn record<R, E: From<StepError>>(
    buffer: &Buffer,
    work: &mut dyn FnMut() -> Result<R, E>,
) -> Result<(R, Graph), E> {
    let window = Window::open(&buffer.client)?;
    // Its result is dropped to make room for the recorded one.
    drop(work()?);
    window.client.start_capture().map_err(unsupported)?;
    let result = work()?;
    Ok((result, Graph(window.close()?)))
}

/// A capture that ends with its scope: the device would refuse to read, or record launches of others, if one stayed open.
struct Window<'a> {
    client: &'a Client,
    is_open: bool,
}

impl<'a> Window<'a> {
    fn open(client: &'a Client) -> Result<Self, StepError> {
        client.graph_prepare().map_err(unsupported)?;
        Ok(Self { client, is_open: true })
    }

    /// Returns what was recorded. The first run has computed the step, so that without a recording it is launched instead.
    fn close(mut self) -> Result<ClientGraph, StepError> {
        self.is_open = false;
        self.client.stop_capture().map_err(unsupported)
    }
}

impl Drop for Window<'_> {
    fn drop(&mut self) {
        if self.is_open {
            // The work has failed, and reports why.
            let _ = self.client.stop_capture();
        }
    }
}
