//! Special token ids by role, collected from all files of a model.

use crate::tokenizer::Parsed;
use firebox_store::TextAssets;
use serde_json::Value;

/// Special tokens known by role.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct SpecialTokens {
    pub bos: Option<u32>,
    pub eos: Option<u32>,
    pub unk: Option<u32>,
    pub pad: Option<u32>,
}

/// The spelling of a role such as `eos_token` in `tokenizer_config.json`, or else in `special_tokens_map.json`.
pub(crate) fn spelled(assets: &TextAssets, role: &str) -> Option<String> {
    let files = [&assets.tokenizer_config, &assets.special_tokens_map];
    files.into_iter().flatten().find_map(|file| {
        let token = file.get(role)?;
        // Either the text itself or a description of an added token.
        token.as_str().or_else(|| token.get("content")?.as_str()).map(str::to_owned)
    })
}

/// Fills in the roles that the vocabulary leaves open from the model's other files.
///
/// `add_bos_token` and `add_eos_token` of `tokenizer_config.json` are ignored: `transformers` 5 does not read them if there is a
/// `tokenizer.json`, whose post-processor defines the tokens around a text. GGUF vocabularies have flags of their own.
pub(crate) fn complete(parsed: &mut Parsed, assets: &TextAssets, config: &Value) {
    let lookup = |role: &str, id_key: &str, parsed: &Parsed| {
        let by_name = spelled(assets, role).and_then(|token| parsed.backend.token_to_id(&token));
        by_name.or_else(|| ids_at(config, id_key, parsed).first().copied())
    };
    let named = parsed.named;
    parsed.named.bos = named.bos.or_else(|| lookup("bos_token", "bos_token_id", parsed));
    parsed.named.eos = named.eos.or_else(|| lookup("eos_token", "eos_token_id", parsed));
    parsed.named.pad = named.pad.or_else(|| lookup("pad_token", "pad_token_id", parsed));
    parsed.named.unk = named.unk.or_else(|| lookup("unk_token", "unk_token_id", parsed));
}

/// Every id that ends a generation, ascending.
pub(crate) fn ends(parsed: &Parsed, assets: &TextAssets, config: &Value) -> Vec<u32> {
    let mut ends = parsed.ends.clone();
    ends.extend(parsed.named.eos);
    ends.extend(spelled(assets, "eos_token").and_then(|token| parsed.backend.token_to_id(&token)));
    if let Some(generation) = &assets.generation_config {
        ends.extend(ids_at(generation, "eos_token_id", parsed));
    }
    ends.extend(ids_at(config, "eos_token_id", parsed));
    ends.sort_unstable();
    ends.dedup();
    ends
}

/// The ids under a key that holds one number or a list of them, at the top level or in the `text_config` of a multimodal model.
/// Values outside the vocabulary (such as -1 for 'none') are skipped.
fn ids_at(file: &Value, key: &str, parsed: &Parsed) -> Vec<u32> {
    let places = [file.get(key), file.get("text_config").and_then(|text| text.get(key))];
    let Some(found) = places.into_iter().flatten().find(|value| !value.is_null()) else { return Vec::new() };
    let one = std::slice::from_ref(found);
    let values = found.as_array().map_or(one, Vec::as_slice);
    let ids = values.iter().filter_map(Value::as_u64).filter_map(|id| u32::try_from(id).ok());
    ids.filter(|&id| parsed.pieces.contains(id)).collect()
}
