//! Measured facts about the machine's processor, memory, disk and devices, and the warnings they give rise to.

use std::hint::black_box;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use firebox_runtime::pressure::{self, Cgroup, Level, PressureSource};
use firebox_runtime::thermal::{self, Heat, Thermometer};
use firebox_runtime::{available_devices, human_bytes, instructions, physical_bytes};
use firebox_store::Checkpoint;
use serde::Serialize;

use super::disk::{self, Disk};

/// Read over and over: larger than the caches of most processors, and at most this part of what can be taken.
const READ_BYTES: usize = 128 << 20;
const READ_SHARE: u64 = 8;

/// The time for which memory is read.
const READ_TIME: Duration = Duration::from_millis(250);

/// The read rate of a disk, in bytes per second, below which a warning is given.
const SLOW_DISK: f64 = 5e8;

/// Programs and small models need as much.
const LITTLE_MEMORY: u64 = 1 << 30;

/// Where loaders of Vulkan look for drivers.
const DRIVERS: [&str; 3] = ["/usr/share/vulkan/icd.d", "/usr/local/share/vulkan/icd.d", "/etc/vulkan/icd.d"];

/// The properties of the machine that decide how models run.
#[derive(Debug, Serialize)]
pub struct Machine {
    pub processor: Processor,
    pub memory: Memory,
    pub disk: Option<Disk>,
    /// Why there is no figure of the disk.
    pub disk_error: Option<String>,
    /// The devices that `--device` accepts in this build.
    pub devices: Vec<&'static str>,
    /// Drivers of Vulkan that are installed.
    pub vulkan_drivers: Vec<String>,
    pub heat: Option<Warmth>,
    /// True if this command was compiled without optimisation.
    pub is_debug_build: bool,
}

#[derive(Debug, Serialize)]
pub struct Processor {
    pub threads: usize,
    /// The instruction set that products are computed with.
    pub instructions: &'static str,
}

#[derive(Debug, Serialize)]
pub struct Memory {
    pub physical_bytes: Option<u64>,
    /// The memory that can be taken before it runs short.
    pub available_bytes: Option<u64>,
    /// The memory that the control groups of containers and services leave.
    pub group_bytes: Option<u64>,
    pub pressure: Level,
    /// The rate at which all threads together read it.
    pub read_bytes_per_second: f64,
}

#[derive(Debug, Serialize)]
pub struct Warmth {
    pub celsius: f32,
    pub state: Heat,
}

impl Machine {
    /// This one. The disk is measured by the files of a model, where there is one.
    pub fn measured(checkpoint: Option<&Checkpoint>) -> Self {
        let threads = thread::available_parallelism().map_or(1, usize::from);
        // Before anything is taken for measuring.
        let pressure = pressure::read_all(&mut pressure::system()).unwrap_or_default();
        let (disk, disk_error) = match disk::measured(checkpoint) {
            Ok(disk) => (Some(disk), None),
            Err(error) => (None, Some(crate::outcome::in_one_line(&error))),
        };
        Self {
            processor: Processor { threads, instructions: instructions() },
            memory: Memory {
                physical_bytes: physical_bytes(),
                available_bytes: pressure.available,
                group_bytes: group_bytes(),
                pressure: pressure.level,
                read_bytes_per_second: reading_rate(threads, room(pressure.available)),
            },
            disk,
            disk_error,
            devices: available_devices(),
            vulkan_drivers: drivers(DRIVERS.map(Path::new)),
            heat: warmth(),
            is_debug_build: cfg!(debug_assertions),
        }
    }

    /// Returns the facts as rows of a table.
    pub fn facts(&self) -> Vec<[String; 2]> {
        let Self { processor, memory, .. } = self;
        let instructions = match processor.instructions {
            "avx512" => "AVX-512 with VNNI",
            "avx2" => "AVX2",
            _ => "no vector instructions that products are written for",
        };
        let size = |bytes: Option<u64>| bytes.map_or("an unknown part".into(), human_bytes);
        let mut memory_text = format!(
            "{} of {} can be taken, read at {:.1} GB/s",
            size(memory.available_bytes),
            size(memory.physical_bytes),
            memory.read_bytes_per_second / 1e9
        );
        if let Some(group) = memory.group_bytes {
            memory_text += &format!("; control groups leave {}", human_bytes(group));
        }
        let disk = match (&self.disk, &self.disk_error) {
            (Some(disk), _) => {
                format!("{:.2} GB/s past the page cache, {}", disk.read_bytes_per_second / 1e9, disk.file)
            }
            (None, error) => format!("not measured: {}", error.as_deref().unwrap_or("for no known reason")),
        };
        let vulkan = match (self.vulkan_drivers.is_empty(), self.devices.contains(&"wgpu")) {
            (true, _) => "no driver is installed".into(),
            (false, true) => self.vulkan_drivers.join(", "),
            (false, false) => format!(
                "{}; this build does not use it, one with `--features wgpu` does",
                self.vulkan_drivers.join(", ")
            ),
        };
        let heat = match &self.heat {
            Some(warmth) => format!("{:.0} °C, {}", warmth.celsius, state(warmth.state)),
            None => "no sensor says".into(),
        };
        [
            ("processor", format!("{} threads, {instructions}", processor.threads)),
            ("memory", memory_text),
            ("disk", disk),
            ("devices", self.devices.join(", ")),
            ("vulkan", vulkan),
            ("heat", heat),
        ]
        .map(|(name, text)| [name.to_owned(), text])
        .into()
    }

    /// Returns warnings about conditions that slow models down, each with a remedy.
    pub fn warnings(&self) -> Vec<String> {
        let mut warnings = Vec::new();
        let mut warn = |is: bool, text: String| warnings.extend(is.then_some(text));
        warn(
            self.is_debug_build,
            "this command was built without optimisation; build it with `cargo build --release`".into(),
        );
        warn(
            self.processor.instructions == "portable",
            "products run without vector instructions, several times slower than on a processor with AVX2; take \
             small models"
                .into(),
        );
        warn(
            self.processor.threads == 1,
            "there is one thread, and reading ahead shares it with computing; give the machine or container a second \
             core"
            .into(),
        );
        let memory = &self.memory;
        warn(
            memory.available_bytes.is_some_and(|available| available < LITTLE_MEMORY),
            format!(
                "little memory is left; close programs, or run models by `--memory {}M` so that they stream",
                (memory.available_bytes.unwrap_or(0) / 2) >> 20
            ),
        );
        warn(
            memory.available_bytes.is_none(),
            "the system does not say how much memory is left; set `--memory`".into(),
        );
        warn(
            memory.pressure > Level::None,
            "programs wait for memory already; whatever is started now makes it worse".into(),
        );
        warn(
            memory.group_bytes.is_some_and(|left| memory.physical_bytes.is_some_and(|all| left < all / 4)),
            "a control group leaves only a small part of the machine's memory; raise the limit of the container or \
             service if more is wanted"
                .into(),
        );
        warn(
            self.disk.as_ref().is_some_and(|disk| disk.read_bytes_per_second < SLOW_DISK),
            "the disk is slow: models larger than memory will run at less than a token a second; keep them on a faster \
             one, or take a model that fits"
                .into(),
        );
        warn(
            self.heat.as_ref().is_some_and(|warmth| warmth.state >= Heat::Serious),
            "the machine is hot and about to slow itself down; let it cool before anything is measured"
                .into(),
        );
        warnings
    }
}

fn state(heat: Heat) -> &'static str {
    match heat {
        Heat::Nominal => "cool enough for anything",
        Heat::Fair => "warm",
        Heat::Serious => "hot",
        Heat::Critical => "so hot that it slows itself down",
    }
}

/// Returns the memory that control groups leave, if they have limits.
fn group_bytes() -> Option<u64> {
    let root = Path::new("/");
    let groups = [Cgroup::v1(root), Cgroup::v2(root)];
    groups.into_iter().flatten().filter_map(|mut group| group.read()?.available).min()
}

fn warmth() -> Option<Warmth> {
    let mut thermometer = Thermometer::new(thermal::system()?);
    let state = thermometer.read();
    Some(Warmth { celsius: thermometer.celsius()?, state })
}

fn drivers(folders: [&Path; 3]) -> Vec<String> {
    let entries = folders.into_iter().filter_map(|folder| folder.read_dir().ok()).flatten().flatten();
    let mut names: Vec<String> = entries
        .filter(|entry| entry.path().extension().is_some_and(|extension| extension == "json"))
        .map(|entry| {
            let name = entry.path().file_stem().unwrap_or_default().to_string_lossy().into_owned();
            name.split("_icd").next().unwrap_or(&name).to_owned()
        })
        .collect();
    names.sort();
    names.dedup();
    names
}

/// Returns the number of bytes of memory to read.
fn room(available: Option<u64>) -> usize {
    let most = available.map_or(u64::MAX, |available| available / READ_SHARE);
    READ_BYTES.min(usize::try_from(most).unwrap_or(usize::MAX))
}

/// Bytes a second that so many threads read of memory together.
///
/// They compare what is equal. The C library's comparison reads as fast as memory gives, however this program was
/// compiled.
fn reading_rate(threads: usize, room: usize) -> f64 {
    let read = || {
        let half = (room / threads / 2).max(1);
        let (one, other) = (vec![1u8; half], vec![1u8; half]);
        let began = Instant::now();
        let mut bytes = 0;
        while began.elapsed() < READ_TIME {
            black_box(black_box(&one) == black_box(&other));
            bytes += 2 * half;
        }
        bytes as f64 / began.elapsed().as_secs_f64()
    };
    thread::scope(|scope| {
        let readers: Vec<_> = (0..threads).map(|_| scope.spawn(read)).collect();
        readers.into_iter().filter_map(|reader| reader.join().ok()).sum()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    pub fn machine() -> Machine {
        Machine {
            processor: Processor { threads: 8, instructions: "avx2" },
            memory: Memory {
                physical_bytes: Some(16 << 30),
                available_bytes: Some(12 << 30),
                group_bytes: None,
                pressure: Level::None,
                read_bytes_per_second: 4e10,
            },
            disk: Some(Disk { read_bytes_per_second: 3e9, file: "a file".into() }),
            disk_error: None,
            devices: vec!["cpu"],
            vulkan_drivers: Vec::new(),
            heat: None,
            is_debug_build: false,
        }
    }

    #[test]
    fn a_machine_that_is_well_is_told_nothing() {
        assert_eq!(machine().warnings(), Vec::<String>::new());
    }

    #[test]
    fn whatever_stands_in_the_way_is_told_once_and_with_a_remedy() {
        type Change = fn(&mut Machine);
        let broken: [(&str, Change); 8] = [
            ("--release", |machine| machine.is_debug_build = true),
            ("small models", |machine| machine.processor.instructions = "portable"),
            ("second core", |machine| machine.processor.threads = 1),
            ("--memory 256M", |machine| machine.memory.available_bytes = Some(512 << 20)),
            ("makes it worse", |machine| machine.memory.pressure = Level::Some),
            ("raise the limit", |machine| machine.memory.group_bytes = Some(2 << 30)),
            ("faster one", |machine| {
                machine.disk = Some(Disk { read_bytes_per_second: 1e8, file: String::new() })
            }),
            ("cool", |machine| machine.heat = Some(Warmth { celsius: 90.0, state: Heat::Serious })),
        ];
        for (word, change) in broken {
            let mut machine = machine();
            change(&mut machine);
            let warnings = machine.warnings();
            assert!(matches!(&warnings[..], [only] if only.contains(word)), "{word}: {warnings:?}");
        }
    }

    #[test]
    fn drivers_are_called_by_their_files() {
        let folder = tempfile::tempdir().unwrap();
        for name in ["lvp_icd.x86_64.json", "radeon_icd.json", "readme.txt"] {
            std::fs::write(folder.path().join(name), "{}").unwrap();
        }
        let nowhere = folder.path().join("none");
        assert_eq!(drivers([folder.path(), folder.path(), &nowhere]), ["lvp", "radeon"]);
    }

    #[test]
    fn memory_is_read_at_a_rate_that_memory_has() {
        let rate = reading_rate(2, READ_BYTES);
        assert!((1e8..1e13).contains(&rate), "{rate}");
    }
}
