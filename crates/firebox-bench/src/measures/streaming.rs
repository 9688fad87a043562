//! Measures the cost of reading weights from disk while a model runs. Every round measures each way of running once.

use std::time::Instant;

use anyhow::{Context as _, anyhow};
use firebox_cache::{PAGE_TOKENS, PagePool, SequenceCache};
use firebox_model::{Decoder, Input, LogitRows, StreamedConfig, StreamedDecoder, StreamedWeights};
use firebox_runtime::{KvType, device};
use firebox_store::{Checkpoint, ReadMethod, StreamConfig, read_rate};

use crate::child::{self, Task, TaskKind};
use crate::figure::{Declared, Figures, alone, compared, spread, times};
use crate::measures::run::{PLENTY, Resident, Run, RunResult};
use crate::setup::Setup;

pub const FIGURES: &[Declared] = &[
    alone("streaming.disk", "GB/s"),
    times("streaming.all_kept", "tok/s", "loaded plainly"),
    times("streaming.all_kept_q4", "tok/s", "loaded plainly"),
    times("streaming.nothing_kept", "tok/s", "the slower of disk and computing"),
    times("streaming.ahead", "tok/s", "without reading ahead"),
    times("streaming.prompt_ahead", "tok/s", "without reading ahead"),
    times("streaming.together", "tok/s", "one sequence"),
    compared("streaming.memory_saved", "%", "MB", "loaded plainly"),
];

/// Tokens decoded for one figure.
const TOKENS: (usize, usize) = (12, 4);

const DEPTH: usize = 32;
const BATCH: usize = 8;
const BUFFERS: usize = 3;

/// Seconds of one pass.
fn step(decoder: &Decoder, caches: &mut [SequenceCache], tokens: usize) -> anyhow::Result<f64> {
    let vocab = decoder.config().vocab_size;
    let tokens: Vec<u32> = (0..tokens).map(|at| ((100 + at * 7919 % 7000) % vocab) as u32).collect();
    let mut caches: Vec<&mut SequenceCache> = caches.iter_mut().collect();
    let inputs: Vec<Input<'_>> =
        caches.iter().map(|cache| Input::new(&tokens, cache.position(), 0)).collect();
    let began = Instant::now();
    let logits = decoder.forward_together(&inputs, &mut caches, LogitRows::Last)?;
    logits.try_into_vec_as::<f32>().map_err(|error| anyhow!("{error}"))?;
    Ok(began.elapsed().as_secs_f64())
}

/// Seconds of a decode step of some sequences, the mean of `steps` after one that fills the buffers.
fn decode(decoder: &Decoder, pool: &PagePool, batch: usize, steps: usize) -> anyhow::Result<f64> {
    let mut caches: Vec<_> = (0..batch).map(|_| SequenceCache::new(pool)).collect();
    step(decoder, &mut caches, DEPTH)?;
    step(decoder, &mut caches, 1)?;
    let times = (0..steps).map(|_| step(decoder, &mut caches, 1)).collect::<Result<Vec<_>, _>>()?;
    Ok(times.iter().sum::<f64>() / steps as f64)
}

/// Decodes the same tokens with two decoders, step by step in turn, and returns medians: a machine's speed changes within
/// seconds.
fn decode_in_turn(decoders: [&Decoder; 2], pool: &PagePool, steps: usize) -> anyhow::Result<[f64; 2]> {
    let mut caches = [[SequenceCache::new(pool)], [SequenceCache::new(pool)]];
    let mut times = [Vec::new(), Vec::new()];
    for (decoder, caches) in decoders.iter().zip(&mut caches) {
        step(decoder, caches, DEPTH)?;
        step(decoder, caches, 1)?;
    }
    for at in 0..steps {
        for which in [at % 2, 1 - at % 2] {
            times[which].push(step(decoders[which], &mut caches[which], 1)?);
        }
    }
    Ok(times.map(|times| spread(times).median))
}

/// Seconds of a prompt, after another that fills the buffers.
fn prompt(decoder: &Decoder, pool: &PagePool, tokens: usize) -> anyhow::Result<f64> {
    let fed = |_| step(decoder, &mut [SequenceCache::new(pool)], tokens);
    let times = (0..3).map(fed).collect::<Result<Vec<_>, _>>()?;
    Ok((times[1] + times[2]) / 2.0)
}

fn parts(decoder: &Decoder) -> anyhow::Result<&StreamedWeights> {
    decoder.streamed().context("it streams")
}

/// The prompt whose computation takes about as long as reading the weights.
fn even_prompt(decoder: &Decoder, pool: &PagePool, reading: f64) -> anyhow::Result<usize> {
    let at = |tokens| prompt(decoder, pool, tokens).map(|seconds| (tokens, seconds));
    let ((few, short), (many, long)) = (at(64)?, at(256)?);
    let each = (long - short) / (many - few) as f64;
    Ok((few as f64 + (reading - short) / each).clamp(8.0, 1024.0) as usize)
}

pub fn measure(setup: &Setup, figures: &mut Figures) -> anyhow::Result<()> {
    let tokens = setup.usual_or(TOKENS.0, TOKENS.1);
    memory(setup, figures)?;
    let (checkpoint, cpu) = (Checkpoint::open(setup.plain())?, device("cpu")?);
    let plain = Decoder::load(&checkpoint, &cpu)?;
    let kept = all_kept(&checkpoint)?;
    let streamed = StreamedDecoder::open(&checkpoint, &cpu, &config())?;
    let pool = PagePool::new(plain.layout(KvType::F16));
    pool.reserve(BATCH, 2 * PAGE_TOKENS);
    let units = parts(&streamed)?.units();
    let bytes = units.iter().map(|unit| unit.bytes()).sum::<u64>() as f64;
    let disk = checkpoint.disk(parts(&streamed)?.reading().0);
    let reads = || -> anyhow::Result<f64> { Ok(bytes / read_rate(&*disk, units)?) };
    let even = even_prompt(&kept, &pool, reads()?)?;
    for _ in 0..setup.rounds {
        let before = reads()?;
        let [one, all] = decode_in_turn([&plain, &kept], &pool, tokens)?;
        parts(&streamed)?.set_buffers(BUFFERS);
        let ahead = decode(&streamed, &pool, 1, tokens)?;
        let together = decode(&streamed, &pool, BATCH, tokens)?;
        let prompt_ahead = prompt(&streamed, &pool, even)?;
        parts(&streamed)?.set_buffers(1);
        let behind = decode(&streamed, &pool, 1, tokens)?;
        let prompt_behind = prompt(&streamed, &pool, even)?;
        let reading = (before + reads()?) / 2.0;
        figures.add("streaming.disk", bytes / 1e9 / reading)?;
        figures.more("streaming.all_kept", 1.0 / all, 1.0 / one)?;
        figures.more("streaming.nothing_kept", 1.0 / ahead, 1.0 / reading.max(all))?;
        figures.more("streaming.ahead", 1.0 / ahead, 1.0 / behind)?;
        figures.more("streaming.prompt_ahead", even as f64 / prompt_ahead, even as f64 / prompt_behind)?;
        figures.more("streaming.together", BATCH as f64 / together, 1.0 / ahead)?;
    }
    drop((plain, kept, streamed));
    let checkpoint = Checkpoint::open(setup.q4())?;
    let (plain, kept) = (Decoder::load(&checkpoint, &cpu)?, all_kept(&checkpoint)?);
    for _ in 0..setup.rounds {
        let [one, all] = decode_in_turn([&plain, &kept], &pool, 4 * tokens)?;
        figures.more("streaming.all_kept_q4", 1.0 / all, 1.0 / one)?;
    }
    Ok(())
}

fn config() -> StreamedConfig {
    StreamedConfig {
        stream: StreamConfig { buffers: BUFFERS, ..StreamConfig::default() },
        method: Some(ReadMethod::Direct),
        ..StreamedConfig::default()
    }
}

fn all_kept(checkpoint: &Checkpoint) -> anyhow::Result<StreamedDecoder> {
    let decoder = StreamedDecoder::open(checkpoint, &device("cpu")?, &config())?;
    (0..parts(&decoder)?.parts())
        .try_for_each(|part| parts(&decoder)?.load(part).map_err(anyhow::Error::from))?;
    Ok(decoder)
}

/// The most memory that is resident, in processes of their own.
fn memory(setup: &Setup, figures: &mut Figures) -> anyhow::Result<()> {
    let plain = Run { tokens: setup.usual_or(TOKENS.0, TOKENS.1), ..Run::short(setup.plain()) };
    let streamed = Run { memory: Some(PLENTY), layers: Some((0, Resident::Fastest)), ..plain.clone() };
    for _ in 0..setup.rounds {
        let peak = |run: &Run| -> anyhow::Result<f64> {
            Checkpoint::open(&run.model)?.evict()?;
            let ran: RunResult = child::asked(&Task::new(TaskKind::Run, run)?, None)?;
            Ok(ran.peak as f64 / 1e6)
        };
        let (ours, baseline) = (peak(&streamed)?, peak(&plain)?);
        figures.add_pair("streaming.memory_saved", 100.0 * (1.0 - ours / baseline), ours, baseline)?;
    }
    Ok(())
}
