//! Tests that an exported model computes what its source does, in both formats.

#![allow(clippy::unwrap_used)]

use std::path::{Path, PathBuf};

use firebox::internals::eval::{Prefill, verify_against};
use firebox::internals::runtime::{export, likeliest};
use firebox::internals::store::{
    Bits, BlockType, Checkpoint, Dtype, Encoding, ExportReport, ImportOptions, Quantization, TokenizerSource,
    import,
};
use firebox::internals::text::Tokenizer;
use firebox::{KvType, Model, RuntimeError, device};

/// Families that can be written as GGUF.
const FAMILIES: [&str; 18] = [
    "llama",
    "mistral",
    "smollm3",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "gemma3_text",
    "phi3",
    "olmo2",
    "olmo3",
    "granite",
    "glm4",
    "seed_oss",
    "ernie4_5",
    "exaone4",
    "hunyuan_v1_dense",
    "cohere2",
    "starcoder2",
];

/// Families that cannot be written as safetensors under their published names.
const OWN_NAMES: [&str; 8] = [
    "gpt_oss",
    "granitemoe",
    "granitemoehybrid",
    "lfm2",
    "lfm2_moe",
    "nemotron_h",
    "qwen3_5_moe_text",
    "gemma4-mixture-keys-as-values",
];

const PROMPT: [u32; 9] = [5, 77, 130, 9, 101, 14, 3, 150, 66];

fn fixtures(folder: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(folder)
}

fn open(path: &Path) -> Model {
    Model::open(path, &device("cpu").unwrap()).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn gguf(source: &Path, file: &Path) -> Result<ExportReport, RuntimeError> {
    export::gguf(source, file, &mut |_| ())
}

fn safetensors(source: &Path, folder: &Path, dtype: Dtype) -> Result<ExportReport, RuntimeError> {
    export::safetensors(source, folder, dtype, &mut |_| ())
}

/// The logits of the prompt's last token, and the tokens that follow it.
fn answer(path: &Path) -> (Vec<f32>, Vec<u32>) {
    let model = open(path);
    let mut session = model.session().unwrap().with_kv_type(KvType::F32);
    let logits = session.feed(&PROMPT).unwrap();
    let mut tokens = vec![likeliest(&logits)];
    for _ in 0..12 {
        let next = session.feed(&tokens[tokens.len() - 1..]).unwrap();
        tokens.push(likeliest(&next));
    }
    (logits, tokens)
}

#[track_caller]
fn same_answer(one: &Path, other: &Path, tolerance: f32) {
    let ((logits, tokens), (found, found_tokens)) = (answer(one), answer(other));
    let largest = logits.iter().zip(&found).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    assert!(largest <= tolerance, "{}: {largest}", one.display());
    assert_eq!(tokens, found_tokens, "{}", one.display());
}

#[test]
fn families_compute_the_same_as_gguf() {
    let scratch = tempfile::tempdir().unwrap();
    let variants = [
        "llama-sharded-bf16",
        "gemma3_text-mixed-softcap",
        "mistral-window7-headdim12",
        "phi3-longrope-short-to-long",
        "phi3-partial-window",
        "qwen2-window5-last-layers",
        "qwen3-bias-legacy-config",
    ];
    let references = FAMILIES.map(|family| fixtures("reference").join(family));
    for source in references.into_iter().chain(variants.map(|name| fixtures("variants").join(name))) {
        let file = scratch.path().join(source.file_name().unwrap()).with_extension("gguf");
        let report = gguf(&source, &file).unwrap_or_else(|error| panic!("{}: {error}", source.display()));
        assert_eq!(report.unpacked, 0);
        assert!(report.notes.last().unwrap().contains("no tokenizer"), "{report:?}");
        same_answer(&source, &file, 1e-5);
        let expected = source.join("expected.safetensors");
        let found = verify_against(&open(&file), &expected, Prefill::Whole).unwrap();
        assert!(found.passes(1e-4), "{}: {found:?}", source.display());
    }
}

#[test]
fn directories_come_out_as_they_went_in() {
    let scratch = tempfile::tempdir().unwrap();
    let mut sources: Vec<PathBuf> = ["reference", "variants"]
        .into_iter()
        .flat_map(|folder| std::fs::read_dir(fixtures(folder)).unwrap())
        .map(|entry| entry.unwrap().path())
        .collect();
    sources.sort();
    let mut written = 0;
    for source in sources {
        let name = source.file_name().unwrap().to_str().unwrap();
        let folder = scratch.path().join(name);
        let exported = safetensors(&source, &folder, Dtype::BF16);
        if OWN_NAMES.iter().any(|own| name.starts_with(own)) {
            let error = exported.unwrap_err().to_string();
            assert!(error.contains("model_type") && error.contains("use the published"), "{error}");
            continue;
        }
        exported.unwrap_or_else(|error| panic!("{name}: {error}"));
        let (given, found) = (Checkpoint::open(&source).unwrap(), Checkpoint::open(&folder).unwrap());
        assert_eq!(given.config(), found.config(), "{name}");
        assert!(given.tensors().eq(found.tensors()), "{name}");
        for info in given.tensors() {
            let [one, other] = [&given, &found].map(|model| model.weight(&info.name).unwrap().data);
            assert_eq!(one, other, "{name}: {}", info.name);
        }
        // Without padding, which other engines take for tensors of the model.
        let bytes = std::fs::read(folder.join("model.safetensors")).unwrap();
        let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        assert!(file.names().iter().all(|name| !name.starts_with("__pad")), "{name}");
        written += 1;
    }
    assert!(written > 50, "{written}");
}

#[test]
fn gguf_files_become_directories() {
    let scratch = tempfile::tempdir().unwrap();
    for family in ["llama", "mistral", "smollm3", "qwen2", "qwen3", "gemma3_text", "phi3", "qwen3_moe"] {
        let source = fixtures("gguf").join(family);
        let (file, folder) = (source.join("model.gguf"), scratch.path().join(family));
        safetensors(&file, &folder, Dtype::F32).unwrap_or_else(|error| panic!("{family}: {error}"));
        let exported = Checkpoint::open(&folder).unwrap();
        assert_eq!(exported.config().get("firebox"), None, "{family}");
        same_answer(&file, &folder, 1e-5);
        let found = verify_against(&open(&folder), &source.join("hf/expected.safetensors"), Prefill::Whole);
        assert!(found.as_ref().unwrap().passes(1e-4), "{family}: {found:?}");
        // And back again.
        let again = scratch.path().join(family).with_extension("gguf");
        gguf(&folder, &again).unwrap_or_else(|error| panic!("{family}: {error}"));
        same_answer(&file, &again, 1e-5);
        same_tokens(&file, &again);
        same_tokens(&file, &folder);
    }
}

/// Checks that two models make the same tokens of texts, and end answers with the same ones.
#[track_caller]
fn same_tokens(one: &Path, other: &Path) {
    let [one, other] = [one, other].map(|path| {
        let model = Checkpoint::open(path).unwrap();
        Tokenizer::new(model.text(), model.config()).unwrap()
    });
    for text in ["the hat", "  he inherits\n\nthe other at once ", "<bos>on<eos>"] {
        assert_eq!(one.encode(text, true).unwrap(), other.encode(text, true).unwrap(), "{text:?}");
    }
    assert_eq!(
        (one.eos_ids(), one.bos_id(), one.pad_id()),
        (other.eos_ids(), other.bos_id(), other.pad_id())
    );
}

#[test]
fn quantized_bundles_keep_every_weight_as_gguf() {
    let scratch = tempfile::tempdir().unwrap();
    for family in ["qwen3", "llama"] {
        for (bits, group, block) in [
            (Bits::Q8, 32, BlockType::Q8_0),
            (Bits::Q4, 32, BlockType::Q4_0),
            (Bits::Q4, 64, BlockType::Q4_0),
        ] {
            let path = |end: &str| scratch.path().join(format!("{family}-{bits:?}-{group}{end}"));
            let options = ImportOptions::from(Some(Quantization { bits, group }));
            import(fixtures("reference").join(family), path(""), &options, &mut |_| ()).unwrap();
            let report = gguf(&path(""), &path(".gguf")).unwrap();
            assert_eq!(report.unpacked, 0, "{report:?}");
            let (given, found) =
                (Checkpoint::open(path("")).unwrap(), Checkpoint::open(path(".gguf")).unwrap());
            let values = |model: &Checkpoint, name: &str| model.weight(name).unwrap().to_f32().unwrap();
            let name = "model.layers.1.mlp.down_proj.weight";
            assert_eq!(found.info(name).unwrap().encoding, Encoding::Block(block));
            for info in given.tensors().filter(|info| family == "qwen3" || !info.name.contains("_proj")) {
                assert_eq!(values(&given, &info.name), values(&found, &info.name), "{}", info.name);
            }
            assert_eq!(answer(&path("")).1, answer(&path(".gguf")).1, "{family} {bits:?} {group}");
            // And unpacked.
            safetensors(&path(""), &path("-hf"), Dtype::F32).unwrap();
            let unpacked = Checkpoint::open(path("-hf")).unwrap();
            for info in given.tensors() {
                assert_eq!(values(&given, &info.name), values(&unpacked, &info.name), "{}", info.name);
            }
        }
    }
}

#[test]
fn rows_that_no_block_holds_are_rounded_and_told() {
    let scratch = tempfile::tempdir().unwrap();
    let (bundle, file) = (scratch.path().join("bundle"), scratch.path().join("model.gguf"));
    let options = ImportOptions::from(Some(Quantization { bits: Bits::Q8, group: 32 }));
    let source = fixtures("variants/mistral-window7-headdim12");
    import(&source, &bundle, &options, &mut |_| ()).unwrap();
    let report = gguf(&bundle, &file).unwrap();
    let notes = report.notes.join("; ");
    assert!(notes.contains("F16, rounded") && notes.contains("window of 7"), "{notes}");
    assert!(report.unpacked > 0);
    let (given, found) = (Checkpoint::open(&bundle).unwrap(), Checkpoint::open(&file).unwrap());
    let name = "model.embed_tokens.weight";
    let [given, found] = [&given, &found].map(|model| model.weight(name).unwrap().to_f32().unwrap());
    assert!(given.iter().zip(&found).all(|(a, b)| (a - b).abs() <= 1e-3 * a.abs().max(1e-3)));
}

#[test]
fn templates_and_samplers_are_in_the_file() {
    let scratch = tempfile::tempdir().unwrap();
    let (folder, file) = (scratch.path().join("hf"), scratch.path().join("model.gguf"));
    safetensors(&fixtures("gguf/qwen3/model.gguf"), &folder, Dtype::BF16).unwrap();
    let template = "{% for m in messages %}{{ m.content }}{% endfor %}";
    std::fs::write(folder.join("chat_template.jinja"), template).unwrap();
    std::fs::write(folder.join("generation_config.json"), r#"{"temperature": 0.5, "top_k": 20}"#).unwrap();
    gguf(&folder, &file).unwrap();
    let found = Checkpoint::open(&file).unwrap();
    assert_eq!(found.text().chat_template.as_deref(), Some(template));
    let recommended = found.text().generation_config.as_ref().unwrap();
    assert_eq!((&recommended["temperature"], &recommended["top_k"]), (&0.5.into(), &20.into()));
    let Some(TokenizerSource::Gguf(vocabulary)) = &found.text().tokenizer else { panic!("no vocabulary") };
    assert_eq!((vocabulary.model.as_str(), vocabulary.pre.as_deref()), ("gpt2", Some("qwen2")));
    assert_eq!(vocabulary.tokens.len(), found.info("model.embed_tokens.weight").unwrap().shape[0]);
}

#[test]
fn what_gguf_cannot_say_is_refused_by_name() {
    let scratch = tempfile::tempdir().unwrap();
    let file = scratch.path().join("model.gguf");
    for (source, words) in [
        ("reference/bert", ["model_type", "bert"]),
        ("reference/glm4_moe", ["model_type", "glm4_moe"]),
        ("variants/qwen3_moe-dense-layers", ["--safetensors", "mlp_only_layers"]),
        ("variants/llama-rope-dynamic", ["rope_parameters", "--safetensors"]),
        ("variants/smollm3-nope-sliding", ["window", "--safetensors"]),
        ("variants/llama-rope-yarn", ["truncate", "--safetensors"]),
        ("variants/llama-bias-headdim20-onekv", ["activation", "--safetensors"]),
        ("../../assets/pocket", ["tokenizer", "`Split`"]),
    ] {
        let error = gguf(&fixtures(source), &file).unwrap_err().to_string();
        for word in words {
            assert!(error.contains(word), "{source}: {error}");
        }
        assert!(!file.exists(), "{source}");
    }
}
