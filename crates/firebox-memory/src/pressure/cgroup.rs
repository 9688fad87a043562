//! Memory pressure of Linux control groups.

use std::fs;
use std::path::{Component, Path, PathBuf};

use super::headroom::Headroom;
use super::stall::Stall;
use super::{Level, Pressure, PressureSource};

/// The control groups of this process, of which every limit applies.
#[derive(Debug)]
pub struct Cgroup {
    groups: Vec<Group>,
}

#[derive(Debug, Clone, Copy)]
enum Version {
    V1,
    V2,
}

impl Cgroup {
    /// Finds the memory groups of version 1 below `root`; `None` if there are none.
    pub fn v1(root: &Path) -> Option<Self> {
        Self::found(Version::V1, root, &root.join("sys/fs/cgroup/memory"))
    }

    /// Finds the groups of version 2 below `root`; `None` if there are none or they do not control memory.
    pub fn v2(root: &Path) -> Option<Self> {
        // If both versions are mounted, version 2 has a directory of its own.
        let mounts = ["sys/fs/cgroup", "sys/fs/cgroup/unified"];
        mounts.iter().find_map(|mount| Self::found(Version::V2, root, &root.join(mount)))
    }

    fn found(version: Version, root: &Path, mount: &Path) -> Option<Self> {
        let cgroup = fs::read_to_string(root.join("proc/self/cgroup")).ok()?;
        let own = mount.join(below_mount(own_path(&cgroup, version)?));
        let around = own.ancestors().take_while(|directory| directory.starts_with(mount));
        let groups: Vec<Group> =
            around.filter_map(|directory| Group::found(version, directory, root)).collect();
        (!groups.is_empty()).then_some(Self { groups })
    }
}

impl PressureSource for Cgroup {
    fn read(&mut self) -> Option<Pressure> {
        self.groups.iter_mut().filter_map(Group::read).reduce(Pressure::and)
    }
}

/// Returns the path of a line such as `4:memory:/user.slice` or, in version 2, `0::/user.slice`.
fn own_path(cgroup: &str, version: Version) -> Option<&str> {
    cgroup.lines().find_map(|line| {
        let mut fields = line.splitn(3, ':');
        let (number, controllers, path) = (fields.next()?, fields.next()?, fields.next()?);
        let wanted = match version {
            Version::V1 => controllers.split(',').any(|controller| controller == "memory"),
            Version::V2 => number == "0" && controllers.is_empty(),
        };
        wanted.then_some(path)
    })
}

/// Returns the path below the mount. In a container it may lead out of the mount; then the mount itself is the container's
/// group.
fn below_mount(path: &str) -> PathBuf {
    let path = Path::new(path.trim_start_matches('/'));
    let inside = path.components().all(|component| matches!(component, Component::Normal(_)));
    if inside { path.to_owned() } else { PathBuf::new() }
}

/// The files of one group.
#[derive(Debug)]
struct Group {
    version: Version,
    directory: PathBuf,
    stall: Stall,
    hits: Option<u64>,
}

impl Group {
    fn found(version: Version, directory: &Path, root: &Path) -> Option<Self> {
        let directory = directory.to_owned();
        let stall = Stall::new(directory.join("memory.pressure"), root.join("proc/uptime"));
        let group = Self { version, directory, stall, hits: None };
        group.used().map(|_| group)
    }

    /// Returns the pressure in this group; `None` if it has no limit and so shares the machine's memory.
    fn read(&mut self) -> Option<Pressure> {
        let total = self.limit()?;
        let used = self.used()?.saturating_sub(self.reclaimable());
        let strain = self.hit_limit().max(self.stall.read());
        Some(
            Headroom { available: total.saturating_sub(used), total, is_shared: false }
                .pressure_under(strain),
        )
    }

    fn limit(&self) -> Option<u64> {
        match self.version {
            // An absent limit is a number larger than any machine's memory.
            Version::V1 => self.number("memory.limit_in_bytes").filter(|&limit| limit < 1 << 60),
            Version::V2 => {
                [self.number("memory.max"), self.number("memory.high")].into_iter().flatten().min()
            }
        }
    }

    fn used(&self) -> Option<u64> {
        self.number(match self.version {
            Version::V1 => "memory.usage_in_bytes",
            Version::V2 => "memory.current",
        })
    }

    /// Returns the bytes of file pages, which count as used but can be read again. Active pages are included, as in the
    /// machine's `MemAvailable`: a group through which a model streams is always full of them.
    fn reclaimable(&self) -> u64 {
        let names = match self.version {
            Version::V1 => ["total_inactive_file", "total_active_file"],
            Version::V2 => ["inactive_file", "active_file"],
        };
        self.sum("memory.stat", names).unwrap_or(0)
    }

    /// Returns whether the group hit its limit since the last call.
    fn hit_limit(&mut self) -> Level {
        let hits = match self.version {
            Version::V1 => self.number("memory.failcnt"),
            Version::V2 => self.sum("memory.events", ["high", "max"]),
        };
        let before = std::mem::replace(&mut self.hits, hits);
        // A missing count compares below every number; the first count does not tell when its events happened.
        if before.is_some() && hits > before { Level::Some } else { Level::None }
    }

    fn number(&self, file: &str) -> Option<u64> {
        fs::read_to_string(self.directory.join(file)).ok()?.trim().parse().ok()
    }

    /// Returns the sum of two numbers in a file of lines such as `inactive_file 7393685504`.
    fn sum(&self, file: &str, names: [&str; 2]) -> Option<u64> {
        let text = fs::read_to_string(self.directory.join(file)).ok()?;
        let fields = text.lines().filter_map(|line| line.split_once(' '));
        let numbers =
            fields.filter(|(name, _)| names.contains(name)).map(|(_, number)| number.trim().parse());
        numbers.filter_map(Result::ok).reduce(u64::saturating_add)
    }
}
