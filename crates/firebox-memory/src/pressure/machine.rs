//! Memory pressure of the whole machine.

use std::fs;
use std::path::{Path, PathBuf};

use super::headroom::Headroom;
use super::stall::Stall;
use super::{Pressure, PressureSource};
use crate::process::kib_field;

/// The memory of the whole machine, and how long its processes wait for memory.
#[derive(Debug)]
pub struct Machine {
    meminfo: PathBuf,
    stall: Stall,
}

impl Machine {
    /// Reads the system whose root directory is `root`, usually `/`; `None` if it does not report memory.
    pub fn below(root: &Path) -> Option<Self> {
        let proc = root.join("proc");
        let meminfo = proc.join("meminfo");
        headroom(&meminfo)?;
        Some(Self { meminfo, stall: Stall::new(proc.join("pressure/memory"), proc.join("uptime")) })
    }
}

impl PressureSource for Machine {
    fn read(&mut self) -> Option<Pressure> {
        Some(headroom(&self.meminfo)?.pressure_under(self.stall.read()))
    }
}

fn headroom(meminfo: &Path) -> Option<Headroom> {
    let text = fs::read_to_string(meminfo).ok()?;
    let (available, total) = (kib_field(&text, "MemAvailable:")?, kib_field(&text, "MemTotal:")?);
    Some(Headroom { available, total, is_shared: true })
}
