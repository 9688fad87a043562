//! Prefetching of a model's memory-mapped segments.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;

use burn::tensor::Device;
use firebox_model::{Decoder, segments_by_layer};
use firebox_store::{Checkpoint, SegmentId};

/// Layers that are prefetched after the next one.
const AHEAD: usize = 3;

/// The memory-mapped segments of a model that are read on first access: which are resident, and the fetcher that loads
/// them before a layer waits for them.
#[derive(Debug)]
pub(crate) struct Prefetcher {
    checkpoint: Checkpoint,
    /// In the order in which a pass needs them.
    parts: Vec<Part>,
    fetcher: Arc<Fetcher>,
}

#[derive(Debug)]
struct Part {
    id: SegmentId,
    /// The layer that needs it.
    layer: usize,
    /// Whether it was resident when last checked, or has been loaded since.
    there: Arc<AtomicBool>,
}

impl Prefetcher {
    /// The segments of a model; none if the model streams its weights, which has a readahead of its own.
    pub fn of(checkpoint: &Checkpoint, decoder: &Decoder, fetcher: &Arc<Fetcher>) -> Self {
        // On other devices the weights are copies, and the files are not read again.
        let mapped = decoder.streamed().is_none() && *decoder.device() == Device::flex();
        let touched = mapped.then(|| segments_by_layer(checkpoint, decoder.config()));
        let touched = touched.into_iter().flatten();
        let parts = touched.map(|(layer, id)| Part { id, layer, there: Arc::default() }).collect();
        Self { checkpoint: checkpoint.clone(), parts, fetcher: fetcher.clone() }
    }

    /// Returns whether a layer can run without waiting for the disk. If not, starts to load it and those after it.
    pub fn are_there(&self, layer: usize) -> bool {
        let needed = self.parts.iter().filter(|part| part.layer == layer);
        // All parts are checked, so that all missing ones are fetched.
        let missing = needed.filter(|part| !self.look(part)).count();
        let there = missing == 0;
        if !there {
            self.fetch_from(layer);
        }
        there
    }

    /// Requests the missing segments of a layer and the next ones.
    pub fn fetch_from(&self, layer: usize) {
        for part in self.parts.iter().filter(|part| (layer..=layer + AHEAD).contains(&part.layer)) {
            if !part.there.load(Ordering::Relaxed) {
                self.fetcher.ask(Fetch {
                    checkpoint: self.checkpoint.clone(),
                    id: part.id,
                    there: part.there.clone(),
                });
            }
        }
    }

    /// Marks all parts as unknown, because the system may have evicted some.
    pub fn doubt(&self) {
        for part in &self.parts {
            part.there.store(false, Ordering::Relaxed);
        }
    }

    fn look(&self, part: &Part) -> bool {
        if !part.there.load(Ordering::Relaxed) {
            // If the system cannot tell, the layer waits for its page faults.
            part.there.store(self.checkpoint.is_resident(part.id).unwrap_or(true), Ordering::Relaxed);
        }
        part.there.load(Ordering::Relaxed)
    }
}

/// Loads segments on a thread of its own, in the order of the requests.
#[derive(Debug, Default)]
pub(crate) struct Fetcher {
    wanted: Mutex<FetchRequest>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct FetchRequest {
    queue: VecDeque<Fetch>,
    over: bool,
}

#[derive(Debug, Clone)]
struct Fetch {
    checkpoint: Checkpoint,
    id: SegmentId,
    /// Set once loaded, even if the system has evicted it again, so that the layer runs.
    there: Arc<AtomicBool>,
}

impl Fetcher {
    /// Starts the thread, which runs until [`end`](Self::end).
    pub fn start() -> Arc<Self> {
        let fetcher = Arc::new(Self::default());
        let reading = fetcher.clone();
        let thread = thread::Builder::new().name("firebox-fetch".into()).spawn(move || reading.read());
        if thread.is_err() {
            fetcher.end();
        }
        fetcher
    }

    fn ask(&self, fetch: Fetch) {
        let mut wanted = self.wanted();
        if wanted.over {
            // Without a thread, layers wait for their page faults.
            fetch.there.store(true, Ordering::Relaxed);
        } else if !wanted.queue.iter().any(|asked| Arc::ptr_eq(&asked.there, &fetch.there)) {
            wanted.queue.push_back(fetch);
            self.changed.notify_one();
        }
    }

    pub fn end(&self) {
        self.wanted().over = true;
        self.changed.notify_one();
    }

    fn read(&self) {
        let mut wanted = self.wanted();
        while !wanted.over {
            let Some(Fetch { checkpoint, id, there }) = wanted.queue.front().cloned() else {
                wanted = self.changed.wait(wanted).unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            drop(wanted);
            // The access that needs the segment reports a read error.
            let _ = checkpoint.populate(id);
            there.store(true, Ordering::Relaxed);
            wanted = self.wanted();
            wanted.queue.pop_front();
        }
    }

    fn wanted(&self) -> MutexGuard<'_, FetchRequest> {
        self.wanted.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
