//! Prefetching of a model's memory-mapped segments.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;

use burn::tensor::Device;
use firebox_model::{Decoder, segments_by_layer};
use firebox_store::{Checkpoint, SegmentId};

/// Layers that are prefetched after the next one.
const LAYERS_AHEAD: usize = 3;

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
    is_resident: Arc<AtomicBool>,
}

impl Prefetcher {
    /// The segments of a model; none if the model streams its weights, which has a readahead of its own.
    pub fn new(checkpoint: &Checkpoint, decoder: &Decoder, fetcher: &Arc<Fetcher>) -> Self {
        // On other devices the weights are copies, and the files are not read again.
        let mapped = decoder.streamed().is_none() && *decoder.device() == Device::flex();
        let segments = mapped.then(|| segments_by_layer(checkpoint, decoder.config()));
        let segments = segments.into_iter().flatten();
        let parts = segments.map(|(layer, id)| Part { id, layer, is_resident: Arc::default() }).collect();
        Self { checkpoint: checkpoint.clone(), parts, fetcher: fetcher.clone() }
    }

    /// Returns whether a layer can run without waiting for the disk. If not, starts to load it and those after it.
    pub fn is_resident(&self, layer: usize) -> bool {
        let needed = self.parts.iter().filter(|part| part.layer == layer);
        // All parts are checked, so that all missing ones are fetched.
        let missing = needed.filter(|part| !self.check(part)).count();
        if missing > 0 {
            self.prefetch_from(layer);
        }
        missing == 0
    }

    /// Requests the missing segments of a layer and the next ones.
    pub fn prefetch_from(&self, layer: usize) {
        for part in self.parts.iter().filter(|part| (layer..=layer + LAYERS_AHEAD).contains(&part.layer)) {
            if !part.is_resident.load(Ordering::Relaxed) {
                self.fetcher.request(Fetch {
                    checkpoint: self.checkpoint.clone(),
                    id: part.id,
                    is_resident: part.is_resident.clone(),
                });
            }
        }
    }

    /// Marks all parts as unknown, because the system may have evicted some.
    pub fn forget_residency(&self) {
        for part in &self.parts {
            part.is_resident.store(false, Ordering::Relaxed);
        }
    }

    fn check(&self, part: &Part) -> bool {
        if !part.is_resident.load(Ordering::Relaxed) {
            // If the system cannot tell, the layer waits for its page faults.
            part.is_resident.store(self.checkpoint.is_resident(part.id).unwrap_or(true), Ordering::Relaxed);
        }
        part.is_resident.load(Ordering::Relaxed)
    }
}

/// Loads segments on a thread of its own, in the order of the requests.
#[derive(Debug, Default)]
pub(crate) struct Fetcher {
    requests: Mutex<FetchQueue>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct FetchQueue {
    queue: VecDeque<Fetch>,
    is_ended: bool,
}

#[derive(Debug, Clone)]
struct Fetch {
    checkpoint: Checkpoint,
    id: SegmentId,
    /// Set once loaded, even if the system has evicted it again, so that the layer runs.
    is_resident: Arc<AtomicBool>,
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

    fn request(&self, fetch: Fetch) {
        let mut requests = self.lock_requests();
        if requests.is_ended {
            // Without a thread, layers wait for their page faults.
            fetch.is_resident.store(true, Ordering::Relaxed);
        } else if !requests.queue.iter().any(|queued| Arc::ptr_eq(&queued.is_resident, &fetch.is_resident)) {
            requests.queue.push_back(fetch);
            self.changed.notify_one();
        }
    }

    pub fn end(&self) {
        self.lock_requests().is_ended = true;
        self.changed.notify_one();
    }

    fn read(&self) {
        let mut requests = self.lock_requests();
        while !requests.is_ended {
            let Some(Fetch { checkpoint, id, is_resident }) = requests.queue.front().cloned() else {
                requests = self.changed.wait(requests).unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            drop(requests);
            // The access that needs the segment reports a read error.
            let _ = checkpoint.populate(id);
            is_resident.store(true, Ordering::Relaxed);
            requests = self.lock_requests();
            requests.queue.pop_front();
        }
    }

    fn lock_requests(&self) -> MutexGuard<'_, FetchQueue> {
        self.requests.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
