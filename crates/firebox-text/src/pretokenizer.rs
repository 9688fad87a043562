//! GGUF's named pre-tokenizers, which split a text into words.

use crate::error::TextError;
use serde_json::Value;
use tokenizers::SplitDelimiterBehavior;
use tokenizers::normalizers::{NFC, NormalizerWrapper};
use tokenizers::pre_tokenizers::PreTokenizerWrapper;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};

const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";
const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN2: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN35: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const TEKKEN: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const GPT4O: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const DEEPSEEK3_WORDS: &str = r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"##;
const DEEPSEEK_CJK: &str = r"[\x{4E00}-\x{9FA5}\x{800}-\x{4E00}\x{AC00}-\x{D7FF}]+";
const DEEPSEEK3_CJK: &str = r"[\x{4E00}-\x{9FA5}\x{3040}-\x{309F}\x{30A0}-\x{30FF}]+";
/// Letters of the scripts with upper and lower case, as listed by the DeepSeek LLM vocabulary.
const DEEPSEEK_LETTERS: &str = concat!(
    r"\s?[",
    r"A-Za-z\x{B5}\x{C0}-\x{D6}\x{D8}-\x{F6}\x{F8}-\x{1BA}\x{1BC}-\x{1BF}\x{1C4}-\x{293}",
    r"\x{295}-\x{2AF}\x{370}-\x{373}\x{376}\x{377}\x{37B}-\x{37D}\x{37F}\x{386}\x{388}-\x{38A}",
    r"\x{38C}\x{38E}-\x{3A1}\x{3A3}-\x{3F5}\x{3F7}-\x{481}\x{48A}-\x{52F}\x{531}-\x{556}",
    r"\x{10A0}-\x{10C5}\x{13A0}-\x{13F5}\x{13F8}-\x{13FD}\x{1C90}-\x{1CBA}\x{1CBD}-\x{1CBF}",
    r"\x{1D00}-\x{1D2B}\x{1D6B}-\x{1D77}\x{1D79}-\x{1D9A}\x{1E00}-\x{1F15}\x{1F18}-\x{1F1D}",
    r"\x{1F20}-\x{1F45}\x{1F48}-\x{1F4D}\x{1F50}-\x{1F57}\x{1F59}\x{1F5B}\x{1F5D}\x{1F5F}-\x{1F7D}",
    r"\x{1F80}-\x{1FB4}\x{1FB6}-\x{1FBC}\x{1FBE}\x{1FC2}-\x{1FC4}\x{1FC6}-\x{1FCC}",
    r"\x{1FD0}-\x{1FD3}\x{1FD6}-\x{1FDB}\x{1FE0}-\x{1FEC}\x{1FF2}-\x{1FF4}\x{1FF6}-\x{1FFC}",
    r"\x{2102}\x{2107}\x{210A}-\x{2113}\x{2115}\x{2119}-\x{211D}\x{2124}\x{2126}\x{2128}",
    r"\x{212A}-\x{212D}\x{212F}-\x{2134}\x{2139}\x{213C}-\x{213F}\x{2145}-\x{2149}\x{214E}\x{2183}",
    r"\x{2184}\x{2C00}-\x{2C7B}\x{2C7E}-\x{2CE4}\x{2CEB}-\x{2CEE}\x{2CF2}\x{2CF3}\x{A640}-\x{A66D}",
    r"\x{A680}-\x{A69B}\x{A722}-\x{A76F}\x{A771}-\x{A787}\x{A78B}-\x{A78E}\x{AB70}-\x{ABBF}",
    r"\x{FB00}-\x{FB06}\x{FB13}-\x{FB17}\x{FF21}-\x{FF3A}\x{FF41}-\x{FF5A}\x{10400}-\x{1044F}",
    r"\x{104B0}-\x{104D3}\x{104D8}-\x{104FB}\x{10C80}-\x{10CB2}\x{10CC0}-\x{10CF2}",
    r"\x{118A0}-\x{118DF}\x{1E900}-\x{1E943}",
    r"]+",
);
const DEEPSEEK_PUNCTUATION: &str =
    r"\s?[!-/:-~\x{FF01}-\x{FF0F}\x{FF1A}-\x{FF5E}\x{2018}-\x{201F}\x{3000}-\x{3002}]+";
const BLOOM: &str = r" ?[^(\s|.,!?\x{2026}\x{3002}\x{FF0C}\x{3001}\x{964}\x{6D4}\x{60C})]+";
const EXAONE_MOE: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+";
const BAILING: &str = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+";
const SEED: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+";
const COHERE_DIGITS: &str = r"\d{1,3}(?=(?:\d{3})*\b)";
const DEFAULT_PUNCTUATION: &str = r"[\p{P}\$\+<=>\^~\|]+";
const FALCON_PUNCTUATION: &str = r"[\p{P}\$\+<=>\^~\|`]+";
const DIGIT: &str = r"\p{N}";
const DIGITS: &str = r"\p{N}+";
const THREE_DIGITS: &str = "[0-9][0-9][0-9]";
const DIGITS_TO_THREE: &str = r"\p{N}{1,3}";

/// A name for each of the settings that [`named`](PreTokenizer::named) knows, the most usual one.
const NAMES: [&str; 24] = [
    "qwen2",
    "llama-bpe",
    "gpt-2",
    "smollm",
    "tekken",
    "gpt-4o",
    "qwen35",
    "stablelm2",
    "glm4",
    "deepseek-v3",
    "deepseek-coder",
    "deepseek-llm",
    "minicpm5",
    "granite-embed-multi-97m",
    "falcon",
    "bloom",
    "viking",
    "tiny_aya",
    "superbpe",
    "bailingmoe",
    "seed-coder",
    "exaone-moe",
    "laguna",
    "default",
];

/// The settings behind a value of `tokenizer.ggml.pre`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PreTokenizer {
    /// Patterns, each applied to the pieces that the previous one left; matches and the gaps between them become words.
    patterns: &'static [&'static str],
    /// Normalizes the text to Unicode's composed form first.
    compose: bool,
    /// A word that is a token becomes that token, even if no merges lead to it.
    pub ignore_merges: bool,
    /// A text begins with the model's first token, unless the metadata says otherwise.
    pub add_bos: bool,
}

const fn plain(patterns: &'static [&'static str]) -> PreTokenizer {
    PreTokenizer { patterns, compose: false, ignore_merges: false, add_bos: false }
}

impl PreTokenizer {
    /// Looks up a name in `llama.cpp`'s spelling.
    pub fn named(name: &str) -> Result<Self, TextError> {
        Ok(match name {
            "" | "default" => plain(&[DEFAULT_PUNCTUATION, GPT2, DIGITS, THREE_DIGITS]),
            "llama3" | "llama-v3" | "llama-bpe" | "falcon3" | "falcon-h1" | "pixtral" | "midm-2.0"
            | "lfm2" | "jina-v5-nano" => {
                PreTokenizer { ignore_merges: true, add_bos: true, ..plain(&[LLAMA3]) }
            }
            "dbrx" | "smaug-bpe" | "glm4" | "chatglm-bpe" => plain(&[LLAMA3]),
            "minicpm5" => PreTokenizer { ignore_merges: true, ..plain(&[DIGITS_TO_THREE, LLAMA3]) },
            "gpt2" | "gpt-2" | "phi-2" | "mpt" | "olmo" | "jais" | "trillion" | "granite-docling"
            | "exaone4" | "jina-es" | "jina-de" | "jina-v2-es" | "jina-v2-de" | "jina-v1-en"
            | "jina-v2-code" | "roberta-bpe" | "gigachat" | "a.x-4.0" | "mellum" | "modern-bert" => {
                plain(&[GPT2])
            }
            "starcoder" | "refact" | "command-r" | "smollm" | "codeshell" | "exaone" | "minerva-7b"
            | "mellum2" => plain(&[DIGIT, GPT2]),
            "qwen2" | "deepseek-r1-qwen" | "megrez" => PreTokenizer { compose: true, ..plain(&[QWEN2]) },
            "stablelm2" | "hunyuan" | "solar-open" | "grok-2" | "kormo" | "f2llmv2" => plain(&[QWEN2]),
            "qwen35" => PreTokenizer { compose: true, ..plain(&[QWEN35]) },
            "deepseek-llm" => {
                plain(&[r"[\r\n]", DEEPSEEK_LETTERS, DEEPSEEK_PUNCTUATION, r"\s+$", DEEPSEEK_CJK, DIGITS])
            }
            "deepseek-coder" => plain(&[r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", DEEPSEEK_CJK, DIGIT]),
            "deepseek-v3" | "hunyuan-dense" | "joyai-llm" | "hy_v4" => {
                plain(&[DIGITS_TO_THREE, DEEPSEEK3_CJK, DEEPSEEK3_WORDS])
            }
            "falcon" => plain(&[FALCON_PUNCTUATION, GPT2, THREE_DIGITS]),
            "poro-chat" | "bloom" | "gpt3-finnish" => plain(&[BLOOM]),
            "viking" => plain(&[BLOOM, DIGIT]),
            "tekken" => PreTokenizer { ignore_merges: true, add_bos: true, ..plain(&[TEKKEN]) },
            "gpt-4o" | "llama4" | "kanana2" | "talkie" | "minimax-m2" => plain(&[GPT4O]),
            "granite-embed-multi-97m" => PreTokenizer { ignore_merges: true, ..plain(&[GPT4O]) },
            "tiny_aya" | "cohere2moe" => plain(&[COHERE_DIGITS, GPT4O]),
            "superbpe" => plain(&[DIGITS, r"(?=(\d{3})+(?!\d))"]),
            "bailingmoe" | "bailingmoe2" | "llada-moe" => plain(&[BAILING]),
            "seed-coder" => plain(&[SEED]),
            "exaone-moe" => plain(&[EXAONE_MOE]),
            "laguna" => plain(&[r"[^\n]+|[\n]+", QWEN2]),
            _ => return Err(TextError::UnknownPreTokenizer { pre: name.to_owned() }),
        })
    }

    /// Returns a name for the steps of a `tokenizer.json` before its byte-level model, if there is one.
    pub fn name_of(normalizer: &Value, pre_tokenizer: &Value, ignore_merges: bool) -> Option<&'static str> {
        let compose = match normalizer.get("type").and_then(Value::as_str) {
            None => false,
            Some("NFC") => true,
            Some(_) => return None,
        };
        let steps = pre_tokenizer.get("pretokenizers").and_then(Value::as_array).map(Vec::as_slice);
        let mut patterns = Vec::new();
        for step in steps.unwrap_or(std::slice::from_ref(pre_tokenizer)) {
            patterns.extend(pattern(step)?);
        }
        NAMES.into_iter().find(|name| {
            let is_same = |it: &Self| {
                it.compose == compose && it.ignore_merges == ignore_merges && it.patterns == patterns
            };
            Self::named(name).is_ok_and(|settings| is_same(&settings))
        })
    }

    pub fn normalizer(&self) -> Option<NormalizerWrapper> {
        self.compose.then(|| NFC.into())
    }

    /// The splits, followed by the mapping of bytes to printable characters.
    pub fn splitter(&self) -> Result<PreTokenizerWrapper, TextError> {
        let mut steps = Vec::with_capacity(self.patterns.len() + 1);
        for pattern in self.patterns {
            let pattern = SplitPattern::Regex((*pattern).to_owned());
            let split = Split::new(pattern, SplitDelimiterBehavior::Isolated, false);
            let split = split.map_err(|error| TextError::Encode { reason: error.to_string() })?;
            steps.push(split.into());
        }
        steps.push(ByteLevel::new(false, false, false).into());
        Ok(Sequence::new(steps).into())
    }
}

/// The pattern by which a step of a `tokenizer.json` splits a text. The outer `None` says that it does something else, the
/// inner that it does not split.
fn pattern(step: &Value) -> Option<Option<&str>> {
    let is = |field: &str, value: Value| step.get(field) == Some(&value);
    match step.get("type").and_then(Value::as_str)? {
        "Split" if is("behavior", "Isolated".into()) && is("invert", false.into()) => {
            step.pointer("/pattern/Regex").and_then(Value::as_str).map(Some)
        }
        "Digits" if is("individual_digits", true.into()) => Some(Some(DIGIT)),
        "ByteLevel" if is("add_prefix_space", true.into()) => None,
        "ByteLevel" if is("use_regex", false.into()) => Some(None),
        "ByteLevel" => Some(Some(GPT2)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::{NAMES, PreTokenizer};

    #[test]
    fn what_a_name_stands_for_has_a_name() {
        for name in NAMES {
            let settings = PreTokenizer::named(name).unwrap();
            let [normalizer, splitter] = [
                serde_json::to_value(settings.normalizer()).unwrap(),
                serde_json::to_value(settings.splitter().unwrap()).unwrap(),
            ];
            let found = PreTokenizer::name_of(&normalizer, &splitter, settings.ignore_merges).unwrap();
            let found = PreTokenizer::named(found).unwrap();
            assert_eq!(found.patterns, settings.patterns, "{name}");
        }
        let lower = serde_json::json!({"type": "Lowercase"});
        assert_eq!(PreTokenizer::name_of(&lower, &serde_json::Value::Null, false), None);
    }

    #[test]
    fn every_pattern_compiles() {
        let names = [
            "default",
            "llama-bpe",
            "smaug-bpe",
            "minicpm5",
            "gpt-2",
            "smollm",
            "qwen2",
            "qwen35",
            "deepseek-llm",
            "deepseek-coder",
            "deepseek-v3",
            "falcon",
            "bloom",
            "viking",
            "tekken",
            "gpt-4o",
            "tiny_aya",
            "superbpe",
            "bailingmoe",
            "seed-coder",
            "exaone-moe",
            "laguna",
        ];
        for name in names {
            PreTokenizer::named(name).unwrap().splitter().unwrap();
        }
        assert!(PreTokenizer::named("kimi-k2").unwrap_err().to_string().contains("kimi-k2"));
    }
}
