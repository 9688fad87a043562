//! Assigns cores to models.

use std::fmt;
use std::io;
use std::sync::Arc;

use rayon::{ThreadPool, ThreadPoolBuilder};

use crate::RuntimeError;

/// How models share the cores.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum CpuPolicy {
    /// All models have all cores, and the operating system schedules threads.
    #[default]
    Off,
    /// Small models have cores of their own, and large models the others.
    Split {
        /// The number of cores for small models. At least one is left for large models.
        small: usize,
    },
}

/// A share of the cores.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Cores {
    /// The cores of small models.
    Small,
    /// The cores of large models.
    Large,
}

/// Thread pools that a policy binds to cores. Clones share the threads.
///
/// Inside [`run`](Self::run), a model computes only on the threads of its cores. On other devices nothing changes.
///
/// ```
/// use firebox_runtime::placement::{Cores, CpuPolicy, Placed};
///
/// let placed = Placed::new(CpuPolicy::Off)?;
/// assert_eq!(placed.run(Cores::Small, || 2 + 2), 4);
/// # Ok::<(), firebox_runtime::RuntimeError>(())
/// ```
#[derive(Clone, Default)]
pub struct Placed(Option<Arc<Split>>);

struct Split {
    small: ThreadPool,
    large: ThreadPool,
}

impl Placed {
    /// Starts the threads of a policy. If the system does not allow binding threads to cores, they run unbound.
    pub fn new(policy: CpuPolicy) -> Result<Self, RuntimeError> {
        let CpuPolicy::Split { small } = policy else { return Ok(Self(None)) };
        let cores = allowed_cores();
        if small == 0 || small >= cores.len() {
            return Err(RuntimeError::Cores { wanted: small, cores: cores.len() });
        }
        let (few, others) = cores.split_at(small);
        Ok(Self(Some(Arc::new(Split { small: pool("small", few)?, large: pool("large", others)? }))))
    }

    /// Runs a function on a share of the cores.
    pub fn run<R: Send>(&self, cores: Cores, work: impl FnOnce() -> R + Send) -> R {
        match (&self.0, cores) {
            (None, _) => work(),
            (Some(split), Cores::Small) => split.small.install(work),
            (Some(split), Cores::Large) => split.large.install(work),
        }
    }
}

impl fmt::Debug for Placed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let threads =
            self.0.as_ref().map(|split| [&split.small, &split.large].map(ThreadPool::current_num_threads));
        f.debug_struct("Placed").field("threads", &threads).finish()
    }
}

fn pool(name: &'static str, cores: &[usize]) -> Result<ThreadPool, RuntimeError> {
    let bound: Vec<usize> = cores.to_vec();
    let pool = ThreadPoolBuilder::new()
        .num_threads(cores.len())
        .thread_name(move |thread| format!("{name} {thread}"))
        // A thread that cannot be bound computes as well.
        .start_handler(move |_| drop(bind(&bound)))
        .build();
    pool.map_err(|error| RuntimeError::Threads { reason: error.to_string() })
}

/// Returns the cores that this process may use.
fn allowed_cores() -> Vec<usize> {
    #[cfg(target_os = "linux")]
    if let Ok(cores) = linux::bound_to()
        && !cores.is_empty()
    {
        return cores;
    }
    (0..std::thread::available_parallelism().map_or(1, usize::from)).collect()
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
    use std::path::Path;

    use super::*;
    use crate::{GenerationConfig, Model, device};

    fn tokens(model: &Model, placed: &Placed, cores: Cores) -> Vec<u32> {
        placed.run(cores, || {
            let mut session = model.session().unwrap();
            let config = GenerationConfig { max_tokens: Some(12), ignore_end: true, ..Default::default() };
            let mut generation = crate::Generation::begin(&mut session, None, &[5, 6, 7], config).unwrap();
            while generation.next_piece().unwrap().is_some() {}
            generation.finish().unwrap().tokens
        })
    }

    #[test]
    fn models_say_the_same_wherever_they_compute() {
        let cores = allowed_cores().len();
        if cores < 2 {
            return;
        }
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/reference/llama");
        let model = Model::open(root, &device("cpu").unwrap()).unwrap();
        let off = Placed::new(CpuPolicy::Off).unwrap();
        let split = Placed::new(CpuPolicy::Split { small: 1 }).unwrap();
        let expected = tokens(&model, &off, Cores::Small);
        assert_eq!(tokens(&model, &split, Cores::Small), expected);
        assert_eq!(tokens(&model, &split, Cores::Large), expected);
        assert_eq!(split.run(Cores::Small, rayon::current_num_threads), 1);
        assert_eq!(split.run(Cores::Large, rayon::current_num_threads), cores - 1);
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn threads_stay_on_their_cores() {
        let cores = allowed_cores();
        if cores.len() < 2 {
            return;
        }
        let split = Placed::new(CpuPolicy::Split { small: 1 }).unwrap();
        let on = |which| split.run(which, || linux::bound_to().unwrap());
        assert_eq!(on(Cores::Small), cores[..1]);
        assert_eq!(on(Cores::Large), cores[1..]);
        assert_eq!(linux::bound_to().unwrap(), cores, "the calling thread is unbound");
    }

    #[test]
    fn both_have_a_core() {
        let cores = allowed_cores().len();
        for small in [0, cores, cores + 1] {
            let refused = Placed::new(CpuPolicy::Split { small }).unwrap_err();
            assert!(refused.to_string().contains(&format!("of {cores}")), "{refused}");
        }
    }
}
