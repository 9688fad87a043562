//! Which layers attend to a window of the last tokens rather than to all of them.

use serde_json::{Value, json};

use super::config::{Keys, layers};
use super::metadata::{List, Value as Metadatum};
use crate::error::Fault;

const SLIDING: &str = "sliding_attention";
const FULL: &str = "full_attention";
const PATTERN: &str = "attention.sliding_window_pattern";

/// The tokens in a window, or None if no layer has one.
pub(super) fn sliding_window(keys: &Keys<'_>) -> Result<Option<u64>, Fault> {
    // Zero is how converters write that there is none.
    Ok(keys.number("attention.sliding_window")?.filter(|window| *window > 0))
}

/// The kind of each layer by the pattern in the metadata: a truth value for each, or a number of which every
/// multiple attends to everything. `interval` is that number where there is no pattern.
fn pattern(keys: &Keys<'_>, windowed: bool, interval: Option<u64>) -> Result<Vec<&'static str>, Fault> {
    let layers = layers(keys.metadata, keys.architecture)?;
    let name = |sliding: bool| if sliding { SLIDING } else { FULL };
    let key = keys.key(PATTERN);
    let interval = match keys.metadata.get(&key) {
        Some(Metadatum::List(List::Bools(pattern))) => {
            let Some(pattern) = pattern.get(..layers) else {
                return Err(Fault::new(key, format!("{} entries for {layers} layers", pattern.len())));
            };
            return Ok(pattern.iter().map(|sliding| name(*sliding)).collect());
        }
        _ => keys.number(PATTERN)?.or(interval),
    };
    match interval {
        Some(0) => Err(Fault::new(key, "0; expected 1 or more")),
        Some(interval) => {
            let slides = |layer: u64| windowed && !layer.is_multiple_of(interval);
            Ok((1..=layers as u64).map(|layer| name(slides(layer))).collect())
        }
        None => Ok(vec![name(windowed); layers]),
    }
}

/// Every sixth layer of Gemma 3 attends to everything, where the metadata does not say otherwise.
const GEMMA3_PATTERN: u64 = 6;

/// What Gemma 3's configuration says of windows.
pub(super) fn gemma3(keys: &Keys<'_>) -> Result<Value, Fault> {
    let window = sliding_window(keys)?;
    let types = pattern(keys, window.is_some(), Some(GEMMA3_PATTERN))?;
    Ok(json!({"sliding_window": window, "layer_types": types}))
}

/// What the configuration of Qwen 2 and 3 says of windows.
pub(super) fn qwen(keys: &Keys<'_>) -> Result<Value, Fault> {
    let window = sliding_window(keys)?;
    let types = match window {
        Some(_) => pattern(keys, true, None)?,
        // A pattern without a window to apply says nothing.
        None => vec![FULL; layers(keys.metadata, keys.architecture)?],
    };
    Ok(json!({"use_sliding_window": window.is_some(), "sliding_window": window, "layer_types": types}))
}

/// What the configuration of Qwen 3 with experts says of windows: all layers have one or none has.
pub(super) fn qwen3_moe(keys: &Keys<'_>) -> Result<Value, Fault> {
    let mut window = sliding_window(keys)?;
    if window.is_some() {
        let types = pattern(keys, true, None)?;
        let sliding = types.iter().filter(|kind| **kind == SLIDING).count();
        if sliding == 0 {
            window = None;
        } else if sliding < types.len() {
            return Err(Fault::unsupported(
                keys.key(PATTERN),
                format!("a window on {sliding} of {} layers; in this architecture all have one", types.len()),
            ));
        }
    }
    Ok(json!({"use_sliding_window": window.is_some(), "sliding_window": window}))
}
