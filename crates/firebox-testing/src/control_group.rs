//! A control group with a memory limit.

use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::process::{Child, Command};

/// A control group, which is removed when it is dropped, if all of its processes have ended.
pub struct ControlGroup(PathBuf);

impl ControlGroup {
    /// Creates a group of the version that is mounted. This takes the rights of root.
    pub fn new(name: &str, bytes: u64) -> io::Result<Self> {
        let (parent, limit) = ["/sys/fs/cgroup/memory", "/sys/fs/cgroup"]
            .into_iter()
            .zip(["memory.limit_in_bytes", "memory.max"])
            .find(|(parent, _)| Path::new(parent).join("cgroup.procs").exists())
            .ok_or_else(|| io::Error::new(ErrorKind::NotFound, "there are no control groups of memory"))?;
        let path = Path::new(parent).join(format!("firebox-{name}-{}", std::process::id()));
        std::fs::create_dir(&path)?;
        let group = Self(path);
        std::fs::write(group.0.join(limit), bytes.to_string())?;
        Ok(group)
    }

    /// Starts a program in the group.
    pub fn spawn(&self, command: &mut Command) -> io::Result<Child> {
        let mut child = command.spawn()?;
        match std::fs::write(self.0.join("cgroup.procs"), child.id().to_string()) {
            Ok(()) => Ok(child),
            Err(error) => {
                // Without the limit the program would measure something else.
                child.kill()?;
                child.wait()?;
                Err(error)
            }
        }
    }
}

impl Drop for ControlGroup {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir(&self.0);
    }
}
