//! Trains models, heads and low-rank adapters.
//!
//! - [`Examples`]: conversations and prompts from JSONL, as [`Sample`]s whose prompts are no targets;
//! - [`pack`]: samples in batches of so many tokens, shuffled anew in every epoch;
//! - [`Network`] and [`Source`]: what is trained, and what it is trained on;
//! - [`train`]: the loop, into a [`Run`] folder that it can go on from, to the same bits, whenever it ended;
//! - [`Progress`]: receives what happens in a run; [`Silent`] drops it, [`Lines`] writes it as text;
//! - [`BoundaryCache`]: the hidden states that a frozen trunk hands to a head, computed once;
//! - [`Adapter`]: adapters in the directories of the `peft` package.

mod boundary;
mod checkpoint;
mod corpus;
mod ending;
mod error;
mod examples;
mod export;
mod files;
mod format;
mod metrics;
mod network;
mod optimizer;
mod packed;
mod packing;
mod parameters;
mod peft;
mod plot;
pub mod pocket;
mod precision;
mod profile;
mod progress;
mod run;
mod schedule;
mod settings;
mod trainer;
mod training_batch;

pub use boundary::{BoundaryCache, BoundaryKey, Stored};
pub use checkpoint::{Best, Position};
pub use corpus::{Subject, TrainingData, boundary_states};
pub use ending::Ending;
pub use error::TrainError;
pub use examples::{Examples, ExamplesConfig, Skipped, Summary};
pub use export::{adapter_of, cut_head, export_adapter, export_head, export_model, rebind_head};
pub use format::{Format, Sample};
pub use metrics::Record;
pub use network::{Network, Source};
pub use optimizer::Optimizer;
pub use packed::Packed;
pub use packing::pack;
pub use peft::{Adapter, AdapterPair, is_adapter};
pub use precision::Precision;
pub use profile::{Profile, profile};
pub use progress::{Evaluation, Lines, Progress, Silent, Start, StepReport};
pub use run::{Run, Which};
pub use schedule::Schedule;
pub use settings::{AdamSettings, Settings};
pub use trainer::{Trained, train};
pub use training_batch::{Goal, TrainingBatch};
