//! The cache of a running sequence: keys and values of attention layers, and the fixed-size state of recurrent
//! layers.
//!
//! A [`SequenceCache`] is a list of runs of consecutive positions. Each run lies in a page of a [`PagePool`] or in a
//! mapped file, and attention reads it in place as a span. A clone shares all pages, so branching a sequence copies
//! no keys or values. Tokens belong to [`Turn`]s, which are evicted, hidden and pinned as a whole. This crate knows
//! nothing about models.
//!
//! A sequence has one owner, so decoding a token takes no contended lock. Pools and shared pages are behind mutexes that
//! are held briefly: a pool's once per 128 positions, a page's while its tensors are handed out.

mod arena;
mod error;
mod eviction;
mod kv_run;
mod layer_kv;
mod layout;
mod ledger;
mod page;
mod page_buffers;
mod pool;
mod recurrent_state;
mod sequence;
mod turn;

pub use error::CacheError;
pub use eviction::{
    AfterEviction, AttentionSinks, Eviction, EvictionPolicy, SlidingWindow, Truncation, WholeTurns,
};
pub use kv_run::MappedKv;
pub use layer_kv::LayerKv;
pub use layout::{KvType, LayerLayout, Layout};
pub use ledger::{PageLedger, Reclaimable};
pub use page_buffers::{PAGE_TOKENS, allocated_positions};
pub use pool::PagePool;
pub use recurrent_state::RecurrentState;
pub use sequence::{
    AttentionCache, Block, LayerCache, Outline, PageTable, RecurrentStates, Replay, SequenceCache, SlotRange,
    TransientKv,
};
pub use turn::{HiddenReason, Role, Turn, TurnId, TurnKind};
