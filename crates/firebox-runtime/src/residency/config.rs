//! The policy of residency: every constant that decides what is loaded, evicted, charged or waited for.

use std::time::Duration;

/// The constants of the policy. There is one set of values, [`CONFIG`].
pub(super) struct Config {
    /// Bytes that a program is expected to take beyond what was measured, where one model runs in a budget: code that has not run yet,
    /// tables of the sampler, logits.
    pub program_slack: u64,
    /// Bytes that a program is expected to take beyond what it takes before models run, where several share a budget. What it takes is
    /// measured again while they run, and charged instead.
    pub shared_program_slack: u64,
    /// A step that streams everything may turn out faster than predicted. It is hardly faster by more than a tenth, because the probe
    /// measures such rounds. With more caution, parts that save less would be evicted only to find that out.
    pub streaming_caution: f64,
    /// The share of the available memory that parts may take while a model is probed.
    pub probe_memory_share: f64,
    /// Seconds of reading after which a probe loads no further part: many parts leave the processor's caches, as in a pass.
    pub probe_read_seconds: f64,
    /// Bytes that a probe may take where the system does not report the available memory.
    pub probe_bytes: u64,

    /// Rows of a prompt in one pass, unless the options say otherwise. Many rows share one read of the weights, and all models need the
    /// memory for intermediate results only once.
    pub prefill_rows: usize,
    /// Pieces that a block is read in where models share a budget, each resident or not: about as large as the largest matrices.
    pub pieces: usize,
    /// Bytes that a model takes beside its weights and its tokenizer's tables: its norms and the lookup of tensors.
    pub model_overhead: u64,
    /// The factor by which a tokenizer takes more memory while it is built: its source is in memory as well.
    pub tokenizer_build_factor: u64,

    /// If at most one part in this many is missing, one buffer serves all: another part computes while each of them is read, so a second
    /// buffer is worth less than another resident part.
    pub few_missing: usize,
    /// A model takes memory from an equally urgent one only if its size is below this fraction (numerator, denominator) of the other's:
    /// models of about one size should not evict each other in turn.
    pub smaller_by: (u64, u64),
    /// How long no part is added after memory was short.
    pub calm_after_shortage: Duration,
    /// The longest wait, within a pass, for a buffer that another model is reading into. The pass holds up all models.
    pub pass_wait: Duration,
    /// The longest wait for such a buffer while a model or a head is loaded: the slowest read of a slow disk after others.
    pub open_wait: Duration,
    /// How long one buffer is waited for before all models are asked again.
    pub recheck: Duration,

    /// Steps from one reading of the thermometer to the next.
    pub steps_per_reading: usize,
    /// Events that are kept until they are asked for.
    pub max_events: usize,

    /// Time between two measurements of the program's memory. One takes a twentieth of a millisecond.
    pub program_interval: Duration,
    /// Bytes that the program may grow until the next measurement.
    pub program_headroom: u64,
    /// [`program_headroom`](Self::program_headroom) for when memory changed by at most half of that during the last
    /// measurements.
    pub steady_program_headroom: u64,
    /// Measurements in a row after which the largest of them decides what is charged.
    pub measurements_to_settle: u32,

    /// Reads below this size go through the page cache at once, without a place in the disk queue: rows of an embedding, which a pass
    /// waits for.
    pub unqueued_read: usize,
    /// Reads of other models after which a waiting read comes first, so that the least urgent model makes progress.
    pub max_overtaken: u32,

    /// The fastest rate at which other programs take memory: the kernel clears pages for a few threads at once.
    pub others_bytes_per_second: u64,
    /// The shortest time between two readings of memory pressure. A reading takes an eighth of a millisecond, which is three percent of
    /// a core.
    pub monitor_interval: Duration,
    /// [`monitor_interval`](Self::monitor_interval) while no part is resident, so that nothing can be evicted.
    pub idle_monitor_interval: Duration,
    /// The longest time between two readings. Limits may be lowered at any time.
    pub max_monitor_interval: Duration,
    /// Time from a program's first allocation until a part is evicted for it: the shortest interval, two ticks of a busy system's clock,
    /// and the eviction.
    pub reaction_time: Duration,
    /// With more available memory than this, the rate of other programs does not matter: memory is read twice before it is gone.
    pub plenty: u64,
}

const OTHERS_BYTES_PER_SECOND: u64 = 2 << 30;

/// The values in use.
pub(super) const CONFIG: Config = Config {
    program_slack: 20 << 20,
    shared_program_slack: 40 << 20,
    streaming_caution: 0.9,
    probe_memory_share: 0.5,
    probe_read_seconds: 0.5,
    probe_bytes: 1 << 30,

    prefill_rows: 128,
    pieces: 4,
    model_overhead: 256 << 10,
    tokenizer_build_factor: 3,

    few_missing: 3,
    smaller_by: (3, 4),
    calm_after_shortage: Duration::from_secs(10),
    pass_wait: Duration::from_millis(250),
    open_wait: Duration::from_secs(2),
    recheck: Duration::from_millis(20),

    steps_per_reading: 64,
    max_events: 256,

    program_interval: Duration::from_millis(20),
    program_headroom: 8 << 20,
    steady_program_headroom: 6 << 20,
    measurements_to_settle: 12,

    unqueued_read: 256 << 10,
    max_overtaken: 16,

    others_bytes_per_second: OTHERS_BYTES_PER_SECOND,
    monitor_interval: Duration::from_millis(4),
    idle_monitor_interval: Duration::from_millis(32),
    max_monitor_interval: Duration::from_millis(250),
    reaction_time: Duration::from_millis(16),
    plenty: OTHERS_BYTES_PER_SECOND / 8,
};
