//! The files of a checkpoint on their disk, and how fast they are read.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::checkpoint::Checkpoint;
use crate::error::StoreError;
use crate::memory::allocate;
use crate::read_at::{ReadAt, ReadMethod};
use crate::read_unit::ReadUnit;

/// The files themselves.
#[derive(Debug)]
struct Files {
    checkpoint: Checkpoint,
    method: ReadMethod,
}

impl ReadAt for Files {
    fn read_at(&self, file: usize, buffer: &mut [u8], start: u64) -> Result<usize, StoreError> {
        self.checkpoint.mapping(file).read_some(buffer, start, self.method)
    }
}

impl Checkpoint {
    /// Its files, to be read that way. Where the file system does not let the page cache be passed by, they are read
    /// through it.
    pub fn disk(&self, method: ReadMethod) -> Arc<dyn ReadAt> {
        Arc::new(Files { checkpoint: self.clone(), method })
    }

    /// The faster way to read these units again and again, and its rate in bytes a second. `room` is how many bytes
    /// the page cache may hold of them: unless that is all, it will have lost each by the time that its turn comes
    /// again.
    pub fn fastest_method(
        &self,
        units: &[Arc<ReadUnit>],
        room: u64,
    ) -> Result<(ReadMethod, f64), StoreError> {
        let measure = |method| read_rate(&*self.disk(method), sample_units(units)).map(|rate| (method, rate));
        let direct = measure(ReadMethod::Direct)?;
        let total: u64 = units.iter().map(|unit| unit.bytes()).sum();
        if total <= room {
            let buffered = measure(ReadMethod::Buffered)?;
            if buffered.1 > direct.1 {
                return Ok(buffered);
            }
        }
        Ok(direct)
    }
}

/// Read units that are read to find out how fast that is.
const PROBES: usize = 4;

/// A few units that stand for all, from the middle, where opening the file has left nothing in the page cache.
pub fn sample_units(units: &[Arc<ReadUnit>]) -> &[Arc<ReadUnit>] {
    let middle = units.len() / 2;
    &units[middle..units.len().min(middle + PROBES)]
}

/// Reads units one after the other, and says how many of their bytes a second that were.
pub fn read_rate(disk: &dyn ReadAt, units: &[Arc<ReadUnit>]) -> Result<f64, StoreError> {
    let largest = units.iter().map(|unit| unit.buffer_bytes()).max().unwrap_or(0);
    let mut buffer = allocate(largest)?;
    let (mut bytes, mut spent) = (0, Duration::ZERO);
    for unit in units {
        let began = Instant::now();
        unit.read(disk, buffer.as_mut())?;
        spent += began.elapsed();
        bytes += unit.bytes();
    }
    Ok(bytes as f64 / spent.as_secs_f64().max(1e-9))
}
