//! Residency of a model's mapped segments, and a thread that reads missing ones ahead.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;

use burn::tensor::Device;
use firebox_model::Decoder;
use firebox_store::{Checkpoint, SegmentId};

use crate::readahead;

/// Layers that are read ahead of the one that runs next.
const AHEAD: usize = 3;

/// The parts of a model that are mapped, and come from disk when they are touched: which are in memory, and who brings
/// them there before a layer waits for them.
#[derive(Debug)]
pub(crate) struct Segments {
    checkpoint: Checkpoint,
    /// In the order in which a pass needs them.
    parts: Vec<Part>,
    fetcher: Arc<Fetcher>,
}

#[derive(Debug)]
struct Part {
    id: SegmentId,
    /// The layer that it is needed for.
    layer: usize,
    /// Whether it was in memory when that was asked last, or has been brought there since.
    there: Arc<AtomicBool>,
}

impl Segments {
    /// Those of a model. One that streams its weights reads ahead by itself.
    pub fn of(checkpoint: &Checkpoint, decoder: &Decoder, fetcher: &Arc<Fetcher>) -> Self {
        // Elsewhere weights are copies, and nobody touches the files again.
        let mapped = decoder.streamed().is_none() && *decoder.device() == Device::flex();
        let touched = mapped.then(|| readahead::touched(checkpoint, decoder.config()));
        let touched = touched.into_iter().flatten();
        let parts = touched.map(|(layer, id)| Part { id, layer, there: Arc::default() }).collect();
        Self { checkpoint: checkpoint.clone(), parts, fetcher: fetcher.clone() }
    }

    /// Whether a layer can run without waiting for the disk. If not, it is being read from then on, and those behind it.
    pub fn are_there(&self, layer: usize) -> bool {
        let needed = self.parts.iter().filter(|part| part.layer == layer);
        // All of them are looked at, so that all of them are fetched.
        let missing = needed.filter(|part| !self.look(part)).count();
        let there = missing == 0;
        if !there {
            self.fetch_from(layer);
        }
        there
    }

    /// Has read what a layer and the next ones need.
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

    /// Asks again which parts are in memory: the system may have taken some back.
    pub fn doubt(&self) {
        for part in &self.parts {
            part.there.store(false, Ordering::Relaxed);
        }
    }

    fn look(&self, part: &Part) -> bool {
        if !part.there.load(Ordering::Relaxed) {
            // Where the system does not say, a layer waits for its pages by itself.
            part.there.store(self.checkpoint.is_resident(part.id).unwrap_or(true), Ordering::Relaxed);
        }
        part.there.load(Ordering::Relaxed)
    }
}

/// Reads segments into memory on a thread of its own, in the order in which they were asked for.
#[derive(Debug, Default)]
pub(crate) struct Fetcher {
    wanted: Mutex<LogitRows>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct LogitRows {
    queue: VecDeque<Fetch>,
    over: bool,
}

#[derive(Debug, Clone)]
struct Fetch {
    checkpoint: Checkpoint,
    id: SegmentId,
    /// Set once it was brought, even if the system has taken it back by then: who asked must get on.
    there: Arc<AtomicBool>,
}

impl Fetcher {
    /// Begins to read what is asked for, until it is [ended](Self::end).
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
            // Without a thread layers wait for their pages by themselves.
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
            // What cannot be read is told to whoever touches it.
            let _ = checkpoint.populate(id);
            there.store(true, Ordering::Relaxed);
            wanted = self.wanted();
            wanted.queue.pop_front();
        }
    }

    fn wanted(&self) -> MutexGuard<'_, LogitRows> {
        self.wanted.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
