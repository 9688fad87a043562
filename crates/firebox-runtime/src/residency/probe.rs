use std::cell::RefCell;
use std::ops::Range;
use std::time::Instant;

use burn::tensor::{Device, Tensor};
use firebox_cache::{KvType, PagePool, SequenceCache};
use firebox_kernels::on_pool;
use firebox_model::{Decoder, Input, Pass, StreamedWeights};

use super::calibration::{Round, explained};
use crate::RuntimeError;
use crate::planner::{Rates, Shape};

/// Layers that compute while they are read.
pub(super) const READ: usize = 5;

/// How often they do, and parts that are kept.
const READ_REPEATS: usize = 3;
const KEPT_REPEATS: usize = 9;

/// How many tokens a sequence has when its layers are timed: what it remembers takes time too.
const DEPTH: usize = 64;

/// Seconds of reading after which a round is long enough to be like all others.
const ROUND: f64 = 0.5;

/// Short rounds are gone through until so many seconds are over, but not more often than that.
const ROUNDS: f64 = 0.5;
const ROUND_REPEATS: usize = 3;
const MOST_ROUNDS: usize = 15;

/// Measures how fast a machine reads and computes the parts of a decoder that nothing is kept of, in a few
/// seconds at most.
///
/// Some layers compute while the next ones are read, and then while they are kept and nothing is; other layers are taken to be
/// as fast, byte for byte, as those of their kind. Then parts go round and round as they always will: as many as are read
/// soon, all of them read; some with every other one kept; and the unembedding behind layers that are kept. How fast parts are
/// read, and what reading and computing cost each other, becomes what [explains](explained) all three.
pub(super) struct Probe<'a> {
    pub decoder: &'a Decoder,
    pub streamed: &'a StreamedWeights,
    pub shape: &'a Shape,
    /// How many parts may be in memory together.
    pub at_once: usize,
}

impl Probe<'_> {
    pub fn rates(&self) -> Result<Rates, RuntimeError> {
        on_pool(self.decoder.device(), || self.measured())
    }

    fn measured(&self) -> Result<Rates, RuntimeError> {
        let all = self.decoder.layers();
        self.streamed.read_ahead(0..all);
        // The first reads find buffers that were never used, and threads that sleep.
        let sequence = RefCell::new(self.sequence());
        let times = |layers| self.layer_times(layers, &mut sequence.borrow_mut(), &[0]);
        let read = self.layers(self.at_once.min(READ));
        times(read)?;
        let before = self.streamed.report();
        let disturbed = typical(READ_REPEATS, || times(read))?;
        let after = self.streamed.report();

        let buffers = self.streamed.buffers();
        self.streamed.read_ahead(0..0);
        self.streamed.set_buffers(0);
        let layers = self.layers(self.at_once);
        self.layer_times(layers, &mut sequence.borrow_mut(), &[0; DEPTH])?;
        let alone = self.kept(0..layers, || times(layers))?;
        let blocks = all..self.streamed.parts().min(all + self.at_once);
        let rows = self.kept(blocks.clone(), || self.row_times(blocks.len()))?;
        self.streamed.set_buffers(buffers);

        let (bytes, reading) = (after.bytes - before.bytes, after.reading - before.reading);
        let config = &self.decoder.config().blocks;
        let compute = (0..self.shape.parts.len()).map(|part| match config.get(part) {
            Some(block) => self.seconds(part, &alone, |other| config[other] == *block),
            None => self.seconds(part, &rows, |_| true),
        });
        let rates = Rates {
            read_bytes_per_second: bytes as f64 / reading.as_secs_f64().max(1e-9),
            read_latency: 0.0,
            compute: compute.collect(),
            overhead: self.beginning()?,
            contention: (behind_first(&disturbed) / behind_first(&alone[..read])).max(1.0),
            hindrance: 1.0,
        };
        explained(rates.clone(), self.shape, buffers, &self.rounds(&rates)?)
    }

    /// Ways in which parts go round.
    fn rounds(&self, rates: &Rates) -> Result<Vec<Round>, RuntimeError> {
        let (layers, parts) = (self.decoder.layers(), self.streamed.parts());
        let all = self.soon(0..parts, rates).max(self.layers(self.at_once.min(READ)));
        let mut rounds = vec![self.seen((0..all).map(|part| (part, false)).collect())?];
        let kept = self.at_once.min(layers);
        let half = kept.min(layers / 2);
        if half > 0 {
            rounds.push(self.seen((0..2 * half).map(|part| (part, part % 2 == 0)).collect())?);
        }
        let blocks = layers..layers + self.soon(layers..parts, rates);
        if !blocks.is_empty() {
            let blocks = blocks.map(|part| (part, false));
            rounds.push(self.seen((0..kept).map(|part| (part, true)).chain(blocks).collect())?);
        }
        Ok(rounds)
    }

    /// Goes round and round through some parts, of which these are kept: some of the first layers, then some of the first blocks of
    /// the unembedding.
    fn seen(&self, parts: Vec<(usize, bool)>) -> Result<Round, RuntimeError> {
        let sequence = RefCell::new(self.sequence());
        let with = |kept: bool| parts.iter().filter(move |part| part.1 == kept).map(|part| part.0);
        with(true).try_for_each(|part| self.streamed.load(part))?;
        let first = with(false).next().unwrap_or(0);
        self.streamed.read_ahead(first..with(false).next_back().unwrap_or(first) + 1);
        let layers = parts.iter().filter(|part| part.0 < self.decoder.layers()).count();
        let round = || Ok(vec![self.round_time(layers, parts.len() - layers, &mut sequence.borrow_mut())?]);
        let rounds = (ROUNDS / round()?[0]).ceil() as usize;
        let times = typical(rounds.clamp(ROUND_REPEATS, MOST_ROUNDS), round)?;
        self.streamed.read_ahead(0..0);
        with(true).for_each(|part| self.streamed.evict(part));
        Ok(Round { parts, seconds: times[0] })
    }

    /// How many of these parts are read before a round is long enough.
    fn soon(&self, parts: Range<usize>, rates: &Rates) -> usize {
        let mut left = ROUND;
        let parts = self.shape.parts[parts].iter().take_while(|part| {
            let fits = left > 0.0;
            left -= rates.read_seconds(part.bytes);
            fits
        });
        parts.count()
    }

    /// Seconds that one token takes through so many of the first layers and then blocks of the unembedding.
    fn round_time(
        &self,
        layers: usize,
        blocks: usize,
        sequence: &mut SequenceCache,
    ) -> Result<f64, RuntimeError> {
        let began = Instant::now();
        self.layer_times(layers, sequence, &[0])?;
        self.row_times(blocks)?;
        Ok(began.elapsed().as_secs_f64())
    }

    /// So many of the first layers, or more, so that there is one of every kind.
    fn layers(&self, count: usize) -> usize {
        let blocks = &self.decoder.config().blocks;
        let firsts = (0..blocks.len()).filter(|&layer| !blocks[..layer].contains(&blocks[layer]));
        (firsts.max().unwrap_or(0) + count).min(blocks.len())
    }

    /// What `measure` finds of some parts while they are kept.
    fn kept(
        &self,
        parts: Range<usize>,
        measure: impl Fn() -> Result<Vec<f64>, RuntimeError>,
    ) -> Result<Vec<f64>, RuntimeError> {
        let mut times = Vec::with_capacity(parts.len());
        for start in parts.clone().step_by(self.at_once.max(1)) {
            let kept = start..parts.end.min(start + self.at_once);
            kept.clone().try_for_each(|part| self.streamed.load(part))?;
            let measured = typical(KEPT_REPEATS, &measure)?;
            times.extend_from_slice(&measured[start - parts.start..kept.end - parts.start]);
            kept.for_each(|part| self.streamed.evict(part));
        }
        Ok(times)
    }

    fn sequence(&self) -> SequenceCache {
        SequenceCache::new(&PagePool::new(self.decoder.layout(KvType::F16)))
    }

    fn begin(&self, tokens: &[u32], position: usize) -> Result<Pass, RuntimeError> {
        Ok(Pass::begin(self.decoder, &[Input::new(tokens, position, 0)])?)
    }

    /// Seconds that each of the first layers computes for some tokens, which a sequence then remembers there.
    fn layer_times(
        &self,
        layers: usize,
        sequence: &mut SequenceCache,
        tokens: &[u32],
    ) -> Result<Vec<f64>, RuntimeError> {
        let mut pass = self.begin(tokens, sequence.position())?;
        let step = |_| self.timed(|| Ok(pass.step(self.decoder, &mut [&mut *sequence])?));
        let times = (0..layers).map(step).collect();
        sequence.advance();
        times
    }

    /// Seconds that each of the first blocks of the unembedding computes.
    fn row_times(&self, blocks: usize) -> Result<Vec<f64>, RuntimeError> {
        let hidden = Tensor::<2>::ones([1, self.decoder.config().hidden_size], self.decoder.device());
        let block = |block| self.timed(|| Ok(self.streamed.unembed_rows(block, &hidden).map(drop)?));
        (0..blocks).map(block).collect()
    }

    /// Seconds of some work, but for those that it waited for reads.
    fn timed(&self, work: impl FnOnce() -> Result<(), RuntimeError>) -> Result<f64, RuntimeError> {
        let (began, waited) = (Instant::now(), self.streamed.report().waiting);
        work()?;
        settle(self.decoder.device())?;
        let waited = self.streamed.report().waiting - waited;
        Ok(began.elapsed().saturating_sub(waited).as_secs_f64())
    }

    /// Seconds that a pass takes before its first layer.
    fn beginning(&self) -> Result<f64, RuntimeError> {
        Ok(typical(KEPT_REPEATS, || Ok(vec![self.timed(|| self.begin(&[0], 0).map(drop))?]))?[0])
    }

    /// Seconds that a part computes, from those that were measured and are like it.
    fn seconds(&self, part: usize, measured: &[f64], is_alike: impl Fn(usize) -> bool) -> f64 {
        let parts = &self.shape.parts;
        let first = if parts[part].is_layer { 0 } else { self.decoder.layers() };
        let per_byte = |other: usize| measured[other] / parts[first + other].bytes.max(1) as f64;
        // The first one wakes threads that have had nothing to do.
        let rates: Vec<f64> = (1..measured.len()).filter(|&other| is_alike(other)).map(per_byte).collect();
        let mean = rates.iter().sum::<f64>() / rates.len() as f64;
        (if rates.is_empty() { per_byte(0) } else { mean }) * parts[part].bytes as f64
    }
}

/// Waits until a device has done what it was given.
fn settle(device: &Device) -> Result<(), RuntimeError> {
    device.sync().map_err(|error| RuntimeError::Readback { reason: error.to_string() })
}

/// The medians of what is measured several times.
fn typical(
    repeats: usize,
    measure: impl Fn() -> Result<Vec<f64>, RuntimeError>,
) -> Result<Vec<f64>, RuntimeError> {
    let runs = (0..repeats).map(|_| measure()).collect::<Result<Vec<_>, _>>()?;
    let times = |index: usize| median(runs.iter().map(|run| run[index]).collect());
    Ok((0..runs[0].len()).filter_map(times).collect())
}

/// The sum but for the first, if there are others.
fn behind_first(times: &[f64]) -> f64 {
    times[usize::from(times.len() > 1)..].iter().sum()
}

fn median(mut values: Vec<f64>) -> Option<f64> {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied()
}
