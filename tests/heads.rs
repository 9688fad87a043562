//! Tests that a trunk with a head computes what a single model of the same weights computes, whenever the head is
//! switched to, and whatever other heads are in use.

#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use firebox::heads::{FALLBACK, HeadPoolConfig};
use firebox::internals::cache::SequenceCache;
use firebox::internals::model::{Head, HeadForm, Input, LogitRows, ModelError};
use firebox::internals::runtime::{Account, Budget};
use firebox::internals::store::{
    Checkpoint, Dtype, Encoding, Heads, NewHead, StoreError, TensorInfo, Tensors, Weight, encode,
};
use firebox::residency::ResidencyOptions;
use firebox::{
    AfterEviction, KvType, Model, OWN_HEAD, PagePool, PersistentPrefix, PrefixOptions, Role, Session,
    WholeTurns, device,
};
use proptest::prelude::*;
use safetensors::{SafeTensors, tensor::TensorView};

#[path = "heads/pool.rs"]
mod pool;

const FAMILIES: &str = "cohere2 deepseek_v3 ernie4_5 exaone4 gemma3_text gemma4_text glm4 glm4_moe glm4_moe_lite gpt2 gpt_oss granite \
     granitemoe granitemoehybrid hunyuan_v1_dense lfm2_moe llama mamba2 ministral3 mistral nemotron_h olmo2 olmo3 phi3 qwen2 \
     qwen3 qwen3_5_moe_text qwen3_5_text qwen3_moe qwen3_next seed_oss smollm3 starcoder2";

fn fixture(family: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/reference").join(family)
}

fn layer_of(name: &str) -> Option<usize> {
    name.split_once("layers.").or_else(|| name.split_once(".h."))?.1.split('.').next()?.parse().ok()
}

fn is_final_norm(name: &str) -> bool {
    ["model.norm.weight", "model.norm.bias", ".norm_f.weight", ".ln_f.weight", ".ln_f.bias"]
        .iter()
        .any(|end| name.ends_with(end))
}

/// Writes a model that differs from the fixture, from layer `split` on, in everything that a head may have.
fn changed(family: &str, split: usize, seed: u32, folder: &Path) -> PathBuf {
    let path = folder.join(format!("{family}-{seed}"));
    std::fs::create_dir(&path).unwrap();
    std::fs::copy(fixture(family).join("config.json"), path.join("config.json")).unwrap();
    let bytes = std::fs::read(fixture(family).join("model.safetensors")).unwrap();
    let model = SafeTensors::deserialize(&bytes).unwrap();
    let mut state = seed;
    let mut tensors = BTreeMap::new();
    for (name, view) in model.tensors() {
        let mut data = view.data().to_vec();
        if layer_of(&name).is_some_and(|layer| layer >= split) || is_final_norm(&name) {
            for value in data.as_chunks_mut::<4>().0 {
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                let noise = (state >> 8) as f32 / (1 << 24) as f32 - 0.5;
                *value = (f32::from_le_bytes(*value) * (1.0 + noise)).to_le_bytes();
            }
        }
        tensors.insert(name, (view.dtype(), view.shape().to_vec(), data));
    }
    let views = tensors
        .iter()
        .map(|(name, (dtype, shape, data))| (name, TensorView::new(*dtype, shape.clone(), data).unwrap()));
    safetensors::serialize_to_file(views, None, &path.join("model.safetensors")).unwrap();
    path
}

/// A trunk, models that differ from it from its split on, and the corresponding heads.
struct Wardrobe {
    trunk: Model,
    wholes: Vec<Model>,
    heads: Vec<Arc<Head>>,
    _folder: tempfile::TempDir,
}

impl Wardrobe {
    fn new(family: &str, heads: u32) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let open = |path: &Path| Model::open(path, &device("cpu").unwrap()).unwrap();
        let trunk = open(&fixture(family));
        let decoder = trunk.decoder().unwrap();
        let split = decoder.layers() / 2;
        decoder.split_at(split).unwrap();
        let paths: Vec<_> = (1..=heads).map(|seed| changed(family, split, seed, folder.path())).collect();
        let head = |path: &PathBuf| {
            // The source has all tensors, but only a head's own are read.
            let tensors = Checkpoint::open(path).unwrap();
            let own = Arc::new(Own { tensors, split });
            let id = path.file_name().unwrap().to_str().unwrap();
            Arc::new(Head::load(id, own, &HeadForm::Blocks, split, &decoder, trunk.checkpoint()).unwrap())
        };
        let heads = paths.iter().map(head).collect();
        let wholes = paths.iter().map(|path| open(path)).collect();
        Self { trunk, wholes, heads, _folder: folder }
    }

    fn session(&self) -> Session {
        Session::new(self.trunk.decoder().unwrap())
    }
}

/// The tensors of a checkpoint that belong to a head.
#[derive(Debug)]
struct Own {
    tensors: Checkpoint,
    split: usize,
}

impl Tensors for Own {
    fn path(&self) -> &Path {
        self.tensors.path()
    }

    fn info(&self, name: &str) -> Option<&TensorInfo> {
        let own = layer_of(name).is_some_and(|layer| layer >= self.split) || is_final_norm(name);
        if own { self.tensors.info(name) } else { None }
    }

    fn weight(&self, name: &str) -> Result<Weight, StoreError> {
        self.tensors.weight(name)
    }

    fn names(&self) -> Box<dyn Iterator<Item = &str> + '_> {
        Box::new(Tensors::names(&self.tensors).filter(|name| self.info(name).is_some()))
    }
}

fn tokens(start: u32, count: usize) -> Vec<u32> {
    (0..count as u32).map(|i| 3 + (start + i * 31) % 90).collect()
}

fn bits(logits: &[f32]) -> Vec<u32> {
    logits.iter().map(|logit| logit.to_bits()).collect()
}

#[test]
fn a_trunk_with_a_head_is_one_model() {
    for family in FAMILIES.split(' ') {
        let wardrobe = Wardrobe::new(family, 1);
        let mut changed = wardrobe.session();
        changed.set_head(Some(wardrobe.heads[0].clone()));
        let mut whole = wardrobe.wholes[0].session().unwrap();
        let mut bare = wardrobe.session();
        for fed in [tokens(1, 40), tokens(9, 1), tokens(5, 3)] {
            let (changed, whole) = (changed.feed(&fed).unwrap(), whole.feed(&fed).unwrap());
            assert_eq!(bits(&changed), bits(&whole), "{family}");
            assert_ne!(
                bits(&changed),
                bits(&bare.feed(&fed).unwrap()),
                "{family}: the head changes something"
            );
        }
    }
}

#[test]
fn swapping_there_and_back_leaves_no_trace() {
    for family in FAMILIES.split(' ') {
        let wardrobe = Wardrobe::new(family, 2);
        let mut session = wardrobe.session();
        // Several pages long, in pieces that end within a page.
        let mut wholes: Vec<Session> = wardrobe.wholes.iter().map(|model| model.session().unwrap()).collect();
        let mut bare = wardrobe.session();
        let order = [None, Some(0), Some(1), Some(0), None, Some(1)];
        for (step, changed) in order.into_iter().enumerate() {
            session.set_head(changed.map(|head: usize| wardrobe.heads[head].clone()));
            for fed in [tokens(step as u32, 70), tokens(step as u32 * 3, 1)] {
                let found = session.feed(&fed).unwrap();
                let own = bare.feed(&fed).unwrap();
                let all: Vec<_> = wholes.iter_mut().map(|whole| whole.feed(&fed).unwrap()).collect();
                let expected = changed.map_or(&own, |head| &all[head]);
                assert_eq!(bits(&found), bits(expected), "{family}, step {step}");
            }
        }
    }
}

#[test]
fn sequences_of_several_heads_share_a_pass() {
    for family in FAMILIES.split(' ') {
        let wardrobe = Wardrobe::new(family, 2);
        let decoder = wardrobe.trunk.decoder().unwrap();
        let pool = PagePool::new(decoder.layout(KvType::F16));
        let heads = [Some(1), None, Some(0), Some(1), None];
        let changed: Vec<_> =
            heads.iter().map(|head| head.map(|head: usize| wardrobe.heads[head].clone())).collect();
        let mut caches: Vec<_> = heads.iter().map(|_| SequenceCache::new(&pool)).collect();
        let mut alone: Vec<_> = heads.iter().map(|_| SequenceCache::new(&pool)).collect();
        for step in 0..4 {
            let fed: Vec<_> = (0..heads.len())
                .map(|at| tokens(at as u32 * 7 + step, if step == 0 { 9 + at } else { 1 }))
                .collect();
            let input = |at: usize, caches: &[SequenceCache]| Input {
                head: changed[at].as_ref(),
                ..Input::new(&fed[at], caches[at].position(), 0)
            };
            let inputs: Vec<_> = (0..heads.len()).map(|at| input(at, &caches)).collect();
            for wanted in [LogitRows::All, LogitRows::Last] {
                let (mut together, mut by_itself) = (caches.clone(), alone.clone());
                let mut all: Vec<_> = together.iter_mut().collect();
                let found = decoder.forward_together(&inputs, &mut all, wanted).unwrap();
                let found = found.try_into_vec_as::<f32>().unwrap();
                let mut expected = Vec::new();
                for (at, cache) in by_itself.iter_mut().enumerate() {
                    let one = decoder.forward_together(&[inputs[at]], &mut [cache], wanted).unwrap();
                    expected.extend(one.try_into_vec_as::<f32>().unwrap());
                }
                assert_eq!(bits(&found), bits(&expected), "{family}, {wanted:?}");
                if wanted == LogitRows::Last {
                    (caches, alone) = (together, by_itself);
                }
            }
        }
    }
}

#[test]
fn a_branch_with_another_head_leaves_shared_pages_unchanged() {
    let wardrobe = Wardrobe::new("qwen3", 2);
    let mut session = wardrobe.session();
    session.feed(&tokens(4, 200)).unwrap();
    let mut branch = session.clone();
    branch.set_head(Some(wardrobe.heads[0].clone()));
    branch.feed(&[7]).unwrap();
    let mut plain = wardrobe.session();
    plain.feed(&tokens(4, 200)).unwrap();
    assert_eq!(bits(&session.feed(&[8, 9]).unwrap()), bits(&plain.feed(&[8, 9]).unwrap()));
    let mut whole = wardrobe.wholes[0].session().unwrap();
    whole.feed(&[tokens(4, 200), vec![7]].concat()).unwrap();
    assert_eq!(bits(&branch.feed(&[3]).unwrap()), bits(&whole.feed(&[3]).unwrap()));
}

#[test]
fn a_saved_session_goes_on_with_any_head() {
    for family in ["llama", "qwen3_5_text", "gemma4_text"] {
        let wardrobe = Wardrobe::new(family, 2);
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("saved");
        let mut session = wardrobe.session();
        session.set_head(Some(wardrobe.heads[0].clone()));
        session.feed(&tokens(4, 150)).unwrap();
        session.save(&path, &wardrobe.trunk).unwrap();
        for head in [Some(0), Some(1), None] {
            let mut restored = Session::restore(&path, &wardrobe.trunk, KvType::F16).unwrap();
            restored.set_head(head.map(|head: usize| wardrobe.heads[head].clone()));
            let model = head.map_or(&wardrobe.trunk, |head| &wardrobe.wholes[head]);
            let mut whole = model.session().unwrap();
            whole.feed(&tokens(4, 150)).unwrap();
            assert_eq!(bits(&restored.feed(&[5]).unwrap()), bits(&whole.feed(&[5]).unwrap()), "{family}");
        }
    }
}

/// Copies a fixture to a folder where heads can be installed.
fn installable(family: &str, folder: &Path) -> PathBuf {
    let path = folder.join("model");
    std::fs::create_dir(&path).unwrap();
    for file in ["config.json", "model.safetensors"] {
        std::fs::copy(fixture(family).join(file), path.join(file)).unwrap();
    }
    path
}

fn noise(seed: u32, count: usize) -> Vec<f32> {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / (1 << 24) as f32 - 0.5
    };
    (0..count).map(|_| next()).collect()
}

/// An installed adapter computes what a model with the adapter merged into its weights computes.
#[test]
fn an_adapter_is_the_weights_it_would_make() {
    adapter_equals_weights("qwen3", ["q_proj.weight", "down_proj.weight"]);
    // Latent attention multiplies with parts of the adapted matrix.
    adapter_equals_weights("deepseek_v3", ["kv_b_proj.weight", "o_proj.weight"]);
}

fn adapter_equals_weights(family: &str, targets: [&str; 2]) {
    const RANK: usize = 3;
    let folder = tempfile::tempdir().unwrap();
    let path = installable(family, folder.path());
    let checkpoint = Checkpoint::open(&path).unwrap();
    let layers = Model::open(&path, &device("cpu").unwrap()).unwrap().decoder().unwrap().layers();
    let (split, scale) = (layers - 2, 0.5);
    let form = HeadForm::Adapter { scale };
    let mut head = NewHead::new(&checkpoint, split, serde_json::to_value(&form).unwrap()).unwrap();
    let bytes = std::fs::read(path.join("model.safetensors")).unwrap();
    let mut merged = BTreeMap::new();
    for (name, view) in SafeTensors::deserialize(&bytes).unwrap().tensors() {
        let mut values: Vec<f32> =
            view.data().as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect();
        let adapted = targets.iter().any(|target| name.ends_with(target));
        if adapted && layer_of(&name).is_some_and(|layer| layer >= split) {
            let [outputs, inputs] = view.shape() else { unreachable!() };
            let (inward, outward) = (noise(1, RANK * inputs), noise(2, outputs * RANK));
            for (row, values) in values.chunks_exact_mut(*inputs).enumerate() {
                for (column, value) in values.iter_mut().enumerate() {
                    let sum = |rank: usize| outward[row * RANK + rank] * inward[rank * inputs + column];
                    *value += scale * (0..RANK).map(sum).sum::<f32>();
                }
            }
            let module = name.strip_suffix(".weight").unwrap();
            let f32s = Encoding::Plain(Dtype::F32);
            for (end, values, shape) in [("A", inward, [RANK, *inputs]), ("B", outward, [*outputs, RANK])] {
                let name = format!("{module}.lora_{end}.weight");
                head.push(encode(&name, &values, &shape, f32s).unwrap()).unwrap();
            }
        }
        let data: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        merged.insert(name, (view.shape().to_vec(), data));
    }
    head.write(folder.path().join("head")).unwrap();
    Heads::open(&path).unwrap().install(folder.path().join("head"), "adapted").unwrap();
    let whole = folder.path().join("whole");
    std::fs::create_dir(&whole).unwrap();
    std::fs::copy(path.join("config.json"), whole.join("config.json")).unwrap();
    let views = merged.iter().map(|(name, (shape, data))| {
        (name, TensorView::new(safetensors::Dtype::F32, shape.clone(), data).unwrap())
    });
    safetensors::serialize_to_file(views, None, &whole.join("model.safetensors")).unwrap();

    let model = Model::open(&path, &device("cpu").unwrap()).unwrap();
    let model = model.with_heads(HeadPoolConfig::patient()).unwrap();
    let mut session = model.session().unwrap();
    assert!(session.use_head("adapted").fallback_reason.is_none());
    let found = session.feed(&tokens(3, 30)).unwrap();
    let whole = Model::open(&whole, &device("cpu").unwrap()).unwrap();
    let expected = whole.session().unwrap().feed(&tokens(3, 30)).unwrap();
    let own = model.session().unwrap().feed(&tokens(3, 30)).unwrap();
    let range = expected.iter().fold(0f32, |range, logit| range.max(logit.abs()));
    let furthest = |one: &[f32], other: &[f32]| {
        one.iter().zip(other).fold(0f32, |most, (one, other)| most.max((one - other).abs()))
    };
    assert!(furthest(&found, &expected) < range * 1e-3, "{}", furthest(&found, &expected));
    assert!(furthest(&own, &expected) > range * 1e-2, "the adapter changes something");
}

/// A head that fails to load does not determine the split.
#[test]
fn a_head_that_cannot_be_loaded_splits_nothing() {
    let model = Model::open(fixture("llama"), &device("cpu").unwrap()).unwrap();
    let decoder = model.decoder().unwrap();
    let tensors = Checkpoint::open(fixture("llama")).unwrap();
    let load = |own: Arc<dyn Tensors + Send + Sync>, split: usize| {
        Head::load("head", own, &HeadForm::Blocks, split, &decoder, model.checkpoint())
    };
    // The tensors of the trunk do not belong to a head.
    assert!(matches!(load(Arc::new(tensors.clone()), 1).unwrap_err(), ModelError::ExtraTensors { .. }));
    assert_eq!(decoder.split(), None);
    let own = |split: usize| Arc::new(Own { tensors: tensors.clone(), split });
    load(own(2), 2).unwrap();
    assert_eq!(decoder.split(), Some(2));
    for split in [3, 4] {
        let refused = load(own(split), split).unwrap_err();
        assert!(matches!(refused, ModelError::Config { .. }), "{refused}");
    }
}

/// Writes a model with a bridge as its fallback head.
fn bridged(folder: &Path) -> PathBuf {
    let path = installable("llama", folder);
    let checkpoint = Checkpoint::open(&path).unwrap();
    let decoder = Model::open(&path, &device("cpu").unwrap()).unwrap().decoder().unwrap();
    let (split, hidden) = (decoder.layers() / 2, decoder.config().hidden_size);
    let form = HeadForm::Bridge { width: 4 };
    let mut head = NewHead::new(&checkpoint, split, serde_json::to_value(&form).unwrap()).unwrap();
    let shapes = [
        ("bridge.norm.weight", vec![hidden]),
        ("bridge.inward.weight", vec![4, hidden]),
        ("bridge.outward.weight", vec![hidden, 4]),
    ];
    for (seed, (name, shape)) in shapes.into_iter().enumerate() {
        let values = noise(seed as u32, shape.iter().product());
        head.push(encode(name, &values, &shape, Encoding::Plain(Dtype::F32)).unwrap()).unwrap();
    }
    head.write(folder.join("head")).unwrap();
    Heads::open(&path).unwrap().install(folder.join("head"), FALLBACK).unwrap();
    path
}

/// A sequence that uses a bridge skips the last layers, and returns to them as if it had never left.
#[test]
fn a_bridge_leaves_no_trace() {
    let folder = tempfile::tempdir().unwrap();
    let path = bridged(folder.path());
    let model = Model::open(&path, &device("cpu").unwrap()).unwrap();
    let model = model.with_heads(HeadPoolConfig::patient()).unwrap();
    let (mut session, mut plain) = (model.session().unwrap(), model.session().unwrap());
    for (step, fed) in [tokens(1, 50), tokens(2, 70), tokens(3, 1), tokens(4, 20)].into_iter().enumerate() {
        // A missing head is replaced by the fallback.
        let changed = session.use_head(if step % 2 == 0 { OWN_HEAD } else { "none" });
        assert_eq!(changed.fallback_reason.is_some(), step % 2 == 1);
        let (found, expected) = (session.feed(&fed).unwrap(), plain.feed(&fed).unwrap());
        assert_eq!(bits(&found) == bits(&expected), step % 2 == 0, "step {step}");
    }
}

/// A model in a limited budget charges its heads to that budget by default.
#[test]
fn heads_of_a_fitted_model_are_charged_to_its_budget() {
    let folder = tempfile::tempdir().unwrap();
    let path = bridged(folder.path());
    let config = ResidencyOptions { layers: Some(0), ..ResidencyOptions::new(8 << 30) };
    let model = Model::open_within(&path, &device("cpu").unwrap(), &config).unwrap();
    let budget = model.residency().unwrap().budget().clone();
    let before = budget.held(Account::Weights);
    let model = model.with_heads(HeadPoolConfig::patient()).unwrap();
    assert!(model.session().unwrap().use_head(FALLBACK).fallback_reason.is_none());
    assert!(budget.held(Account::Weights) > before);
}

#[test]
fn the_memory_of_a_head_that_left_is_the_next_ones() {
    let folder = tempfile::tempdir().unwrap();
    let path = installable("llama", folder.path());
    let trunk = Checkpoint::open(&path).unwrap();
    let split = Model::open(&path, &device("cpu").unwrap()).unwrap().decoder().unwrap().layers() - 1;
    let heads = Heads::open(&path).unwrap();
    for seed in [1, 2] {
        let whole = Checkpoint::open(changed("llama", split, seed, folder.path())).unwrap();
        let form = serde_json::to_value(HeadForm::Blocks).unwrap();
        let mut head = NewHead::new(&trunk, split, form).unwrap();
        for tensor in whole.tensors() {
            if layer_of(&tensor.name).is_some_and(|layer| layer >= split) {
                head.push(whole.weight(&tensor.name).unwrap()).unwrap();
            }
        }
        let written = folder.path().join(format!("head-{seed}"));
        head.write(&written).unwrap();
        heads.install(&written, &format!("head-{seed}")).unwrap();
    }
    let ran = |session: &mut Session| bits(&session.feed(&tokens(9, 3)).unwrap());
    let model = Model::open(&path, &device("cpu").unwrap()).unwrap();
    let budget = Budget::new(1 << 30);
    let config = HeadPoolConfig { budget: Some(budget.clone()), ..HeadPoolConfig::patient() };
    let model = model.with_heads(config).unwrap();
    let pool = model.heads().unwrap();
    let (one, other) = ("head-1", "head-2");
    let with_head = |name: &str| {
        let mut session = model.session().unwrap();
        assert!(session.use_head(name).fallback_reason.is_none());
        session
    };
    let (first, second) = (ran(&mut with_head(one)), ran(&mut with_head(other)));
    assert_ne!(first, second);
    let both = budget.held(Account::Weights);
    let each = heads.head(one).unwrap().bytes();
    assert_eq!(both, 2 * each);

    // The memory of an evicted head stays charged until the next load takes it over, which computes the same.
    pool.evict(one);
    assert_eq!(budget.held(Account::Weights), both);
    assert_eq!(ran(&mut with_head(one)), first);
    assert_eq!(budget.held(Account::Weights), both);

    // A head in use keeps its memory, which stays charged.
    let mut changed = with_head(one);
    pool.evict(one);
    pool.evict(other);
    assert_eq!(ran(&mut with_head(other)), second);
    assert_eq!(ran(&mut changed), first);
    pool.evict(other);
    assert_eq!(budget.held(Account::Weights), both);
    drop(changed);
    assert_eq!(budget.held(Account::Weights), each);
}

/// A classifier reads the trunk's state of the last token, and does not change the sequence.
#[test]
fn a_classifier_reads_the_trunk() {
    let folder = tempfile::tempdir().unwrap();
    let path = installable("llama", folder.path());
    let checkpoint = Checkpoint::open(&path).unwrap();
    let decoder = Model::open(&path, &device("cpu").unwrap()).unwrap().decoder().unwrap();
    let (split, hidden) = (decoder.layers() / 2, decoder.config().hidden_size);
    let labels: Vec<String> = ["chat", "code", "summarize"].map(str::to_owned).into();
    let form = HeadForm::Classifier { labels };
    let mut head = NewHead::new(&checkpoint, split, serde_json::to_value(&form).unwrap()).unwrap();
    let (matrix, norm) = (noise(5, 3 * hidden), noise(6, hidden));
    let f32s = Encoding::Plain(Dtype::F32);
    head.push(encode("classifier.weight", &matrix, &[3, hidden], f32s).unwrap()).unwrap();
    head.push(encode("model.norm.weight", &norm, &[hidden], f32s).unwrap()).unwrap();
    head.write(folder.path().join("head")).unwrap();
    Heads::open(&path).unwrap().install(folder.path().join("head"), "router").unwrap();
    let model = Model::open(&path, &device("cpu").unwrap()).unwrap();
    let model = model.with_heads(HeadPoolConfig::patient()).unwrap();
    let mut session = model.session().unwrap();
    session.feed(&tokens(1, 40)).unwrap();
    let router = model.heads().unwrap().acquire("router").head.unwrap();
    let found = session.classify(&router, &tokens(7, 9)).unwrap();
    assert_eq!(session.tokens().len(), 40);

    let all = [tokens(1, 40), tokens(7, 9)].concat();
    let states = decoder.hidden_after(&all, split).unwrap().try_into_vec_as::<f32>().unwrap();
    let last = &states[states.len() - hidden..];
    let square = last.iter().map(|x| x * x).sum::<f32>() / hidden as f32 + 1e-6;
    let score = |row: &[f32]| -> f32 {
        row.iter().zip(last).zip(&norm).map(|((w, x), norm)| w * x * norm / square.sqrt()).sum()
    };
    let weights: Vec<f32> = matrix.chunks_exact(hidden).map(|row| score(row).exp()).collect();
    for (label, weight) in ["chat", "code", "summarize"].iter().zip(&weights) {
        let found = found.iter().find(|found| found.label == *label).unwrap().probability;
        let expected = weight / weights.iter().sum::<f32>();
        assert!((found - expected).abs() < 1e-2, "{label}: {found} instead of {expected}");
    }
    assert!(found.is_sorted_by(|one, other| one.probability >= other.probability));
    // A classifier can neither generate nor share a pass with heads that do.
    session.use_head("router");
    let config = firebox::GenerationConfig::default();
    assert!(firebox::Generation::begin(&mut session, None, &[5], config).is_err());
}

/// A session that used a head and was cleared starts from the prefix, which belongs to the model itself.
#[test]
fn a_prefix_is_that_of_the_model_itself() {
    let wardrobe = Wardrobe::new("llama", 1);
    let folder = tempfile::tempdir().unwrap();
    let options = PrefixOptions::default();
    let prefix = PersistentPrefix::open_or_build(&folder, &wardrobe.trunk, &tokens(2, 140), options).unwrap();
    let mut changed = wardrobe.session();
    changed.set_head(Some(wardrobe.heads[0].clone()));
    changed.feed(&[5]).unwrap();
    changed.clear();
    let mut changed = changed.with_prefix(&prefix).unwrap();
    let mut whole = wardrobe.wholes[0].session().unwrap();
    whole.feed(&tokens(2, 140)).unwrap();
    let (changed, whole) = (changed.feed(&[7]).unwrap(), whole.feed(&[7]).unwrap());
    let range = whole.iter().fold(0f32, |range, logit| range.max(logit.abs()));
    for (changed, whole) in changed.iter().zip(&whole) {
        assert!((changed - whole).abs() < range * 1e-3, "{changed} instead of {whole}");
    }
}

/// After positions are compacted and turns are evicted or hidden, a head computes what it would compute for the rest
/// alone, and the trunk's states stay unchanged.
#[test]
fn a_head_can_be_put_on_after_turns_have_gone() {
    for (family, after) in
        [("llama", AfterEviction::KeepPositions), ("qwen3", AfterEviction::CompactPositions)]
    {
        let wardrobe = Wardrobe::new(family, 1);
        let mut session = wardrobe.session().with_turn_capacity(300, WholeTurns { after });
        for turn in 0..6 {
            session.begin_turn(&[Role::User]).unwrap();
            session.feed(&tokens(turn, 90)).unwrap();
        }
        assert!(session.tokens().len() < 540, "some turns have gone");
        let own = session.clone().feed(&[9]).unwrap();
        let mut other = session.clone();
        other.set_head(Some(wardrobe.heads[0].clone()));
        let changed = other.feed(&[9]).unwrap();
        assert_ne!(bits(&changed), bits(&own));
        assert!(changed.iter().all(|logit| logit.is_finite()));
        // Pages shared with other sessions are not overwritten.
        assert_eq!(bits(&session.feed(&[9]).unwrap()), bits(&own), "{family}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// Covers rewinds, branches and switches in any order: only the tokens and the current head matter.
    #[test]
    fn history_does_not_show(steps in prop::collection::vec((0u8..5, 0usize..150), 1..12)) {
        let wardrobe = Wardrobe::new("llama", 2);
        let mut session = wardrobe.session();
        let mut head = None;
        let mut next = 1;
        let mut others = Vec::new();
        for (kind, count) in steps {
            match kind {
                0 => session.rewind(session.tokens().len().saturating_sub(count)),
                1 => others.push(session.clone()),
                2 => {
                    head = [None, Some(0), Some(1)][count % 3];
                    session.set_head(head.map(|head: usize| wardrobe.heads[head].clone()));
                }
                _ => {
                    next += 1;
                    let found = session.feed(&tokens(next, count + 1)).unwrap();
                    let model = head.map_or(&wardrobe.trunk, |head| &wardrobe.wholes[head]);
                    let mut fresh = model.session().unwrap();
                    let fresh = fresh.feed(session.tokens()).unwrap();
                    let range = fresh.iter().fold(0f32, |range, logit| range.max(logit.abs()));
                    for (found, fresh) in found.iter().zip(&fresh) {
                        prop_assert!((found - fresh).abs() < range * 2e-3, "{found} instead of {fresh}");
                    }
                }
            }
        }
    }
}
