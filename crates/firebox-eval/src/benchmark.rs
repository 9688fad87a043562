//! Measures how fast a model runs.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use firebox_cache::{KvType, PagePool, SequenceCache};
use firebox_memory::process::release_after_prompt;
use firebox_model::{Decoder, Input, LogitRows};
use firebox_runtime::session::PREFILL_CHUNK;
use firebox_runtime::{Model, RuntimeError, read_floats};
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
    /// Tokens per second of all sequences together, by batch size.
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

    fn decode(&self, batch: usize) -> Result<f64, RuntimeError> {
        self.pool.reserve(batch, self.config.depth + self.config.tokens);
        let mut caches: Vec<SequenceCache> = (0..batch).map(|_| self.cache()).collect();
        for (sequence, cache) in caches.iter_mut().enumerate() {
            let tokens: Vec<u32> = (0..self.config.depth).map(|index| self.token(index + sequence)).collect();
            self.feed(&tokens, cache)?;
            release_after_prompt(tokens.len().min(self.chunk));
        }
        let mut caches: Vec<&mut SequenceCache> = caches.iter_mut().collect();
        let began = Instant::now();
        for step in 0..self.config.tokens {
            let tokens: Vec<[u32; 1]> = (0..batch).map(|sequence| [self.token(step + sequence)]).collect();
            let tokens: Vec<&[u32]> = tokens.iter().map(<[u32; 1]>::as_slice).collect();
            self.pass(&tokens, &mut caches)?;
        }
        Ok((batch * self.config.tokens) as f64 / began.elapsed().as_secs_f64())
    }

    fn feed(&self, tokens: &[u32], cache: &mut SequenceCache) -> Result<(), RuntimeError> {
        let mut pieces = tokens.chunks(self.chunk).peekable();
        while let Some(piece) = pieces.next() {
            if pieces.peek().is_some() {
                self.decoder.encode(Input::new(piece, cache.position(), 0), cache)?;
            } else {
                self.pass(&[piece], &mut [cache])?;
            }
        }
        Ok(())
    }

    /// Runs one pass over the last tokens of some sequences, and reads their logits back.
    fn pass(&self, tokens: &[&[u32]], caches: &mut [&mut SequenceCache]) -> Result<(), RuntimeError> {
        let inputs: Vec<Input<'_>> = tokens
            .iter()
            .zip(&*caches)
            .map(|(tokens, cache)| Input::new(tokens, cache.position(), 0))
            .collect();
        read_floats(self.decoder.forward_together(&inputs, caches, LogitRows::Last)?).map(drop)
    }
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
