//! The measures. Each runs in a process of its own, so that its memory peak is its own.

mod concurrency;
mod foreign;
pub mod heads;
pub mod models;
mod prompt;
mod published;
pub mod residency_sweep;
pub mod run;
mod short_memory;
mod streaming;
mod streams;

use crate::figure::{Declared, Figures};
use crate::setup::Setup;

/// Something that is measured.
pub struct Measure {
    pub name: &'static str,
    pub says: &'static str,
    /// All that it may bring.
    pub figures: &'static [Declared],
    pub run: fn(&Setup, &mut Figures) -> anyhow::Result<()>,
}

/// All of them, in the order in which they are measured.
pub const ALL: &[Measure] = &[
    Measure {
        name: "models",
        says: "three models in less memory than they take",
        figures: models::FIGURES,
        run: models::measure,
    },
    Measure {
        name: "requests",
        says: "many requests of one model",
        figures: concurrency::FIGURES,
        run: concurrency::measure,
    },
    Measure {
        name: "prompt",
        says: "answers beside a long prompt",
        figures: prompt::FIGURES,
        run: prompt::measure,
    },
    Measure { name: "heads", says: "changes of heads", figures: heads::FIGURES, run: heads::measure },
    Measure {
        name: "streams",
        says: "what conversations remember",
        figures: streams::FIGURES,
        run: streams::measure,
    },
    Measure {
        name: "streaming",
        says: "layers from disk",
        figures: streaming::FIGURES,
        run: streaming::measure,
    },
    Measure {
        name: "sweep",
        says: "speed by how many layers are kept, predicted and measured",
        figures: residency_sweep::FIGURES,
        run: residency_sweep::measure,
    },
    Measure {
        name: "published",
        says: "published sweeps, predicted from their ends",
        figures: published::FIGURES,
        run: published::measure,
    },
    Measure {
        name: "short_memory",
        says: "less memory than was asked for",
        figures: short_memory::FIGURES,
        run: short_memory::measure,
    },
    Measure { name: "foreign", says: "beside llama.cpp", figures: foreign::FIGURES, run: foreign::measure },
];

/// The measure of that name.
pub fn named(name: &str) -> Option<&'static Measure> {
    ALL.iter().find(|measure| measure.name == name)
}
