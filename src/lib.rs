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

pub use firebox_runtime::{
    Afterwards, AttentionSinks, BranchId, BranchInfo, Branches, CacheError, Condenser, Condensing,
    DRAFT_TOKENS, Divergence, Drafter, EmbeddingVerification, EvictionPolicy, Extract, Finish, Forgetting,
    Generation, GenerationConfig, Hidden, KvType, LogitVerification, LookupDrafter, Model, ModelDrafter,
    Origin, Perplexity, PersistentPrefix, Piece, Pool, Prefill, PrefixOptions, Role, RuntimeError, Sampler,
    SamplerConfig, Saved, Session, SlidingWindow, Speculation, Summary, Truncation, Turn, TurnId, TurnKind,
    Verification, WholeTurns, anonymous_bytes, available_devices, device, expected_input_ids, fit_facts,
    likeliest, mapped_file_bytes, peak_resident_bytes, perplexity, verify_against,
};

/// Attention and recurrent state of running sequences.
pub use firebox_cache as cache;
/// Networks and their parts, as Burn modules.
pub use firebox_model as model;
/// How much earlier turns have to do with what was just said.
pub use firebox_runtime::relevance;
/// Checkpoints on disk.
pub use firebox_store as store;
/// Tokenizers, chat templates, detokenizing.
pub use firebox_text as text;
