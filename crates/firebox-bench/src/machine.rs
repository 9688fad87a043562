//! The machine that figures come from.

use std::fmt;
use std::fs;
use std::process::Command;

use firebox_runtime::{human_bytes, instructions, physical_bytes};

/// The properties of the machine that decide its speed, as far as the system reports them.
#[derive(Debug, Clone)]
pub struct Machine {
    processor: Option<String>,
    system: Option<String>,
    commit: Option<String>,
    /// The work that it had already: processes that wanted to run, on average over a minute.
    load: Option<String>,
    day: jiff::civil::Date,
}

impl Machine {
    pub fn look() -> Self {
        let field = |line: &str| Some(line.strip_prefix("model name")?.split_once(':')?.1.trim().to_owned());
        let read = |path: &str| fs::read_to_string(path).ok();
        let first_word = |text: String| text.split_whitespace().next().map(str::to_owned);
        Self {
            processor: read("/proc/cpuinfo").and_then(|text| text.lines().find_map(field)),
            system: read("/proc/sys/kernel/osrelease").map(|text| format!("Linux {}", text.trim())),
            commit: commit(),
            load: read("/proc/loadavg").and_then(first_word),
            day: jiff::Zoned::now().date(),
        }
    }
}

impl fmt::Display for Machine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let processor = self.processor.as_deref().unwrap_or("a processor without a name");
        write!(f, "{processor}, {} threads, {}", rayon::current_num_threads(), instructions())?;
        if let Some(bytes) = physical_bytes() {
            write!(f, ", {} of memory", human_bytes(bytes))?;
        }
        if let Some(system) = &self.system {
            write!(f, ", {system}")?;
        }
        if let Some(load) = &self.load {
            write!(f, ", a load of {load} before")?;
        }
        write!(f, "; {}", self.day)?;
        if let Some(commit) = &self.commit {
            write!(f, ", commit {commit}")?;
        }
        Ok(())
    }
}

/// Returns the commit that is checked out, with a plus sign if there are uncommitted changes.
fn commit() -> Option<String> {
    let git = |args: &[&str]| {
        let output = Command::new("git").args(args).output().ok().filter(|output| output.status.success())?;
        Some(String::from_utf8_lossy(&output.stdout).trim().to_owned())
    };
    let commit = git(&["rev-parse", "--short", "HEAD"])?;
    let is_changed =
        git(&["status", "--porcelain", "--untracked-files=no"]).is_some_and(|text| !text.is_empty());
    Some(if is_changed { format!("{commit}+") } else { commit })
}
