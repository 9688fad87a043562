//! Firebox runs and adapts transformer language models on the machines people carry.
//!
//! ```no_run
//! use firebox::engine::{Engine, EngineConfig, Request};
//! use firebox::{Model, device};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let model = Model::open("models/my-model", &device("cpu")?)?;
//!
//! let mut chat = model.chat()?.with_system("Be brief.");
//! for piece in chat.ask("Who are you?")? {
//!     print!("{}", piece?.text);
//! }
//!
//! let prompt = model.tokenizer()?.encode("Once upon a time", true)?;
//! let mut session = model.session()?;
//! let logits = session.feed(&prompt)?;
//!
//! let engine = Engine::start(EngineConfig::default())?;
//! engine.add("my-model", model)?;
//! println!("{}", engine.generate(Request::new("my-model", prompt)).wait()?.summary.text);
//! # Ok(()) }
//! ```
//!
//! # Where to begin
//!
//! | to | open |
//! |---|---|
//! | load a Hugging Face directory, a GGUF file or a bundle | [`Model::open`] on a [`device()`] |
//! | talk to it | [`Model::chat`]; with a session and a template of your own, [`Conversation`] and [`Script`] |
//! | continue a text | [`Model::session`] and [`Generation::begin`] with a [`GenerationConfig`] and a [`SamplerConfig`] |
//! | have JSON or another form | [`GenerationConfig::with_grammar`] and [`Grammar`] |
//! | feed tokens, rewind, fork, save | [`Session`], [`Branches`], [`SessionFile`] |
//! | share the beginning of sessions | [`PrefixTree`] in a process, [`PersistentPrefix`] between processes |
//! | answer many requests of several models at once | [`engine::Engine::generate`] |
//! | change the last layers for another task | [`Model::with_heads`] and [`heads`] |
//! | stay within a memory limit | [`Model::open_within`]; several models in one budget, [`residency::SharedBudget`] |
//! | hide turns that do not matter now | [`Session::mask_irrelevant`] and [`relevance`] |
//! | embed and rank texts | [`Model::embed`], [`Model::rerank`] |
//! | train a head or an adapter | [`train`] |
//! | watch all of it | [`Model::with_telemetry`] and [`telemetry`] |
//! | replace a part of the network | [`components`] |
//!
//! Errors say what to do. Enums and results may grow, so match them with a wildcard; configurations are written with their
//! methods or with `..Default::default()`. Everything else is in [`internals`], without a promise of stability.

pub use firebox_runtime::{
    AfterEviction, BranchId, Branches, CacheError, Capacity, Chat, Conversation, Device, Draft, Drafter,
    EmbedOptions, Eviction, EvictionPolicy, Finish, Generation, GenerationConfig, Grammar, KvType,
    LogProbabilities, Model, OWN_HEAD, PagePool, PausedGeneration, PersistentPrefix, Piece, Pooling,
    PrefixLimits, PrefixOptions, PrefixTree, Question, Ranked, Role, RuntimeError, Sampler, SamplerConfig,
    Script, Session, SessionFile, SessionSummary, Speculation, Summary, Turn, TurnId, TurnKind, WholeTurns,
    available_devices, device, human_bytes, parse_bytes, peak_resident_bytes,
};

/// Heads that sessions of a model switch between.
pub use firebox_runtime::heads;
/// How relevant earlier turns are to the newest message.
pub use firebox_runtime::relevance;
/// Models within a number of bytes.
pub use firebox_runtime::residency;

/// Parts of a network that a program supplies itself.
pub mod components {
    pub use firebox_model::{
        ComponentError, FeedForward, Mixer, MixerMemory, OwnFeedForward, OwnMixer, Sequence, Sequences,
    };
}

/// Many requests at once, of one model or several.
pub mod engine {
    pub use firebox_engine::{
        Engine, EngineConfig, EngineError, Event, Failure, Outcome, Pipeline, PipelineEvent, PipelineStream,
        PromptEncoder, Request, RequestId, RequestStatus, ResponseStream, Router, Stage,
    };
    pub use firebox_runtime::schedule::Priority;
}

/// Metrics and a timeline of a program.
pub mod telemetry {
    pub use firebox_runtime::telemetry::{
        Counter, Gauge, Histogram, Kind, Meters, Snapshot, TIMELINE_EVENTS, Telemetry, Timeline, render,
    };
}

/// Training of models, heads and adapters.
pub mod train {
    pub use firebox_model::{HeadForm, Seeded, Tower};
    pub use firebox_store::{Dtype, Heads, trunk_hash};
    pub use firebox_text::ChatTemplate;
    pub use firebox_train::{
        Adapter, Ending, Examples, ExamplesConfig, Format, Lines, Network, Packed, Precision, Progress, Run,
        Schedule, Settings, Silent, Stored, Subject, TrainError, Trained, TrainingData, boundary_states,
        export_adapter, export_head, export_model, train,
    };
}

/// The crates that Firebox consists of, for tests, measurements and experiments. Any release may change them.
pub mod internals {
    pub use firebox_cache as cache;
    pub use firebox_engine as engine;
    pub use firebox_eval as eval;
    pub use firebox_model as model;
    pub use firebox_runtime as runtime;
    pub use firebox_store as store;
    pub use firebox_text as text;
    pub use firebox_train as train;
}
