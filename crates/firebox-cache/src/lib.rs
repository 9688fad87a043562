//! What a running sequence remembers: keys and values of attention layers, and the fixed-size state of
//! recurrent ones.
//!
//! A [`SequenceCache`] is a list of runs of positions, each in a page of a [`Pool`] or in a file. Attention reads
//! the runs as spans, where they lie. A clone shares all pages, so a branch of a sequence is a clone that goes on by
//! itself: no key or value is copied. Tokens belong to [`Turn`]s, which are forgotten, hidden and pinned as a whole.
//! Nothing here knows what a model is.
//!
//! A sequence has one owner; there is no lock that two threads wait for at every token. Pools and pages that several
//! sequences share are behind mutexes that are taken for moments: a pool's once for every 128 positions, a page's
//! for as long as handing out its tensors takes.

mod error;
mod eviction;
mod layout;
mod page;
mod pool;
mod recurrent;
mod remembered;
mod run;
mod sequence;
mod turn;

pub use error::CacheError;
pub use eviction::{
    Afterwards, AttentionSinks, EvictionPolicy, Forgetting, SlidingWindow, Truncation, WholeTurns,
};
pub use layout::{KvType, LayerLayout, Layout};
pub use page::{PAGE, positions_held};
pub use pool::{Ledger, Pool, Spare};
pub use recurrent::RecurrentState;
pub use remembered::Remembered;
pub use run::Mapped;
pub use sequence::{AttentionCache, Block, LayerCache, Outline, Replay, SequenceCache, States, Stretch};
pub use turn::{Hidden, Role, Turn, TurnId, TurnKind};
