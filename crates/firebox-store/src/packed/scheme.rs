//! What `config.json` says about the packing of a model's weights.

use serde_json::Value;

use crate::encoding::Dtype;
use crate::error::Fault;
use crate::excerpt::Excerpt;

/// What to do with a model that is packed in an unknown way.
const REMEDY: &str = "take the model's original weights or a GGUF file";

/// A way of packing weights in safetensors files.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Scheme {
    /// Bytes (FP8 or signed integers) with a scale for a tensor, a row or a block of this many rows and inputs.
    Bytes { block: [usize; 2] },
    /// Words of integers along the inputs of a row, as `compressed-tensors` writes them.
    Compressed { bits: usize, group: Option<usize> },
    /// Words of integers along outputs, interleaved.
    Awq { group: Option<usize> },
    /// Words of integers along inputs, one row a word's integers.
    Gptq { bits: usize, group: Option<usize>, zeros_less_one: bool },
    /// Four-bit floats with a power of two for every 32, in stacks of experts.
    Mxfp4,
    /// Words of integers along the inputs of a row, with a scale and an offset a group.
    Mlx { bits: usize, group: usize },
    /// Four-bit codes into a table, with a largest magnitude for every block.
    FourBitCodes,
}

/// The scheme of a model, and the dtype that its unpacked weights have where the packed ones do not say.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Packing {
    pub(crate) scheme: Scheme,
    pub(crate) dtype: Dtype,
}

impl Packing {
    /// Reads the packing from a configuration; `None` if it does not mention one. Unknown ones are refused by name.
    pub(crate) fn of(config: &Value) -> Result<Option<Self>, Fault> {
        let within = [config, &config["text_config"], &config["llm_config"]];
        let found = |key: &str| within.into_iter().map(|config| &config[key]).find(|value| value.is_object());
        let scheme = match (found("quantization_config"), found("quantization")) {
            (Some(packing), _) if packing["quant_method"].is_string() => by_method(packing)?,
            (_, Some(mlx)) => mlx_scheme(mlx)?,
            (Some(packing), None) if packing["group_size"].is_u64() && packing["bits"].is_u64() => {
                mlx_scheme(packing)?
            }
            (Some(_), None) => {
                return Err(Fault::unsupported(
                    "quantization_config.quant_method",
                    format!("missing; {REMEDY}"),
                ));
            }
            (None, None) => return Ok(None),
        };
        let dtype = within.into_iter().find_map(|config| {
            let name = config["dtype"].as_str().or(config["torch_dtype"].as_str())?;
            torch_dtype(name)
        });
        Ok(Some(Self { scheme, dtype: dtype.unwrap_or(Dtype::BF16) }))
    }
}

impl Scheme {
    /// Names the scheme for people.
    pub(crate) fn name(self) -> String {
        let groups = |group: Option<usize>| match group {
            Some(group) => format!("in groups of {group}"),
            None => "by rows".into(),
        };
        match self {
            Self::Bytes { .. } => "bytes with scales (FP8 or INT8)".into(),
            Self::Compressed { bits, group } => {
                format!("compressed-tensors of {bits} bits {}", groups(group))
            }
            Self::Awq { group } => format!("AWQ of 4 bits {}", groups(group)),
            Self::Gptq { bits, group, .. } => format!("GPTQ of {bits} bits {}", groups(group)),
            Self::Mxfp4 => "MXFP4".into(),
            Self::Mlx { bits, group } => format!("MLX of {bits} bits in groups of {group}"),
            Self::FourBitCodes => "bitsandbytes of 4 bits".into(),
        }
    }
}

/// The dtype of a name in `torch`.
pub(super) fn torch_dtype(name: &str) -> Option<Dtype> {
    match name.trim_start_matches("torch.") {
        "float32" => Some(Dtype::F32),
        "float16" => Some(Dtype::F16),
        "bfloat16" => Some(Dtype::BF16),
        _ => None,
    }
}

fn unknown(field: &str, found: &Value, known: &str) -> Fault {
    let found = found.as_str().map_or_else(|| found.to_string(), str::to_owned);
    Fault::unsupported(field, format!("{:?}; known is {known}: {REMEDY}", Excerpt(&found)))
}

/// Checks that a field is missing, null, or has one of these values.
fn expect(packing: &Value, field: &str, values: &[&str]) -> Result<(), Fault> {
    match &packing[field] {
        Value::Null => Ok(()),
        Value::String(text) if values.contains(&text.as_str()) => Ok(()),
        other => Err(unknown(&format!("quantization_config.{field}"), other, &values.join(", "))),
    }
}

fn by_method(packing: &Value) -> Result<Scheme, Fault> {
    const FIELD: &str = "quantization_config.quant_method";
    match packing["quant_method"].as_str().unwrap_or_default() {
        "fp8" | "fbgemm_fp8" => {
            expect(packing, "fmt", &["e4m3"])?;
            Ok(Scheme::Bytes { block: block(&packing["weight_block_size"], "weight_block_size")? })
        }
        "compressed-tensors" => compressed(packing),
        "awq" => {
            expect(packing, "version", &["gemm", "GEMM"])?;
            bits(packing, &[4])?;
            Ok(Scheme::Awq { group: group(&packing["group_size"])? })
        }
        "gptq" => {
            expect(packing, "checkpoint_format", &["gptq", "gptq_v2"])?;
            Ok(Scheme::Gptq {
                bits: bits(packing, &[2, 4, 8])?,
                group: group(&packing["group_size"])?,
                zeros_less_one: packing["checkpoint_format"] != "gptq_v2",
            })
        }
        "mxfp4" => Ok(Scheme::Mxfp4),
        "bitsandbytes" if packing["load_in_4bit"] == true || packing["_load_in_4bit"] == true => {
            expect(packing, "bnb_4bit_quant_type", &["nf4", "fp4"])?;
            Ok(Scheme::FourBitCodes)
        }
        "bitsandbytes" => Err(unknown(FIELD, &"bitsandbytes of 8 bits".into(), "bitsandbytes of 4 bits")),
        _ => Err(unknown(
            FIELD,
            &packing["quant_method"],
            "fp8, fbgemm_fp8, compressed-tensors, awq, gptq, mxfp4, bitsandbytes and MLX",
        )),
    }
}

fn bits(packing: &Value, known: &[u64]) -> Result<usize, Fault> {
    let names: Vec<String> = known.iter().map(u64::to_string).collect();
    match packing["bits"].as_u64().or((packing["bits"].is_null() && known == [4]).then_some(4)) {
        Some(bits) if known.contains(&bits) => Ok(bits as usize),
        _ => Err(unknown("quantization_config.bits", &packing["bits"], &names.join(", "))),
    }
}

/// Inputs that share a scale; `None` for whole rows.
fn group(value: &Value) -> Result<Option<usize>, Fault> {
    match value.as_i64() {
        None if value.is_null() => Ok(None),
        Some(-1) => Ok(None),
        Some(group @ 1..=1_048_576) => Ok(Some(group as usize)),
        _ => Err(unknown("quantization_config.group_size", value, "1 and more, or -1")),
    }
}

/// Rows and inputs that share a scale: 128 of both unless stated.
fn block(value: &Value, field: &str) -> Result<[usize; 2], Fault> {
    if value.is_null() {
        return Ok([128, 128]);
    }
    let sizes: Vec<usize> =
        value.as_array().into_iter().flatten().filter_map(Value::as_u64).map(|n| n as usize).collect();
    match sizes[..] {
        [rows @ 1..=65_536, inputs @ 1..=65_536] => Ok([rows, inputs]),
        _ => Err(unknown(&format!("quantization_config.{field}"), value, "two numbers from 1 on")),
    }
}

fn compressed(packing: &Value) -> Result<Scheme, Fault> {
    expect(packing, "quantization_status", &["compressed"])?;
    expect(packing, "format", &["pack-quantized", "int-quantized", "float-quantized", "naive-quantized"])?;
    let groups = packing["config_groups"].as_object();
    let mut schemes = groups.into_iter().flatten().map(|(name, group)| {
        let weights = &group["weights"];
        let field = |field: &str| format!("config_groups.{name}.weights.{field}");
        let packed = match &group["format"] {
            Value::Null => &packing["format"],
            format => format,
        };
        if packed != "pack-quantized" {
            if weights["num_bits"] != 8 {
                return Err(unknown(&field("num_bits"), &weights["num_bits"], "8 for this format"));
            }
            return Ok(Scheme::Bytes {
                block: block(&weights["block_structure"], &field("block_structure"))?,
            });
        }
        if weights["type"] != "int" {
            return Err(unknown(&field("type"), &weights["type"], "int for this format"));
        }
        match weights["num_bits"].as_u64() {
            Some(bits @ (4 | 8)) => {
                Ok(Scheme::Compressed { bits: bits as usize, group: self::group(&weights["group_size"])? })
            }
            _ => Err(unknown(&field("num_bits"), &weights["num_bits"], "4 and 8")),
        }
    });
    let Some(first) = schemes.next().transpose()? else {
        return Err(unknown(
            "quantization_config.config_groups",
            &packing["config_groups"],
            "an object of groups",
        ));
    };
    for other in schemes {
        if other? != first {
            let reason = format!("groups that are packed differently; {REMEDY}");
            return Err(Fault::unsupported("quantization_config.config_groups", reason));
        }
    }
    Ok(first)
}

fn mlx_scheme(packing: &Value) -> Result<Scheme, Fault> {
    match &packing["mode"] {
        Value::Null => {}
        mode if mode == "affine" => {}
        mode => return Err(unknown("quantization.mode", mode, "affine")),
    }
    let (bits, group) = (bits(packing, &[2, 4, 8])?, group(&packing["group_size"])?);
    let Some(group) = group else {
        return Err(unknown("quantization.group_size", &packing["group_size"], "1 and more"));
    };
    Ok(Scheme::Mlx { bits, group })
}
