//! Sliding windows: which layers attend only to the latest tokens.

use serde_json::{Value, json};

use super::keys::Keys;
use super::metadata::{List, Value as Metadatum};
use crate::error::Fault;

pub(super) const SLIDING: &str = "sliding_attention";
const FULL: &str = "full_attention";
const PATTERN: &str = "attention.sliding_window_pattern";

/// The window's size in tokens, or `None` if no layer has one.
pub(super) fn sliding_window(keys: &Keys<'_>) -> Result<Option<u64>, Fault> {
    // Converters write zero for "no window".
    Ok(keys.number("attention.sliding_window")?.filter(|window| *window > 0))
}

/// The attention kind of each layer from the pattern in the metadata: a flag per layer, or a number of which every multiple
/// has full attention. `interval` is that number if there is no pattern.
fn pattern(keys: &Keys<'_>, windowed: bool, interval: Option<u64>) -> Result<Vec<&'static str>, Fault> {
    let layers = keys.layers()?;
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

/// Every sixth layer of Gemma 3 has full attention, unless the metadata says otherwise.
const GEMMA3_PATTERN: u64 = 6;

/// The window entries of Gemma 3's configuration.
pub(super) fn gemma3(keys: &Keys<'_>) -> Result<Value, Fault> {
    let window = sliding_window(keys)?;
    let types = pattern(keys, window.is_some(), Some(GEMMA3_PATTERN))?;
    Ok(json!({"sliding_window": window, "layer_types": types}))
}

/// The window entries of Gemma 4's configuration, whose files tell the kind of each layer.
pub(super) fn gemma4(keys: &Keys<'_>) -> Result<Value, Fault> {
    let window = keys.dimension("attention.sliding_window")?;
    Ok(json!({"sliding_window": window, "layer_types": pattern(keys, true, None)?}))
}

/// Every third layer of ModernBERT has full attention, from the first on, unless the metadata says otherwise.
const MODERN_BERT_PATTERN: u64 = 3;

/// The window entries of ModernBERT's configuration.
pub(super) fn modern_bert(keys: &Keys<'_>) -> Result<Value, Fault> {
    let types = match keys.metadata.get(&keys.key(PATTERN)) {
        Some(Metadatum::List(_)) => pattern(keys, true, None)?,
        _ => {
            let interval = keys.number(PATTERN)?.unwrap_or(MODERN_BERT_PATTERN).max(1);
            let kind = |layer: u64| if layer.is_multiple_of(interval) { FULL } else { SLIDING };
            (0..keys.layers()? as u64).map(kind).collect()
        }
    };
    Ok(json!({"local_attention": keys.dimension("attention.sliding_window")?, "layer_types": types}))
}

/// The window entries of a family of which every `interval`-th layer has full attention, unless the metadata says
/// otherwise.
pub(super) fn alternating(keys: &Keys<'_>, interval: u64) -> Result<Value, Fault> {
    let window = sliding_window(keys)?;
    let types = match window {
        Some(_) => pattern(keys, true, Some(interval))?,
        None => vec![FULL; keys.layers()?],
    };
    Ok(json!({"sliding_window": window, "layer_types": types}))
}

/// The window entries of Qwen 2's and Qwen 3's configuration.
pub(super) fn qwen(keys: &Keys<'_>) -> Result<Value, Fault> {
    let window = sliding_window(keys)?;
    let types = match window {
        Some(_) => pattern(keys, true, None)?,
        // A pattern without a window has no effect.
        None => vec![FULL; keys.layers()?],
    };
    Ok(json!({"use_sliding_window": window.is_some(), "sliding_window": window, "layer_types": types}))
}

/// The window entries of the configuration of Qwen 3 with experts: either all layers have a window or none has.
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
