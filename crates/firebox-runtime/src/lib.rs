//! Runs models: sessions, decoding, heads and residency.
//!
//! A [`Model`] opens [`Session`]s, a [`Generation`] continues one session by itself, and a [`Chat`] asks and answers in one. What several requests at once need is
//! in [`session`] (chunks and [passes over several sessions](session::BatchPass)), [`decode`] (the decoding loop of one sequence,
//! and drafts for a batch) and [`residency`] (urgency and the order of disk reads); `firebox-engine` is built of it.

mod chat;
mod condenser;
mod conversation;
pub mod decode;
mod device;
mod embed;
mod error;
pub mod export;
mod grammar_cache;
#[cfg(test)]
mod grammar_outputs;
pub mod heads;
mod model;
pub mod planner;
mod pocket;
mod prefix;
mod readahead;
mod readback;
mod readout;
pub mod relevance;
mod reporter;
pub mod residency;
pub mod session;

/// Where a model computes.
pub use burn::tensor::Device;
pub use chat::Chat;
pub use condenser::{CondenseJob, Condenser, ExtractiveCondenser, FactUpdate, TextCondensation, fit_facts};
pub use conversation::{Capacity, CondensedFact, CondensedFacts, Conversation, Question, Script};
pub use decode::{
    DRAFT_BRANCHES, DRAFT_TOKENS, Draft, Drafter, Finish, Generation, GenerationConfig, LogProbabilities,
    LookupDrafter, ModelDrafter, PartialOutput, PausedGeneration, Piece, Sampler, SamplerConfig, Speculation,
    Summary, likeliest,
};
pub use device::{available_devices, device};
pub use embed::{Embedding, EmbeddingChunk, Ranked, TextVector};
pub use error::RuntimeError;
pub use firebox_cache::{
    AfterEviction, AttentionSinks, CacheError, Eviction, EvictionPolicy, HiddenReason, KvType, PAGE_TOKENS,
    PagePool, Role, SlidingWindow, Truncation, Turn, TurnId, TurnKind, WholeTurns,
};
pub use firebox_grammar::{Constraint, Grammar, GrammarError};
pub use firebox_kernels::{Cores, CoresError, instructions};
use firebox_memory::process as memory;
pub use firebox_memory::process::{
    anonymous_bytes, lower_thread_priority, mapped_file_bytes, peak_resident_bytes, physical_bytes,
    resident_bytes, set_release_to_os,
};
pub use firebox_memory::{
    Account, Budget, Charge, MajorPageFaults, MemoryError, PageFaults, governor, human_bytes, parse_bytes,
    pressure, thermal,
};
pub use firebox_model::Pooling;
pub use firebox_schedule::{self as schedule, ScheduleError};
pub use firebox_telemetry as telemetry;
pub use grammar_cache::{CompilePermit, CompiledGrammar, GrammarCache, GrammarCacheConfig, RequestGrammar};
pub use model::Model;
pub use pocket::pocket_model;
pub use prefix::{Origin, PersistentPrefix, PrefixHit, PrefixLimits, PrefixOptions, PrefixStats, PrefixTree};
pub use readback::read_floats;
pub use readout::EmbedOptions;
#[cfg(feature = "fuzzing")]
pub use session::check_session_operations;
pub use session::{BranchId, BranchInfo, Branches, OWN_HEAD, Session, SessionFile, SessionSummary};
