//! Measures how fast a machine reads and computes the parts of a decoder, without running it.

use std::cell::RefCell;
use std::ops::Range;
use std::time::Instant;

use burn::tensor::{Device, Tensor};
use firebox_cache::{KvType, PagePool, SequenceCache};
use firebox_kernels::on_pool;
use firebox_model::{Decoder, Input, Pass, StreamedWeights};

use super::calibration::{Round, calibrate};
use crate::RuntimeError;
use crate::planner::{Rates, Shape};

/// Layers that are timed while they are streamed.
pub(super) const STREAMED_LAYERS: usize = 5;

/// Repetitions with streamed layers, and with resident parts.
const STREAMED_REPEATS: usize = 3;
const RESIDENT_REPEATS: usize = 9;

/// Tokens in the sequence while layers are timed, because attention to them takes time too.
const SEQUENCE_TOKENS: usize = 64;

/// Seconds of reading that make a round long enough to stand for all others.
const ROUND_SECONDS: f64 = 0.5;

/// Rounds are repeated for this many seconds, within these numbers of repetitions.
const REPEAT_SECONDS: f64 = 0.5;
const MIN_ROUNDS: usize = 3;
const MAX_ROUNDS: usize = 15;

/// A measurement of a decoder without resident parts. It takes a few seconds at most.
///
/// Some layers compute while the next ones are read, and then while they are resident and nothing is read. Other layers
/// are assumed to be as fast per byte as those of their kind. Then one token passes some parts as in decoding: as many
/// as are read in a short time, all of them streamed; then with every other one resident; and then the unembedding
/// behind resident layers. [Calibration](calibrate) finds the rate of reading, and how much reading and computing slow
/// each other down, from all three.
pub(super) struct Probe<'a> {
    pub decoder: &'a Decoder,
    pub weights: &'a StreamedWeights,
    pub shape: &'a Shape,
    /// The most parts that may be in memory at the same time.
    pub at_once: usize,
}

impl Probe<'_> {
    pub fn rates(&self) -> Result<Rates, RuntimeError> {
        on_pool(self.decoder.device(), || self.measure())
    }

    fn measure(&self) -> Result<Rates, RuntimeError> {
        let all = self.decoder.layers();
        self.weights.read_ahead(0..all);
        // The first reads use new buffers and wake threads, so they are not timed.
        let sequence = RefCell::new(self.sequence());
        let times = |layers| self.layer_times(layers, &mut sequence.borrow_mut(), &[0]);
        let streamed_layers = self.layers_of_all_kinds(self.at_once.min(STREAMED_LAYERS));
        times(streamed_layers)?;
        let before = self.weights.report();
        let streamed = medians(STREAMED_REPEATS, || times(streamed_layers))?;
        let after = self.weights.report();

        let buffers = self.weights.buffers();
        self.weights.read_ahead(0..0);
        self.weights.set_buffers(0);
        let layers = self.layers_of_all_kinds(self.at_once);
        self.layer_times(layers, &mut sequence.borrow_mut(), &[0; SEQUENCE_TOKENS])?;
        let resident = self.while_resident(0..layers, || times(layers))?;
        let blocks = all..self.weights.parts().min(all + self.at_once);
        let rows = self.while_resident(blocks.clone(), || self.unembedding_times(blocks.len()))?;
        self.weights.set_buffers(buffers);

        let (bytes, reading) = (after.bytes - before.bytes, after.reading - before.reading);
        let config = &self.decoder.config().blocks;
        let compute = (0..self.shape.parts.len()).map(|part| match config.get(part) {
            Some(block) => self.compute_seconds(part, &resident, |other| config[other] == *block),
            None => self.compute_seconds(part, &rows, |_| true),
        });
        let contention = sum_after_first(&streamed) / sum_after_first(&resident[..streamed_layers]);
        let rates = Rates {
            read_bytes_per_second: bytes as f64 / reading.as_secs_f64().max(1e-9),
            read_latency: 0.0,
            compute: compute.collect(),
            overhead: self.overhead()?,
            contention: contention.max(1.0),
            hindrance: 1.0,
        };
        calibrate(rates.clone(), self.shape, buffers, &self.rounds(&rates)?)
    }

    fn rounds(&self, rates: &Rates) -> Result<Vec<Round>, RuntimeError> {
        let (layers, parts) = (self.decoder.layers(), self.weights.parts());
        let all =
            self.readable(0..parts, rates).max(self.layers_of_all_kinds(self.at_once.min(STREAMED_LAYERS)));
        let mut rounds = vec![self.time_round((0..all).map(|part| (part, false)).collect())?];
        let resident = self.at_once.min(layers);
        let half = resident.min(layers / 2);
        if half > 0 {
            rounds.push(self.time_round((0..2 * half).map(|part| (part, part % 2 == 0)).collect())?);
        }
        let blocks = layers..layers + self.readable(layers..parts, rates);
        if !blocks.is_empty() {
            let blocks = blocks.map(|part| (part, false));
            rounds.push(self.time_round((0..resident).map(|part| (part, true)).chain(blocks).collect())?);
        }
        Ok(rounds)
    }

    /// Times rounds through the first layers and then the first blocks of the unembedding, each with whether it is
    /// resident.
    fn time_round(&self, parts: Vec<(usize, bool)>) -> Result<Round, RuntimeError> {
        let sequence = RefCell::new(self.sequence());
        let with = |resident: bool| parts.iter().filter(move |part| part.1 == resident).map(|part| part.0);
        with(true).try_for_each(|part| self.weights.load(part))?;
        let first = with(false).next().unwrap_or(0);
        self.weights.read_ahead(first..with(false).next_back().unwrap_or(first) + 1);
        let layers = parts.iter().filter(|part| part.0 < self.decoder.layers()).count();
        let round =
            || Ok(vec![self.round_seconds(layers, parts.len() - layers, &mut sequence.borrow_mut())?]);
        let rounds = (REPEAT_SECONDS / round()?[0]).ceil() as usize;
        let times = medians(rounds.clamp(MIN_ROUNDS, MAX_ROUNDS), round)?;
        self.weights.read_ahead(0..0);
        with(true).for_each(|part| self.weights.evict(part));
        Ok(Round { parts, seconds: times[0] })
    }

    /// Returns how many of these parts are read in the time that makes a round long enough.
    fn readable(&self, parts: Range<usize>, rates: &Rates) -> usize {
        let mut left = ROUND_SECONDS;
        let parts = self.shape.parts[parts].iter().take_while(|part| {
            let fits = left > 0.0;
            left -= rates.read_seconds(part.bytes);
            fits
        });
        parts.count()
    }

    /// Returns the seconds that one token takes through some of the first layers and then some blocks of the
    /// unembedding.
    fn round_seconds(
        &self,
        layers: usize,
        blocks: usize,
        sequence: &mut SequenceCache,
    ) -> Result<f64, RuntimeError> {
        let began = Instant::now();
        self.layer_times(layers, sequence, &[0])?;
        self.unembedding_times(blocks)?;
        Ok(began.elapsed().as_secs_f64())
    }

    /// Returns a number of first layers that includes every kind, with `count` of the kind that appears last.
    fn layers_of_all_kinds(&self, count: usize) -> usize {
        let blocks = &self.decoder.config().blocks;
        let firsts = (0..blocks.len()).filter(|&layer| !blocks[..layer].contains(&blocks[layer]));
        (firsts.max().unwrap_or(0) + count).min(blocks.len())
    }

    /// The medians of `measure` for some parts while they are resident.
    fn while_resident(
        &self,
        parts: Range<usize>,
        measure: impl Fn() -> Result<Vec<f64>, RuntimeError>,
    ) -> Result<Vec<f64>, RuntimeError> {
        let mut times = Vec::with_capacity(parts.len());
        for start in parts.clone().step_by(self.at_once.max(1)) {
            let resident = start..parts.end.min(start + self.at_once);
            resident.clone().try_for_each(|part| self.weights.load(part))?;
            let measured = medians(RESIDENT_REPEATS, &measure)?;
            times.extend_from_slice(&measured[start - parts.start..resident.end - parts.start]);
            resident.for_each(|part| self.weights.evict(part));
        }
        Ok(times)
    }

    fn sequence(&self) -> SequenceCache {
        SequenceCache::new(&PagePool::new(self.decoder.layout(KvType::F16)))
    }

    fn begin(&self, tokens: &[u32], position: usize) -> Result<Pass, RuntimeError> {
        Ok(Pass::begin(self.decoder, &[Input::new(tokens, position, 0)])?)
    }

    /// Seconds that each of the first layers computes for some tokens, which are appended to a sequence.
    fn layer_times(
        &self,
        layers: usize,
        sequence: &mut SequenceCache,
        tokens: &[u32],
    ) -> Result<Vec<f64>, RuntimeError> {
        let mut pass = self.begin(tokens, sequence.position())?;
        let step = |_| self.compute_time(|| Ok(pass.step(self.decoder, &mut [&mut *sequence])?));
        let times = (0..layers).map(step).collect();
        sequence.advance();
        times
    }

    /// Seconds that each of the first blocks of the unembedding computes.
    fn unembedding_times(&self, blocks: usize) -> Result<Vec<f64>, RuntimeError> {
        let hidden = Tensor::<2>::ones([1, self.decoder.config().hidden_size], self.decoder.device());
        let block = |block| self.compute_time(|| Ok(self.weights.unembed_rows(block, &hidden).map(drop)?));
        (0..blocks).map(block).collect()
    }

    /// Seconds of some work without the time that it waited for reads.
    fn compute_time(&self, work: impl FnOnce() -> Result<(), RuntimeError>) -> Result<f64, RuntimeError> {
        let (began, waited) = (Instant::now(), self.weights.report().waiting);
        work()?;
        synchronize(self.decoder.device())?;
        let waited = self.weights.report().waiting - waited;
        Ok(began.elapsed().saturating_sub(waited).as_secs_f64())
    }

    /// Seconds that a pass takes before its first layer.
    fn overhead(&self) -> Result<f64, RuntimeError> {
        let begin = || Ok(vec![self.compute_time(|| self.begin(&[0], 0).map(drop))?]);
        Ok(medians(RESIDENT_REPEATS, begin)?[0])
    }

    /// Seconds that a part computes, estimated from the measured parts of its kind.
    fn compute_seconds(&self, part: usize, measured: &[f64], is_alike: impl Fn(usize) -> bool) -> f64 {
        let parts = &self.shape.parts;
        let first = if parts[part].is_layer { 0 } else { self.decoder.layers() };
        let per_byte = |other: usize| measured[other] / parts[first + other].bytes.max(1) as f64;
        // The first part wakes idle threads.
        let rates: Vec<f64> = (1..measured.len()).filter(|&other| is_alike(other)).map(per_byte).collect();
        let mean = rates.iter().sum::<f64>() / rates.len() as f64;
        (if rates.is_empty() { per_byte(0) } else { mean }) * parts[part].bytes as f64
    }
}

/// Waits until a device has finished its work.
fn synchronize(device: &Device) -> Result<(), RuntimeError> {
    device.sync().map_err(|error| RuntimeError::Readback { reason: error.to_string() })
}

/// The medians of repeated measurements.
fn medians(
    repeats: usize,
    measure: impl Fn() -> Result<Vec<f64>, RuntimeError>,
) -> Result<Vec<f64>, RuntimeError> {
    let runs = (0..repeats).map(|_| measure()).collect::<Result<Vec<_>, _>>()?;
    let times = |index: usize| median(runs.iter().map(|run| run[index]).collect());
    Ok((0..runs[0].len()).filter_map(times).collect())
}

/// Returns the sum of all times but the first, or of all if there is only one.
fn sum_after_first(times: &[f64]) -> f64 {
    times[usize::from(times.len() > 1)..].iter().sum()
}

fn median(mut values: Vec<f64>) -> Option<f64> {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied()
}
