//! What it costs to read weights from disk while a model runs, as ratios measured in one run, one after the other.
//!
//! `FIREBOX_BENCH_MODEL=MODEL cargo bench --bench streaming -- [ROUNDS [TOKENS]]`. Every round measures each way of running
//! once; printed are medians, with the lowest and the highest.

use std::error::Error;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use firebox::cache::{Pool, SequenceCache};
use firebox::model::{Decoder, Input, Streamed, StreamedConfig, Wanted};
use firebox::store::{Checkpoint, ReadMethod, StreamConfig, reading_rate};
use firebox::{KvType, device};

/// What the command line uses too.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

const DEPTH: usize = 32;
const BATCH: usize = 8;
const BUFFERS: usize = 3;

/// Seconds of one pass.
fn step(decoder: &Decoder, caches: &mut [SequenceCache], tokens: usize) -> Result<f64, Box<dyn Error>> {
    let vocab = decoder.config().vocab_size;
    let tokens: Vec<u32> = (0..tokens).map(|at| ((100 + at * 7919 % 7000) % vocab) as u32).collect();
    let mut caches: Vec<&mut SequenceCache> = caches.iter_mut().collect();
    let inputs: Vec<Input<'_>> =
        caches.iter().map(|cache| Input::new(&tokens, cache.position(), 0)).collect();
    let began = Instant::now();
    let logits = decoder.forward_together(&inputs, &mut caches, Wanted::Last)?;
    logits.try_into_vec_as::<f32>().map_err(|error| format!("{error:?}"))?;
    Ok(began.elapsed().as_secs_f64())
}

/// Seconds of a decode step of some sequences, the mean of `steps` after one that fills the buffers.
fn decode(decoder: &Decoder, pool: &Pool, batch: usize, steps: usize) -> Result<f64, Box<dyn Error>> {
    let mut caches: Vec<_> = (0..batch).map(|_| SequenceCache::new(pool)).collect();
    step(decoder, &mut caches, DEPTH)?;
    step(decoder, &mut caches, 1)?;
    let times = (0..steps).map(|_| step(decoder, &mut caches, 1)).collect::<Result<Vec<_>, _>>()?;
    Ok(times.iter().sum::<f64>() / steps as f64)
}

/// Seconds of a prompt, after another that fills the buffers.
fn prompt(decoder: &Decoder, pool: &Pool, tokens: usize) -> Result<f64, Box<dyn Error>> {
    let fed = |_| step(decoder, &mut [SequenceCache::new(pool)], tokens);
    let times = (0..3).map(fed).collect::<Result<Vec<_>, _>>()?;
    Ok((times[1] + times[2]) / 2.0)
}

fn parts(decoder: &Decoder) -> Result<&Streamed, Box<dyn Error>> {
    Ok(decoder.streamed().ok_or("it streams")?)
}

/// The prompt whose computation takes about as long as reading the weights.
fn even_prompt(decoder: &Decoder, pool: &Pool, reading: f64) -> Result<usize, Box<dyn Error>> {
    let at = |tokens| prompt(decoder, pool, tokens).map(|seconds| (tokens, seconds));
    let ((few, short), (many, long)) = (at(64)?, at(256)?);
    let each = (long - short) / (many - few) as f64;
    Ok((few as f64 + (reading - short) / each).clamp(8.0, 1024.0) as usize)
}

fn main() -> Result<(), Box<dyn Error>> {
    let numbers: Vec<usize> = std::env::args().skip(1).filter_map(|arg| arg.parse().ok()).collect();
    let (rounds, tokens) = (numbers.first().copied().unwrap_or(5), numbers.get(1).copied().unwrap_or(12));
    let path = std::env::var_os("FIREBOX_BENCH_MODEL").map_or_else(
        || PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/reference/qwen3")),
        PathBuf::from,
    );
    let (checkpoint, cpu) = (Checkpoint::open(&path)?, device("cpu")?);
    let method = std::env::var("FIREBOX_READ").ok().and_then(|name| name.parse().ok());
    let config = StreamedConfig {
        stream: StreamConfig { buffers: BUFFERS, ..StreamConfig::default() },
        method: Some(method.unwrap_or(ReadMethod::Direct)),
        ..StreamedConfig::default()
    };
    let plain = Decoder::load(&checkpoint, &cpu)?;
    let kept = Decoder::stream(&checkpoint, &cpu, &config)?;
    for part in 0..parts(&kept)?.parts() {
        parts(&kept)?.keep(part)?;
    }
    let streamed = Decoder::stream(&checkpoint, &cpu, &config)?;
    let pool = Pool::new(plain.layout(KvType::F16));
    pool.reserve(2 * BATCH);
    let portions = parts(&streamed)?.portions();
    let bytes: u64 = portions.iter().map(|portion| portion.bytes()).sum();
    let disk = checkpoint.disk(parts(&streamed)?.reading().0);
    let rate = reading_rate(&*disk, portions)?;
    let even = even_prompt(&kept, &pool, bytes as f64 / rate)?;
    say(format!(
        "{}, {rounds} rounds of {tokens} tokens; {} MB in {} parts, {} buffers",
        path.display(),
        bytes / 1_000_000,
        portions.len(),
        BUFFERS
    ));
    let mut rows = Table::default();
    for _ in 0..rounds {
        let reading = bytes as f64 / reading_rate(&*disk, portions)?;
        let one = decode(&plain, &pool, 1, tokens)?;
        let all = decode(&kept, &pool, 1, tokens)?;
        parts(&streamed)?.set_buffers(BUFFERS);
        let ahead = decode(&streamed, &pool, 1, tokens)?;
        let together = decode(&streamed, &pool, BATCH, tokens)?;
        let prompt_ahead = prompt(&streamed, &pool, even)?;
        parts(&streamed)?.set_buffers(1);
        let alone = decode(&streamed, &pool, 1, tokens)?;
        let prompt_alone = prompt(&streamed, &pool, even)?;
        let again = bytes as f64 / reading_rate(&*disk, portions)?;
        rows.add("disk, GB/s", bytes as f64 / 1e9 / ((reading + again) / 2.0));
        rows.add("plain, tok/s", 1.0 / one);
        rows.add("all kept / plain", one / all);
        rows.add("streamed, tok/s", 1.0 / ahead);
        rows.add("streamed / min(disk, compute)", ((reading + again) / 2.0).max(all) / ahead);
        rows.add("streamed / without reading ahead", alone / ahead);
        rows.add(&format!("prompt of {even}, tok/s"), even as f64 / prompt_ahead);
        rows.add(&format!("prompt of {even} / without reading ahead"), prompt_alone / prompt_ahead);
        rows.add(&format!("{BATCH} streamed / one streamed"), BATCH as f64 * ahead / together);
    }
    rows.print();
    let report = parts(&streamed)?.report();
    say(format!(
        "read {} GB in {:.1} s",
        report.bytes / 1_000_000_000,
        Duration::as_secs_f64(&report.reading)
    ));
    Ok(())
}

/// What was measured in every round, by name.
#[derive(Default)]
struct Table(Vec<(String, Vec<f64>)>);

impl Table {
    fn add(&mut self, name: &str, value: f64) {
        match self.0.iter_mut().find(|(known, _)| known == name) {
            Some((_, values)) => values.push(value),
            None => self.0.push((name.to_owned(), vec![value])),
        }
    }

    fn print(&mut self) {
        for (name, values) in &mut self.0 {
            values.sort_by(f64::total_cmp);
            let (low, middle, high) = (values[0], values[values.len() / 2], values[values.len() - 1]);
            say(format!("{name:<44} {middle:>9.3}   {low:.3} to {high:.3}"));
        }
    }
}

#[allow(clippy::print_stdout)]
fn say(line: String) {
    println!("{line}");
}
