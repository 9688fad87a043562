//! Tests that training computes what inference computes.

#![allow(clippy::unwrap_used)]

use std::path::{Path, PathBuf};

use burn::tensor::{Device, Tensor, TensorData};
use firebox::internals::model::{AdapterPlan, Fed, HeadForm, LogitRows, Seeded, Tower};
use firebox::internals::store::Checkpoint;
use firebox::{Model, device};

const FAMILIES: [&str; 34] = [
    "cohere2",
    "deepseek_v3",
    "ernie4_5",
    "exaone4",
    "gemma3_text",
    "gemma4_text",
    "glm4",
    "glm4_moe",
    "glm4_moe_lite",
    "gpt2",
    "gpt_oss",
    "granite",
    "granitemoe",
    "granitemoehybrid",
    "hunyuan_v1_dense",
    "lfm2",
    "lfm2_moe",
    "llama",
    "mamba2",
    "ministral3",
    "mistral",
    "nemotron_h",
    "olmo2",
    "olmo3",
    "phi3",
    "qwen2",
    "qwen3",
    "qwen3_5_moe_text",
    "qwen3_5_text",
    "qwen3_moe",
    "qwen3_next",
    "seed_oss",
    "smollm3",
    "starcoder2",
];

const SEEDED: Seeded = Seeded { seed: 7, embedding: 0.02, head_norms: 1.0 };

fn fixture(family: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/reference").join(family)
}

fn learning() -> Device {
    device("cpu").unwrap().autodiff()
}

fn tokens(start: u32, count: usize) -> Vec<u32> {
    (0..count as u32).map(|i| 3 + (start + i * 31) % 90).collect()
}

fn values(tensor: Tensor<2>) -> Vec<f32> {
    tensor.without_autodiff().try_into_vec_as::<f32>().unwrap()
}

fn assert_close(found: &[f32], expected: &[f32], what: &str) {
    let range = expected.iter().fold(0f32, |range, value| range.max(value.abs()));
    assert_eq!(found.len(), expected.len(), "{what}");
    for (found, expected) in found.iter().zip(expected) {
        assert!((found - expected).abs() < range * 1e-4, "{what}: {found} instead of {expected}");
    }
}

/// Returns the logits of all tokens of some sequences, as a decoder computes them.
fn expected(model: &Model, sequences: &[Vec<u32>]) -> Vec<f32> {
    let decoder = model.decoder().unwrap();
    let logits = sequences
        .iter()
        .flat_map(|tokens| values(decoder.forward(tokens, 0, &mut decoder.cache(), LogitRows::All).unwrap()));
    logits.collect()
}

fn sequences() -> Vec<Vec<u32>> {
    vec![tokens(1, 30), tokens(5, 1), tokens(9, 17)]
}

fn lengths(sequences: &[Vec<u32>]) -> Vec<usize> {
    sequences.iter().map(Vec::len).collect()
}

#[test]
fn a_tower_equals_its_model() {
    for family in FAMILIES {
        let model = Model::open(fixture(family), &device("cpu").unwrap()).unwrap();
        let tower = Tower::whole(model.checkpoint(), &learning()).unwrap();
        let sequences = sequences();
        let logits = tower.forward(Fed::Tokens(sequences.concat()), &lengths(&sequences)).unwrap();
        assert_close(&values(logits), &expected(&model, &sequences), family);
    }
}

#[test]
fn an_untrained_head_equals_its_model() {
    // The layers of Gemma 4 read more than the states that a head is trained on.
    for family in FAMILIES.into_iter().filter(|family| *family != "gemma4_text") {
        let model = Model::open(fixture(family), &device("cpu").unwrap()).unwrap();
        let decoder = model.decoder().unwrap();
        let sequences = sequences();
        for split in [1, decoder.layers() - 1] {
            let states: Vec<_> =
                sequences.iter().map(|tokens| decoder.hidden_after(tokens, split).unwrap()).collect();
            let states = Tensor::cat(states, 0);
            let plan = AdapterPlan { rank: 4, targets: vec!["q_proj".into(), "down_proj".into()] };
            let forms = [(HeadForm::Blocks, None), (HeadForm::Adapter { scale: 2.0 }, Some(&plan))];
            for (form, plan) in forms {
                let tower =
                    Tower::head(model.checkpoint(), None, &form, plan, split, &learning(), SEEDED).unwrap();
                let logits = tower.forward(Fed::States(states.clone()), &lengths(&sequences)).unwrap();
                assert_close(&values(logits), &expected(&model, &sequences), family);
            }
        }
    }
}

/// Layers that read inputs of their own, or what earlier layers store, cannot start from hidden states.
#[test]
fn heads_of_layers_that_read_more_are_not_trained() {
    let model = Model::open(fixture("gemma4_text"), &device("cpu").unwrap()).unwrap();
    let error = Tower::head(model.checkpoint(), None, &HeadForm::Blocks, None, 3, &learning(), SEEDED);
    assert!(error.unwrap_err().to_string().contains("train a bridge"));
}

/// A bridge initially adds nothing, even in families whose norms add to their weights, and learns.
#[test]
fn a_bridge_of_every_family_learns() {
    const WIDTH: usize = 3;
    for family in FAMILIES {
        let model = Model::open(fixture(family), &device("cpu").unwrap()).unwrap();
        let decoder = model.decoder().unwrap();
        let (split, form) = (decoder.layers() - 1, HeadForm::Bridge { width: WIDTH });
        let tower = Tower::head(model.checkpoint(), None, &form, None, split, &learning(), SEEDED).unwrap();
        let tokens = tokens(1, 30);
        let states = decoder.hidden_after(&tokens, split).unwrap();
        let logits = tower.forward(Fed::States(states), &[tokens.len()]).unwrap();
        let gradients = logits.powi_scalar(2).mean().backward();
        let mut outward = Outward { gradients: &gradients, width: WIDTH, largest: None };
        burn::module::Module::visit(&tower, &mut outward);
        assert!(outward.largest.unwrap() > 0.0, "{family}");
    }
}

/// Finds the gradient of a bridge's output projection.
struct Outward<'g> {
    gradients: &'g burn::tensor::Gradients,
    width: usize,
    largest: Option<f32>,
}

impl burn::module::ModuleVisitor for Outward<'_> {
    fn visit_float<const D: usize>(&mut self, param: &burn::module::Param<Tensor<D>>) {
        let tensor = param.val();
        if D == 2 && tensor.dims()[1] == self.width {
            let gradient = tensor.grad(self.gradients).unwrap();
            self.largest = Some(gradient.abs().max().try_into_scalar::<f32>().unwrap());
        }
    }
}

/// Small steps along the gradient of all parameters change the loss by as much as the gradient predicts.
#[test]
fn every_family_learns() {
    let folder = tempfile::tempdir().unwrap();
    // The loss of this fixture jumps within the steps: they would have to be smaller than f32 can tell.
    for family in FAMILIES.into_iter().filter(|family| *family != "qwen3_next") {
        let checkpoint = Checkpoint::open(with_all_experts(family, folder.path())).unwrap();
        let tower = Tower::whole(&checkpoint, &learning()).unwrap();
        let sequences = sequences();
        let loss = |tower: &Tower| {
            let logits = tower.forward(Fed::Tokens(sequences.concat()), &lengths(&sequences)).unwrap();
            let [rows, vocab] = logits.dims();
            let targets: Vec<i32> = (0..rows as i32).map(|row| (row * 7 + 3) % vocab as i32).collect();
            let targets: Tensor<2, burn::tensor::Int> =
                Tensor::from_data(TensorData::new(targets, [rows, 1]), &logits.device());
            burn::tensor::activation::log_softmax(logits, 1).gather(1, targets).mean().neg()
        };
        let first = loss(&tower);
        let before = first.clone().without_autodiff().try_into_scalar::<f32>().unwrap();
        let gradients = first.backward();
        let mut stepping = Stepping { gradients: &gradients, rate: 0.0, square: 0.0, missing: 0 };
        let _ = burn::module::Module::map(tower.clone(), &mut stepping);
        let (square, missing) = (stepping.square, stepping.missing);
        assert_eq!(missing, 0, "{family}: every parameter has a gradient");
        // The decrease that a linear function would have.
        let wanted = 1e-4 * f64::from(before);
        let after = |rate: f64| {
            let mut stepping = Stepping { gradients: &gradients, rate, square: 0.0, missing: 0 };
            let stepped = burn::module::Module::map(tower.clone(), &mut stepping);
            loss(&stepped).without_autodiff().try_into_scalar::<f32>().unwrap()
        };
        // Half of what steps in both directions differ by, in which the curvature cancels.
        let lost = f64::from(after(-wanted / square) - after(wanted / square)) / 2.0;
        assert!((lost / wanted - 1.0).abs() < 0.05, "{family}: lost {lost} instead of {wanted}");
    }
}

/// Writes the fixture with all experts of mixtures active: with only some active, the loss jumps whenever a token's
/// choice changes, which no gradient shows.
fn with_all_experts(family: &str, folder: &Path) -> PathBuf {
    let path = folder.join(family);
    std::fs::create_dir(&path).unwrap();
    let config = std::fs::read_to_string(fixture(family).join("config.json")).unwrap();
    let config = config.replace("\"num_experts_per_tok\": 2", "\"num_experts_per_tok\": 8");
    let config = config.replace("\"n_group\": 2", "\"n_group\": 1");
    std::fs::write(path.join("config.json"), config).unwrap();
    std::fs::copy(fixture(family).join("model.safetensors"), path.join("model.safetensors")).unwrap();
    path
}

struct Stepping<'a> {
    gradients: &'a burn::tensor::Gradients,
    rate: f64,
    square: f64,
    missing: usize,
}

impl burn::module::ModuleMapper for Stepping<'_> {
    fn map_float<const D: usize>(
        &mut self,
        param: burn::module::Param<Tensor<D>>,
    ) -> burn::module::Param<Tensor<D>> {
        param.map(|tensor| {
            let Some(gradient) = tensor.grad(self.gradients) else {
                self.missing += 1;
                return tensor;
            };
            let square = gradient.clone().powi_scalar(2).sum().try_into_scalar::<f32>().unwrap();
            self.square += f64::from(square);
            let stepped = tensor.clone().without_autodiff().sub(gradient.mul_scalar(self.rate));
            stepped.autodiff().require_grad()
        })
    }
}

/// Skipping a layer equals a model whose layer adds nothing.
#[test]
fn a_profile_measures_what_layers_contribute() {
    let folder = tempfile::tempdir().unwrap();
    let sample = |seed| {
        let tokens = tokens(seed, 150);
        let learn = (0..tokens.len()).map(|at| at % 3 == 2).collect();
        Ok(firebox::internals::train::Sample { tokens, learn })
    };
    let samples = || [sample(1), sample(8)];
    let model = Model::open(fixture("qwen3"), &device("cpu").unwrap()).unwrap();
    let profile = firebox::internals::train::profile(&model.decoder().unwrap(), samples()).unwrap();
    assert_eq!(profile.targets, 100);
    for layer in 0..profile.without.len() {
        let path = folder.path().join(layer.to_string());
        std::fs::create_dir(&path).unwrap();
        std::fs::copy(fixture("qwen3").join("config.json"), path.join("config.json")).unwrap();
        let bytes = std::fs::read(fixture("qwen3").join("model.safetensors")).unwrap();
        let tensors = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        let adds = ["o_proj", "down_proj"].map(|name| (format!("layers.{layer}."), name));
        let muted = |name: &str| adds.iter().any(|(layer, end)| name.contains(layer) && name.contains(end));
        let zeros = vec![0u8; bytes.len()];
        let views = tensors.tensors().into_iter().map(|(name, view)| {
            let data = if muted(&name) { &zeros[..view.data().len()] } else { view.data() };
            let view =
                safetensors::tensor::TensorView::new(view.dtype(), view.shape().to_vec(), data).unwrap();
            (name, view)
        });
        safetensors::serialize_to_file(views.collect::<Vec<_>>(), None, &path.join("model.safetensors"))
            .unwrap();
        let muted = Model::open(&path, &device("cpu").unwrap()).unwrap();
        let muted = firebox::internals::train::profile(&muted.decoder().unwrap(), samples()).unwrap();
        let difference = profile.loss + profile.without[layer] - muted.loss;
        assert!(difference.abs() < 1e-5, "layer {layer}: {difference}");
    }
}
