//! The mapped weights that a pass touches, and having them come from the disk before it does.

use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

use firebox_model::config::FeedForwardConfig;
use firebox_model::{Architecture, DecoderConfig};
use firebox_store::{Checkpoint, SegmentId};

use crate::pressure;

/// Threads that read: a disk is rarely busy with what one of them waits for.
const READERS: usize = 2;

/// The segments that a pass reads whole, each with the layer that it is needed for, in that order.
pub(crate) fn touched(checkpoint: &Checkpoint, config: &DecoderConfig) -> Vec<(usize, SegmentId)> {
    let last = config.blocks.len().saturating_sub(1);
    let unembedding = if config.tied_embeddings { SegmentId::Embed } else { SegmentId::Final };
    let segments = checkpoint.segments().into_iter().filter_map(|segment| match segment.id {
        SegmentId::Layer(layer) => Some((layer, segment.id)),
        id if id == unembedding => Some((last, id)),
        // Of an embedding a few rows are touched.
        _ => None,
    });
    let mut segments: Vec<_> = segments.collect();
    segments.sort_by_key(|(layer, _)| *layer);
    segments
}

/// Reads all of a decoder that is about to be opened, and does not wait for it: the disk reads while its tokenizer is made and its
/// first layers run. Not a mixture, of which few experts may ever be chosen, nor what is more than half of the memory to spare.
pub(crate) fn read_all_of(checkpoint: &Checkpoint) {
    // Any fault of the configuration is told by whoever builds the model.
    let Ok(Architecture::Decoder(config)) = Architecture::from_json(checkpoint.config()) else { return };
    let is_mixture = |feed_forward: &_| matches!(feed_forward, FeedForwardConfig::MixtureOfExperts(_));
    if config.blocks.iter().any(|block| is_mixture(&block.feed_forward)) {
        return;
    }
    let all: u64 = checkpoint.segments().iter().map(|segment| segment.bytes).sum();
    let spare = pressure::read_all(&mut pressure::system()).and_then(|pressure| pressure.available);
    if spare.is_none_or(|spare| all > spare / 2) {
        return;
    }
    let segments = Arc::new(Mutex::new(touched(checkpoint, &config).into_iter()));
    for _ in 0..READERS {
        let (segments, checkpoint) = (segments.clone(), checkpoint.clone());
        let next = move || segments.lock().unwrap_or_else(PoisonError::into_inner).next();
        let read = move || {
            while let Some((_, segment)) = next() {
                // What cannot be read is told to whoever touches it.
                let _ = checkpoint.populate(segment);
            }
        };
        // Without a thread, pages come when they are touched.
        drop(thread::Builder::new().name("firebox-read".into()).spawn(read));
    }
}
