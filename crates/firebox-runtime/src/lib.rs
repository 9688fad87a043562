//! Runs models: sessions, sampling, generation, and the measures that say whether a model computes what
//! it should.

mod benchmark;
mod branches;
mod condenser;
mod device;
mod error;
mod generation;
mod lookahead;
mod memory;
mod model;
mod perplexity;
mod prefix;
pub mod relevance;
mod sampler;
mod saved;
mod session;
mod speculation;
mod turn_record;
mod turns;
mod verification;

pub use benchmark::{Benchmark, BenchmarkConfig, benchmark};
pub use branches::{BranchId, BranchInfo, Branches};
pub use condenser::{Condenser, Condensing, Extract, fit_facts};
pub use device::{available_devices, device};
pub use error::RuntimeError;
pub use firebox_cache::{
    Afterwards, AttentionSinks, CacheError, EvictionPolicy, Forgetting, Hidden, KvType, Pool, Role,
    SlidingWindow, Truncation, Turn, TurnId, TurnKind, WholeTurns,
};
pub use generation::{Finish, Generation, GenerationConfig, Piece, Summary};
pub use memory::{anonymous_bytes, mapped_file_bytes, peak_resident_bytes};
pub use model::Model;
pub use perplexity::{Divergence, Perplexity, perplexity};
pub use prefix::{Origin, PersistentPrefix, PrefixOptions};
pub use sampler::{Sampler, SamplerConfig, likeliest};
pub use saved::Saved;
pub use session::Session;
pub use speculation::{DRAFT_TOKENS, Drafter, LookupDrafter, ModelDrafter, Speculation};
pub use verification::{
    EmbeddingVerification, LogitVerification, Prefill, Verification, expected_input_ids, verify_against,
};
