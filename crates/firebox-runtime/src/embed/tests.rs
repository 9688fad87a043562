//! Tests of embedding and ranking.

use std::fs;
use std::num::NonZero;
use std::path::{Path, PathBuf};

use firebox_model::{EncoderInput, Pooling};
use firebox_testing::tool::tool;
use safetensors::tensor::{Dtype, SafeTensors, TensorView};
use serde_json::{Value, json};

use super::*;
use crate::planner::{decoder_shape, encoder_activation_bytes};
use crate::readback::read_floats;
use crate::residency::{ShareOptions, SharedBudget};
use crate::{Account, Budget, KvType, MemoryError, device};

fn root(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(path)
}

fn gguf(family: &str) -> Model {
    Model::open(root(&format!("tests/fixtures/gguf/{family}/model.gguf")), &device("cpu").unwrap()).unwrap()
}

/// Returns the small encoder of random weights with a tokenizer, as a classifier of `labels` labels.
fn encoder(labels: usize, pooling: Option<&str>) -> (tempfile::TempDir, Model) {
    let folder = tempfile::tempdir().unwrap();
    let source = root("tests/fixtures/reference/bert");
    let mut config: Value = serde_json::from_slice(&fs::read(source.join("config.json")).unwrap()).unwrap();
    let bytes = fs::read(source.join("model.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let number = |seed: usize, at: usize| ((at * 37 + seed * 11) % 101) as f32 / 101.0 - 0.5;
    let floats = |seed: usize, count: usize| -> Vec<u8> {
        (0..count).flat_map(|at| number(seed, at).to_le_bytes()).collect()
    };
    let width = 48;
    let mut tensors: Vec<(String, Vec<usize>, Vec<u8>)> = file
        .tensors()
        .into_iter()
        .filter(|(name, _)| labels == 0 || !name.starts_with("pooler."))
        .map(|(name, view)| {
            let name = if labels > 0 { format!("bert.{name}") } else { name };
            (name, view.shape().to_vec(), view.data().to_vec())
        })
        .collect();
    if labels > 0 {
        config["architectures"] = json!(["BertForSequenceClassification"]);
        tensors.extend([
            ("bert.pooler.dense.weight".into(), vec![width, width], floats(1, width * width)),
            ("bert.pooler.dense.bias".into(), vec![width], floats(2, width)),
            ("classifier.weight".into(), vec![labels, width], floats(3, labels * width)),
            ("classifier.bias".into(), vec![labels], floats(4, labels)),
        ]);
    }
    let views = tensors.iter().map(|(name, shape, data)| {
        (name.as_str(), TensorView::new(Dtype::F32, shape.clone(), data).unwrap())
    });
    fs::write(folder.path().join("model.safetensors"), safetensors::serialize(views, None).unwrap()).unwrap();
    fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
    let recorded = root("crates/firebox-text/tests/fixtures/tokenizers/wordpiece.json");
    let recorded: Value = serde_json::from_slice(&fs::read(recorded).unwrap()).unwrap();
    fs::write(folder.path().join("tokenizer.json"), recorded["tokenizer"].to_string()).unwrap();
    if let Some(mode) = pooling {
        fs::create_dir(folder.path().join("1_Pooling")).unwrap();
        fs::write(folder.path().join("1_Pooling/config.json"), json!({ mode: true }).to_string()).unwrap();
    }
    let model = Model::open(folder.path(), &device("cpu").unwrap()).unwrap();
    (folder, model)
}

fn close(found: &[f32], expected: &[f32]) -> bool {
    found.len() == expected.len() && found.iter().zip(expected).all(|(a, b)| (a - b).abs() < 2e-5)
}

fn length(vector: &[f32]) -> f32 {
    vector.iter().map(|element| element * element).sum::<f32>().sqrt()
}

/// By plain loops over what one pass of one text gives.
fn by_hand(model: &Model, tokens: &[u32], pooling: Pooling, normalize: bool) -> Vec<f32> {
    let states = read_floats(model.states(&[tokens]).unwrap().remove(0)).unwrap();
    let width = states.len() / tokens.len();
    let rows: Vec<&[f32]> = states.chunks(width).collect();
    let mut vector: Vec<f32> = match pooling {
        Pooling::Mean => {
            (0..width).map(|at| rows.iter().map(|row| row[at]).sum::<f32>() / rows.len() as f32).collect()
        }
        Pooling::First => rows[0].to_vec(),
        Pooling::Last => rows[rows.len() - 1].to_vec(),
    };
    if normalize {
        let length = length(&vector);
        vector.iter_mut().for_each(|element| *element /= length);
    }
    vector
}

const TEXTS: [&str; 5] = ["Hello world.", "a", "the quick brown fox", "7 8 9", "Hello world."];

#[test]
fn vectors_are_those_of_each_text_alone() {
    let (_folder, bert) = encoder(0, None);
    for model in [bert, gguf("llama"), gguf("qwen3_5_text"), gguf("gemma3_text")] {
        for pooling in [Pooling::Mean, Pooling::First, Pooling::Last] {
            for normalize in [true, false] {
                let options = EmbedOptions { normalize, pooling: Some(pooling), dimensions: None };
                let found = model.embed(&TEXTS, &options).unwrap();
                for (text, found) in TEXTS.iter().zip(&found) {
                    let tokens = model.tokenizer().unwrap().encode(text, true).unwrap();
                    assert!(
                        close(found, &by_hand(&model, &tokens, pooling, normalize)),
                        "{pooling:?}, {text}"
                    );
                }
                assert_eq!(found[0], found[4]);
            }
        }
    }
}

/// The states behind the last layer are those that the logits are made of.
#[test]
fn states_of_a_decoder_have_its_final_norm() {
    let decoder = gguf("qwen3").decoder().unwrap();
    let texts: [&[u32]; 2] = [&[5, 9, 17], &[4]];
    let states = decoder.states(&texts).unwrap();
    assert_eq!(states[0].dims(), [3, decoder.config().hidden_size]);
    let raw = read_floats(decoder.hidden_after(texts[0], decoder.layers()).unwrap()).unwrap();
    assert!(read_floats(states[0].clone()).unwrap() != raw);
    let width = decoder.config().hidden_size;
    for row in read_floats(states[0].clone()).unwrap().chunks(width) {
        // A norm's weights are around one here.
        let mean = row.iter().map(|element| element * element).sum::<f32>() / width as f32;
        assert!((0.3..3.0).contains(&mean), "{mean}");
    }
}

#[test]
fn a_text_of_any_length_has_a_vector() {
    let (_folder, model) = encoder(0, None);
    let longest = model.encoder().unwrap().config().max_positions;
    let texts = ["a ".repeat(longest * 3), "b ".repeat(5), String::new()];
    let found = model.embed(&texts, &EmbedOptions::default()).unwrap();
    assert!(found.iter().all(|vector| (length(vector) - 1.0).abs() < 1e-5));
    let cut = EmbedOptions { dimensions: NonZero::new(5), ..EmbedOptions::default() };
    let short = model.embed(&texts, &cut).unwrap();
    assert!(short.iter().all(|vector| vector.len() == 5 && (length(vector) - 1.0).abs() < 1e-5));
    assert_eq!(model.embed::<&str>(&[], &EmbedOptions::default()).unwrap(), Vec::<Vec<f32>>::new());
    let many = vec!["a b a"; 700];
    let found = model.embed(&many, &EmbedOptions::default()).unwrap();
    assert!(found.len() == 700 && found.iter().all(|vector| close(vector, &found[0])));
}

/// Rows that passes of a decoder are planned to have.
const PLANNED: usize = 16;

/// A model in memory that it may share, all of it kept.
fn shared(path: &Path) -> (SharedBudget, Model) {
    let shared = SharedBudget::beside(&Budget::new(256 << 20)).unwrap();
    let options = ShareOptions { rows: PLANNED, ..ShareOptions::pinned() };
    let model = shared.open(path, &device("cpu").unwrap(), &options).unwrap();
    (shared, model)
}

fn held(budget: &Budget) -> u64 {
    Account::ALL.iter().map(|account| budget.held(*account)).sum()
}

fn all_close(found: &[Vec<f32>], expected: &[Vec<f32>]) -> bool {
    found.len() == expected.len() && found.iter().zip(expected).all(|(one, other)| close(one, other))
}

#[test]
fn a_pass_of_a_decoder_beyond_what_was_planned_is_paid_for_or_refused() {
    let (shared, model) = shared(&root("tests/fixtures/gguf/llama/model.gguf"));
    let (decoder, options) = (model.decoder().unwrap(), EmbedOptions::default());
    let longest = decoder.config().max_positions;
    let texts = ["a b ".repeat(longest), "a b".into()];
    let expected = gguf("llama").embed(&texts, &options).unwrap();
    let shape = decoder_shape(model.checkpoint(), decoder.config(), KvType::default()).unwrap();
    let beyond = (longest - PLANNED) as u64 * shape.activation_bytes_per_row;

    let own = model.residency().unwrap().budget();
    let before = held(own);
    assert!(own.most_held() < before + beyond);
    assert!(all_close(&model.embed(&texts, &options).unwrap(), &expected));
    assert!(own.most_held() >= before + beyond, "{} of {beyond}", own.most_held() - before);
    assert_eq!((held(own), own.held(Account::Activations)), (before, 0));

    let room = 2 * PLANNED as u64 * decoder.layout(KvType::F32).bytes_per_position() as u64;
    let budget = shared.budget();
    let taken = budget.charge(Account::Scratch, budget.left() - room).unwrap();
    let refused = model.embed(&texts[..1], &options).unwrap_err();
    assert!(
        matches!(
            refused,
            RuntimeError::Memory(MemoryError::OverBudget { account: Account::Activations, .. })
        ),
        "{refused}"
    );
    assert!(refused.to_string().contains("in smaller pieces"), "{refused}");
    assert!(all_close(&model.embed(&texts[1..], &options).unwrap(), &expected[1..]), "there is room for it");
    drop(taken);
    assert!(all_close(&model.embed(&texts, &options).unwrap(), &expected));
}

#[test]
fn short_texts_pay_for_the_pages_that_they_take() {
    let (_commons, model) = shared(&root("tests/fixtures/gguf/llama/model.gguf"));
    let position = model.decoder().unwrap().layout(KvType::F32).bytes_per_position() as u64;
    let own = model.residency().unwrap().budget();
    let (before, texts, pages) = (held(own), vec!["a"; 60], 60 * 16 * position);
    assert!(own.most_held() < before + pages);
    model.embed(&texts, &EmbedOptions::default()).unwrap();
    assert!(own.most_held() >= before + pages, "{} of {pages}", own.most_held() - before);
}

#[test]
fn a_pass_of_an_encoder_in_shared_memory_is_paid_for_or_refused() {
    let (folder, alone) = encoder(0, None);
    let ((shared, model), options) = (shared(folder.path()), EmbedOptions::default());
    let longest = model.encoder().unwrap().config().max_positions;
    let texts = ["a b ".repeat(longest), "a b".into()];
    let expected = alone.embed(&texts, &options).unwrap();
    let pass = encoder_activation_bytes(model.encoder().unwrap().config(), std::iter::once(longest));

    let budget = shared.budget();
    let before = held(budget);
    assert!(budget.most_held() < before + pass);
    assert_eq!(model.embed(&texts, &options).unwrap(), expected);
    assert!(budget.most_held() >= before + pass, "{} of {pass}", budget.most_held() - before);
    assert_eq!(held(budget), before);

    let taken = budget.charge(Account::Scratch, budget.left()).unwrap();
    let refused = model.embed(&texts, &options).unwrap_err();
    assert!(
        matches!(
            refused,
            RuntimeError::Memory(MemoryError::OverBudget { account: Account::Activations, .. })
        ),
        "{refused}"
    );
    assert!(model.rerank("a", &texts).is_err());
    drop(taken);
    assert_eq!(model.embed(&texts, &options).unwrap(), expected);
}

#[test]
fn pooling_follows_the_checkpoint() {
    let tokens = |model: &Model| model.tokenizer().unwrap().encode(TEXTS[0], true).unwrap();
    for (mode, pooling) in [
        ("pooling_mode_cls_token", Pooling::First),
        ("pooling_mode_lasttoken", Pooling::Last),
        ("pooling_mode_mean_tokens", Pooling::Mean),
    ] {
        let (_folder, model) = encoder(0, Some(mode));
        let found = model.embed(&TEXTS[..1], &EmbedOptions::default()).unwrap();
        assert!(close(&found[0], &by_hand(&model, &tokens(&model), pooling, true)), "{mode}");
    }
    let (_folder, model) = encoder(0, Some("pooling_mode_max_tokens"));
    let refused = model.embed(&TEXTS[..1], &EmbedOptions::default()).unwrap_err().to_string();
    assert!(refused.contains("pooling_mode_max_tokens") && refused.contains("not supported"), "{refused}");
    let options = EmbedOptions { pooling: Some(Pooling::Mean), ..EmbedOptions::default() };
    assert!(model.embed(&TEXTS[..1], &options).is_ok());
}

#[test]
fn documents_come_in_the_order_of_their_cosines() {
    let (_folder, bert) = encoder(0, None);
    for model in [bert, gguf("llama")] {
        let ranked = model.rerank(TEXTS[0], &TEXTS).unwrap();
        assert!(ranked.windows(2).all(|pair| pair[0].score >= pair[1].score));
        let mut first = [ranked[0].document, ranked[1].document];
        first.sort_unstable();
        assert!(first == [0, 4] && (ranked[0].score - 1.0).abs() < 1e-5);
        assert!(model.rerank::<&str>("a", &[]).unwrap().is_empty());
    }
}

/// Both texts of a pair are read together, each as what it is.
#[test]
fn a_cross_encoder_scores_pairs() {
    for labels in [1, 2] {
        let (_folder, model) = encoder(labels, None);
        let (encoder, tokenizer) = (model.encoder().unwrap(), model.tokenizer().unwrap());
        assert_eq!(encoder.labels(), Some(labels));
        let documents = ["a b", "Hello world", "the fox", &"a b ".repeat(300)];
        let query = tokenizer.encode("7 8", true).unwrap();
        let ranked = model.rerank("7 8", &documents).unwrap();
        assert_eq!(ranked.len(), documents.len());
        for Ranked { document, score } in ranked {
            let mut tokens =
                [&query[..], &tokenizer.encode(documents[document], true).unwrap()[1..]].concat();
            if tokens.len() > 128 {
                let end = tokens[tokens.len() - 1];
                tokens.truncate(127);
                tokens.push(end);
            }
            let input = EncoderInput { tokens: &tokens, second: query.len() };
            let states = read_floats(encoder.forward_together(&[input]).unwrap()).unwrap();
            let number = |seed: usize, at: usize| ((at * 37 + seed * 11) % 101) as f32 / 101.0 - 0.5;
            let product = |seed: usize, row: usize, of: &[f32]| -> f32 {
                of.iter().enumerate().map(|(at, element)| element * number(seed, row * 48 + at)).sum()
            };
            let pooled: Vec<f32> =
                (0..48).map(|row| (product(1, row, &states[..48]) + number(2, row)).tanh()).collect();
            let said: Vec<f32> = (0..labels).map(|row| product(3, row, &pooled) + number(4, row)).collect();
            let logit = if labels == 1 { said[0] } else { said[1] - said[0] };
            assert!((score - 1.0 / (1.0 + (-logit).exp())).abs() < 1e-4, "{document}: {score}, {said:?}");
            let alone = read_floats(encoder.forward(&tokens).unwrap()).unwrap();
            assert!(alone != states, "the second text is told from the first");
        }
    }
}

#[test]
#[ignore = "tool: all-MiniLM-L6-v2"]
fn a_published_encoder_tells_what_texts_are_about() {
    let model = Model::open(tool("FIREBOX_MINILM"), &device("cpu").unwrap()).unwrap();
    let documents =
        ["The cat sleeps on the sofa.", "Interest rates rose again.", "Paris is the capital of France."];
    for (query, best) in [("a kitten napping", 0), ("news about banks", 1), ("Which city governs France?", 2)]
    {
        assert_eq!(model.rerank(query, &documents).unwrap()[0].document, best, "{query}");
    }
}

#[test]
fn modules_behind_a_model_are_applied_or_refused() {
    let (folder, model) = encoder(0, None);
    let text = ["the quick brown fox"];
    let last = EmbedOptions { pooling: Some(Pooling::Last), ..EmbedOptions::default() };
    let expected = model.embed(&text, &last).unwrap();
    let path = |name: &str| folder.path().join(name);
    let reopened = || Model::open(folder.path(), &device("cpu").unwrap());
    let embedded = || reopened().unwrap().embed(&text, &EmbedOptions::default());
    fs::create_dir(path("1_Pooling")).unwrap();
    for mode in [json!("lasttoken"), json!(["lasttoken"])] {
        fs::write(path("1_Pooling/config.json"), json!({ "pooling_mode": mode }).to_string()).unwrap();
        assert_eq!(embedded().unwrap(), expected);
    }
    fs::write(path("1_Pooling/config.json"), json!({ "pooling_mode": ["cls", "max"] }).to_string()).unwrap();
    let refused = embedded().unwrap_err().to_string();
    assert!(refused.contains("pooling_mode") && refused.contains("cls with max"), "{refused}");
    fs::write(path("1_Pooling/config.json"), json!({ "pooling_mode": "lasttoken" }).to_string()).unwrap();

    let module = |kind: &str, folder: &str| {
        let kind = format!("sentence_transformers.models.{kind}");
        json!([{ "idx": 0, "name": "0", "path": folder, "type": kind }])
    };
    let write = |modules: Value| fs::write(path("modules.json"), modules.to_string()).unwrap();
    write(module("WordWeights", "1_WordWeights"));
    let refused = embedded().unwrap_err().to_string();
    assert!(refused.contains("WordWeights"), "{refused}");
    write(module("Dense", "../2_Dense"));
    let refused = reopened().unwrap_err().to_string();
    assert!(refused.contains("modules.json") && refused.contains("folder of the model"), "{refused}");

    let (inputs, outputs) = (48, 3);
    write(module("Dense", "2_Dense"));
    fs::create_dir(path("2_Dense")).unwrap();
    let weight: Vec<f32> = (0..outputs * inputs).map(|at| (at % 7) as f32 - 3.0).collect();
    let bias = [0.5, -1.0, 2.0_f32];
    let bytes = |floats: &[f32]| floats.iter().flat_map(|float| float.to_le_bytes()).collect::<Vec<u8>>();
    let (weight_bytes, bias_bytes) = (bytes(&weight), bytes(&bias));
    let tensors = [
        ("linear.weight", TensorView::new(Dtype::F32, vec![outputs, inputs], &weight_bytes).unwrap()),
        ("linear.bias", TensorView::new(Dtype::F32, vec![outputs], &bias_bytes).unwrap()),
    ];
    let file = safetensors::serialize(tensors, None).unwrap();
    fs::write(path("2_Dense/model.safetensors"), file).unwrap();
    let config = |activation: &str| {
        let said =
            json!({ "in_features": inputs, "out_features": outputs, "activation_function": activation });
        fs::write(path("2_Dense/config.json"), said.to_string()).unwrap();
    };
    config("torch.nn.modules.activation.Tanh");
    let model = reopened().unwrap();
    assert_eq!(model.embedding_width(), outputs);
    let options = EmbedOptions { normalize: false, ..EmbedOptions::default() };
    let found = model.embed(&text, &options).unwrap().remove(0);
    let pooled =
        by_hand(&model, &model.tokenizer().unwrap().encode(text[0], true).unwrap(), Pooling::Last, false);
    let expected: Vec<f32> = (weight.chunks(inputs).zip(bias))
        .map(|(row, bias)| (row.iter().zip(&pooled).map(|(a, b)| a * b).sum::<f32>() + bias).tanh())
        .collect();
    assert!(close(&found, &expected), "{found:?}, not {expected:?}");
    let cut = EmbedOptions { dimensions: NonZero::new(2), normalize: false, pooling: None };
    assert_eq!(model.embed(&text, &cut).unwrap()[0], found[..2]);
    let modules = |kinds: &[&str]| {
        let module = |kind: &&str| json!({ "path": "2_Dense", "type": format!("sentence_transformers.models.{kind}") });
        fs::write(path("modules.json"), json!(kinds.iter().map(module).collect::<Vec<_>>()).to_string())
            .unwrap();
    };
    modules(&["Normalize", "Dense"]);
    let refused = embedded().unwrap_err().to_string();
    assert!(refused.contains("another order"), "{refused}");
    modules(&["Dense", "Dense"]);
    let refused = reopened().unwrap_err().to_string();
    assert!(refused.contains("in_features") && refused.contains("3 numbers come in"), "{refused}");
    modules(&["Dense"]);
    config("torch.nn.modules.activation.Hardtanh");
    let refused = reopened().unwrap_err().to_string();
    assert!(refused.contains("activation_function") && refused.contains("Hardtanh"), "{refused}");
}
