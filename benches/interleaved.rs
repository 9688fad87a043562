//! Three models that do not fit into memory together, one question to each: how long until the specialist says something,
//! and how much is said in a second.
//!
//! `cargo bench --bench interleaved -- [MEGABYTES [ROUNDS]]`: models of random bf16 weights that take so many megabytes
//! together, in the proportion 120 : 890 : 340 (router, specialist, fallback). They are made in the directory for temporary
//! files, which should lie on the disk to be measured. Every way of running them is a process of its own, before which all
//! files are dropped from the page cache. Printed are medians.
//!
//! All ways answer the same: prompts of 16 tokens, then 8 tokens of the router, 100 of the fallback, 100 of the specialist,
//! greedily; where one comes after the other, in this order. The bench fails where ways say different tokens.

use std::error::Error;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use firebox::engine::{Clock, Event, Host, HostConfig, Request, WallClock, Worked};
use firebox::fit::{Commons, Terms};
use firebox::model::StreamedConfig;
use firebox::schedule::Priority;
use firebox::store::{Checkpoint, ReadMethod, reading_rate};
use firebox::{
    Generation, GenerationConfig, Model, PrefixLimits, SamplerConfig, device, peak_resident_bytes,
};
use serde_json::{Value, json};

#[path = "../tests/made/mod.rs"]
mod made;

use made::Made;

/// What the command line uses too.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// The models in the order in which they are asked: what they are called, their part of the bytes, layers, tokens of the
/// answer.
const MODELS: [(&str, usize, usize, usize); 3] =
    [("router", 120, 12, 8), ("fallback", 340, 18, 100), ("specialist", 890, 32, 100)];
const ALL_PARTS: usize = 1350;
const PROMPT: usize = 16;
/// What may be taken of what preloading all takes.
const SHARE: f64 = 0.65;
/// Megabytes of models that are too few to measure anything with, and room for a program that runs nothing large.
const SMALL: usize = 500;
const PROGRAM: f64 = 64e6;

/// Ways of running them.
const WAYS: [(&str, &str); 5] = [
    ("mapped", "one after the other: mapped, read ahead whole, dropped"),
    ("read", "one after the other: read past the page cache, dropped"),
    ("preload", "all loaded before"),
    ("cold", "interleaved, from nothing"),
    ("standing", "interleaved, a host that stands"),
];

fn main() -> Result<(), Box<dyn Error>> {
    let args: Vec<String> = std::env::args().skip(1).filter(|arg| !arg.starts_with("--")).collect();
    if let [way, folder, budget] = &args[..] {
        let result = run(way, Path::new(folder), budget.parse()?)?;
        say(result.to_string());
        return Ok(());
    }
    let number = |at: usize, usual| args.get(at).and_then(|arg| arg.parse().ok()).unwrap_or(usual);
    let (megabytes, rounds): (usize, usize) = (number(0, 54), number(1, 3));
    let folder = tempfile::tempdir()?;
    let vocab = if megabytes < SMALL { 2048 } else { 32_000 };
    for (seed, (name, part, layers, _)) in MODELS.into_iter().enumerate() {
        let made = Made::of_bytes(megabytes * 1_000_000 * part / ALL_PARTS, layers, vocab);
        made.write(&folder.path().join(name), seed as u64 + 1)?;
        say(format!("{name}: {} MB, {made:?}", made.bytes() / 1_000_000));
    }
    drop_caches(folder.path())?;
    for method in ReadMethod::ALL {
        let checkpoint = Checkpoint::open(folder.path().join("specialist"))?;
        let decoder = firebox::model::Decoder::stream(&checkpoint, &device("cpu")?, &streaming(method))?;
        let portions = decoder.streamed().ok_or("it streams")?.portions();
        let disk = checkpoint.disk(method);
        say(format!("the disk, {method}: {:.2} GB/s", reading_rate(&*disk, portions)? / 1e9));
    }
    // What the budget is a part of.
    let mut preloaded = Vec::new();
    for _ in 0..rounds {
        preloaded.push(measured("preload", folder.path(), 0)?);
    }
    let all = median(&preloaded, "peak");
    // The program itself takes more than that where models are tiny, and they only show that it works.
    let least = if megabytes < SMALL { PROGRAM + SHARE * (megabytes * 1_000_000) as f64 } else { 0.0 };
    let budget = (all * SHARE).max(least) as u64;
    say(format!("preloading takes {:.0} MB, the budget is {:.0} MB", all / 1e6, budget as f64 / 1e6));
    let mut table: Vec<(&str, &str, Vec<Value>)> =
        WAYS.iter().map(|(way, words)| (*way, *words, Vec::new())).collect();
    for _ in 0..rounds {
        for (way, _, results) in &mut table {
            let result = measured(way, folder.path(), budget)?;
            if let Some(first) = preloaded.first()
                && first["tokens"] != result["tokens"]
            {
                return Err(format!(
                    "{way} says something else: {} and {}",
                    first["tokens"], result["tokens"]
                )
                .into());
            }
            results.push(result);
        }
    }
    print(&table, budget);
    Ok(())
}

fn print(table: &[(&str, &str, Vec<Value>)], budget: u64) {
    let of = |way: &str, field: &str| {
        let row = table.iter().find(|(name, ..)| *name == way);
        row.map_or(0.0, |(.., results)| median(results, field))
    };
    say(format!(
        "{:<56} {:>9} {:>9} {:>9} {:>9} {:>9} {:>9}",
        "", "opening s", "first s", "all s", "tok/s", "read MB", "peak MB"
    ));
    for (way, words, _) in table {
        say(format!(
            "{words:<56} {:>9.3} {:>9.3} {:>9.3} {:>9.2} {:>9.0} {:>9.0}{}",
            of(way, "opening"),
            of(way, "first"),
            of(way, "all"),
            of(way, "count") / of(way, "all"),
            of(way, "read") / 1e6,
            of(way, "peak") / 1e6,
            if of(way, "held") > 0.0 {
                format!("; accounts {:.0} MB of {:.0}", of(way, "held") / 1e6, budget as f64 / 1e6)
            } else {
                String::new()
            }
        ));
    }
    for way in ["cold", "standing"] {
        let rounds = |name: &str| {
            let row = table.iter().find(|(other, ..)| *other == name);
            row.map_or(&[][..], |(.., results)| results).iter()
        };
        let number = |result: &Value, field: &str| result[field].as_f64().unwrap_or_default();
        // Of the two ways to load whole models the faster one, in every round.
        let sooner = rounds("mapped").zip(rounds("read")).zip(rounds(way)).map(|((mapped, read), own)| {
            number(mapped, "first").min(number(read, "first")) / number(own, "first")
        });
        let faster = rounds("preload").zip(rounds(way)).map(|(preload, own)| {
            let loading = if way == "cold" { number(preload, "opening") } else { 0.0 };
            (loading + number(preload, "all")) / number(own, "all")
        });
        let most = rounds(way).map(|own| number(own, "peak")).fold(0.0, f64::max);
        say(format!(
            "{way}: the specialist's first token {} times sooner than one after the other (8.5 wanted); {} of the tokens a \
             second of preloading (0.85 wanted); {:.0} MB of {:.0} at most",
            spread(sooner),
            spread(faster),
            most / 1e6,
            budget as f64 / 1e6
        ));
    }
}

fn spread(ratios: impl Iterator<Item = f64>) -> String {
    let mut ratios: Vec<f64> = ratios.collect();
    ratios.sort_by(f64::total_cmp);
    let at = |at: usize| ratios.get(at).copied().unwrap_or_default();
    format!("{:.2} ({:.2}–{:.2})", at(ratios.len() / 2), at(0), at(ratios.len().saturating_sub(1)))
}

/// What one way comes to in a process of its own, with nothing in the page cache.
fn measured(way: &str, folder: &Path, budget: u64) -> Result<Value, Box<dyn Error>> {
    drop_caches(folder)?;
    let output = Command::new(std::env::current_exe()?)
        .args([way, &folder.to_string_lossy(), &budget.to_string()])
        .output()?;
    let said = String::from_utf8_lossy(&output.stdout);
    let Some(last) = said.lines().last().filter(|_| output.status.success()) else {
        return Err(format!("{way} failed: {said}{}", String::from_utf8_lossy(&output.stderr)).into());
    };
    if std::env::var_os("FIREBOX_BENCH_EACH").is_some() {
        say(format!("  {way}: {last}"));
    }
    Ok(serde_json::from_str(last)?)
}

fn drop_caches(folder: &Path) -> Result<(), Box<dyn Error>> {
    for (name, ..) in MODELS {
        Checkpoint::open(folder.join(name))?.evict()?;
    }
    Ok(())
}

fn run(way: &str, folder: &Path, budget: u64) -> Result<Value, Box<dyn Error>> {
    let began = Instant::now();
    let mut heard = match way {
        "mapped" => in_turn(folder, began, mapped)?,
        "read" => in_turn(folder, began, read)?,
        "preload" => {
            let mut host = host()?;
            for (name, ..) in MODELS {
                host.add(name, mapped(&folder.join(name))?)?;
            }
            together(host, began.elapsed())?
        }
        _ => interleaved(folder, budget, way == "standing", began)?,
    };
    let read = std::fs::read_to_string("/proc/self/io").unwrap_or_default();
    let read = read.lines().find_map(|line| line.strip_prefix("read_bytes: ")?.parse::<u64>().ok());
    heard["read"] = json!(read.unwrap_or_default());
    heard["peak"] = json!(peak_resident_bytes());
    heard["count"] = json!(MODELS.iter().map(|(.., tokens)| tokens).sum::<usize>());
    Ok(heard)
}

/// One that keeps no beginnings: nobody asks the same again.
fn host() -> Result<Host, Box<dyn Error>> {
    let prefixes = PrefixLimits { pages: 0, ..PrefixLimits::default() };
    Ok(Host::new(HostConfig { prefixes, ..HostConfig::default() })?)
}

/// Opened, and all of it in memory: the plain way.
fn mapped(path: &Path) -> Result<Model, Box<dyn Error>> {
    let model = Model::open(path, &device("cpu")?)?;
    for segment in model.checkpoint().segments() {
        model.checkpoint().populate(segment.id)?;
    }
    Ok(model)
}

fn streaming(method: ReadMethod) -> StreamedConfig {
    StreamedConfig { method: Some(method), rate: Some(1e9), ..StreamedConfig::default() }
}

/// Read into memory of its own.
fn read(path: &Path) -> Result<Model, Box<dyn Error>> {
    let model = Model::streamed(Checkpoint::open(path)?, &device("cpu")?, &streaming(ReadMethod::Direct))?;
    let decoder = model.decoder()?;
    let streamed = decoder.streamed().ok_or("it streams")?;
    streamed.set_buffers(0);
    for part in 0..streamed.parts() {
        streamed.keep(part)?;
    }
    Ok(model)
}

fn prompt() -> Vec<u32> {
    (0..PROMPT as u32).map(|at| 3 + at * 97 % 2000).collect()
}

fn config(tokens: usize) -> GenerationConfig {
    GenerationConfig {
        max_tokens: Some(tokens),
        ignore_end: true,
        sampler: SamplerConfig::greedy(),
        ..GenerationConfig::default()
    }
}

fn in_turn(
    folder: &Path,
    began: Instant,
    load: impl Fn(&Path) -> Result<Model, Box<dyn Error>>,
) -> Result<Value, Box<dyn Error>> {
    let (mut said, mut first, mut opening) = (Vec::new(), Duration::ZERO, Duration::ZERO);
    for (name, .., tokens) in MODELS {
        let since = Instant::now();
        let model = load(&folder.join(name))?;
        opening += since.elapsed();
        let mut session = model.session()?;
        let mut generation = Generation::begin(&mut session, None, &prompt(), config(tokens))?;
        let mut count = 0;
        while generation.next_piece()?.is_some() {
            count += 1;
            if count == 1 {
                first = began.elapsed();
            }
        }
        said.push(generation.finish()?.tokens);
    }
    Ok(json!({
        "opening": opening.as_secs_f64(), "first": first.as_secs_f64(), "all": began.elapsed().as_secs_f64(),
        "tokens": digest(&said),
    }))
}

fn interleaved(folder: &Path, budget: u64, stands: bool, began: Instant) -> Result<Value, Box<dyn Error>> {
    let mut host = host()?;
    let commons = Commons::new(budget)?;
    // As long as the answers are.
    let terms = Terms { context: Some(128), rows: PROMPT, filled: stands, ..Terms::default() };
    for (name, ..) in MODELS {
        let (commons, path, cpu) = (commons.clone(), folder.join(name), device("cpu")?);
        match name {
            "router" | "specialist" => host.add(name, commons.open(path, &cpu, &terms)?)?,
            // Rarely used.
            _ => {
                let terms = Terms { filled: false, ..terms.clone() };
                host.add_later(name, move || commons.open(&path, &cpu, &terms))?;
            }
        }
    }
    let opening = if stands { began.elapsed() } else { Duration::ZERO };
    let since = if stands { Instant::now() } else { began };
    let mut heard = asked(host, since)?;
    heard["opening"] = json!(opening.as_secs_f64());
    heard["held"] = json!(commons.budget().most_held());
    Ok(heard)
}

fn together(host: Host, opening: Duration) -> Result<Value, Box<dyn Error>> {
    let mut heard = asked(host, Instant::now())?;
    heard["opening"] = json!(opening.as_secs_f64());
    Ok(heard)
}

/// Asks all at once.
fn asked(mut host: Host, began: Instant) -> Result<Value, Box<dyn Error>> {
    let clock = WallClock::default();
    let mut said = vec![Vec::new(); MODELS.len()];
    let mut asked = Vec::new();
    for (name, .., tokens) in MODELS {
        let request =
            Request::new(name, prompt()).with_config(config(tokens)).with_priority(Priority::Interactive);
        asked.push(host.submit(request, clock.now()).map_err(|failure| failure.error)?);
    }
    let (mut first, mut error) = ([Duration::ZERO; MODELS.len()], None);
    let mut ends = [Duration::ZERO; MODELS.len()];
    loop {
        let worked = host.work(&clock, &mut |id, event| {
            let Some(which) = asked.iter().position(|asked| *asked == id) else { return };
            match event {
                Event::Piece(piece) => {
                    if said[which].is_empty() {
                        first[which] = began.elapsed();
                    }
                    said[which].extend(piece.token);
                }
                Event::Finished(_) => ends[which] = began.elapsed(),
                Event::Failed(failure) => error = Some(failure.error),
                Event::Waiting { .. } => {}
            }
        });
        if let Some(error) = error.take() {
            return Err(error.into());
        }
        match worked {
            Worked::Layer { .. } => {}
            Worked::Waiting => std::thread::sleep(Duration::from_micros(100)),
            Worked::Idle => break,
        }
    }
    let seconds = |times: [Duration; MODELS.len()]| times.map(|time| time.as_secs_f64());
    let specialist = MODELS.len() - 1;
    Ok(json!({
        "first": first[specialist].as_secs_f64(), "all": began.elapsed().as_secs_f64(), "tokens": digest(&said),
        "firsts": seconds(first), "ends": seconds(ends),
    }))
}

/// Tells answers from others.
fn digest(said: &[Vec<u32>]) -> String {
    let all =
        said.iter().flatten().fold(0u64, |all, &token| all.wrapping_mul(0x0100_0000_01b3) ^ u64::from(token));
    format!("{all:x} of {:?}", said.iter().map(Vec::len).collect::<Vec<_>>())
}

fn median(results: &[Value], field: &str) -> f64 {
    let mut values: Vec<f64> = results.iter().filter_map(|result| result[field].as_f64()).collect();
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or_default()
}

#[allow(clippy::print_stdout)]
fn say(line: String) {
    println!("{line}");
}
