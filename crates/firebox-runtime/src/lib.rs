//! Runs models: sessions, sampling, generation, and the measures that say whether a model computes what
//! it should.

mod benchmark;
mod branches;
mod condenser;
mod conversation;
mod decode;
mod device;
mod embedding;
pub mod engine;
mod error;
#[cfg(test)]
mod grammar_outputs;
pub mod heads;
mod lost;
mod model;
mod perplexity;
pub mod placement;
pub mod planner;
mod pocket;
mod prefix;
mod readahead;
pub mod relevance;
mod reporter;
pub mod residency;
mod saved;
mod session;
mod shared;
mod turn_record;
mod turns;
mod verification;

pub use benchmark::{Benchmark, BenchmarkConfig, benchmark};
pub use branches::{BranchId, BranchInfo, Branches};
/// Where a model computes.
pub use burn::tensor::Device;
pub use condenser::{Condenser, Condensing, Extract, fit_facts};
pub use conversation::{Capacity, Conversation, Question, Script};
pub use decode::{
    DRAFT_BRANCHES, DRAFT_TOKENS, Draft, Drafter, Finish, Generation, GenerationConfig, LogProbabilities,
    LookupDrafter, ModelDrafter, PartialOutput, PausedGeneration, Piece, Sampler, SamplerConfig, Speculation,
    Summary, likeliest,
};
pub use device::{available_devices, device};
pub use embedding::{EmbedOptions, Ranked};
pub use error::RuntimeError;
pub use firebox_cache::{
    AfterEviction, AttentionSinks, CacheError, Eviction, EvictionPolicy, HiddenReason, KvType, PAGE_TOKENS,
    PagePool, Role, SlidingWindow, Truncation, Turn, TurnId, TurnKind, WholeTurns,
};
pub use firebox_grammar::{Constraint, Grammar, GrammarError};
pub use firebox_kernels::instructions;
use firebox_memory::process as memory;
pub use firebox_memory::process::{
    anonymous_bytes, mapped_file_bytes, peak_resident_bytes, physical_bytes, resident_bytes,
    set_release_to_os,
};
pub use firebox_memory::{
    Account, Budget, Charge, MajorPageFaults, MemoryError, PageFaults, governor, human_bytes, parse_bytes,
    pressure, thermal,
};
pub use firebox_model::Pooling;
pub use firebox_schedule::{self as schedule, ScheduleError};
pub use firebox_telemetry as telemetry;
pub use model::Model;
pub use perplexity::{Divergence, Perplexity, perplexity};
pub use pocket::pocket_model;
pub use prefix::{Origin, PersistentPrefix, PrefixOptions};
pub use saved::{Saved, SavedSummary};
pub use session::{OWN_HEAD, Session};
pub use shared::{Begun, PrefixLimits, PrefixStats, PrefixTree};
pub use verification::{
    EmbeddingVerification, LogitVerification, Prefill, Verification, expected_input_ids, verify_against,
};
