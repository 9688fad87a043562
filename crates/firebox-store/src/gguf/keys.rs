//! Metadata keys of one architecture.

use super::metadata::Metadata;
use crate::error::Fault;

/// Reads metadata keys of one architecture.
pub(super) struct Keys<'a> {
    pub(super) metadata: &'a Metadata,
    pub(super) architecture: &'a str,
}

impl Keys<'_> {
    pub(super) fn key(&self, name: &str) -> String {
        format!("{}.{name}", self.architecture)
    }

    pub(super) fn number(&self, name: &str) -> Result<Option<u64>, Fault> {
        self.metadata.uniform(&self.key(name))
    }

    /// A required number that is not zero: it is a dimension or a divisor.
    pub(super) fn dimension(&self, name: &str) -> Result<u64, Fault> {
        match self.number(name)? {
            Some(0) => Err(Fault::new(self.key(name), "0; expected 1 or more")),
            Some(value) if value > MAX_DIMENSION => {
                Err(Fault::new(self.key(name), format!("{value}; more than {MAX_DIMENSION} is not a model")))
            }
            Some(value) => Ok(value),
            None => Err(Fault::new(self.key(name), "missing")),
        }
    }

    pub(super) fn float(&self, name: &str) -> Result<Option<f64>, Fault> {
        Ok(self.metadata.float(&self.key(name))?.map(tidy))
    }

    pub(super) fn text(&self, name: &str) -> Result<Option<&str>, Fault> {
        self.metadata.text(&self.key(name))
    }

    /// The number of ordinary blocks, without those that draft further tokens.
    pub(super) fn layers(&self) -> Result<usize, Fault> {
        let blocks = self.dimension("block_count")?;
        let drafts = self.number("nextn_predict_layers")?.unwrap_or(0);
        blocks
            .checked_sub(drafts)
            .filter(|layers| (1..=MAX_LAYERS).contains(layers))
            .and_then(|layers| usize::try_from(layers).ok())
            .ok_or_else(|| {
                Fault::new(self.key("block_count"), format!("{blocks} blocks, {drafts} of them drafting"))
            })
    }

    /// The number of each layer, of which the file has a list, or one for all.
    pub(super) fn each_layer(&self, name: &str) -> Result<Vec<u64>, Fault> {
        let layers = self.layers()?;
        let key = self.key(name);
        let Some(numbers) = self.metadata.each(&key)? else { return Ok(vec![self.dimension(name)?; layers]) };
        // Blocks that draft come last.
        let Some(numbers) = numbers.get(..layers) else {
            return Err(Fault::new(key, format!("{} entries for {layers} layers", numbers.len())));
        };
        Ok(numbers.iter().map(|number| u64::try_from(*number).unwrap_or(u64::MAX)).collect())
    }

    pub(super) fn require_rms_norm(&self) -> Result<(), Fault> {
        let name = "attention.layer_norm_rms_epsilon";
        self.float(name)?.map(drop).ok_or_else(|| Fault::new(self.key(name), "missing"))
    }

    pub(super) fn layer_norm_epsilon(&self) -> Result<f64, Fault> {
        let name = "attention.layer_norm_epsilon";
        self.float(name)?.ok_or_else(|| Fault::new(self.key(name), "missing"))
    }

    pub(super) fn no_experts(&self) -> Result<(), Fault> {
        let name = "expert_count";
        match self.number(name)? {
            None | Some(0) => Ok(()),
            Some(count) => {
                Err(Fault::unsupported(self.key(name), format!("{count} experts in this architecture")))
            }
        }
    }

    /// The width of an attention head.
    pub(super) fn head_dim(&self) -> Result<u64, Fault> {
        if self.number("attention.key_length")?.is_some() {
            let length = self.dimension("attention.key_length")?;
            let value_length = self.number("attention.value_length")?.unwrap_or(length);
            if length != value_length {
                return Err(Fault::unsupported(
                    self.key("attention.key_length"),
                    format!("{length} for keys and {value_length} for values"),
                ));
            }
            return Ok(length);
        }
        let (hidden, heads) = (self.dimension("embedding_length")?, self.dimension("attention.head_count")?);
        if !hidden.is_multiple_of(heads) {
            return Err(Fault::new(
                self.key("attention.head_count"),
                format!("{heads} heads do not divide {hidden} and there is no attention.key_length"),
            ));
        }
        Ok(hidden / heads)
    }
}

/// The largest dimension. Larger ones are refused, because per-layer lists are sized by some of them.
pub(super) const MAX_DIMENSION: u64 = 1 << 32;
const MAX_LAYERS: u64 = 100_000;

/// The shortest decimal of the same f32, as in the original configuration: 1e-6 rather than 9.999999974752427e-7.
pub(super) fn tidy(value: f64) -> f64 {
    let narrow = value as f32;
    if f64::from(narrow) != value {
        return value;
    }
    narrow.to_string().parse().unwrap_or(value)
}
