//! Reads memory-mapped weights ahead of the passes that need them.

use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

use firebox_model::config::FeedForwardConfig;
use firebox_model::{Architecture, segments_by_layer};
use firebox_store::{Checkpoint, SegmentId};

use crate::pressure;

/// Threads that read: a single one rarely keeps a disk busy.
const READERS: usize = 2;

/// Starts to read all weights of a decoder that is about to be opened, while its tokenizer is built and its first
/// layers run. Skips mixtures of experts, of which few experts may ever be active, and models larger than half of the
/// available memory.
pub(crate) fn read_all_of(checkpoint: &Checkpoint) {
    // Building the model reports a faulty configuration.
    let Ok(Architecture::Decoder(config)) = Architecture::from_json(checkpoint.config()) else { return };
    let is_mixture = |feed_forward: &_| matches!(feed_forward, FeedForwardConfig::MixtureOfExperts(_));
    if config.blocks.iter().any(|block| is_mixture(&block.feed_forward)) {
        return;
    }
    let segments = checkpoint.segments().into_iter().filter(|segment| segment.id != SegmentId::Rows);
    let all: u64 = segments.map(|segment| segment.bytes).sum();
    let spare = pressure::read_all(&mut pressure::system()).and_then(|pressure| pressure.available);
    if spare.is_none_or(|spare| all > spare / 2) {
        return;
    }
    let segments = Arc::new(Mutex::new(segments_by_layer(checkpoint, &config).into_iter()));
    for _ in 0..READERS {
        let (segments, checkpoint) = (segments.clone(), checkpoint.clone());
        let next = move || segments.lock().unwrap_or_else(PoisonError::into_inner).next();
        let read = move || {
            while let Some((_, segment)) = next() {
                // The access that needs the segment reports a read error.
                let _ = checkpoint.populate(segment);
            }
        };
        // Without a thread, pages are read on first access.
        drop(thread::Builder::new().name("firebox-read".into()).spawn(read));
    }
}
