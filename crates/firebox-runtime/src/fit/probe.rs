use std::time::{Duration, Instant};

use firebox_kernels::on_pool;
use firebox_model::{Decoder, Input, Pass, Streamed, Wanted};

use crate::RuntimeError;
use crate::planner::{Rates, Shape};

/// How often each layer that is probed computes.
const REPEATS: usize = 3;

/// How long to wait for buffers to fill before computing without them.
const PATIENCE: Duration = Duration::from_secs(2);

/// Measures how fast a machine reads and computes the parts of a decoder that nothing is kept of, in less time than a
/// few tokens take, and with the buffers that are there anyway.
///
/// A few layers compute once while nothing is read, and once while the next ones are; the difference is what reading
/// costs computing. Other layers are taken to be as fast, byte for byte, as those of their kind.
pub(super) fn probe(decoder: &Decoder, streamed: &Streamed, shape: &Shape) -> Result<Rates, RuntimeError> {
    let probe = Probe { decoder, streamed, token: 0 };
    let probed = probe.layers();
    on_pool(decoder.device(), || probe.times(probed, true)).map(drop)?;
    let (mut alone, mut disturbed) = (vec![Vec::new(); probed], vec![Vec::new(); probed]);
    for _ in 0..REPEATS {
        for (times, reading) in [(&mut alone, false), (&mut disturbed, true)] {
            let measured = on_pool(decoder.device(), || probe.times(probed, reading))?;
            times.iter_mut().zip(measured).for_each(|(times, time)| times.push(time));
        }
    }
    let (alone, disturbed): (Vec<f64>, Vec<f64>) =
        (alone.into_iter().map(median).collect(), disturbed.into_iter().map(median).collect());
    let contention = (disturbed.iter().sum::<f64>() / alone.iter().sum::<f64>()).max(1.0);
    let unembedding = on_pool(decoder.device(), || probe.unembedding())? / contention;
    let overhead = on_pool(decoder.device(), || probe.beginning())?;

    let blocks = &decoder.config().blocks;
    let like = |layer: usize| (0..probed).find(|&other| blocks[other] == blocks[layer]).unwrap_or(0);
    let rest: u64 = shape.parts.iter().filter(|part| !part.is_layer).map(|part| part.bytes).sum();
    let compute = shape.parts.iter().enumerate().map(|(index, part)| {
        if part.is_layer {
            let like = like(index);
            alone[like] * part.bytes as f64 / shape.parts[like].bytes.max(1) as f64
        } else {
            unembedding * part.bytes as f64 / rest.max(1) as f64
        }
    });
    let report = streamed.report();
    Ok(Rates {
        read_bytes_per_second: report.bytes as f64 / report.reading.as_secs_f64().max(1e-9),
        read_latency: 0.0,
        compute: compute.collect(),
        overhead,
        contention,
    })
}

struct Probe<'a> {
    decoder: &'a Decoder,
    streamed: &'a Streamed,
    token: u32,
}

impl Probe<'_> {
    /// Enough of the first layers that there is one of every kind.
    fn layers(&self) -> usize {
        let blocks = &self.decoder.config().blocks;
        let firsts = (0..blocks.len()).filter(|&layer| !blocks[..layer].contains(&blocks[layer]));
        let fewest = self.streamed.buffers().min(blocks.len());
        firsts.last().map_or(0, |last| last + 1).max(fewest)
    }

    fn begin(&self) -> Result<Pass, RuntimeError> {
        Ok(Pass::begin(self.decoder, &[Input { tokens: &[self.token], position: 0, length: 1 }])?)
    }

    /// Seconds that each of the first layers computes.
    fn times(&self, layers: usize, reading: bool) -> Result<Vec<f64>, RuntimeError> {
        let mut cache = self.decoder.cache();
        let mut pass = self.begin()?;
        let mut times = Vec::with_capacity(layers);
        for layer in 0..layers {
            if reading {
                self.streamed.read_ahead(0..self.decoder.layers());
            } else {
                // What is about to compute is there, and nothing else comes.
                self.streamed.read_ahead(layer..layer + 1);
                self.streamed.settle(PATIENCE);
                self.streamed.read_ahead(0..0);
            }
            let (began, waited) = (Instant::now(), self.streamed.report().waiting);
            pass.step(self.decoder, &mut [&mut cache])?;
            let waited = self.streamed.report().waiting - waited;
            times.push(began.elapsed().saturating_sub(waited).as_secs_f64());
        }
        Ok(times)
    }

    /// Seconds that the unembedding computes while it is read.
    fn unembedding(&self) -> Result<f64, RuntimeError> {
        self.streamed.read_ahead(0..self.streamed.parts());
        let pass = self.begin()?;
        let (began, waited) = (Instant::now(), self.streamed.report().waiting);
        let logits = pass.logits(self.decoder, Wanted::Last)?.try_into_vec_as::<f32>();
        logits.map_err(|error| RuntimeError::Readback { reason: error.to_string() })?;
        let waited = self.streamed.report().waiting - waited;
        Ok(began.elapsed().saturating_sub(waited).as_secs_f64())
    }

    /// Seconds that a pass takes before its first layer.
    fn beginning(&self) -> Result<f64, RuntimeError> {
        self.begin()?;
        let began = Instant::now();
        self.begin()?;
        Ok(began.elapsed().as_secs_f64())
    }
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}
