//! Translation of GGUF's tensor names to Hugging Face's, and back.

use super::family::Family;
use crate::segment::SegmentId;

/// The translation of one tensor of a GGUF file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Role {
    /// A tensor under this name.
    Tensor(String),
    /// The stacked weights of all experts of a layer. Names begin with `prefix` and end with a projection; each expert has
    /// all of them, one after the other.
    Experts { prefix: String, projections: &'static [&'static str] },
    /// The stacked biases of a projection of all experts of a layer.
    ExpertBiases { prefix: String, projection: &'static str },
    /// Frequency factors of rotary positions, which become part of the configuration.
    RopeFactors(RopeFactors),
    /// A tensor of old converters that can be computed, and is ignored.
    Redundant,
}

/// A kind of frequency factors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RopeFactors {
    All,
    Long,
    Short,
}

/// The role of a tensor. `layers` is the number of ordinary blocks; blocks beyond it predict further tokens.
///
/// Unknown names are kept in a form that cannot collide with tensors of the model.
pub(crate) fn role(family: Family, layers: usize, name: &str) -> Role {
    match name {
        "rope_freqs.weight" => return Role::RopeFactors(RopeFactors::All),
        "rope_factors_long.weight" => return Role::RopeFactors(RopeFactors::Long),
        "rope_factors_short.weight" => return Role::RopeFactors(RopeFactors::Short),
        _ => {}
    }
    let known = match name.strip_prefix("blk.") {
        Some(rest) => rest.split_once('.').and_then(|(layer, rest)| {
            let layer: usize = layer.parse().ok()?;
            block(family, layers, layer, rest)
        }),
        None => whole(family, name).map(Role::Tensor),
    };
    known.unwrap_or_else(|| Role::Tensor(name.to_owned()))
}

/// Translates a tensor outside of blocks.
fn whole(family: Family, name: &str) -> Option<String> {
    let (stem, suffix) = name.rsplit_once('.')?;
    let stem = match (family, stem) {
        (Family::Bert, "token_embd") => "embeddings.word_embeddings",
        (Family::Bert, "token_types") => "embeddings.token_type_embeddings",
        (Family::Bert, "token_embd_norm") => "embeddings.LayerNorm",
        (Family::Bert, "position_embd") => "embeddings.position_embeddings",
        (Family::Bert, "cls") => "classifier.dense",
        (Family::Bert, "cls.output") => "classifier.out_proj",
        (Family::Bert, _) => return None,
        (Family::Lfm2 | Family::Lfm2Moe, "token_embd_norm") => "model.norm",
        (Family::NomicBert, "token_embd") => "embeddings.word_embeddings",
        (Family::NomicBert, "token_types") => "embeddings.token_type_embeddings",
        (Family::NomicBert, "token_embd_norm") => "emb_ln",
        (Family::ModernBert, "token_embd") => "embeddings.tok_embeddings",
        (Family::ModernBert, "token_embd_norm") => "embeddings.norm",
        (Family::ModernBert, "output_norm") => "final_norm",
        (Family::NomicBert | Family::ModernBert, _) => return None,
        (Family::Mamba2 | Family::NemotronH, "token_embd") => "backbone.embeddings",
        (Family::Mamba2 | Family::NemotronH, "output_norm") => "backbone.norm_f",
        (Family::Gemma4, "per_layer_token_embd") => "model.embed_tokens_per_layer",
        (Family::Gemma4, "per_layer_model_proj") => "model.per_layer_model_projection",
        (Family::Gemma4, "per_layer_proj_norm") => "model.per_layer_projection_norm",
        (Family::Gpt2, "token_embd") => "transformer.wte",
        (Family::Gpt2, "position_embd") => "transformer.wpe",
        (Family::Gpt2, "output_norm") => "transformer.ln_f",
        (_, "token_embd") => "model.embed_tokens",
        (_, "output_norm") => "model.norm",
        (_, "output") => "lm_head",
        _ => return None,
    };
    Some(format!("{stem}.{suffix}"))
}

fn block(family: Family, layers: usize, layer: usize, rest: &str) -> Option<Role> {
    let prefix = match family {
        Family::Gpt2 => format!("transformer.h.{layer}."),
        Family::Bert => format!("encoder.layer.{layer}."),
        Family::NomicBert => format!("encoder.layers.{layer}."),
        Family::ModernBert => format!("layers.{layer}."),
        Family::Mamba2 | Family::NemotronH if layer < layers => format!("backbone.layers.{layer}."),
        // Of the other families Hugging Face numbers them anew.
        _ if layer < layers || family == Family::Glm4Moe => format!("model.layers.{layer}."),
        _ => format!("mtp.layers.{}.", layer - layers),
    };
    if family.has_mamba()
        && let Some(part) = mamba_part(rest)
    {
        let mixer = if family == Family::GraniteHybrid { "mamba" } else { "mixer" };
        return Some(Role::Tensor(format!("{prefix}{mixer}.{part}")));
    }
    // These parameters are neither a weight nor a bias.
    let bare = match (family, rest) {
        (_, "ssm_a") if family.has_delta_nets() => Some("linear_attn.A_log"),
        (_, "ssm_dt.bias") if family.has_delta_nets() => Some("linear_attn.dt_bias"),
        (Family::Glm4Moe | Family::DeepSeek2 | Family::NemotronH, "exp_probs_b.bias") => {
            Some("mlp.gate.e_score_correction_bias")
        }
        (Family::Lfm2Moe, "exp_probs_b.bias") => Some("mlp.expert_bias"),
        (Family::Gemma4, "layer_output_scale.weight") => Some("layer_scalar"),
        (Family::Gemma4, "ffn_gate_inp.scale") => Some("router.scale"),
        (Family::Gemma4, "ffn_down_exps.scale") => Some("router.per_expert_scale"),
        (Family::GptOss, "attn_sinks.weight") => Some("self_attn.sinks"),
        _ => None,
    };
    if let Some(name) = bare {
        return Some(Role::Tensor(format!("{prefix}{name}")));
    }
    let (stem, suffix) = rest.rsplit_once('.')?;
    let projections: &[&str] = match (stem, suffix) {
        ("ffn_gate_exps", "weight") => &["gate_proj"],
        ("ffn_up_exps", "weight") => &["up_proj"],
        ("ffn_gate_up_exps", "weight") => &["gate_proj", "up_proj"],
        ("ffn_down_exps", "weight") => &["down_proj"],
        _ => &[],
    };
    if !projections.is_empty() {
        return Some(Role::Experts { prefix: format!("{prefix}mlp."), projections });
    }
    let biased = match (family, stem, suffix) {
        (Family::GptOss, "ffn_gate_exps", "bias") => Some("gate_proj"),
        (Family::GptOss, "ffn_up_exps", "bias") => Some("up_proj"),
        (Family::GptOss, "ffn_down_exps", "bias") => Some("down_proj"),
        _ => None,
    };
    if let Some(projection) = biased {
        return Some(Role::ExpertBiases { prefix: format!("{prefix}mlp."), projection });
    }
    if stem == "attn_rot_embd" {
        return Some(Role::Redundant);
    }
    if layer >= layers
        && family != Family::Glm4Moe
        && let Some(name) = drafting(stem)
    {
        return Some(Role::Tensor(format!("mtp.{name}.{suffix}")));
    }
    let name = match family {
        Family::Bert => bert_block(stem),
        Family::NomicBert => nomic_bert_block(stem),
        Family::ModernBert => modern_bert_block(stem),
        _ => decoder_block(family, stem),
    };
    Some(Role::Tensor(format!("{prefix}{}.{suffix}", name?)))
}

/// Names in the blocks of some families, where a GGUF name denotes different tensors depending on the structure of the
/// block. Reversed, the first of several GGUF names for a tensor counts.
const OF_FAMILIES: &[(&[Family], &str, &str)] = &[
    (&[Family::Gemma4], "inp_gate", "per_layer_input_gate"),
    (&[Family::Gemma4], "proj", "per_layer_projection"),
    (&[Family::Gemma4], "post_norm", "post_per_layer_input_norm"),
    (&[Family::Gemma4], "pre_ffw_norm_2", "pre_feedforward_layernorm_2"),
    (&[Family::Gemma4], "post_ffw_norm_1", "post_feedforward_layernorm_1"),
    (&[Family::Gemma4], "post_ffw_norm_2", "post_feedforward_layernorm_2"),
    (&[Family::Gemma4], "ffn_gate_inp", "router.proj"),
    (GEMMAS, "ffn_norm", "pre_feedforward_layernorm"),
    (GEMMAS, "post_ffw_norm", "post_feedforward_layernorm"),
    (GEMMAS, "post_attention_norm", "post_attention_layernorm"),
    (&[Family::Glm4Moe, Family::GptOss], "post_attention_norm", "post_attention_layernorm"),
    (&[Family::Olmo2, Family::Exaone4, Family::SeedOss], "post_attention_norm", "post_attention_layernorm"),
    (&[Family::Olmo2, Family::Exaone4], "post_ffw_norm", "post_feedforward_layernorm"),
    (&[Family::DeepSeek2], "attn_q_a", "self_attn.q_a_proj"),
    (&[Family::DeepSeek2], "attn_q_a_norm", "self_attn.q_a_layernorm"),
    (&[Family::DeepSeek2], "attn_q_b", "self_attn.q_b_proj"),
    (&[Family::DeepSeek2], "attn_kv_a_mqa", "self_attn.kv_a_proj_with_mqa"),
    (&[Family::DeepSeek2], "attn_kv_a_norm", "self_attn.kv_a_layernorm"),
    (&[Family::DeepSeek2], "attn_kv_b", "self_attn.kv_b_proj"),
    (&[Family::DeepSeek2], "attn_k_b", "self_attn.k_b_proj"),
    (&[Family::DeepSeek2], "attn_v_b", "self_attn.v_b_proj"),
    (&[Family::Mamba2, Family::NemotronH], "attn_norm", "norm"),
    (&[Family::NemotronH], "attn_q", "mixer.q_proj"),
    (&[Family::NemotronH], "attn_k", "mixer.k_proj"),
    (&[Family::NemotronH], "attn_v", "mixer.v_proj"),
    (&[Family::NemotronH], "attn_output", "mixer.o_proj"),
    (&[Family::NemotronH], "ffn_up", "mixer.up_proj"),
    (&[Family::NemotronH], "ffn_down", "mixer.down_proj"),
    (&[Family::GraniteHybrid], "ffn_gate_shexp", "mlp.shared_mlp.gate_proj"),
    (&[Family::GraniteHybrid], "ffn_up_shexp", "mlp.shared_mlp.up_proj"),
    (&[Family::GraniteHybrid], "ffn_down_shexp", "shared_mlp.output_linear"),
    (&[Family::GraniteHybrid], "ffn_down", "shared_mlp.output_linear"),
    (&[Family::GptOss], "ffn_gate_inp", "mlp.router"),
    (&[Family::Glm4], "post_attention_norm", "post_self_attn_layernorm"),
    (&[Family::Glm4], "post_ffw_norm", "post_mlp_layernorm"),
    (&[Family::Glm4, Family::Phi3], "ffn_up", "mlp.gate_up_proj"),
    (&[Family::HunyuanDense], "attn_q_norm", "self_attn.query_layernorm"),
    (&[Family::HunyuanDense], "attn_k_norm", "self_attn.key_layernorm"),
    (&[Family::Starcoder2, Family::Gpt2], "ffn_up", "mlp.c_fc"),
    (&[Family::Starcoder2, Family::Gpt2], "ffn_down", "mlp.c_proj"),
    (&[Family::Gpt2], "attn_norm", "ln_1"),
    (&[Family::Gpt2], "ffn_norm", "ln_2"),
    (&[Family::Gpt2], "attn_qkv", "attn.c_attn"),
    (&[Family::Gpt2], "attn_output", "attn.c_proj"),
    (&[Family::Phi3], "attn_qkv", "self_attn.qkv_proj"),
    (&[Family::Glm4Moe, Family::DeepSeek2], "ffn_gate_shexp", "mlp.shared_experts.gate_proj"),
    (SHARED_EXPERTS, "ffn_up_shexp", "mlp.shared_experts.up_proj"),
    (SHARED_EXPERTS, "ffn_down_shexp", "mlp.shared_experts.down_proj"),
    (&[Family::Glm4Moe], "nextn.eh_proj", "eh_proj"),
    (&[Family::Glm4Moe], "nextn.enorm", "enorm"),
    (&[Family::Glm4Moe], "nextn.hnorm", "hnorm"),
    (&[Family::Glm4Moe], "nextn.embed_tokens", "embed_tokens"),
    (&[Family::Glm4Moe], "nextn.shared_head_head", "shared_head.head"),
    (&[Family::Glm4Moe], "nextn.shared_head_norm", "shared_head.norm"),
    (&[Family::Lfm2, Family::Lfm2Moe], "shortconv.conv", "conv.conv"),
    (&[Family::Lfm2, Family::Lfm2Moe], "shortconv.in_proj", "conv.in_proj"),
    (&[Family::Lfm2, Family::Lfm2Moe], "shortconv.out_proj", "conv.out_proj"),
    (DELTA_NETS, "post_attention_norm", "post_attention_layernorm"),
    (DELTA_NETS, "attn_qkv", "linear_attn.in_proj_qkv"),
    (DELTA_NETS, "attn_gate", "linear_attn.in_proj_z"),
    (DELTA_NETS, "ssm_in", "linear_attn.in_proj_qkvz"),
    (DELTA_NETS, "ssm_alpha", "linear_attn.in_proj_a"),
    (DELTA_NETS, "ssm_beta", "linear_attn.in_proj_b"),
    (DELTA_NETS, "ssm_ba", "linear_attn.in_proj_ba"),
    (DELTA_NETS, "ssm_conv1d", "linear_attn.conv1d"),
    (DELTA_NETS, "ssm_norm", "linear_attn.norm"),
    (DELTA_NETS, "ssm_out", "linear_attn.out_proj"),
];

const GEMMAS: &[Family] = &[Family::Gemma3, Family::Gemma4, Family::GemmaEmbedding];
const SHARED_EXPERTS: &[Family] = &[Family::Glm4Moe, Family::DeepSeek2, Family::NemotronH];
const DELTA_NETS: &[Family] = &[Family::Qwen35, Family::Qwen35Moe, Family::Qwen3Next];

/// Names in the blocks of all other decoders.
const USUAL: &[(&str, &str)] = &[
    ("attn_norm", "input_layernorm"),
    ("ffn_norm", "post_attention_layernorm"),
    ("attn_q", "self_attn.q_proj"),
    ("attn_k", "self_attn.k_proj"),
    ("attn_v", "self_attn.v_proj"),
    ("attn_output", "self_attn.o_proj"),
    ("attn_q_norm", "self_attn.q_norm"),
    ("attn_k_norm", "self_attn.k_norm"),
    ("ffn_gate", "mlp.gate_proj"),
    ("ffn_up", "mlp.up_proj"),
    ("ffn_down", "mlp.down_proj"),
    ("ffn_gate_inp", "mlp.gate"),
    ("ffn_gate_shexp", "mlp.shared_expert.gate_proj"),
    ("ffn_up_shexp", "mlp.shared_expert.up_proj"),
    ("ffn_down_shexp", "mlp.shared_expert.down_proj"),
    ("ffn_gate_inp_shexp", "mlp.shared_expert_gate"),
];

/// GGUF's names outside of the blocks of a decoder, without what they end in. The first of several for a tensor counts.
const OUTSIDE: &[&str] = &["token_embd", "token_embd_norm", "output_norm", "output"];

fn decoder_block(family: Family, stem: &str) -> Option<&'static str> {
    let own = OF_FAMILIES.iter().find(|(families, own, _)| *own == stem && families.contains(&family));
    let usual = || USUAL.iter().find(|(usual, _)| *usual == stem).map(|(_, name)| *name);
    own.map(|(_, _, name)| *name).or_else(usual)
}

/// Returns the GGUF name of a decoder's tensor, by the tables that [`role`] reads; `None` if it has none, or is part of
/// a stack.
pub(crate) fn gguf_name(family: Family, layers: usize, name: &str) -> Option<String> {
    // Parameters that are neither have names of their own.
    let (_, suffix @ ("weight" | "bias")) = name.rsplit_once('.')? else { return None };
    let is_named = |found: &String| role(family, layers, found) == Role::Tensor(name.to_owned());
    match SegmentId::from_tensor_name(name) {
        SegmentId::Layer(layer) => {
            let own = OF_FAMILIES.iter().filter(|(families, ..)| families.contains(&family));
            let stems = own.map(|(_, stem, _)| *stem).chain(USUAL.iter().map(|(stem, _)| *stem));
            stems.map(|stem| format!("blk.{layer}.{stem}.{suffix}")).find(is_named)
        }
        _ => OUTSIDE.iter().map(|stem| format!("{stem}.{suffix}")).find(is_named),
    }
}

/// GGUF's names of stacks of experts.
const STACKS: &[&str] = &["ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"];

/// Returns the GGUF name of the stack that a matrix of an expert belongs to, and the expert's number.
pub(crate) fn gguf_stack(family: Family, layers: usize, name: &str) -> Option<(String, usize)> {
    let SegmentId::Layer(layer) = SegmentId::from_tensor_name(name) else { return None };
    let (before, rest) = name.split_once("experts.")?;
    let (expert, projection) = rest.strip_suffix(".weight")?.split_once('.')?;
    let holds = |found: &String| match role(family, layers, found) {
        Role::Experts { prefix, projections } => prefix == before && projections == [projection],
        _ => false,
    };
    let stack = STACKS.iter().map(|stem| format!("blk.{layer}.{stem}.weight")).find(holds)?;
    Some((stack, expert.parse().ok()?))
}

/// Translates a tensor of Mamba-2 behind the layer's number.
fn mamba_part(rest: &str) -> Option<&'static str> {
    Some(match rest {
        "ssm_in.weight" => "in_proj.weight",
        "ssm_out.weight" => "out_proj.weight",
        "ssm_norm.weight" => "norm.weight",
        "ssm_conv1d.weight" => "conv1d.weight",
        "ssm_conv1d.bias" => "conv1d.bias",
        "ssm_dt.bias" => "dt_bias",
        "ssm_a" => "A_log",
        "ssm_d" => "D",
        _ => return None,
    })
}

fn bert_block(stem: &str) -> Option<&'static str> {
    Some(match stem {
        "attn_q" => "attention.self.query",
        "attn_k" => "attention.self.key",
        "attn_v" => "attention.self.value",
        "attn_output" => "attention.output.dense",
        "attn_output_norm" => "attention.output.LayerNorm",
        "ffn_up" => "intermediate.dense",
        "ffn_down" => "output.dense",
        "layer_output_norm" => "output.LayerNorm",
        _ => return None,
    })
}

/// Translates what a block that drafts the token after next has beyond others. Hugging Face names it under `mtp`.
fn drafting(stem: &str) -> Option<&'static str> {
    Some(match stem {
        "nextn.eh_proj" => "fc",
        "nextn.enorm" => "pre_fc_norm_embedding",
        "nextn.hnorm" => "pre_fc_norm_hidden",
        "nextn.shared_head_norm" => "norm",
        _ => return None,
    })
}

fn nomic_bert_block(stem: &str) -> Option<&'static str> {
    Some(match stem {
        "attn_qkv" => "attn.Wqkv",
        "attn_output" => "attn.out_proj",
        "attn_output_norm" => "norm1",
        "ffn_up" => "mlp.fc11",
        "ffn_gate" => "mlp.fc12",
        "ffn_down" => "mlp.fc2",
        "layer_output_norm" => "norm2",
        _ => return None,
    })
}

fn modern_bert_block(stem: &str) -> Option<&'static str> {
    Some(match stem {
        "attn_norm" => "attn_norm",
        "attn_qkv" => "attn.Wqkv",
        "attn_output" => "attn.Wo",
        "ffn_norm" => "mlp_norm",
        "ffn_up" => "mlp.Wi",
        "ffn_down" => "mlp.Wo",
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_translated_to_hugging_face() {
        for (family, name, expected) in [
            (Family::Llama, "token_embd.weight", "model.embed_tokens.weight"),
            (Family::Llama, "blk.3.ffn_norm.weight", "model.layers.3.post_attention_layernorm.weight"),
            (Family::Qwen2, "blk.0.attn_q.bias", "model.layers.0.self_attn.q_proj.bias"),
            (Family::Gemma3, "blk.0.ffn_norm.weight", "model.layers.0.pre_feedforward_layernorm.weight"),
            (
                Family::Gemma3,
                "blk.0.post_attention_norm.weight",
                "model.layers.0.post_attention_layernorm.weight",
            ),
            (Family::Phi3, "blk.1.ffn_up.weight", "model.layers.1.mlp.gate_up_proj.weight"),
            (Family::Olmo2, "blk.0.post_ffw_norm.weight", "model.layers.0.post_feedforward_layernorm.weight"),
            (
                Family::SeedOss,
                "blk.0.post_attention_norm.weight",
                "model.layers.0.post_attention_layernorm.weight",
            ),
            (
                Family::Glm4,
                "blk.0.post_attention_norm.weight",
                "model.layers.0.post_self_attn_layernorm.weight",
            ),
            (
                Family::HunyuanDense,
                "blk.2.attn_q_norm.weight",
                "model.layers.2.self_attn.query_layernorm.weight",
            ),
            (Family::Starcoder2, "blk.1.ffn_down.bias", "model.layers.1.mlp.c_proj.bias"),
            (Family::Gpt2, "blk.3.attn_qkv.bias", "transformer.h.3.attn.c_attn.bias"),
            (Family::Gpt2, "position_embd.weight", "transformer.wpe.weight"),
            (Family::Qwen3Moe, "blk.1.ffn_gate_inp.weight", "model.layers.1.mlp.gate.weight"),
            (Family::Qwen35, "blk.2.ssm_a", "model.layers.2.linear_attn.A_log"),
            (Family::Qwen35, "blk.2.ssm_dt.bias", "model.layers.2.linear_attn.dt_bias"),
            (Family::Qwen35, "blk.2.attn_gate.weight", "model.layers.2.linear_attn.in_proj_z.weight"),
            (Family::Qwen35, "blk.8.nextn.eh_proj.weight", "mtp.fc.weight"),
            (Family::Qwen35, "blk.8.attn_q.weight", "mtp.layers.0.self_attn.q_proj.weight"),
            (Family::Qwen35Moe, "blk.8.ffn_up_shexp.weight", "mtp.layers.0.mlp.shared_expert.up_proj.weight"),
            (Family::Qwen3Next, "blk.2.ssm_in.weight", "model.layers.2.linear_attn.in_proj_qkvz.weight"),
            (Family::Qwen3Next, "blk.2.ssm_ba.weight", "model.layers.2.linear_attn.in_proj_ba.weight"),
            (
                Family::Qwen3Next,
                "blk.2.ffn_gate_inp_shexp.weight",
                "model.layers.2.mlp.shared_expert_gate.weight",
            ),
            (Family::Glm4Moe, "blk.1.exp_probs_b.bias", "model.layers.1.mlp.gate.e_score_correction_bias"),
            (
                Family::Glm4Moe,
                "blk.1.ffn_down_shexp.weight",
                "model.layers.1.mlp.shared_experts.down_proj.weight",
            ),
            (
                Family::Glm4Moe,
                "blk.1.post_attention_norm.weight",
                "model.layers.1.post_attention_layernorm.weight",
            ),
            (
                Family::Glm4Moe,
                "blk.8.nextn.shared_head_norm.weight",
                "model.layers.8.shared_head.norm.weight",
            ),
            (Family::Lfm2, "token_embd_norm.weight", "model.norm.weight"),
            (Family::GptOss, "blk.1.attn_sinks.weight", "model.layers.1.self_attn.sinks"),
            (Family::Gemma4, "per_layer_token_embd.weight", "model.embed_tokens_per_layer.weight"),
            (Family::Gemma4, "blk.1.layer_output_scale.weight", "model.layers.1.layer_scalar"),
            (Family::Gemma4, "blk.1.ffn_down_exps.scale", "model.layers.1.router.per_expert_scale"),
            (Family::NemotronH, "blk.1.attn_q.weight", "backbone.layers.1.mixer.q_proj.weight"),
            (
                Family::NemotronH,
                "blk.1.ffn_up_shexp.weight",
                "backbone.layers.1.mlp.shared_experts.up_proj.weight",
            ),
            (Family::Mamba2, "blk.1.ssm_a", "backbone.layers.1.mixer.A_log"),
            (Family::GraniteHybrid, "blk.1.ssm_dt.bias", "model.layers.1.mamba.dt_bias"),
            (
                Family::GraniteHybrid,
                "blk.1.ffn_down_shexp.weight",
                "model.layers.1.shared_mlp.output_linear.weight",
            ),
            (Family::DeepSeek2, "blk.1.attn_k_b.weight", "model.layers.1.self_attn.k_b_proj.weight"),
            (Family::GptOss, "blk.1.ffn_gate_inp.bias", "model.layers.1.mlp.router.bias"),
            (Family::Lfm2Moe, "blk.1.shortconv.in_proj.weight", "model.layers.1.conv.in_proj.weight"),
            (Family::Lfm2Moe, "blk.1.exp_probs_b.bias", "model.layers.1.mlp.expert_bias"),
            (Family::Bert, "token_embd_norm.bias", "embeddings.LayerNorm.bias"),
            (Family::NomicBert, "token_embd_norm.bias", "emb_ln.bias"),
            (Family::NomicBert, "blk.1.ffn_gate.weight", "encoder.layers.1.mlp.fc12.weight"),
            (Family::ModernBert, "output_norm.weight", "final_norm.weight"),
            (Family::ModernBert, "blk.1.ffn_up.weight", "layers.1.mlp.Wi.weight"),
            (Family::GemmaEmbedding, "dense_2.weight", "dense_2.weight"),
            (Family::Bert, "blk.1.layer_output_norm.weight", "encoder.layer.1.output.LayerNorm.weight"),
            (
                Family::Llama,
                "blk.9999999999999999999999.attn_q.weight",
                "blk.9999999999999999999999.attn_q.weight",
            ),
            (Family::Llama, "something.else", "something.else"),
        ] {
            assert_eq!(role(family, 8, name), Role::Tensor(expected.into()), "{name}");
            let back = gguf_name(family, 8, expected);
            assert!(back.is_none_or(|back| back == name), "{expected}");
        }
        let stacks: [(_, _, _, &[&str]); 3] = [
            (Family::Qwen3Moe, "blk.1.ffn_down_exps.weight", "model.layers.1.mlp.", &["down_proj"]),
            (Family::Qwen35Moe, "blk.9.ffn_up_exps.weight", "mtp.layers.1.mlp.", &["up_proj"]),
            (
                Family::Glm4Moe,
                "blk.9.ffn_gate_up_exps.weight",
                "model.layers.9.mlp.",
                &["gate_proj", "up_proj"],
            ),
        ];
        for (family, name, prefix, projections) in stacks {
            let prefix = prefix.into();
            assert_eq!(role(family, 8, name), Role::Experts { prefix, projections }, "{name}");
        }
        assert_eq!(role(Family::Phi3, 8, "rope_factors_long.weight"), Role::RopeFactors(RopeFactors::Long));
    }

    #[test]
    fn experts_find_their_stack() {
        let name = "model.layers.3.mlp.experts.12.down_proj.weight";
        let stack = Some(("blk.3.ffn_down_exps.weight".to_owned(), 12));
        assert_eq!(gguf_stack(Family::Qwen3Moe, 8, name), stack);
        for name in
            ["model.layers.3.mlp.experts.1.w1.weight", "model.layers.3.mlp.gate.weight", "lm_head.weight"]
        {
            assert_eq!(gguf_stack(Family::Qwen3Moe, 8, name), None);
        }
    }

    #[test]
    fn names_of_dense_families_have_a_way_back() {
        for (family, name, expected) in [
            (Family::Llama, "lm_head.weight", Some("output.weight")),
            (Family::Llama, "model.layers.3.post_attention_layernorm.weight", Some("blk.3.ffn_norm.weight")),
            (
                Family::Olmo2,
                "model.layers.3.post_attention_layernorm.weight",
                Some("blk.3.post_attention_norm.weight"),
            ),
            (Family::Phi3, "model.layers.0.mlp.gate_up_proj.weight", Some("blk.0.ffn_up.weight")),
            (Family::Qwen2, "model.layers.0.self_attn.q_proj.bias", Some("blk.0.attn_q.bias")),
            (Family::Starcoder2, "model.layers.0.mlp.c_proj.bias", Some("blk.0.ffn_down.bias")),
            (Family::Qwen3Moe, "model.layers.0.mlp.experts.0.up_proj.weight", None),
            (Family::Llama, "model.layers.0.self_attn.rotary_emb.inv_freq", None),
            (Family::Bert, "encoder.layer.1.output.LayerNorm.weight", None),
        ] {
            assert_eq!(gguf_name(family, 8, name).as_deref(), expected, "{name}");
        }
    }
}
