//! Firebox runs and adapts transformer language models on the machines people carry.
//!
//! This crate is the public face of the workspace: it re-exports what applications need and holds nothing
//! of its own.
//!
//! ```no_run
//! use firebox::{Generation, GenerationConfig, Model, device};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let model = Model::open("models/my-model", &device("cpu")?)?;
//! let tokenizer = model.tokenizer()?.clone();
//! let prompt = tokenizer.encode("Once upon a time", true)?;
//! let mut session = model.session()?;
//! let config = GenerationConfig { max_tokens: Some(64), ..Default::default() };
//! let mut generation = Generation::begin(&mut session, Some(tokenizer), &prompt, config)?;
//! while let Some(piece) = generation.next_piece()? {
//!     print!("{}", piece.text);
//! }
//! # Ok(()) }
//! ```

pub use firebox_eval::{
    Divergence, EmbeddingVerification, EvalError, LogitVerification, Perplexity, Prefill, Verification,
    expected_input_ids, perplexity, verify_against,
};
pub use firebox_runtime::{
    Account, AfterEviction, AttentionSinks, BranchId, BranchInfo, Branches, Budget, CacheError, Capacity,
    Charge, CondenseJob, Condenser, Constraint, Conversation, DRAFT_BRANCHES, DRAFT_TOKENS, Device, Draft,
    Drafter, EmbedOptions, Eviction, EvictionPolicy, ExtractiveCondenser, Finish, Generation,
    GenerationConfig, Grammar, GrammarError, HiddenReason, KvType, LogProbabilities, LookupDrafter,
    MajorPageFaults, MemoryError, Model, ModelDrafter, OWN_HEAD, Origin, PageFaults, PagePool, PartialOutput,
    PausedGeneration, PersistentPrefix, Piece, Pooling, PrefixHit, PrefixLimits, PrefixOptions, PrefixStats,
    PrefixTree, Question, Ranked, Role, RuntimeError, Sampler, SamplerConfig, ScheduleError, Script, Session,
    SessionFile, SessionSummary, SlidingWindow, Speculation, Summary, Truncation, Turn, TurnId, TurnKind,
    WholeTurns, anonymous_bytes, available_devices, device, fit_facts, human_bytes, likeliest,
    mapped_file_bytes, parse_bytes, peak_resident_bytes, resident_bytes, set_release_to_os,
};

/// Attention and recurrent state of running sequences.
pub use firebox_cache as cache;
/// Many requests at once, of one model or several.
pub use firebox_engine as engine;
/// Networks and their parts, as Burn modules.
pub use firebox_model as model;
/// How many layers stay in memory while a model runs.
pub use firebox_runtime::governor;
/// Heads that a model's sequences change between.
pub use firebox_runtime::heads;
/// Which cores compute for which model.
pub use firebox_runtime::placement;
/// How much of a model to keep in memory, and how fast it is then going to run.
pub use firebox_runtime::planner;
/// How short memory is, as far as the system says.
pub use firebox_runtime::pressure;
/// How much earlier turns have to do with what was just said.
pub use firebox_runtime::relevance;
/// A model fitted into a number of bytes.
pub use firebox_runtime::residency;
/// Which model runs next, and who waits where.
pub use firebox_runtime::schedule;
/// What a program does, in numbers and on a timeline.
pub use firebox_runtime::telemetry;
/// How hot the machine is, and what is done less for it.
pub use firebox_runtime::thermal;
/// Checkpoints on disk.
pub use firebox_store as store;
/// Tokenizers, chat templates, detokenizing.
pub use firebox_text as text;
/// Training of models, heads and adapters.
pub use firebox_train as train;
