//! Identifies what cached keys and values depend on.

use firebox_cache::KvType;
use firebox_model::Decoder;
use firebox_store::TensorFile;

use super::{FORMAT, VERSION, words};
use crate::{Model, RuntimeError};

/// The metadata field of the head that computed the layers behind the split.
pub(super) const HEAD: &str = "head generation";

/// The fields that keys and values depend on beside the tokens. A file can be used only where all of them are equal.
#[derive(Debug)]
pub(crate) struct KvKey(pub(super) [(&'static str, String); 4]);

impl KvKey {
    pub fn new(model: &Model, decoder: &Decoder, kv_type: KvType, head: &str) -> Result<Self, RuntimeError> {
        let format = match kv_type {
            KvType::F32 => "f32",
            KvType::F16 => "f16",
            KvType::Int8 => "int8",
        };
        let mut trunk = model.checkpoint().fingerprint(decoder.layers())?;
        for change in decoder.changes() {
            trunk = format!("{trunk}, with {change}");
        }
        Ok(Self([
            // States are cached at the split, so a file depends on where that is.
            ("trunk", decoder.split().map_or(trunk.clone(), |split| format!("{trunk}, heads from {split}"))),
            (HEAD, head.into()),
            // Adapters are heads.
            ("adapter", "none".into()),
            ("kv format", format.into()),
        ]))
    }

    /// Returns a name for the keys and values of some tokens that no others have.
    pub fn of_tokens(&self, tokens: &[u32]) -> String {
        let mut hasher = blake3::Hasher::new();
        hasher.update(format!("{FORMAT} {VERSION}").as_bytes());
        for (field, value) in &self.0 {
            hasher.update(format!("\n{field} {value}").as_bytes());
        }
        hasher.update(b"\n");
        hasher.update(&words(tokens));
        hasher.finalize().to_hex().to_string()
    }

    /// Refuses a file whose fields differ. With `any_head` its head may differ.
    pub(super) fn check(&self, file: &TensorFile, any_head: bool) -> Result<(), RuntimeError> {
        for (field, expected) in self.0.iter().filter(|(field, _)| !(any_head && *field == HEAD)) {
            let found = file.text(field)?;
            if found != expected {
                return Err(RuntimeError::Foreign {
                    path: file.path().to_owned(),
                    field,
                    found: found.to_owned(),
                    expected: expected.clone(),
                });
            }
        }
        Ok(())
    }
}
