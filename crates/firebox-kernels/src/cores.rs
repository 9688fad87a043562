//! Chooses the cores that compute, and binds the compute threads to them.

use std::fmt;
use std::fs;
use std::io;
use std::path::Path;
use std::str::FromStr;
use std::thread;

use rayon::{ThreadPoolBuildError, ThreadPoolBuilder};

/// Where Linux describes the cores of the machine.
const SYSTEM_CORES: &str = "/sys/devices/system/cpu";

/// Cores whose capacities differ by less are of one kind: some machines let a few of equal cores run a little faster.
const CAPACITY_STEP: f64 = 1.2;

/// The cores that compute.
///
/// ```
/// use firebox_kernels::Cores;
///
/// assert_eq!("0-2,6".parse::<Cores>()?, Cores::Exactly(vec![0, 1, 2, 6]));
/// assert_eq!("performance".parse::<Cores>()?, Cores::Performance);
/// # Ok::<(), firebox_kernels::CoresError>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum Cores {
    /// All that the process may use. The system schedules threads.
    #[default]
    All,
    /// The fast cores, where the system tells the capacity of cores.
    Performance,
    /// Cores by their number, in ascending order.
    Exactly(Vec<usize>),
}

/// Cores that cannot compute as they were chosen.
#[derive(Debug, thiserror::Error)]
#[error("cores {cores}: {reason}")]
pub struct CoresError {
    /// The requested cores.
    pub cores: String,
    /// Why they cannot be used, and what helps.
    pub reason: String,
}

impl fmt::Display for Cores {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::All => f.write_str("all"),
            Self::Performance => f.write_str("performance"),
            Self::Exactly(cores) => f.write_str(&listed(cores)),
        }
    }
}

impl FromStr for Cores {
    type Err = CoresError;

    fn from_str(text: &str) -> Result<Self, CoresError> {
        match text.trim() {
            "all" => Ok(Self::All),
            "performance" => Ok(Self::Performance),
            list => {
                let cores = numbers(list).ok_or_else(|| {
                    refused(text, "it is no choice of cores; write performance, all, or a list such as 0-3,6")
                })?;
                Ok(Self::Exactly(cores))
            }
        }
    }
}

impl Cores {
    /// Starts the threads that compute, bound to these cores: one for each core, or as many as `threads`. Call it before
    /// anything computes. Returns the cores, or `None` if the threads are not bound.
    pub fn start_threads(&self, threads: Option<usize>) -> Result<Option<Vec<usize>>, CoresError> {
        let cores = match self {
            Self::All => None,
            _ => Some(self.choose(Path::new(SYSTEM_CORES), &allowed_cores()?)?),
        };
        let mut pool = ThreadPoolBuilder::new();
        if let Some(threads) = threads.or(cores.as_ref().map(Vec::len)) {
            pool = pool.num_threads(threads);
        }
        if let Some(cores) = &cores {
            check_binding(cores)?;
            let cores = cores.clone();
            // A thread that cannot be bound computes as well.
            pool = pool.start_handler(move |_| drop(bind(&cores)));
        }
        let failed =
            |error: ThreadPoolBuildError| refused(&self.to_string(), &format!("no threads: {error}"));
        pool.build_global().map_err(failed)?;
        Ok(cores)
    }

    /// Chooses among the cores that the process may use. `system` is a folder that describes cores as Linux does.
    fn choose(&self, system: &Path, allowed: &[usize]) -> Result<Vec<usize>, CoresError> {
        match self {
            Self::All => Ok(allowed.to_vec()),
            Self::Performance => {
                let capacities = capacities(system, allowed).ok_or_else(|| {
                    refused(
                        "performance",
                        "the system does not tell the capacity of its cores; list them, as in 0-3",
                    )
                })?;
                let least = least_fast(&capacities);
                let cores = allowed.iter().zip(capacities);
                Ok(cores.filter(|(_, capacity)| *capacity >= least).map(|(core, _)| *core).collect())
            }
            Self::Exactly(cores) => match cores.iter().find(|core| !allowed.contains(core)) {
                Some(core) => {
                    let reason = format!("the process may not use it; it may use {}", listed(allowed));
                    Err(refused(&core.to_string(), &reason))
                }
                None => Ok(cores.clone()),
            },
        }
    }
}

/// Reads a list of numbers and ranges. Returns `None` if it is none, or empty.
fn numbers(list: &str) -> Option<Vec<usize>> {
    let mut cores = Vec::new();
    for part in list.split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last): (usize, usize) = (first.trim().parse().ok()?, last.trim().parse().ok()?);
        // No machine has as many, and a list of them would fill memory.
        if first > last || last > usize::from(u16::MAX) {
            return None;
        }
        cores.extend(first..=last);
    }
    cores.sort_unstable();
    cores.dedup();
    (!cores.is_empty()).then_some(cores)
}

/// Formats cores as [`Cores`] reads them.
fn listed(cores: &[usize]) -> String {
    let mut parts: Vec<(usize, usize)> = Vec::new();
    for &core in cores {
        match parts.last_mut() {
            Some((_, last)) if *last + 1 == core => *last = core,
            _ => parts.push((core, core)),
        }
    }
    let part = |(first, last): (usize, usize)| {
        if first == last { first.to_string() } else { format!("{first}-{last}") }
    };
    parts.into_iter().map(part).collect::<Vec<_>>().join(",")
}

/// Returns the capacities of cores: as the kernel rates them, or else by their highest frequency.
fn capacities(system: &Path, cores: &[usize]) -> Option<Vec<u64>> {
    let read = |file: &str| -> Option<Vec<u64>> {
        let of = |core: &usize| {
            let text = fs::read_to_string(system.join(format!("cpu{core}")).join(file)).ok()?;
            text.trim().parse().ok().filter(|capacity| *capacity > 0)
        };
        cores.iter().map(of).collect()
    };
    read("cpu_capacity").or_else(|| read("cpufreq/cpuinfo_max_freq"))
}

/// Returns the capacity from which on a core is fast: above the largest step between kinds of cores.
fn least_fast(capacities: &[u64]) -> u64 {
    let mut kinds = capacities.to_vec();
    kinds.sort_unstable();
    let step = |pair: &[u64]| pair[1] as f64 / pair[0] as f64;
    let steps = kinds.windows(2).filter(|pair| step(pair) >= CAPACITY_STEP);
    steps.max_by(|one, other| step(one).total_cmp(&step(other))).map_or(0, |pair| pair[1])
}

fn refused(cores: &str, reason: &str) -> CoresError {
    CoresError { cores: cores.to_owned(), reason: reason.to_owned() }
}

/// Tries to bind a thread, because those of the pool cannot report an error.
fn check_binding(cores: &[usize]) -> Result<(), CoresError> {
    let bound = thread::scope(|scope| scope.spawn(|| bind(cores)).join());
    let failed =
        |reason: String| refused(&listed(cores), &format!("threads cannot be bound to them: {reason}"));
    match bound {
        Ok(bound) => bound.map_err(|error| failed(error.to_string())),
        Err(_) => Err(failed("the thread ended".into())),
    }
}

/// Returns the cores that this process may use.
fn allowed_cores() -> Result<Vec<usize>, CoresError> {
    #[cfg(target_os = "linux")]
    return linux::bound_to().map_err(|error| refused("all", &error.to_string()));
    #[cfg(not(target_os = "linux"))]
    Err(refused("all", "this system does not bind threads to cores; leave the choice of cores out"))
}

/// Binds this thread to some cores.
fn bind(cores: &[usize]) -> io::Result<()> {
    #[cfg(target_os = "linux")]
    return linux::bind(cores);
    #[cfg(not(target_os = "linux"))]
    {
        let _ = cores;
        Err(io::ErrorKind::Unsupported.into())
    }
}

#[cfg(target_os = "linux")]
mod linux {
    use std::io;
    use std::mem::{size_of, zeroed};

    /// Returns the cores that this thread may run on.
    pub fn bound_to() -> io::Result<Vec<usize>> {
        // SAFETY: a set of cores is an array of integers, and all zeros is the empty set.
        let mut set: libc::cpu_set_t = unsafe { zeroed() };
        // SAFETY: the pointer is to a writable set of the length that is given; 0 is the calling thread.
        if unsafe { libc::sched_getaffinity(0, size_of::<libc::cpu_set_t>(), &mut set) } != 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: every core below the size of a set may be asked for.
        let has = |core: usize| unsafe { libc::CPU_ISSET(core, &set) };
        Ok((0..libc::CPU_SETSIZE as usize).filter(|&core| has(core)).collect())
    }

    pub fn bind(cores: &[usize]) -> io::Result<()> {
        // SAFETY: as above.
        let mut set: libc::cpu_set_t = unsafe { zeroed() };
        for &core in cores.iter().filter(|core| **core < libc::CPU_SETSIZE as usize) {
            // SAFETY: the core is below the size of a set.
            unsafe { libc::CPU_SET(core, &mut set) };
        }
        // SAFETY: the pointer is to a set of the length that is given; 0 is the calling thread.
        if unsafe { libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &set) } != 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A folder that describes cores: a file's content for every core.
    fn system(file: &str, contents: &[&str]) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        for (core, content) in contents.iter().enumerate() {
            let path = folder.path().join(format!("cpu{core}")).join(file);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, content).unwrap();
        }
        folder
    }

    #[test]
    fn choices_are_read_and_others_are_refused() {
        let read = |text: &str| text.parse::<Cores>();
        assert_eq!(read("all").unwrap(), Cores::All);
        assert_eq!(read(" performance").unwrap(), Cores::Performance);
        assert_eq!(read("6,0-3, 2").unwrap(), Cores::Exactly(vec![0, 1, 2, 3, 6]));
        for wrong in ["", "fast", "3-1", "1-", "-1", "0,,1", "0-99999999999"] {
            let error = read(wrong).unwrap_err().to_string();
            assert!(error.contains("0-3,6"), "{error}");
        }
        assert_eq!(listed(&[0, 1, 2, 3, 6, 8, 9]), "0-3,6,8-9");
    }

    #[test]
    fn fast_cores_are_those_above_the_largest_step_in_capacity() {
        let chosen = |file: &str, contents: &[&str]| {
            let folder = system(file, contents);
            let allowed: Vec<usize> = (0..contents.len()).collect();
            Cores::Performance.choose(folder.path(), &allowed).unwrap()
        };
        // One very fast core, fast ones and small ones; two kinds of which some may run faster; equal ones.
        let phone = ["350\n", "350\n", "800\n", "800\n", "1024\n"];
        assert_eq!(chosen("cpu_capacity", &phone), [2, 3, 4]);
        let laptop = ["5200000", "5200000", "5400000", "3900000", "3900000"];
        assert_eq!(chosen("cpufreq/cpuinfo_max_freq", &laptop), [0, 1, 2]);
        assert_eq!(chosen("cpu_capacity", &["1024"; 4]), [0, 1, 2, 3]);
    }

    #[test]
    fn cores_are_chosen_among_those_that_the_process_may_use() {
        let folder = system("cpu_capacity", &["1024", "1024", "400", "400"]);
        let choose = |cores: Cores, allowed: &[usize]| cores.choose(folder.path(), allowed);
        assert_eq!(choose(Cores::Performance, &[1, 2, 3]).unwrap(), [1]);
        assert_eq!(choose(Cores::Performance, &[2, 3]).unwrap(), [2, 3]);
        assert_eq!(choose(Cores::Exactly(vec![0, 3]), &[0, 1, 2, 3]).unwrap(), [0, 3]);
        let error = choose(Cores::Exactly(vec![0, 3]), &[0, 1]).unwrap_err().to_string();
        assert!(error.contains("cores 3") && error.contains("it may use 0-1"), "{error}");
        // Of a core that is not described nothing is known.
        let error = choose(Cores::Performance, &[0, 4]).unwrap_err().to_string();
        assert!(error.contains("does not tell"), "{error}");
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn threads_stay_on_their_cores() {
        let cores = allowed_cores().unwrap();
        let first = cores[..1].to_vec();
        check_binding(&first).unwrap();
        let bound = thread::spawn(move || {
            bind(&first).unwrap();
            linux::bound_to().unwrap()
        });
        assert_eq!(bound.join().unwrap(), cores[..1]);
        assert_eq!(linux::bound_to().unwrap(), cores, "the calling thread is unbound");
    }
}
