use std::cell::RefCell;
use std::ops::Range;
use std::time::Instant;

use burn::tensor::{Device, Tensor};
use firebox_cache::{KvType, Pool, SequenceCache};
use firebox_kernels::on_pool;
use firebox_model::{Decoder, Input, Pass, Streamed};

use crate::RuntimeError;
use crate::planner::{Prediction, Rates, Shape, predict};

/// How often layers compute while they are read, and parts that are kept.
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

/// A round that waits a smaller share of its time says nothing about reading.
const WAITS: f64 = 0.1;

/// How far the rate of rounds is looked for from that of single layers, as a factor, how far computing is thought to hold
/// reading up, and in how many halvings both are found.
const FARTHEST: f64 = 8.0;
const MOST_HINDRANCE: f64 = 8.0;
const HALVINGS: usize = 30;

/// How often the rate of reading and what holds it up are fitted in turn, since each says something of both.
const FITS: usize = 4;

/// Measures how fast a machine reads and computes the parts of a decoder that nothing is kept of, in a few
/// seconds at most.
///
/// Some layers compute while the next ones are read, and then while they are kept and nothing is; the difference is what
/// being read costs computing. Other layers are taken to be as fast, byte for byte, as those of their kind. Then as many
/// parts as are read soon go round and round as they always will, all of them read at first and then half of them kept. The rate
/// of reading becomes what explains how long the first takes, since readers that have run for a while are faster than those that
/// have just begun; how much computing holds it up is what explains the second.
pub(super) struct Probe<'a> {
    pub decoder: &'a Decoder,
    pub streamed: &'a Streamed,
    pub shape: &'a Shape,
    /// How many parts may be in memory together.
    pub at_once: usize,
}

impl Probe<'_> {
    pub fn rates(&self) -> Result<Rates, RuntimeError> {
        on_pool(self.decoder.device(), || self.measured())
    }

    fn measured(&self) -> Result<Rates, RuntimeError> {
        let (layers, all) = (self.layers(), self.decoder.layers());
        self.streamed.read_ahead(0..all);
        // The first reads find buffers that were never used, and threads that sleep.
        let sequence = RefCell::new(self.sequence());
        let times = || self.layer_times(layers, &mut sequence.borrow_mut(), &[0]);
        times()?;
        let before = self.streamed.report();
        let disturbed = typical(READ_REPEATS, times)?;
        let after = self.streamed.report();

        let buffers = self.streamed.buffers();
        self.streamed.read_ahead(0..0);
        self.streamed.set_buffers(0);
        self.layer_times(layers, &mut sequence.borrow_mut(), &[0; DEPTH])?;
        let alone = self.kept(0..layers, times)?;
        let blocks = all..self.streamed.parts().min(all + self.at_once);
        let rows = self.kept(blocks.clone(), || self.row_times(blocks.len()))?;
        self.streamed.set_buffers(buffers);

        let (bytes, reading) = (after.bytes - before.bytes, after.reading - before.reading);
        let config = &self.decoder.config().blocks;
        let compute = (0..self.shape.parts.len()).map(|part| match config.get(part) {
            Some(block) => self.seconds(part, &alone, |other| config[other] == *block),
            None => self.seconds(part, &rows, |_| true),
        });
        self.calibrated(Rates {
            read_bytes_per_second: bytes as f64 / reading.as_secs_f64().max(1e-9),
            read_latency: 0.0,
            compute: compute.collect(),
            overhead: self.beginning()?,
            contention: (behind_first(&disturbed) / behind_first(&alone)).max(1.0),
            hindrance: 1.0,
        })
    }

    /// The same rates, but for those of reading, with which it is predicted how long rounds were seen to take.
    fn calibrated(&self, rates: Rates) -> Result<Rates, RuntimeError> {
        let parts = self.round(&rates);
        let all_read = self.seen(vec![false; parts])?;
        if !all_read.says_how_reading_goes() {
            return Ok(rates);
        }
        let fitted = self.reading_as_seen(rates, &all_read)?;
        // The ring's buffers are in memory beside what is kept.
        let pairs = self.at_once.saturating_sub(self.streamed.buffers()).min(self.decoder.layers() / 2);
        if pairs == 0 {
            return Ok(fitted);
        }
        let half_kept = self.seen([true, false].repeat(pairs))?;
        if !half_kept.says_how_reading_goes() {
            return Ok(fitted);
        }
        // Both at once is never slower than one after the other.
        let most = MOST_HINDRANCE.min(fitted.contention / (fitted.contention - 1.0));
        (0..FITS).try_fold(fitted, |rates, _| {
            let hindrance = crossing(1.0, most, |hindrance| {
                let rates = Rates { hindrance, ..rates.clone() };
                Ok(self.foretold(&rates, &half_kept)?.seconds_per_token < half_kept.seconds)
            })?;
            self.reading_as_seen(Rates { hindrance, ..rates }, &all_read)
        })
    }

    /// The same rates, but for that of reading, which explains how long a round has taken.
    fn reading_as_seen(&self, rates: Rates, round: &Round) -> Result<Rates, RuntimeError> {
        let rate = rates.read_bytes_per_second;
        let read_bytes_per_second = crossing(rate / FARTHEST, rate * FARTHEST, |read_bytes_per_second| {
            let rates = Rates { read_bytes_per_second, ..rates.clone() };
            Ok(self.foretold(&rates, round)?.seconds_per_token > round.seconds)
        })?;
        Ok(Rates { read_bytes_per_second, ..rates })
    }

    /// Goes round and round through the first parts, of which these are kept.
    fn seen(&self, kept: Vec<bool>) -> Result<Round, RuntimeError> {
        let (parts, sequence) = (kept.len(), RefCell::new(self.sequence()));
        let are_kept = || (0..parts).filter(|&part| kept[part]);
        are_kept().try_for_each(|part| self.streamed.keep(part))?;
        self.streamed.read_ahead(0..parts);
        let round = || {
            let waited = self.streamed.report().waiting;
            let seconds = self.round_time(parts, &mut sequence.borrow_mut())?;
            Ok(vec![seconds, (self.streamed.report().waiting - waited).as_secs_f64()])
        };
        let rounds = (ROUNDS / round()?[0]).ceil() as usize;
        let times = typical(rounds.clamp(ROUND_REPEATS, MOST_ROUNDS), round)?;
        self.streamed.read_ahead(0..0);
        are_kept().for_each(|part| self.streamed.let_go(part));
        Ok(Round { kept, seconds: times[0], waiting: times[1] })
    }

    fn foretold(&self, rates: &Rates, round: &Round) -> Result<Prediction, RuntimeError> {
        let parts = round.kept.len();
        let shape = Shape { parts: self.shape.parts[..parts].to_vec(), ..self.shape.clone() };
        let rates = Rates { compute: rates.compute[..parts].to_vec(), ..rates.clone() };
        predict(&shape, &rates, &round.kept, self.streamed.buffers())
    }

    /// How many of the first parts are read before a round is long enough.
    fn round(&self, rates: &Rates) -> usize {
        let mut left = ROUND;
        let parts = self.shape.parts.iter().take_while(|part| {
            let fits = left > 0.0;
            left -= rates.read_seconds(part.bytes);
            fits
        });
        parts.count().max(self.layers())
    }

    /// Seconds that one token takes through some parts while they are read.
    fn round_time(&self, parts: usize, sequence: &mut SequenceCache) -> Result<f64, RuntimeError> {
        let layers = self.decoder.layers();
        let began = Instant::now();
        self.layer_times(parts.min(layers), sequence, &[0])?;
        self.row_times(parts.saturating_sub(layers))?;
        Ok(began.elapsed().as_secs_f64())
    }

    /// Enough of the first layers that there is more than one of every kind, if there is.
    fn layers(&self) -> usize {
        let blocks = &self.decoder.config().blocks;
        let firsts = (0..blocks.len()).filter(|&layer| !blocks[..layer].contains(&blocks[layer]));
        (firsts.max().unwrap_or(0) + self.at_once).min(blocks.len())
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
            kept.clone().try_for_each(|part| self.streamed.keep(part))?;
            let measured = typical(KEPT_REPEATS, &measure)?;
            times.extend_from_slice(&measured[start - parts.start..kept.end - parts.start]);
            kept.for_each(|part| self.streamed.let_go(part));
        }
        Ok(times)
    }

    fn sequence(&self) -> SequenceCache {
        SequenceCache::new(&Pool::new(self.decoder.layout(KvType::F16)))
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
        let rates = (1..measured.len()).filter(|&other| is_alike(other)).map(per_byte).collect();
        median(rates).unwrap_or_else(|| per_byte(0)) * parts[part].bytes as f64
    }
}

/// Parts that went round, and how long that took.
struct Round {
    kept: Vec<bool>,
    seconds: f64,
    /// Of these, how many nothing computed in because a read was not done.
    waiting: f64,
}

impl Round {
    fn says_how_reading_goes(&self) -> bool {
        self.waiting >= WAITS * self.seconds
    }
}

/// Where between two values, which both are above 0, something stops being so.
fn crossing(
    mut so: f64,
    mut otherwise: f64,
    is_so: impl Fn(f64) -> Result<bool, RuntimeError>,
) -> Result<f64, RuntimeError> {
    for _ in 0..HALVINGS {
        let middle = (so * otherwise).sqrt();
        *(if is_so(middle)? { &mut so } else { &mut otherwise }) = middle;
    }
    Ok((so * otherwise).sqrt())
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
