//! The names, units and descriptions of all metrics and timeline events.

use serde::{Deserialize, Serialize};

/// The unit of a metric.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Unit {
    /// A number of events or things.
    Count,
    /// Bytes.
    Bytes,
    /// Time: stored in nanoseconds, exported in seconds.
    Seconds,
}

impl Unit {
    /// Returns the suffix of exported names.
    pub(super) fn suffix(self) -> &'static str {
        match self {
            Self::Count => "",
            Self::Bytes => "_bytes",
            Self::Seconds => "_seconds",
        }
    }
}

/// Defines an enum with names, units and descriptions from one table. The descriptions are also the documentation.
macro_rules! names {
    ($(#[$about:meta])* $kind:ident { $($(#[doc = $help:literal])+ $variant:ident = $name:literal $unit:ident,)+ }) => {
        $(#[$about])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        pub enum $kind {
            $($(#[doc = $help])+ #[serde(rename = $name)] $variant,)+
        }

        impl $kind {
            /// All metrics.
            pub const ALL: &[Self] = &[$(Self::$variant,)+];

            /// The number of metrics.
            pub(super) const COUNT: usize = Self::ALL.len();

            /// Returns the name without its unit.
            pub fn name(self) -> &'static str {
                match self { $(Self::$variant => $name,)+ }
            }

            /// Returns the unit.
            pub fn unit(self) -> Unit {
                match self { $(Self::$variant => Unit::$unit,)+ }
            }

            /// Returns the description.
            pub fn help(self) -> &'static str {
                match self { $(Self::$variant => concat!($($help),+).trim_ascii(),)+ }
            }
        }
    };
}

names! {
    /// A counter, which only grows.
    Counter {
        /// Tokens of prompts that went through the layers.
        PromptTokens = "prompt_tokens" Count,
        /// Tokens of prompts that were cached and did not go through the layers.
        CachedTokens = "cached_tokens" Count,
        /// Tokens that were generated.
        GeneratedTokens = "generated_tokens" Count,
        /// Drafted tokens that went through the layers.
        DraftedTokens = "drafted_tokens" Count,
        /// Drafted tokens that the model accepted.
        AcceptedTokens = "accepted_tokens" Count,
        /// Requests that ended by themselves.
        FinishedRequests = "finished_requests" Count,
        /// Requests that their client cancelled.
        CancelledRequests = "cancelled_requests" Count,
        /// Requests that the queue refused.
        RefusedRequests = "refused_requests" Count,
        /// Requests that ended because their answers were not read.
        StalledRequests = "stalled_requests" Count,
        /// Grammars that were compiled.
        CompiledGrammars = "compiled_grammars" Count,
        /// Requests that failed.
        FailedRequests = "failed_requests" Count,
        /// Passes through the layers.
        Passes = "passes" Count,
        /// Rows of all passes: tokens, each as often as it went through the layers.
        Rows = "rows" Count,
        /// Time of all passes.
        PassTime = "pass" Seconds,
        /// Quanta of time that the model was given.
        Quanta = "quanta" Count,
        /// Quanta that overran.
        QuantumOverruns = "quantum_overruns" Count,
        /// Tokens that missed their deadline.
        DeadlineSlips = "deadline_slips" Count,
        /// Passes that were preempted between two layers by another model.
        Preemptions = "preemptions" Count,
        /// Requests that were demoted because they fell behind.
        Demotions = "demotions" Count,
        /// Turns that were evicted.
        EvictedTurns = "evicted_turns" Count,
        /// Tokens whose keys and values were evicted.
        EvictedTokens = "evicted_tokens" Count,
        /// Sessions that began after a cached prefix.
        PrefixHits = "prefix_hits" Count,
        /// Sessions that found no cached prefix.
        PrefixMisses = "prefix_misses" Count,
        /// Changes to a head that was in memory.
        WarmHeadSwaps = "warm_head_swaps" Count,
        /// Changes to a head that was loaded first.
        ColdHeadSwaps = "cold_head_swaps" Count,
        /// Changes to a head for which another one, or none, stood in.
        HeadFallbacks = "head_fallbacks" Count,
        /// Heads that were loaded.
        HeadLoads = "head_loads" Count,
        /// Heads that could not be used.
        HeadFailures = "head_failures" Count,
        /// Heads that were evicted.
        HeadEvictions = "head_evictions" Count,
        /// Parts of the weights that were read ahead in time.
        PrefetchHits = "prefetch_hits" Count,
        /// Parts of the weights that a pass waited for.
        PrefetchMisses = "prefetch_misses" Count,
        /// Parts of the weights that were read.
        StreamedParts = "streamed_parts" Count,
        /// Bytes of weights that were read while the model ran.
        StreamedBytes = "streamed" Bytes,
        /// Time that readers spent reading weights.
        ReadTime = "read" Seconds,
        /// Time that passes spent waiting for weights.
        ReadWait = "read_wait" Seconds,
        /// Parts of the weights that were evicted because memory was short or keeping them cost too much.
        ShedParts = "shed_parts" Count,
        /// Parts of the weights that were loaded again.
        GrownParts = "grown_parts" Count,
        /// Times that memory was found short.
        MemoryWarnings = "memory_warnings" Count,
        /// Times that resident weights were found to cost more than they save.
        Thrashes = "thrashes" Count,
        /// Page faults without a read from disk while the model ran.
        MinorFaults = "minor_faults" Count,
        /// Page faults with a read from disk while the model ran.
        MajorPageFaults = "major_faults" Count,
    }
}

names! {
    /// A gauge, which goes up and down.
    Gauge {
        /// Requests that run.
        RunningRequests = "running_requests" Count,
        /// Requests that wait.
        WaitingRequests = "waiting_requests" Count,
        /// Sessions that exist.
        Sessions = "sessions" Count,
        /// Sequences that may decode together.
        BatchLimit = "batch_limit" Count,
        /// Parts of the weights.
        Parts = "parts" Count,
        /// Parts of the weights that are resident.
        KeptParts = "kept_parts" Count,
        /// Bytes of the resident parts.
        KeptWeights = "kept_weights" Bytes,
        /// Bytes of the resident experts.
        KeptExperts = "kept_experts" Bytes,
        /// Buffers that parts are read into.
        ReadBuffers = "read_buffers" Count,
        /// Heads in memory.
        HeadsInMemory = "heads_in_memory" Count,
        /// Bytes of the heads in memory.
        Heads = "heads" Bytes,
        /// Bytes of keys and values.
        KeysAndValues = "keys_and_values" Bytes,
    }
}

names! {
    /// A histogram, exported as a distribution.
    Histogram {
        /// Time from a request to its first token.
        TimeToFirstToken = "time_to_first_token" Seconds,
        /// Time between two tokens of a request.
        InterToken = "inter_token" Seconds,
        /// Time from a request to the start of its work.
        QueueWait = "queue_wait" Seconds,
        /// Time from stopping one model to running another.
        ContextSwitch = "context_switch" Seconds,
        /// Time from asking for another head to having it. Its keys and values are computed with the tokens that follow.
        HeadSwap = "head_swap" Seconds,
        /// Sequences of a decoding pass.
        BatchOccupancy = "batch_occupancy" Count,
    }
}

/// The shape of a timeline event.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Shape {
    /// A span of time.
    Span,
    /// A moment.
    Mark,
    /// A number that holds until the next one.
    Level,
}

/// Defines the kinds of events and the names of their numbers.
macro_rules! kinds {
    ($($(#[doc = $help:literal])+ $kind:ident = $name:literal $shape:ident $category:literal [$($number:literal),*],)+) => {
        /// A kind of timeline event, with two numbers at most.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        pub enum Kind {
            $($(#[doc = $help])+ $kind,)+
        }

        impl Kind {
            /// Returns the name.
            pub fn name(self) -> &'static str {
                match self { $(Self::$kind => $name,)+ }
            }

            /// Returns the category.
            pub fn category(self) -> &'static str {
                match self { $(Self::$kind => $category,)+ }
            }

            /// Returns the names of the numbers.
            pub fn numbers(self) -> &'static [&'static str] {
                match self { $(Self::$kind => &[$($number),*],)+ }
            }

            pub(super) fn shape(self) -> Shape {
                match self { $(Self::$kind => Shape::$shape,)+ }
            }
        }
    };
}

kinds! {
    /// A pass of prompts.
    Prefill = "prefill" Span "pass" ["sequences", "rows"],
    /// A pass of one token of each sequence.
    Decode = "decode" Span "pass" ["sequences", "rows"],
    /// A pass that computes logits of several tokens of a sequence.
    Verify = "verify" Span "pass" ["sequences", "rows"],
    /// Another head's keys and values are computed from the trunk's output.
    Replay = "replay" Span "pass" ["tokens"],
    /// One layer of a pass.
    Layer = "layer" Span "layer" ["layer", "rows"],
    /// Final norm and unembedding.
    Logits = "logits" Span "layer" ["rows"],
    /// A read of a part of the weights.
    Read = "read" Span "io" ["part", "bytes"],
    /// A read of an expert.
    ReadExpert = "read expert" Span "io" ["expert", "bytes"],
    /// A pass waits for a part of the weights.
    Wait = "wait" Span "io" ["part"],
    /// A pass waits for an expert.
    WaitExpert = "wait for expert" Span "io" ["expert"],
    /// A quantum of a model.
    Quantum = "quantum" Span "schedule" ["sequences", "layers"],
    /// Tokens were evicted.
    Eviction = "eviction" Mark "memory" ["turns", "tokens"],
    /// A session begins after a cached prefix.
    PrefixHit = "prefix hit" Mark "memory" ["tokens"],
    /// Memory is short.
    Short = "memory short" Mark "governor" ["available"],
    /// Memory is about to run out.
    Emergency = "emergency" Mark "governor" ["available"],
    /// Steps take longer than they should.
    Thrash = "thrash" Mark "governor" ["step_us", "major_faults"],
    /// Parts of the weights were evicted.
    Shed = "shed" Mark "governor" ["parts", "first"],
    /// A part of the weights was loaded.
    Grew = "grew" Mark "governor" ["part"],
    /// A part of the weights could not be loaded.
    Refused = "refused" Mark "governor" ["part"],
    /// The time of a step without resident weights was measured.
    Learned = "learned" Mark "governor" ["step_us"],
    /// A sequence changes to another head.
    HeadSwap = "head swap" Span "heads" ["fallback"],
    /// A head is loaded.
    HeadLoad = "head load" Span "heads" ["ahead"],
    /// A head was evicted.
    HeadEviction = "head eviction" Mark "heads" [],
    /// A head could not be used, or was not loaded in time.
    HeadFailure = "head failure" Mark "heads" [],
    /// The number of resident parts of the weights.
    KeptParts = "kept parts" Level "governor" ["parts"],
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn names_are_plain_and_unique() {
        let counters = Counter::ALL.iter().map(|counter| (counter.name(), counter.help()));
        let gauges = Gauge::ALL.iter().map(|gauge| (gauge.name(), gauge.help()));
        let histograms = Histogram::ALL.iter().map(|histogram| (histogram.name(), histogram.help()));
        let mut seen = BTreeSet::new();
        for (name, help) in counters.chain(gauges).chain(histograms) {
            assert!(name.chars().all(|letter| letter.is_ascii_lowercase() || letter == '_'), "{name}");
            assert!(seen.insert(name), "{name} twice");
            assert!(help.ends_with('.'), "{name}: {help}");
        }
    }
}
