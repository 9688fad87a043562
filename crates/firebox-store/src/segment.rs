//! Segments: the parts of a model that are loaded, evicted and swapped independently.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use crate::excerpt::Excerpt;

/// A part of a model. The order is that of a forward pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum SegmentId {
    /// Token (and position) embeddings.
    Embed,
    /// Tables of which a pass reads the rows of its tokens and no more.
    Rows,
    /// One transformer block.
    Layer(usize),
    /// The final norm and the unembedding; the pooler of an encoder; the classifier of a head without layers.
    Final,
    /// Tensors that text models do not use: vision towers, draft layers.
    Other,
}

/// More layers than any model has; a larger number in a tensor's name is not a layer.
const MAX_LAYERS: usize = 100_000;

/// Name components that mark tensors outside of the language model.
const NON_TEXT_PARTS: [&str; 6] =
    ["visual", "vision_tower", "vision_model", "audio_tower", "multi_modal_projector", "mtp"];

impl SegmentId {
    /// The segment of a tensor, from its Hugging Face name.
    pub fn from_tensor_name(name: &str) -> Self {
        let mut parts = name.split('.').peekable();
        let mut seen_embedding = false;
        let mut seen_final = false;
        while let Some(part) = parts.next() {
            if NON_TEXT_PARTS.contains(&part) {
                return Self::Other;
            }
            match part {
                "layers" | "layer" | "h" => {
                    if let Some(layer) = parts.peek().and_then(|next| next.parse().ok())
                        && layer < MAX_LAYERS
                    {
                        return Self::Layer(layer);
                    }
                }
                "embed_tokens_per_layer" => return Self::Rows,
                "embed_tokens" | "embeddings" | "emb_ln" | "wte" | "wpe" => seen_embedding = true,
                "per_layer_model_projection" | "per_layer_projection_norm" => seen_embedding = true,
                "lm_head" | "norm" | "norm_f" | "final_norm" | "ln_f" | "pooler" | "cls" | "head"
                | "classifier" | "score" | "bridge" => seen_final = true,
                _ => {}
            }
        }
        match (seen_embedding, seen_final) {
            (true, _) => Self::Embed,
            (false, true) => Self::Final,
            (false, false) => Self::Other,
        }
    }

    /// Returns whether the segment belongs to a trunk that ends before block `layers`.
    pub fn in_trunk(self, layers: usize) -> bool {
        match self {
            Self::Embed | Self::Rows => true,
            Self::Layer(layer) => layer < layers,
            Self::Final | Self::Other => false,
        }
    }
}

impl fmt::Display for SegmentId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Embed => f.pad("embed"),
            Self::Rows => f.pad("rows"),
            Self::Layer(layer) => f.pad(&format!("layer-{layer:04}")),
            Self::Final => f.pad("final"),
            Self::Other => f.pad("other"),
        }
    }
}

impl FromStr for SegmentId {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let id = match text {
            "embed" => Some(Self::Embed),
            "rows" => Some(Self::Rows),
            "final" => Some(Self::Final),
            "other" => Some(Self::Other),
            _ => text
                .strip_prefix("layer-")
                .and_then(|digits| digits.parse().ok())
                .filter(|layer| *layer < MAX_LAYERS)
                .map(Self::Layer),
        };
        // Only the spelling of `Display` is valid: two spellings of one segment would count as two segments.
        id.filter(|id| id.to_string() == text).ok_or_else(|| {
            format!("{:?} is not a segment; expected embed, rows, layer-0000…, final or other", Excerpt(text))
        })
    }
}

/// One segment of an open checkpoint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Segment {
    /// The segment's id.
    pub id: SegmentId,
    /// The files its tensors lie in.
    pub files: Vec<PathBuf>,
    /// The names of its tensors.
    pub tensors: Vec<String>,
    /// Bytes of its tensors, scales included.
    pub bytes: u64,
    /// blake3 of the segment file, as hexadecimal digits; known for bundles only.
    pub hash: Option<String>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tensor_names_map_to_segments() {
        for (name, segment) in [
            ("model.embed_tokens.weight", SegmentId::Embed),
            ("model.language_model.embed_tokens_per_layer.weight", SegmentId::Rows),
            ("model.per_layer_model_projection.weight", SegmentId::Embed),
            ("model.layers.0.per_layer_projection.weight", SegmentId::Layer(0)),
            ("model.layers.12.mlp.experts.3.up_proj.weight", SegmentId::Layer(12)),
            ("model.layers.0.input_layernorm.weight", SegmentId::Layer(0)),
            ("model.layers.3.self_attn.q_norm.weight", SegmentId::Layer(3)),
            ("model.language_model.layers.7.linear_attn.norm.weight", SegmentId::Layer(7)),
            ("encoder.layer.2.output.dense.bias", SegmentId::Layer(2)),
            ("embeddings.LayerNorm.weight", SegmentId::Embed),
            ("bert.embeddings.position_embeddings.weight", SegmentId::Embed),
            ("emb_ln.bias", SegmentId::Embed),
            ("final_norm.weight", SegmentId::Final),
            ("pooler.dense.weight", SegmentId::Final),
            ("model.norm.weight", SegmentId::Final),
            ("backbone.norm_f.weight", SegmentId::Final),
            ("lm_head.weight", SegmentId::Final),
            ("model.visual.blocks.0.norm1.weight", SegmentId::Other),
            ("vision_tower.vision_model.encoder.layers.3.mlp.fc1.weight", SegmentId::Other),
            ("mtp.layers.0.input_layernorm.weight", SegmentId::Other),
            ("model.layers.99999999999.norm.weight", SegmentId::Final),
            ("", SegmentId::Other),
        ] {
            assert_eq!(SegmentId::from_tensor_name(name), segment, "{name}");
        }
    }

    #[test]
    fn ids_print_and_parse_back() {
        for id in [
            SegmentId::Embed,
            SegmentId::Rows,
            SegmentId::Layer(3),
            SegmentId::Layer(12_345),
            SegmentId::Final,
            SegmentId::Other,
        ] {
            assert_eq!(id.to_string().parse(), Ok(id));
        }
        assert_eq!(SegmentId::Layer(3).to_string(), "layer-0003");
        for bad in ["layer-3", "layer-00003", "layer-+003", "layer-", "Embed", "../x"] {
            assert!(bad.parse::<SegmentId>().is_err(), "{bad}");
        }
        assert!(SegmentId::Embed < SegmentId::Layer(0) && SegmentId::Layer(9) < SegmentId::Final);
    }
}
