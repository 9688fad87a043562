use std::fs;
use std::path::{Path, PathBuf};

use super::room::Room;
use super::stall::Stall;
use super::{Pressure, PressureSource};
use crate::process::kib_field;

/// The memory of the whole machine, and how much anybody on it waits for it.
#[derive(Debug)]
pub struct Machine {
    meminfo: PathBuf,
    stall: Stall,
}

impl Machine {
    /// Of a system whose files lie in `root`, usually `/`; absent where it does not say.
    pub fn below(root: &Path) -> Option<Self> {
        let proc = root.join("proc");
        let meminfo = proc.join("meminfo");
        room(&meminfo)?;
        Some(Self { meminfo, stall: Stall::new(proc.join("pressure/memory"), proc.join("uptime")) })
    }
}

impl PressureSource for Machine {
    fn read(&mut self) -> Option<Pressure> {
        Some(room(&self.meminfo)?.under(self.stall.read()))
    }
}

fn room(meminfo: &Path) -> Option<Room> {
    let text = fs::read_to_string(meminfo).ok()?;
    let (available, total) = (kib_field(&text, "MemAvailable:")?, kib_field(&text, "MemTotal:")?);
    Some(Room { available, total, is_shared: true })
}
