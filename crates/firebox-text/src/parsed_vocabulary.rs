//! A vocabulary and its special tokens, as its source and the model's other files describe them.

use crate::backend::Backend;
use crate::special_tokens::{SpecialTokens, spelled};
use crate::token_table::TokenTable;
use firebox_store::TextAssets;
use serde_json::Value;

/// Special tokens put around a text.
#[derive(Debug, Clone, Default)]
pub(crate) struct Frame {
    pub before: Vec<u32>,
    pub after: Vec<u32>,
}

/// A vocabulary as its source describes it, before the model's other files are considered.
pub(crate) struct Parsed {
    pub backend: Backend,
    pub pieces: TokenTable,
    pub frame: Option<Frame>,
    pub named: SpecialTokens,
    /// Ids that end a generation according to the vocabulary.
    pub ends: Vec<u32>,
}

impl Parsed {
    /// Fills in the roles that the vocabulary leaves open from the model's other files.
    ///
    /// `add_bos_token` and `add_eos_token` of `tokenizer_config.json` are ignored: `transformers` 5 does not read them if there is a
    /// `tokenizer.json`, whose post-processor defines the tokens around a text. GGUF vocabularies have flags of their own.
    pub fn complete(&mut self, assets: &TextAssets, config: &Value) {
        let lookup = |role: &str, id_key: &str, parsed: &Self| {
            let by_name = spelled(assets, role).and_then(|token| parsed.backend.token_to_id(&token));
            by_name.or_else(|| ids_at(config, id_key, parsed).first().copied())
        };
        let named = self.named;
        self.named.bos = named.bos.or_else(|| lookup("bos_token", "bos_token_id", self));
        self.named.eos = named.eos.or_else(|| lookup("eos_token", "eos_token_id", self));
        self.named.pad = named.pad.or_else(|| lookup("pad_token", "pad_token_id", self));
        self.named.unk = named.unk.or_else(|| lookup("unk_token", "unk_token_id", self));
    }

    /// Every id that ends a generation, ascending.
    pub fn end_ids(&self, assets: &TextAssets, config: &Value) -> Vec<u32> {
        let mut ends = self.ends.clone();
        ends.extend(self.named.eos);
        ends.extend(spelled(assets, "eos_token").and_then(|token| self.backend.token_to_id(&token)));
        if let Some(generation) = &assets.generation_config {
            ends.extend(ids_at(generation, "eos_token_id", self));
        }
        ends.extend(ids_at(config, "eos_token_id", self));
        ends.sort_unstable();
        ends.dedup();
        ends
    }
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
