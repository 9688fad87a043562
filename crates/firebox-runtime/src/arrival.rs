//! The mapped weights that a pass touches, and having them come from the disk before it does.

use std::thread;

use firebox_model::config::FeedForwardConfig;
use firebox_model::{Architecture, DecoderConfig};
use firebox_store::{Checkpoint, SegmentId};

use crate::pressure;

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

/// Asks for all of a decoder that is about to be opened, without waiting for it: the disk reads while its tokenizer is made and
/// its first layers run. Not for a mixture, of which few experts may ever be chosen, nor for what is more than half of the
/// memory to spare.
pub(crate) fn ask_for_all(checkpoint: &Checkpoint) {
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
    let (segments, checkpoint) = (touched(checkpoint, &config), checkpoint.clone());
    let ask = move || {
        for (_, segment) in segments {
            // What cannot be read is told to whoever touches it.
            let _ = checkpoint.prefetch(segment);
        }
    };
    // On a thread of its own, since a disk that has much to do makes waiting of asking. Without one, pages come when they
    // are touched.
    drop(thread::Builder::new().name("firebox-ask".into()).spawn(ask));
}
