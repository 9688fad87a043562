//! Special tokens by role: their ids, and their spellings in a model's files.

use firebox_store::TextAssets;

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
