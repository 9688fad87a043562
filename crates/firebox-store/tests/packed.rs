//! Packed safetensors models against the numbers that `fixtures/make_packed.py` computes from the formats' definitions.
#![allow(clippy::unwrap_used, reason = "a test that fails here should say so")]

mod support;

use std::fs;
use std::path::{Path, PathBuf};

use firebox_store::safetensors::Header;
use firebox_store::{
    Bits, BlockType, Checkpoint, Dtype, Encoding, ImportOptions, Quantization, export_safetensors, import,
};
use serde_json::{Value, json};
use support::{directory, f32_bytes, numbers, safetensors};
use tempfile::tempdir;

fn fixtures() -> Vec<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/packed");
    let mut found: Vec<PathBuf> = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    found.sort();
    found
}

/// The name, the shape and the numbers of the only unpacked tensor of a fixture.
fn expected(fixture: &Path) -> (String, Vec<usize>, Vec<f32>) {
    let file = fs::read(fixture.join("expected.safetensors")).unwrap();
    let entry = Header::parse(&file).unwrap().entries.remove(0);
    let bytes = &file[entry.start..entry.start + entry.len];
    (entry.name, entry.shape, bytes.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect())
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

#[test]
fn packed_weights_are_imported_bit_for_bit() {
    let folder = tempdir().unwrap();
    let fixtures = fixtures();
    assert_eq!(fixtures.len(), 16);
    for fixture in fixtures {
        let kind = fixture.file_name().unwrap().to_str().unwrap();
        let (name, shape, values) = expected(&fixture);
        let bundle = folder.path().join(kind);
        import(&fixture, &bundle, &ImportOptions::default(), &mut |_| {}).unwrap();
        let bundle = Checkpoint::open(&bundle).unwrap();
        let names: Vec<&str> = bundle.tensors().map(|info| info.name.as_str()).collect();
        assert_eq!(names, [name.as_str(), "model.norm.weight"], "{kind}");
        assert!(
            bundle.config().get("quantization_config").is_none()
                && bundle.config().get("quantization").is_none()
        );
        let weight = bundle.weight(&name).unwrap();
        assert_eq!(weight.shape, shape, "{kind}");
        let found = weight.to_f32().unwrap();
        let wrong = bits(&found).iter().zip(bits(&values)).position(|(found, expected)| *found != expected);
        assert_eq!(wrong.map(|at| (at, found[at], values[at])), None, "{kind}");
    }
}

#[test]
fn packed_weights_are_exported_bit_for_bit() {
    let folder = tempdir().unwrap();
    // What it holds is an expert, and experts are exported for families that are published with a tensor for each.
    for fixture in fixtures().into_iter().filter(|path| !path.ends_with("mxfp4")) {
        let (name, shape, values) = expected(&fixture);
        let (packed, to) =
            (Checkpoint::open_listing(&fixture).unwrap(), folder.path().join(fixture.file_name().unwrap()));
        export_safetensors(&packed, &to, Dtype::BF16, None, &mut |_| {}).unwrap();
        let exported = Checkpoint::open(&to).unwrap();
        assert!(exported.config().get("quantization_config").is_none());
        let weight = exported.weight(&name).unwrap();
        assert_eq!((weight.shape.clone(), exported.tensors().count()), (shape, 2));
        assert!(bits(&weight.to_f32().unwrap()) == bits(&values), "{}", fixture.display());
    }
}

#[test]
fn packed_weights_are_quantized_anew() {
    let folder = tempdir().unwrap();
    let quantize = Some(Quantization { bits: Bits::Q8, group: 32 });
    for fixture in fixtures().into_iter().filter(|path| !path.ends_with("mxfp4")) {
        let (name, shape, values) = expected(&fixture);
        let bundle = folder.path().join(fixture.file_name().unwrap());
        let report = import(&fixture, &bundle, &ImportOptions::from(quantize), &mut |_| {}).unwrap();
        assert_eq!(report.quantized, 1);
        let weight = Checkpoint::open(&bundle).unwrap().weight(&name).unwrap();
        assert!(matches!(weight.encoding, Encoding::Grouped(_)));
        let found = weight.to_f32().unwrap();
        for (found, expected) in found.chunks(shape[1]).zip(values.chunks(shape[1])) {
            let largest = expected.iter().fold(0f32, |largest, value| largest.max(value.abs()));
            for (found, value) in found.iter().zip(expected) {
                // Half a step, the rounding of the scale to f16, and that of the expected number to bf16: an import
                // quantizes what is not rounded yet.
                let close = (found - value).abs() <= largest / 254.0 + largest / 2048.0 + value.abs() / 256.0;
                assert!(close, "{}: {found} instead of {value}, of {largest}", fixture.display());
            }
        }
    }
}

#[test]
fn packed_models_are_listed_and_refused_until_they_are_imported() {
    for fixture in fixtures() {
        let error = Checkpoint::open(&fixture).unwrap_err().to_string();
        for word in ["packed as", "firebox import", "config.json", fixture.to_str().unwrap()] {
            assert!(error.contains(word), "{error:?} does not mention {word:?}");
        }
        let listing = Checkpoint::open_listing(&fixture).unwrap();
        let (name, shape, values) = expected(&fixture);
        assert_eq!(listing.info(&name).unwrap().shape, shape);
        assert!(listing.packed_as(&name).is_some() && listing.packed_as("model.norm.weight").is_none());
        assert_eq!(bits(&listing.weight(&name).unwrap().to_f32().unwrap()), bits(&values));
    }
}

fn refuse(config: Value, words: &[&str]) {
    let folder = tempdir().unwrap();
    let file = safetensors(&[("model.norm.weight", "F32", vec![1], vec![0; 4])]);
    let config = json!({"model_type": "llama", "quantization_config": config}).to_string();
    let path = directory(
        &folder.path().join("model"),
        &[("config.json", config.as_bytes()), ("model.safetensors", &file)],
    );
    let error = Checkpoint::open(&path).unwrap_err().to_string();
    for word in words.iter().chain(&["config.json", "not supported", "original weights or a GGUF file"]) {
        assert!(error.contains(word), "{error:?} does not mention {word:?}");
    }
}

#[test]
fn unknown_packings_are_refused_by_name() {
    refuse(json!({"quant_method": "hqq"}), &["hqq", "awq, gptq"]);
    refuse(json!({"quant_method": "bitsandbytes", "load_in_8bit": true}), &["bitsandbytes of 8 bits"]);
    refuse(json!({"quant_method": "gptq", "bits": 3, "group_size": 128}), &["bits", "\"3\"", "2, 4, 8"]);
    refuse(
        json!({"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemv"}),
        &["version", "gemv"],
    );
    refuse(
        json!({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}),
        &["checkpoint_format", "marlin"],
    );
    refuse(json!({"quant_method": "fp8", "fmt": "e5m2"}), &["fmt", "e5m2"]);
    refuse(
        json!({"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}),
        &["nvfp4-pack-quantized"],
    );
    refuse(json!({"bits": 4, "group_size": 64, "mode": "nvfp4"}), &["mode", "nvfp4"]);
    refuse(json!({"group_size": 64}), &["quant_method", "missing"]);
}

/// Removes or shortens one stored tensor after the other.
#[test]
fn damaged_parts_are_refused() {
    let folder = tempdir().unwrap();
    for (at, fixture) in fixtures().into_iter().enumerate() {
        let file = fs::read(fixture.join("model.safetensors")).unwrap();
        let config = fs::read(fixture.join("config.json")).unwrap();
        let entries = Header::parse(&file).unwrap().entries;
        for (index, damaged) in
            entries.iter().enumerate().filter(|(_, entry)| entry.name != "model.norm.weight")
        {
            if [".input_scale", "_g_idx", ".g_idx"].iter().any(|end| damaged.name.ends_with(end)) {
                continue;
            }
            let tensors: Vec<_> = entries
                .iter()
                .filter(|entry| entry.name != damaged.name)
                .map(|entry| {
                    let bytes = file[entry.start..entry.start + entry.len].to_vec();
                    (entry.name.as_str(), entry.dtype.name(), entry.shape.clone(), bytes)
                })
                .collect();
            let path = directory(
                &folder.path().join(format!("{at}-{index}")),
                &[("config.json", &config), ("model.safetensors", &safetensors(&tensors))],
            );
            let left = Checkpoint::open_listing(&path);
            // Symmetric ones have no zero points. Without its first part nothing looks packed.
            let whole = left.is_ok_and(|left| left.packed_as(&expected(&fixture).0).is_some());
            assert!(!whole || damaged.name.ends_with("weight_zero_point"), "{}", damaged.name);
        }
    }
}

/// The stored tensors of a fixture under other names.
fn renamed(fixture: &str, folder: &Path, model_type: &str, own: impl Fn(&str) -> String) -> PathBuf {
    let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/packed").join(fixture);
    let file = fs::read(fixture.join("model.safetensors")).unwrap();
    let mut config: Value = serde_json::from_slice(&fs::read(fixture.join("config.json")).unwrap()).unwrap();
    config["model_type"] = model_type.into();
    let entries = Header::parse(&file).unwrap().entries;
    let names: Vec<String> = entries.iter().map(|entry| own(&entry.name)).collect();
    let tensors: Vec<_> = entries
        .iter()
        .zip(&names)
        .map(|(entry, name)| {
            let bytes = file[entry.start..entry.start + entry.len].to_vec();
            (name.as_str(), entry.dtype.name(), entry.shape.clone(), bytes)
        })
        .collect();
    let config = config.to_string();
    directory(folder, &[("config.json", config.as_bytes()), ("model.safetensors", &safetensors(&tensors))])
}

#[test]
fn packed_weights_of_a_family_with_own_names_are_unpacked() {
    let folder = tempdir().unwrap();
    let own = |name: &str| name.replace("mlp.up_proj", "feed_forward.w3");
    let model = renamed("mlx-4", &folder.path().join("model"), "lfm2", own);
    let listing = Checkpoint::open_listing(&model).unwrap();
    let (name, _, values) = expected(&fixtures().into_iter().find(|path| path.ends_with("mlx-4")).unwrap());
    assert_eq!(bits(&listing.weight(&name).unwrap().to_f32().unwrap()), bits(&values));
}

/// The matrix `[outputs, inputs]` of an expert in a stack of shape `[experts, inputs, outputs]`.
fn of_expert(stack: &[f32], [inputs, outputs]: [usize; 2], expert: usize) -> Vec<f32> {
    let element = |at: usize| stack[(expert * inputs + at % inputs) * outputs + at / inputs];
    (0..inputs * outputs).map(element).collect()
}

fn assert_quantized(found: &[f32], expected: &[f32]) {
    let largest = expected.iter().fold(0f32, |largest, value| largest.max(value.abs()));
    for (found, value) in found.iter().zip(expected) {
        assert!((found - value).abs() <= largest / 200.0, "{found} instead of {value}, of {largest}");
    }
}

/// Of gpt-oss every expert has matrices of its own, whose blocks stay as they are.
#[test]
fn stacks_of_experts_in_mxfp4_keep_their_blocks() {
    let folder = tempdir().unwrap();
    let model = renamed("mxfp4", &folder.path().join("model"), "gpt_oss", str::to_owned);
    let (_, shape, values) = expected(&fixtures().into_iter().find(|path| path.ends_with("mxfp4")).unwrap());
    let imported = |name: &str, quantize| {
        let bundle = folder.path().join(name);
        import(&model, &bundle, &ImportOptions::from(quantize), &mut |_| {}).unwrap();
        Checkpoint::open(&bundle).unwrap()
    };
    let quantized = imported("q8", Some(Quantization { bits: Bits::Q8, group: 32 }));
    for checkpoint in [Checkpoint::open_listing(&model).unwrap(), imported("plain", None)] {
        assert_eq!(checkpoint.tensors().count(), 1 + shape[0]);
        for expert in 0..shape[0] {
            let name = format!("model.layers.0.mlp.experts.{expert}.gate_up_proj.weight");
            let expected = of_expert(&values, [shape[1], shape[2]], expert);
            let weight = checkpoint.weight(&name).unwrap();
            assert_eq!(weight.shape, [shape[2], shape[1]]);
            assert_eq!(weight.encoding, Encoding::Block(BlockType::MXFP4));
            assert_eq!(checkpoint.info(&name).unwrap().encoding, weight.encoding);
            assert_eq!(weight.to_f32().unwrap(), expected);
            assert_quantized(&quantized.weight(&name).unwrap().to_f32().unwrap(), &expected);
        }
    }
}

/// What lies as `[inputs, outputs]` is quantized along its inputs, from a directory and from a bundle.
#[test]
fn transposed_experts_are_quantized_along_their_inputs() {
    let folder = tempdir().unwrap();
    let stack = numbers(2 * 64 * 6, 3);
    let file = safetensors(&[
        ("model.layers.0.mlp.experts.down_proj", "F32", vec![2, 64, 6], f32_bytes(&stack)),
        ("model.norm.weight", "F32", vec![1], vec![0; 4]),
    ]);
    let files: [(&str, &[u8]); 2] =
        [("config.json", br#"{"model_type": "gpt_oss"}"#), ("model.safetensors", &file)];
    let model = directory(&folder.path().join("model"), &files);
    let bundle = folder.path().join("bundle");
    import(&model, &bundle, &ImportOptions::default(), &mut |_| {}).unwrap();
    for (at, source) in [&model, &bundle].into_iter().enumerate() {
        let quantized = folder.path().join(format!("quantized-{at}"));
        let quantize = Some(Quantization { bits: Bits::Q8, group: 32 });
        let report = import(source, &quantized, &ImportOptions::from(quantize), &mut |_| {}).unwrap();
        assert_eq!(report.quantized, 2);
        let (plain, quantized) = (Checkpoint::open(source).unwrap(), Checkpoint::open(&quantized).unwrap());
        for expert in 0..2 {
            let name = format!("model.layers.0.mlp.experts.{expert}.down_proj");
            assert_eq!(plain.weight(&name).unwrap().shape, [64, 6]);
            let weight = quantized.weight(&format!("{name}.weight")).unwrap();
            assert_eq!(weight.shape, [6, 64]);
            assert_quantized(&weight.to_f32().unwrap(), &of_expert(&stack, [64, 6], expert));
        }
    }
}

/// Without its scales a stack of experts in FP8 would be read as numbers.
#[test]
fn fp8_that_no_scale_belongs_to_is_refused() {
    let folder = tempdir().unwrap();
    let own = |name: &str| name.replace("up_proj.weight", "experts.down_proj");
    let model = renamed("fp8-tensor", &folder.path().join("model"), "qwen3_5_moe", own);
    let error = Checkpoint::open_listing(&model).unwrap_err().to_string();
    assert!(error.contains("FP8 without") && error.contains("experts.down_proj"), "{error}");
}

/// The first inputs of the fuzz target: a configuration, a zero byte, and the weights.
#[test]
fn inputs_of_the_fuzz_target_are_unpacked() {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus/packed");
    let folder = tempdir().unwrap();
    for entry in fs::read_dir(corpus).unwrap() {
        let (path, input) = (entry.as_ref().unwrap().path(), fs::read(entry.unwrap().path()).unwrap());
        let (config, weights) = input.split_at(input.iter().position(|byte| *byte == 0).unwrap());
        let files: [(&str, &[u8]); 2] = [("config.json", config), ("model.safetensors", &weights[1..])];
        let model = directory(&folder.path().join(path.file_name().unwrap()), &files);
        let listing = Checkpoint::open_listing(&model).unwrap();
        assert!(listing.tensors().all(|info| listing.weight(&info.name).is_ok()), "{}", path.display());
    }
}
