//! Tests of custom components: those that reimplement a built-in one change no bit, and those with a state do not
//! depend on how tokens are divided into passes.

#![allow(clippy::unwrap_used)]

use std::path::{Path, PathBuf};
use std::sync::Arc;

use burn::module::{Param, ParamId};
use burn::tensor::{Tensor, TensorData};
use firebox::components::{
    ComponentError, FeedForward, Mixer, MixerMemory, OwnFeedForward, OwnMixer, Sequences,
};
use firebox::engine::{Engine, EngineConfig, Request};
use firebox::heads::HeadPoolConfig;
use firebox::internals::cache::LayerCache;
use firebox::internals::model::{DenseMatrix, Input, Linear, LogitRows, Matrix, ModelError, StreamedConfig};
use firebox::internals::store::Checkpoint;
use firebox::{
    AfterEviction, Generation, GenerationConfig, KvType, Model, PersistentPrefix, PrefixOptions, Role,
    RuntimeError, Session, WholeTurns, device,
};
use firebox_kernels::Activation;
use firebox_kernels::attention::{AttentionParams, AttentionSequence, batch_attention};
use firebox_kernels::gate::gated;

fn path(fixture: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(fixture)
}

fn plain() -> Model {
    Model::open(path("tests/fixtures/reference/llama"), &device("cpu").unwrap()).unwrap()
}

fn tokens(count: u32) -> Vec<u32> {
    (0..count).map(|at| 3 + at * 31 % 300).collect()
}

/// Loads a weight of the checkpoint as a user of the library would.
fn linear(model: &Model, name: &str) -> Linear {
    let weight = model.checkpoint().weight(&format!("{name}.weight")).unwrap();
    let shape = [weight.shape[0], weight.shape[1]];
    let numbers = TensorData::new(weight.to_f32().unwrap(), shape);
    let tensor = Tensor::<2>::from_data(numbers, &device("cpu").unwrap());
    let weight = Matrix::Dense(DenseMatrix::new(Param::initialized(ParamId::new(), tensor)));
    Linear { weight, bias: None, adapter: None }
}

/// A reimplementation of the gated network of layer 1.
#[derive(Debug)]
struct SameGated {
    gate: Linear,
    up: Linear,
    down: Linear,
}

impl SameGated {
    fn new(model: &Model) -> Self {
        let of = |name: &str| linear(model, &format!("model.layers.1.mlp.{name}"));
        Self { gate: of("gate_proj"), up: of("up_proj"), down: of("down_proj") }
    }
}

impl OwnFeedForward for SameGated {
    fn id(&self) -> &str {
        "gated again"
    }

    fn forward(&self, x: Tensor<2>) -> Result<Tensor<2>, ComponentError> {
        let [gate, up] = Linear::forward_each([&self.gate, &self.up], x);
        Ok(self.down.forward(gated(gate, up, Activation::Silu)))
    }
}

const HEADS: usize = 4;
const KV_HEADS: usize = 2;
const HEAD_DIM: usize = 16;

/// A reimplementation of the attention of layer 2.
#[derive(Debug)]
struct SameAttention {
    query: Linear,
    key: Linear,
    value: Linear,
    output: Linear,
}

impl SameAttention {
    fn new(model: &Model) -> Self {
        let of = |name: &str| linear(model, &format!("model.layers.2.self_attn.{name}"));
        Self { query: of("q_proj"), key: of("k_proj"), value: of("v_proj"), output: of("o_proj") }
    }
}

impl OwnMixer for SameAttention {
    fn id(&self) -> &str {
        "attention again"
    }

    fn memory(&self) -> MixerMemory {
        MixerMemory::KeysAndValues { kv_heads: KV_HEADS, head_dim: HEAD_DIM, rope: Some(0) }
    }

    fn forward(&self, x: Tensor<2>, mut sequences: Sequences<'_>) -> Result<Tensor<2>, ComponentError> {
        let [rows, _] = x.dims();
        let [query, key, value] = Linear::forward_each([&self.query, &self.key, &self.value], x);
        let query = sequences.rotate(0, query.reshape([rows, HEADS, HEAD_DIM]));
        let key = sequences.rotate(0, key.reshape([rows, KV_HEADS, HEAD_DIM]));
        let value = value.reshape([rows, KV_HEADS, HEAD_DIM]);
        let mut parts = Vec::new();
        for sequence in sequences.each() {
            let LayerCache::Attention(cache) = sequence.cache else { return Err("no keys".into()) };
            let (from, count) = (sequence.rows.start, sequence.rows.len());
            let of = |tensor: &Tensor<3>| tensor.clone().narrow(0, from, count).swap_dims(0, 1);
            cache.append(of(&key), of(&value));
            let position = sequence.position;
            let scale = (HEAD_DIM as f32).powf(-0.5);
            let params = AttentionParams { position, window: None, scale, softcap: None };
            parts.push(AttentionSequence {
                steps: None,
                rows: count,
                spans: cache.spans(position, None),
                params,
            });
        }
        Ok(self.output.forward(batch_attention(query, parts)))
    }
}

/// A mixer that sums tokens with decaying weights.
#[derive(Debug)]
struct Fading {
    id: &'static str,
    kept: f32,
}

impl OwnMixer for Fading {
    fn id(&self) -> &str {
        self.id
    }

    fn memory(&self) -> MixerMemory {
        MixerMemory::State { memory: Some([1, 1, 64]), convolution: None }
    }

    fn forward(&self, x: Tensor<2>, mut sequences: Sequences<'_>) -> Result<Tensor<2>, ComponentError> {
        let [_, width] = x.dims();
        let mut made = Vec::new();
        for mut sequence in sequences.each() {
            let rows = sequence.rows.clone();
            let state = sequence.state().ok_or("no state")?;
            let mut faded = match state.memory.take() {
                Some(memory) => memory.reshape([1, width]),
                None => Tensor::zeros([1, width], &x.device()),
            };
            for row in rows {
                let new = x.clone().narrow(0, row, 1).mul_scalar(1.0 - self.kept);
                faded = faded.mul_scalar(self.kept).add(new);
                made.push(faded.clone());
            }
            state.memory = Some(faded.unsqueeze_dim(0));
        }
        Ok(Tensor::cat(made, 0))
    }
}

const FADING: Fading = Fading { id: "fading, 0.8", kept: 0.8 };

fn fading() -> Model {
    plain().with_mixer(1, |_| FADING).unwrap()
}

/// Returns the logits after every token, fed in pieces of `piece` tokens.
fn logits(session: &mut Session, tokens: &[u32], piece: usize) -> Vec<f32> {
    let mut all = Vec::new();
    for piece in tokens.chunks(piece) {
        session.feed_each_row(piece, |rows| all.extend_from_slice(rows)).unwrap();
    }
    all
}

fn answer(session: &mut Session, prompt: &[u32]) -> Vec<u32> {
    let config = GenerationConfig::new().with_max_tokens(24).with_ignore_end(true);
    let mut generation = Generation::begin(session, None, prompt, config).unwrap();
    while generation.next_piece().unwrap().is_some() {}
    generation.finish().unwrap().tokens
}

#[test]
fn a_component_that_repeats_the_original_changes_no_bit() {
    let model = plain();
    let own = model.clone().with_feed_forward(1, |_| SameGated::new(&model)).unwrap();
    let own = own.with_mixer(2, |_| SameAttention::new(&model)).unwrap();
    let tokens = tokens(150);
    let begun = |model: &Model| {
        let policy = WholeTurns { after: AfterEviction::CompactPositions };
        model.session().unwrap().with_turn_capacity(100, policy)
    };
    for piece in [150, 7, 1] {
        let expected = logits(&mut model.session().unwrap(), &tokens, piece);
        assert_eq!(logits(&mut own.session().unwrap(), &tokens, piece), expected, "{piece}");
    }
    // Turns are forgotten on the way, and the keys of the remaining ones are rotated back.
    let [expected, found] = [&model, &own].map(|model| {
        let mut session = begun(model);
        for turn in tokens.chunks(30) {
            session.begin_turn(&[Role::User, Role::Assistant]).unwrap();
            session.feed(turn).unwrap();
        }
        assert!(session.tokens().len() <= 100);
        answer(&mut session, &[9])
    });
    assert_eq!(found, expected);
}

#[test]
fn a_state_of_its_own_says_the_same_however_tokens_come() {
    let (model, tokens) = (fading(), tokens(70));
    let whole = logits(&mut model.session().unwrap(), &tokens, tokens.len());
    assert_ne!(whole, logits(&mut plain().session().unwrap(), &tokens, tokens.len()));
    for piece in [1, 9, 64] {
        assert_eq!(logits(&mut model.session().unwrap(), &tokens, piece), whole, "{piece}");
    }
    let vocab = whole.len() / tokens.len();
    let from = |token: usize| &whole[token * vocab..];

    // A session that is rewound, and a branch of it.
    let mut session = model.session().unwrap();
    logits(&mut session, &tokens[..40], 40);
    let mut branch = session.clone();
    session.feed(&[5, 6, 7]).unwrap();
    session.rewind(40);
    assert_eq!(logits(&mut session, &tokens[40..], 4), from(40));
    assert_eq!(logits(&mut branch, &tokens[40..], 30), from(40));

    // Together with another sequence in one pass.
    let decoder = model.decoder().unwrap();
    let mut caches = [decoder.cache(), decoder.cache()];
    let inputs = [Input::new(&tokens[..11], 0, 11), Input::new(&tokens[20..25], 0, 5)];
    let together = |caches: &mut [_; 2]| {
        let [one, other] = caches;
        let logits = decoder.forward_together(&inputs, &mut [one, other], LogitRows::All).unwrap();
        logits.try_into_vec_as::<f32>().unwrap()
    };
    let both = together(&mut caches);
    let exact = |tokens: &[u32]| {
        logits(&mut model.session().unwrap().with_kv_type(KvType::F32), tokens, tokens.len())
    };
    assert_eq!(both, [exact(&tokens[..11]), exact(&tokens[20..25])].concat());

    // Together with other requests.
    let engine = Engine::start(EngineConfig::default()).unwrap();
    engine.add("fading", model.clone()).unwrap();
    let config = GenerationConfig::new().with_max_tokens(24).with_ignore_end(true);
    let asked: Vec<_> = [&tokens[..30], &tokens[..50], &tokens[3..20]]
        .into_iter()
        .map(|prompt| {
            let request = Request::new("fading", prompt.to_vec()).with_config(config.clone());
            (engine.generate(request), answer(&mut model.session().unwrap(), prompt))
        })
        .collect();
    for (answering, expected) in asked {
        assert_eq!(answering.wait().unwrap().summary.tokens, expected);
    }
}

#[test]
fn saved_sessions_require_the_same_components() {
    let (model, tokens) = (fading(), tokens(60));
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("session");
    let mut session = model.session().unwrap();
    session.feed(&tokens[..40]).unwrap();
    session.save(&file, &model).unwrap();
    let mut restored = Session::restore(&file, &model, KvType::default()).unwrap();
    let expected = logits(&mut session, &tokens[40..], 20);
    assert_eq!(logits(&mut restored, &tokens[40..], 1), expected);
    let mut again = Session::restore(&file, &fading(), KvType::default()).unwrap();
    assert_eq!(logits(&mut again, &tokens[40..], 3), expected);

    let slower = plain().with_mixer(1, |_| Fading { id: "fading, 0.9", kept: 0.9 }).unwrap();
    for other in [plain(), slower, fading().with_feed_forward(0, SameAs).unwrap()] {
        let refused = Session::restore(&file, &other, KvType::default()).unwrap_err();
        assert!(matches!(refused, RuntimeError::Foreign { .. }), "{refused}");
        let prefix = |model| {
            PersistentPrefix::open_or_build(folder.path(), model, &tokens, PrefixOptions::default()).unwrap()
        };
        let [mine, theirs] = [prefix(&model), prefix(&other)];
        let next =
            |model: &Model, prefix| model.session().unwrap().with_prefix(prefix).unwrap().feed(&[9]).unwrap();
        let mut session = other.session().unwrap();
        session.feed(&tokens).unwrap();
        assert_eq!(next(&other, &theirs), session.feed(&[9]).unwrap());
        assert_eq!(next(&model, &mine), {
            let mut session = model.session().unwrap();
            session.feed(&tokens).unwrap();
            session.feed(&[9]).unwrap()
        });
    }
}

/// A built-in component, wrapped as a custom one.
#[derive(Debug)]
struct SameAs<T>(T);

impl OwnFeedForward for SameAs<FeedForward> {
    fn id(&self) -> &str {
        "the same feed-forward"
    }

    fn forward(&self, x: Tensor<2>) -> Result<Tensor<2>, ComponentError> {
        Ok(self.0.forward(x)?)
    }
}

/// A built-in mixer, wrapped as a custom one with a declared memory.
#[derive(Debug)]
struct Around(Mixer, MixerMemory);

impl OwnMixer for Around {
    fn id(&self) -> &str {
        "the same mixer"
    }

    fn memory(&self) -> MixerMemory {
        self.1
    }

    fn forward(&self, x: Tensor<2>, sequences: Sequences<'_>) -> Result<Tensor<2>, ComponentError> {
        Ok(self.0.forward(x, sequences)?)
    }
}

#[test]
fn heads_change_over_a_trunk_with_components() {
    let pocket = || Model::open(path("assets/pocket"), &device("cpu").unwrap()).unwrap();
    let memory = pocket().decoder().unwrap().memories()[1];
    let own = pocket().with_mixer(1, |there| Around(there, memory)).unwrap();
    let own = own.with_feed_forward(5, SameAs).unwrap();
    let models = [pocket(), own].map(|model| model.with_heads(HeadPoolConfig::patient()).unwrap());
    for head in ["chat", "code"] {
        let [expected, found] = models.each_ref().map(|model| {
            let prompt = "<|user|>Write a loop from 3 to 12.<|end|><|assistant|>";
            let prompt = model.tokenizer().unwrap().encode(prompt, false).unwrap();
            let mut session = model.session().unwrap();
            session.use_head(head);
            answer(&mut session, &prompt)
        });
        assert_eq!(found, expected, "{head}");
    }
    let [model, _] = models;
    let refused = model.with_feed_forward(0, SameAs).unwrap_err();
    assert!(matches!(refused, RuntimeError::Kind { .. }), "{refused}");
}

#[track_caller]
fn misplaced<T: std::fmt::Debug>(refused: Result<T, RuntimeError>, expected: usize) {
    match refused {
        Err(RuntimeError::Model(ModelError::Misplaced { layer, .. })) => assert_eq!(layer, expected),
        other => panic!("{other:?}"),
    }
}

#[test]
fn where_no_component_can_stand_it_is_refused() {
    misplaced(plain().with_feed_forward(4, SameAs), 4);
    misplaced(plain().with_mixer(9, |_| FADING), 9);
    let checkpoint = Checkpoint::open(path("tests/fixtures/reference/llama")).unwrap();
    let config = StreamedConfig::default();
    let streamed = Model::streamed(checkpoint, &device("cpu").unwrap(), &config).unwrap();
    misplaced(streamed.clone().with_feed_forward(1, SameAs), 1);
    misplaced(streamed.with_mixer(1, |_| FADING), 1);

    let memory = MixerMemory::KeysAndValues { kv_heads: KV_HEADS, head_dim: HEAD_DIM, rope: Some(1) };
    misplaced(plain().with_mixer(1, |there| Around(there, memory)), 1);

    // The layers of a head have the same memory as the checkpoint's own.
    let model = plain();
    model.decoder().unwrap().split_at(2).unwrap();
    misplaced(model.clone().with_mixer(3, |_| FADING), 3);
    model.with_mixer(1, |_| FADING).unwrap();
    let model = plain().with_mixer(3, |_| FADING).unwrap();
    misplaced(model.decoder().unwrap().split_at(2).map_err(RuntimeError::from), 3);
}

/// A component that fails with an error or with a wrong shape.
#[derive(Debug)]
struct Failing {
    narrow: bool,
}

impl OwnFeedForward for Failing {
    fn id(&self) -> &str {
        "failing"
    }

    fn forward(&self, x: Tensor<2>) -> Result<Tensor<2>, ComponentError> {
        if self.narrow { Ok(x.narrow(1, 0, 3)) } else { Err("out of order".into()) }
    }
}

#[test]
fn errors_of_components_are_reported() {
    let told = |model: Model| match model.session().unwrap().feed(&[3, 4]) {
        Err(RuntimeError::Model(error @ ModelError::Component { .. })) => error.to_string(),
        other => panic!("{other:?}"),
    };
    let failing = |narrow| plain().with_feed_forward(2, |_| Failing { narrow }).unwrap();
    assert!(told(failing(false)).contains("out of order"));
    assert!(told(failing(true)).contains("[2, 3]"));
    let memory = FADING.memory();
    let lying = plain().with_mixer(2, |there| Around(there, memory)).unwrap();
    assert!(told(lying).contains("remembers something else"));
}

/// Variants of a model share unchanged components and do not affect each other.
#[test]
fn a_variant_leaves_the_model_as_it_was() {
    let model = plain();
    let expected = model.session().unwrap().feed(&[3, 4, 5]).unwrap();
    let variant = model.clone().with_mixer(1, |_| FADING).unwrap();
    assert_ne!(variant.session().unwrap().feed(&[3, 4, 5]).unwrap(), expected);
    assert_eq!(model.session().unwrap().feed(&[3, 4, 5]).unwrap(), expected);
    assert_eq!(variant.decoder().unwrap().changes(), ["fading, 0.8 as mixer 1"]);
    assert!(!Arc::ptr_eq(&model.decoder().unwrap(), &variant.decoder().unwrap()));
}
