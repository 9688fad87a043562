//! What is counted and measured, what it is called, and in what unit. There is no other list.

use serde::{Deserialize, Serialize};

/// What a number is a number of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Unit {
    /// Things.
    Count,
    /// Bytes.
    Bytes,
    /// Time: nanoseconds where it is kept, seconds where it is shown.
    Seconds,
}

impl Unit {
    /// What names that are shown end with.
    pub(super) fn suffix(self) -> &'static str {
        match self {
            Self::Count => "",
            Self::Bytes => "_bytes",
            Self::Seconds => "_seconds",
        }
    }
}

/// Makes the variants of an enum and their names, units and descriptions from one table. The description is what the
/// documentation says.
macro_rules! names {
    ($(#[$about:meta])* $kind:ident { $($(#[doc = $help:literal])+ $variant:ident = $name:literal $unit:ident,)+ }) => {
        $(#[$about])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        pub enum $kind {
            $($(#[doc = $help])+ #[serde(rename = $name)] $variant,)+
        }

        impl $kind {
            /// All of them.
            pub const ALL: &[Self] = &[$(Self::$variant,)+];

            /// How many there are.
            pub(super) const COUNT: usize = Self::ALL.len();

            /// What it is called, without its unit.
            pub fn name(self) -> &'static str {
                match self { $(Self::$variant => $name,)+ }
            }

            /// What it is a number of.
            pub fn unit(self) -> Unit {
                match self { $(Self::$variant => Unit::$unit,)+ }
            }

            /// What it says, in a sentence.
            pub fn help(self) -> &'static str {
                match self { $(Self::$variant => concat!($($help),+).trim_ascii(),)+ }
            }
        }
    };
}

names! {
    /// What only ever grows.
    Counter {
        /// Tokens of prompts that went through the layers.
        PromptTokens = "prompt_tokens" Count,
        /// Tokens of prompts that were remembered, and did not have to go through the layers.
        CachedTokens = "cached_tokens" Count,
        /// Tokens that were generated.
        GeneratedTokens = "generated_tokens" Count,
        /// Tokens that were drafted and went through the layers before it was their turn.
        DraftedTokens = "drafted_tokens" Count,
        /// Drafted tokens that were what the model chose.
        AcceptedTokens = "accepted_tokens" Count,
        /// Requests that came to an end of their own.
        FinishedRequests = "finished_requests" Count,
        /// Requests that their caller gave up.
        CancelledRequests = "cancelled_requests" Count,
        /// Requests that were not let into the queue.
        RefusedRequests = "refused_requests" Count,
        /// Requests that ended with an error.
        FailedRequests = "failed_requests" Count,
        /// Passes through the layers.
        Passes = "passes" Count,
        /// Rows of all passes: tokens, each as often as it went through the layers.
        Rows = "rows" Count,
        /// Time that passes took.
        PassTime = "pass" Seconds,
        /// Quanta of time that were given to the model.
        Quanta = "quanta" Count,
        /// Quanta that took longer than they should.
        QuantumOverruns = "quantum_overruns" Count,
        /// Tokens that came later than they should.
        DeadlineSlips = "deadline_slips" Count,
        /// Passes that were stopped between two layers for another model.
        Preemptions = "preemptions" Count,
        /// Sessions that were given less urgency because they fell behind.
        Demotions = "demotions" Count,
        /// Turns that were forgotten to make room.
        EvictedTurns = "evicted_turns" Count,
        /// Tokens whose keys and values were forgotten to make room.
        EvictedTokens = "evicted_tokens" Count,
        /// Sessions that began behind a prefix that was computed before.
        PrefixHits = "prefix_hits" Count,
        /// Sessions that found no prefix to begin behind.
        PrefixMisses = "prefix_misses" Count,
        /// Changes to a head that was in memory.
        WarmHeadSwaps = "warm_head_swaps" Count,
        /// Changes to a head that had to be waited for.
        ColdHeadSwaps = "cold_head_swaps" Count,
        /// Changes to a head that another one, or none, stood in for.
        HeadFallbacks = "head_fallbacks" Count,
        /// Heads that were read into memory.
        HeadLoads = "head_loads" Count,
        /// Heads that could not be used.
        HeadFailures = "head_failures" Count,
        /// Heads that left memory to make room.
        HeadEvictions = "head_evictions" Count,
        /// Parts of the weights that were there when they were asked for, because they had been read ahead.
        PrefetchHits = "prefetch_hits" Count,
        /// Parts of the weights that had to be waited for.
        PrefetchMisses = "prefetch_misses" Count,
        /// Parts of the weights that were read.
        StreamedParts = "streamed_parts" Count,
        /// Bytes of weights that were read while the model ran.
        StreamedBytes = "streamed" Bytes,
        /// Time that readers spent reading weights.
        ReadTime = "read" Seconds,
        /// Time that passes spent waiting for weights.
        ReadWait = "read_wait" Seconds,
        /// Parts of the weights that were let go of because memory was short or keeping them cost too much.
        ShedParts = "shed_parts" Count,
        /// Parts of the weights that are kept since there was room again.
        GrownParts = "grown_parts" Count,
        /// Times that memory was found short.
        MemoryWarnings = "memory_warnings" Count,
        /// Times that keeping weights was found to cost more than it saves.
        Thrashes = "thrashes" Count,
        /// Pages that were missing and were found in memory, while the model ran.
        MinorFaults = "minor_faults" Count,
        /// Pages that were missing and had to come from the disk, while the model ran.
        MajorPageFaults = "major_faults" Count,
    }
}

names! {
    /// What goes up and down.
    Gauge {
        /// Requests that are being answered.
        RunningRequests = "running_requests" Count,
        /// Requests that wait for their turn.
        WaitingRequests = "waiting_requests" Count,
        /// Sessions there are.
        Sessions = "sessions" Count,
        /// Sequences that may decode together.
        BatchLimit = "batch_limit" Count,
        /// Parts of the weights.
        Parts = "parts" Count,
        /// Parts of the weights that are kept in memory.
        KeptParts = "kept_parts" Count,
        /// What the parts that are kept take.
        KeptWeights = "kept_weights" Bytes,
        /// What experts take that stay in memory.
        KeptExperts = "kept_experts" Bytes,
        /// Buffers that parts are read into.
        ReadBuffers = "read_buffers" Count,
        /// Heads in memory.
        HeadsInMemory = "heads_in_memory" Count,
        /// What the heads in memory take.
        Heads = "heads" Bytes,
        /// What keys and values take.
        KeysAndValues = "keys_and_values" Bytes,
    }
}

names! {
    /// What is measured again and again, and asked for by its distribution.
    Histogram {
        /// From a request to its first token.
        TimeToFirstToken = "time_to_first_token" Seconds,
        /// From one token of a request to the next.
        InterToken = "inter_token" Seconds,
        /// From a request to the moment when work on it begins.
        QueueWait = "queue_wait" Seconds,
        /// From stopping one model to running another.
        ContextSwitch = "context_switch" Seconds,
        /// From the wish for another head to having one. What it remembers is computed with the tokens that follow.
        HeadSwap = "head_swap" Seconds,
        /// Sequences of a pass that decodes.
        BatchOccupancy = "batch_occupancy" Count,
    }
}

/// What an event of a timeline is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Shape {
    /// Takes time.
    Span,
    /// Takes none.
    Mark,
    /// A number that holds until the next one.
    Level,
}

/// Makes the kinds of events, and what their numbers are called.
macro_rules! kinds {
    ($($(#[doc = $help:literal])+ $kind:ident = $name:literal $shape:ident $category:literal [$($number:literal),*],)+) => {
        /// What happens on a timeline, with two numbers at most.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        pub enum Kind {
            $($(#[doc = $help])+ $kind,)+
        }

        impl Kind {
            /// What it is called.
            pub fn name(self) -> &'static str {
                match self { $(Self::$kind => $name,)+ }
            }

            /// What it belongs to.
            pub fn category(self) -> &'static str {
                match self { $(Self::$kind => $category,)+ }
            }

            /// What its numbers are called.
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
    /// A pass whose logits are wanted for every one of several tokens.
    Verify = "verify" Span "pass" ["sequences", "rows"],
    /// What another head remembers is computed from what the trunk has left.
    Replay = "replay" Span "pass" ["tokens"],
    /// One layer of a pass.
    Layer = "layer" Span "layer" ["layer", "rows"],
    /// Final norm and unembedding.
    Logits = "logits" Span "layer" ["rows"],
    /// A part of the weights is read.
    Read = "read" Span "io" ["part", "bytes"],
    /// An expert is read.
    ReadExpert = "read expert" Span "io" ["expert", "bytes"],
    /// A pass waits for a part of the weights.
    Wait = "wait" Span "io" ["part"],
    /// A pass waits for an expert.
    WaitExpert = "wait for expert" Span "io" ["expert"],
    /// A quantum of time that a model is given.
    Quantum = "quantum" Span "schedule" ["sequences", "layers"],
    /// Tokens were forgotten to make room.
    Eviction = "eviction" Mark "memory" ["turns", "tokens"],
    /// A session begins behind a prefix that was computed before.
    PrefixHit = "prefix hit" Mark "memory" ["tokens"],
    /// Memory is getting short.
    Short = "memory short" Mark "governor" ["available"],
    /// Memory is about to run out.
    Emergency = "emergency" Mark "governor" ["available"],
    /// Steps take longer than they should.
    Thrash = "thrash" Mark "governor" ["step_us", "major_faults"],
    /// Parts of the weights were let go of.
    Shed = "shed" Mark "governor" ["parts", "first"],
    /// A part of the weights is kept.
    Grew = "grew" Mark "governor" ["part"],
    /// A part of the weights was to be kept and could not be.
    Refused = "refused" Mark "governor" ["part"],
    /// What a step takes with nothing kept was measured.
    Learned = "learned" Mark "governor" ["step_us"],
    /// A sequence changes to another head.
    HeadSwap = "head swap" Span "heads" ["fallback"],
    /// A head is read into memory.
    HeadLoad = "head load" Span "heads" ["ahead"],
    /// A head left memory to make room.
    HeadEviction = "head eviction" Mark "heads" [],
    /// A head could not be used, or was not there in time.
    HeadFailure = "head failure" Mark "heads" [],
    /// How many parts of the weights are kept.
    KeptParts = "kept parts" Level "governor" ["parts"],
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn names_are_plain_and_nobody_shares_one() {
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
