//! Tests of memory pressure with made system files.

use std::fs;

use proptest::prelude::*;
use tempfile::TempDir;

use super::*;

const GIB: u64 = 1 << 30;
const MIB: u64 = 1 << 20;

/// A folder with the files of a made system.
struct System(TempDir);

impl System {
    fn new(files: &[(&str, &str)]) -> Self {
        let system = Self(tempfile::tempdir().unwrap());
        files.iter().for_each(|(path, text)| system.write(path, text));
        system
    }

    fn write(&self, path: &str, text: &str) {
        let path = self.0.path().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    fn root(&self) -> &Path {
        self.0.path()
    }
}

fn meminfo(available_mib: u64) -> String {
    format!(
        "MemTotal:       8388608 kB\nMemFree:        1024 kB\nMemAvailable:   {} kB\nBuffers: 97928 kB\n",
        available_mib * 1024
    )
}

fn stall(some: f64, full: f64, some_seconds: f64) -> String {
    let line = |kind, average, seconds: f64| {
        format!("{kind} avg10={average:.2} avg60=0.00 avg300=0.00 total={}\n", (seconds * 1e6) as u64)
    };
    line("some", some, some_seconds) + &line("full", full, 0.0)
}

fn level(source: &mut impl PressureSource) -> Level {
    source.read().unwrap().level
}

#[test]
fn a_machine_is_short_of_memory_when_little_is_available() {
    let system = System::new(&[("proc/meminfo", &meminfo(5000))]);
    let mut machine = Machine::below(system.root()).unwrap();
    let short = (8 * GIB / 100 * 10) as i64;
    let pressure = machine.read().unwrap();
    assert_eq!(pressure.level, Level::None);
    assert_eq!(pressure.available, Some(5000 * MIB - short as u64));
    system.write("proc/meminfo", &meminfo(700));
    assert_eq!(machine.read(), Some(Pressure { level: Level::Some, available: Some(0) }));
    system.write("proc/meminfo", &meminfo(200));
    assert_eq!(level(&mut machine), Level::Critical);
}

/// Reading a model through memory makes programs wait for pages; only where little is left that says something.
#[test]
fn waiting_for_memory_matters_where_little_is_left() {
    let plenty = [("proc/meminfo", &*meminfo(6000)), ("proc/pressure/memory", &*stall(60.0, 55.0, 1.0))];
    let system = System::new(&plenty);
    let mut machine = Machine::below(system.root()).unwrap();
    assert_eq!(level(&mut machine), Level::None);
    system.write("proc/meminfo", &meminfo(1200));
    assert_eq!(level(&mut machine), Level::Some);
    system.write("proc/pressure/memory", &stall(0.0, 0.0, 1.0));
    assert_eq!(level(&mut machine), Level::None);
}

#[test]
fn waiting_shows_before_its_average_does() {
    let files = [
        ("proc/meminfo", &*meminfo(1200)),
        ("proc/uptime", "100.00 190.00\n"),
        ("proc/pressure/memory", &*stall(0.0, 0.0, 1.0)),
    ];
    let system = System::new(&files);
    let mut machine = Machine::below(system.root()).unwrap();
    assert_eq!(level(&mut machine), Level::None);
    system.write("proc/uptime", "101.00 191.00\n");
    system.write("proc/pressure/memory", &stall(0.1, 0.0, 1.2));
    assert_eq!(level(&mut machine), Level::Some);
    system.write("proc/uptime", "102.00 192.00\n");
    assert_eq!(level(&mut machine), Level::None);
}

fn v1(usage: u64, failures: u64) -> Vec<(String, String)> {
    let own = "sys/fs/cgroup/memory/user/me";
    [
        ("proc/self/cgroup".into(), "8:pids:/\n4:cpu,memory:/user/me\n0::/\n".into()),
        (format!("{own}/memory.limit_in_bytes"), format!("{GIB}\n")),
        (format!("{own}/memory.usage_in_bytes"), format!("{usage}\n")),
        (format!("{own}/memory.failcnt"), format!("{failures}\n")),
        (
            format!("{own}/memory.stat"),
            format!("inactive_file 1\ntotal_inactive_file {}\ntotal_active_file {}\n", 200 * MIB, 100 * MIB),
        ),
    ]
    .into()
}

fn write_all(system: &System, files: &[(String, String)]) {
    files.iter().for_each(|(path, text)| system.write(path, text));
}

#[test]
fn a_group_of_the_first_version_may_reclaim_pages_of_files() {
    let system = System::new(&[]);
    write_all(&system, &v1(GIB, 0));
    let mut group = Cgroup::v1(system.root()).unwrap();
    let short = GIB / 100 * 10 / 2;
    assert_eq!(group.read(), Some(Pressure { level: Level::None, available: Some(300 * MIB - short) }));
    assert!(Cgroup::v2(system.root()).is_none());
}

#[test]
fn running_against_the_limit_matters_where_little_is_left() {
    let system = System::new(&[]);
    write_all(&system, &v1(GIB, 5));
    let mut group = Cgroup::v1(system.root()).unwrap();
    assert_eq!(level(&mut group), Level::None);
    write_all(&system, &v1(GIB, 6));
    assert_eq!(level(&mut group), Level::None, "300 MiB can be reclaimed");
    // What is used beyond the limit leaves less of it.
    write_all(&system, &v1(GIB + 200 * MIB, 6));
    assert_eq!(level(&mut group), Level::None);
    write_all(&system, &v1(GIB + 200 * MIB, 7));
    assert_eq!(level(&mut group), Level::Some);
    write_all(&system, &v1(GIB + 200 * MIB, 7));
    assert_eq!(level(&mut group), Level::None);
}

#[test]
fn a_group_without_a_limit_says_nothing() {
    let system = System::new(&[]);
    write_all(&system, &v1(GIB, 0));
    system.write("sys/fs/cgroup/memory/user/me/memory.limit_in_bytes", "9223372036854771712\n");
    assert_eq!(Cgroup::v1(system.root()).unwrap().read(), None);
}

#[test]
fn limits_of_all_groups_around_hold() {
    let system = System::new(&[
        ("proc/self/cgroup", "0::/outer/inner\n"),
        ("sys/fs/cgroup/outer/memory.max", "1073741824\n"),
        ("sys/fs/cgroup/outer/memory.current", "1063741824\n"),
        ("sys/fs/cgroup/outer/inner/memory.max", "max\n"),
        ("sys/fs/cgroup/outer/inner/memory.high", "536870912\n"),
        ("sys/fs/cgroup/outer/inner/memory.current", "1048576\n"),
        ("sys/fs/cgroup/outer/inner/memory.stat", "anon 0\ninactive_file 4096\nactive_file 0\n"),
        ("sys/fs/cgroup/outer/inner/memory.events", "low 0\nhigh 0\nmax 0\noom 0\n"),
    ]);
    let mut group = Cgroup::v2(system.root()).unwrap();
    assert_eq!(group.read(), Some(Pressure { level: Level::Critical, available: Some(0) }));
    system.write("sys/fs/cgroup/outer/memory.current", "1048576\n");
    let free = 512 * MIB - MIB + 4096 - 512 * MIB / 100 * 10 / 2;
    assert_eq!(group.read(), Some(Pressure { level: Level::None, available: Some(free) }));
}

#[test]
fn strain_on_a_group_of_the_second_version_comes_from_its_events_and_stalls() {
    let system = System::new(&[
        ("proc/self/cgroup", "0::/me\n"),
        ("sys/fs/cgroup/me/memory.max", "1000000000\n"),
        ("sys/fs/cgroup/me/memory.current", "920000000\n"),
        ("sys/fs/cgroup/me/memory.events", "low 0\nhigh 1\nmax 1\noom 0\n"),
    ]);
    let mut group = Cgroup::v2(system.root()).unwrap();
    assert_eq!(level(&mut group), Level::None);
    system.write("sys/fs/cgroup/me/memory.events", "low 0\nhigh 1\nmax 2\noom 0\n");
    assert_eq!(level(&mut group), Level::Some);
    assert_eq!(level(&mut group), Level::None);
    system.write("sys/fs/cgroup/me/memory.pressure", &stall(9.0, 0.0, 0.0));
    assert_eq!(level(&mut group), Level::Some);
}

/// A container sees its own group as the mount, and the path from outside.
#[test]
fn inside_a_container_the_mount_is_the_group() {
    for path in ["/docker/0123abcd", "/../../docker/0123abcd"] {
        let system = System::new(&[
            ("proc/self/cgroup", &format!("4:memory:{path}\n")),
            ("sys/fs/cgroup/memory/memory.limit_in_bytes", "1000000\n"),
            ("sys/fs/cgroup/memory/memory.usage_in_bytes", "990000\n"),
        ]);
        assert_eq!(level(&mut Cgroup::v1(system.root()).unwrap()), Level::Critical, "{path}");
    }
}

#[test]
fn all_sources_together_say_the_worst() {
    let system = System::new(&[("proc/meminfo", &*meminfo(6000))]);
    let mut sources = system_below(system.root());
    assert_eq!(sources.len(), 1);
    write_all(&system, &v1(GIB, 0));
    sources = system_below(system.root());
    assert_eq!(sources.len(), 2);
    let (warning, warned) = Warning::channel();
    sources.push(Box::new(warned));
    sources.push(Box::new(|| None));
    let available = Some(300 * MIB - GIB / 100 * 10 / 2);
    assert_eq!(read_all(&mut sources), Some(Pressure { level: Level::None, available }));
    warning.raise(Level::Some);
    assert_eq!(read_all(&mut sources), Some(Pressure { level: Level::Some, available }));
    assert_eq!(read_all(&mut []), None);
}

#[test]
fn where_there_are_no_files_there_are_no_sources() {
    let system = System::new(&[]);
    assert!(system_below(system.root()).is_empty());
}

#[cfg(target_os = "linux")]
#[test]
fn this_system_says_how_much_is_available() {
    let available = read_all(&mut system()).unwrap().available.unwrap();
    let all = crate::process::physical_bytes().unwrap();
    assert!(available < all, "{available} of {all}");
}

#[test]
fn the_worst_warning_is_the_one_that_arrives() {
    let (warning, mut warned) = Warning::channel();
    assert!(!warned.is_urgent());
    warning.raise(Level::Critical);
    warning.clone().raise(Level::Some);
    assert!(warned.is_urgent());
    assert_eq!(level(&mut warned), Level::Critical);
    assert!(!warned.is_urgent());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    /// Whatever stands in the files, reading them is nothing worse than in vain.
    #[test]
    fn malformed_files_are_ignored(
        texts in prop::collection::vec("([a-z_]{1,8}[ :=/]{1,2}-?[0-9]{0,22}( kB)?\n|.{0,20}\n){0,4}", 7),
    ) {
        let names = [
            "proc/uptime",
            "proc/pressure/memory",
            "sys/fs/cgroup/me/memory.max",
            "sys/fs/cgroup/me/memory.stat",
            "sys/fs/cgroup/me/memory.events",
            "sys/fs/cgroup/me/memory.pressure",
            "sys/fs/cgroup/memory/memory.failcnt",
        ];
        let system = System::new(&[
            ("proc/self/cgroup", "3:memory:/\n0::/me\n"),
            ("proc/meminfo", &meminfo(100)),
            ("sys/fs/cgroup/me/memory.current", "18446744073709551615\n"),
            ("sys/fs/cgroup/memory/memory.limit_in_bytes", "1\n"),
            ("sys/fs/cgroup/memory/memory.usage_in_bytes", "18446744073709551615\n"),
        ]);
        let mut sources = system_below(system.root());
        prop_assert_eq!(sources.len(), 3);
        for (name, text) in names.iter().zip(&texts) {
            system.write(name, text);
            read_all(&mut sources);
        }
        system.write("proc/self/cgroup", &texts[0]);
        system.write("proc/meminfo", &texts[1]);
        read_all(&mut system_below(system.root()));
    }
}
