//! Measures how fast a model runs.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use firebox_cache::{KvType, PagePool, SequenceCache};
use firebox_kernels::on_pool;
use firebox_memory::process::release_after_prompt;
use firebox_model::{Decoder, Input, LogitRows, Passed};
use firebox_runtime::decode::{Advance, DecodeState, OutputState, Timing};
use firebox_runtime::session::{BatchPass, PREFILL_CHUNK};
use firebox_runtime::{GenerationConfig, Model, RuntimeError, Session, read_floats};
use serde::Serialize;

/// Configures a benchmark.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BenchmarkConfig {
    /// Tokens of the measured prompt.
    pub prompt: usize,
    /// Cached tokens of every sequence before it decodes.
    pub depth: usize,
    /// Tokens that every sequence decodes.
    pub tokens: usize,
    /// Numbers of sequences that decode together.
    pub batches: Vec<usize>,
    /// Runs that each median is taken of.
    pub repeat: usize,
    /// The type of keys and values.
    pub kv_type: KvType,
}

impl Default for BenchmarkConfig {
    fn default() -> Self {
        Self {
            prompt: 512,
            depth: 128,
            tokens: 64,
            batches: vec![1, 4, 8],
            repeat: 5,
            kv_type: KvType::default(),
        }
    }
}

/// The speed of a model.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Benchmark {
    /// Prompt tokens per second.
    pub prefill_tps: f64,
    /// Tokens per second of all sequences together, by batch size: tokens that were chosen greedily, and that the next
    /// step computed.
    pub decode_tps: BTreeMap<usize, f64>,
}

/// Measures the speed of a model on arbitrary tokens.
pub fn benchmark(model: &Model, config: &BenchmarkConfig) -> Result<Benchmark, RuntimeError> {
    let decoder = model.decoder()?;
    let pool = match model.residency() {
        Some(residency) => residency.pool().clone(),
        None => PagePool::new(decoder.layout(config.kv_type)),
    };
    let chunk = model.residency().map_or(PREFILL_CHUNK, |residency| residency.plan().chunk);
    let bench = Bench { decoder: &decoder, config, pool, chunk };
    bench.prefill()?;
    bench.decode(1)?;
    Ok(Benchmark {
        prefill_tps: median(config.repeat, || bench.prefill())?,
        decode_tps: config
            .batches
            .iter()
            .map(|&batch| Ok((batch, median(config.repeat, || bench.decode(batch))?)))
            .collect::<Result<_, RuntimeError>>()?,
    })
}

struct Bench<'a> {
    decoder: &'a Arc<Decoder>,
    config: &'a BenchmarkConfig,
    pool: PagePool,
    /// Prompt tokens that go through the layers together.
    chunk: usize,
}

impl Bench<'_> {
    fn token(&self, index: usize) -> u32 {
        let vocab = self.decoder.config().vocab_size;
        ((100 + index * 7 % 7000) % vocab) as u32
    }

    fn cache(&self) -> SequenceCache {
        SequenceCache::new(&self.pool)
    }

    fn prefill(&self) -> Result<f64, RuntimeError> {
        // Reserves the context as engines do, so that the first use of memory is not measured.
        self.pool.reserve(1, self.config.prompt);
        let tokens: Vec<u32> = (0..self.config.prompt).map(|index| self.token(index)).collect();
        let mut cache = self.cache();
        let began = Instant::now();
        self.feed(&tokens, &mut cache)?;
        let took = began.elapsed();
        release_after_prompt(tokens.len().min(self.chunk));
        Ok(tokens.len() as f64 / took.as_secs_f64())
    }

    /// Decodes greedily: every token is chosen from the scores of the pass before it, as in an answer.
    fn decode(&self, batch: usize) -> Result<f64, RuntimeError> {
        self.pool.reserve(batch, self.config.depth + self.config.tokens);
        let mut sequences = (0..batch).map(|nth| self.sequence(nth)).collect::<Result<Vec<_>, _>>()?;
        let began = Instant::now();
        for _ in 0..self.config.tokens {
            self.step(&mut sequences)?;
        }
        Ok((batch * self.config.tokens) as f64 / began.elapsed().as_secs_f64())
    }

    /// A sequence that has taken its prompt, and has one more token for the first step.
    fn sequence(&self, nth: usize) -> Result<Sequence, RuntimeError> {
        let mut session = Session::in_pool(self.decoder.clone(), &self.pool).with_chunk(self.chunk);
        let tokens: Vec<u32> = (0..self.config.depth).map(|index| self.token(index + nth)).collect();
        if !tokens.is_empty() {
            session.feed(&tokens)?;
        }
        session.append(self.token(nth));
        let config = GenerationConfig::new().with_ignore_end(true);
        let timing = Timing::begin(Duration::ZERO, session.meters());
        Ok(Sequence { state: DecodeState::new(OutputState::new(config, None)?, timing), session })
    }

    /// Takes the last token of every sequence through the layers and chooses the next, as an engine does.
    fn step(&self, sequences: &mut [Sequence]) -> Result<(), RuntimeError> {
        let decoder = self.decoder;
        let _turn = decoder.begin_turn();
        let guard = loop {
            match decoder.try_stream() {
                Some(guard) => break guard,
                // A pass of another thread ends.
                None => thread::yield_now(),
            }
        };
        let began = Instant::now();
        let scores = on_pool(decoder.device(), || {
            let mut chunks = Vec::with_capacity(sequences.len());
            for Sequence { session, .. } in &mut *sequences {
                let chunk = session.next_chunk(1)?;
                session.reserve_pages(&chunk)?;
                chunks.push(chunk);
            }
            let inputs: Vec<_> = sequences.iter().map(|one| &one.session).zip(&chunks).collect();
            let most = sequences.first().and_then(|one| one.state.candidates());
            let mut pass = BatchPass::begin(decoder, &inputs, Vec::new(), true, most)?;
            while pass.next_layer() < decoder.layers() {
                let mut sessions: Vec<_> = sequences.iter_mut().map(|one| &mut one.session).collect();
                pass.step(decoder, &mut sessions, &mut [])?;
            }
            pass.scores(decoder, &vec![1; sequences.len()])
        })?;
        drop(guard);
        let rows = sequences.len();
        decoder.end_pass(Passed { sequences: rows, rows, logits: rows }, began.elapsed());
        for (Sequence { session, state }, scores) in sequences.iter_mut().zip(scores) {
            state.receive_scores(session, scores);
            while let Advance::Token(_) = state.advance(session, None, || Duration::ZERO)? {}
            state.settle(session);
        }
        Ok(())
    }

    fn feed(&self, tokens: &[u32], cache: &mut SequenceCache) -> Result<(), RuntimeError> {
        let mut pieces = tokens.chunks(self.chunk).peekable();
        while let Some(piece) = pieces.next() {
            let input = Input::new(piece, cache.position(), 0);
            if pieces.peek().is_some() {
                self.decoder.encode(input, cache)?;
            } else {
                read_floats(self.decoder.forward_together(&[input], &mut [cache], LogitRows::Last)?)?;
            }
        }
        Ok(())
    }
}

/// A sequence that decodes.
struct Sequence {
    session: Session,
    state: DecodeState,
}

fn median(
    repeat: usize,
    mut measure: impl FnMut() -> Result<f64, RuntimeError>,
) -> Result<f64, RuntimeError> {
    let mut measured = (0..repeat.max(1)).map(|_| measure()).collect::<Result<Vec<_>, _>>()?;
    measured.sort_by(f64::total_cmp);
    let middle = measured.len() / 2;
    Ok(if measured.len().is_multiple_of(2) {
        (measured[middle - 1] + measured[middle]) / 2.0
    } else {
        measured[middle]
    })
}
