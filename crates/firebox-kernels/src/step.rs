//! Decode steps that an accelerator records once and runs again with other input.
//!
//! A recorded step runs the same kernels on the same buffers. What changes from step to step is read from a
//! [`StepInput`]: the number of steps since the recording, and sections such as tokens and angles.

// Without accelerators there is no buffer, and what follows from one is unreachable.
#![cfg_attr(not(any(feature = "wgpu", feature = "cuda")), allow(unreachable_code, dead_code))]

#[cfg(any(feature = "wgpu", feature = "cuda"))]
mod cube;
#[cfg(not(any(feature = "wgpu", feature = "cuda")))]
mod none;

use std::fmt;
use std::sync::{Arc, Mutex};

use burn::tensor::{Device, Int, Tensor};

#[cfg(any(feature = "wgpu", feature = "cuda"))]
use cube as backend;
#[cfg(not(any(feature = "wgpu", feature = "cuda")))]
use none as backend;

use backend::{Buffer, Graph};

use crate::transfers;

/// Words between the starts of sections: every device binds parts of a buffer at such places.
const ALIGNMENT: usize = 64;

/// The number of steps since the recording, where kernels of a recorded step read it.
#[derive(Debug, Clone)]
pub struct StepCounter {
    pub(crate) counter: Buffer,
    /// Words that kernels of the step read besides, by their content: they are uploaded before the recording, and kept for as long
    /// as it may run.
    pub(crate) tables: Tables,
}

/// Uploaded words.
pub(crate) type Tables = Arc<Mutex<Vec<(Vec<u32>, Buffer)>>>;

/// The buffer that the kernels of a recorded step read their input from: a counter and sections of 32-bit words.
#[derive(Debug)]
pub struct StepInput {
    buffer: Buffer,
    /// The first word and the length of every section.
    sections: Vec<(usize, usize)>,
    tables: Tables,
}

/// A recorded step.
#[derive(Debug)]
pub struct StepGraph(Graph);

/// A step could not be recorded or run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum StepError {
    /// Steps of this kind are not recorded; nothing has happened.
    Unsupported {
        /// What stands against it.
        reason: String,
    },
    /// A recorded step failed. Caches of the step are in an unknown state: clear them.
    Failed {
        /// The device's message.
        reason: String,
    },
}

impl fmt::Display for StepError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unsupported { reason } => write!(f, "a decode step cannot be recorded: {reason}"),
            Self::Failed { reason } => write!(f, "a recorded decode step failed: {reason}"),
        }
    }
}

impl std::error::Error for StepError {}

/// Returns whether a device may record steps.
pub fn supports(device: &Device) -> bool {
    backend::supports(device)
}

/// Returns a copy of logits that the next run overwrites.
pub fn copy(logits: &Tensor<2>) -> Tensor<2> {
    backend::copy(logits)
}

/// Copies a row of `rows` into `[1, positions, width]` floats, to position `at` plus the steps since the recording. Writes in place
/// if the floats are not shared.
///
/// # Panics
/// If the tensors are not on an accelerator, or not equally wide.
pub fn write_row(kept: Tensor<3>, at: usize, rows: Tensor<2>, row: usize, steps: &StepCounter) -> Tensor<3> {
    let ([one, positions, width], [count, row_width]) = (kept.dims(), rows.dims());
    assert_eq!((one, width), (1, row_width), "a row of {row_width} among rows of {width}");
    assert!(at < positions && row < count, "row {row} of {count} at {at} of {positions}");
    backend::write_row(kept, at, rows, row, steps)
}

impl StepInput {
    /// Allocates sections of `lengths` words. Returns `None` on devices that record no steps.
    pub fn new(device: &Device, lengths: &[usize]) -> Option<Self> {
        let mut words = ALIGNMENT;
        let sections = lengths
            .iter()
            .map(|&length| {
                let start = words;
                words += length.next_multiple_of(ALIGNMENT);
                (start, length)
            })
            .collect();
        Some(Self { buffer: backend::allocate(device, words)?, sections, tables: Tables::default() })
    }

    /// Returns the counter.
    pub fn counter(&self) -> StepCounter {
        StepCounter { counter: backend::view(&self.buffer, 0, [1]), tables: self.tables.clone() }
    }

    /// Returns a section of integers.
    pub fn integers(&self, section: usize) -> Tensor<1, Int> {
        let (start, length) = self.sections[section];
        backend::integers(backend::view(&self.buffer, start, [length]))
    }

    /// Returns a section of floats in this shape.
    pub fn floats<const D: usize>(&self, section: usize, shape: [usize; D]) -> Tensor<D> {
        backend::floats(backend::view(&self.buffer, self.sections[section].0, shape))
    }

    /// Writes the counter and all sections in one upload.
    ///
    /// # Panics
    /// If the sections do not have their lengths.
    pub fn write(&self, steps: u32, sections: &[Vec<u32>]) {
        let mut words = vec![steps];
        for (section, &(start, length)) in sections.iter().zip(&self.sections) {
            assert_eq!(section.len(), length, "a section of another length");
            words.resize(start, 0);
            words.extend_from_slice(section);
        }
        words.resize(words.len().next_multiple_of(ALIGNMENT), 0);
        transfers::count_upload();
        backend::write(&self.buffer, words);
    }

    /// Runs `work` once to reserve the memory that it needs, then records it. Recorded kernels do not run: the first
    /// [run](StepGraph::run) writes the result. `work` reads nothing back and uploads nothing.
    pub fn record<R, E: From<StepError>>(
        &self,
        mut work: impl FnMut() -> Result<R, E>,
    ) -> Result<(R, StepGraph), E> {
        let (result, graph) = backend::record(&self.buffer, &mut work)?;
        Ok((result, StepGraph(graph)))
    }
}

impl StepGraph {
    /// Runs the recorded kernels.
    ///
    /// # Safety
    /// All tensors that the recorded work read or wrote, other than those it allocated itself, have to exist in the buffers
    /// that they had then. The calling thread has to be the one that recorded, and no other thread may use those tensors
    /// until the kernels have run.
    pub unsafe fn run(&self) -> Result<(), StepError> {
        // SAFETY: the caller promises what the device's graph asks for.
        unsafe { self.0.run() }
    }
}
