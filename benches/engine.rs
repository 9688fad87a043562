//! What sequences cost each other that share a model or a machine, as ratios measured in one run.
//!
//! `FIREBOX_BENCH_MODEL=MODEL cargo bench --bench engine -- [ROUNDS [TOKENS [PROMPT]]]`: so many rounds in turn, answers of so
//! many tokens, and a long prompt of so many beside one. Printed are medians, with the lowest and the highest.

use std::collections::HashMap;
use std::error::Error;
use std::path::PathBuf;
use std::time::Duration;

use firebox::engine::{Clock, Event, Host, HostConfig, Request, RequestId, WallClock, Worked};
use firebox::schedule::{Priority, ScheduleConfig};
use firebox::{GenerationConfig, Model, device};

/// What the command line uses too.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

const PROMPT: usize = 32;

fn main() -> Result<(), Box<dyn Error>> {
    let numbers: Vec<usize> = std::env::args().skip(1).filter_map(|arg| arg.parse().ok()).collect();
    let number = |at: usize, usual| numbers.get(at).copied().unwrap_or(usual);
    let (rounds, tokens, long) = (number(0, 5), number(1, 200), number(2, 2048));
    let path = std::env::var_os("FIREBOX_BENCH_MODEL").map_or_else(
        || PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/reference/qwen3")),
        PathBuf::from,
    );
    let model = Model::open(&path, &device("cpu")?)?;
    together(&model, rounds, tokens)?;
    switching(&model, tokens)?;
    beside_a_long_prompt(&model, tokens, long)
}

fn host(model: &Model) -> Result<Host, Box<dyn Error>> {
    let mut host = Host::new(HostConfig::default())?;
    host.add("model", model.clone())?;
    Ok(host)
}

fn request(model: &str, vocab: usize, from: usize, prompt: usize, tokens: usize) -> Request {
    let prompt = (0..prompt).map(|at| ((100 + (from + at) * 7919 % 6991) % vocab) as u32).collect();
    let config =
        GenerationConfig { max_tokens: Some(tokens), ignore_end: true, ..GenerationConfig::default() };
    Request::new(model, prompt).with_config(config).with_priority(Priority::Interactive)
}

fn submit(host: &mut Host, request: Request, clock: &WallClock) -> Result<RequestId, Box<dyn Error>> {
    Ok(host.submit(request, clock.now()).map_err(|failure| failure.error)?)
}

/// When the tokens of each request came.
#[derive(Default)]
struct Heard {
    tokens: HashMap<RequestId, Vec<Duration>>,
    last: Option<Duration>,
}

impl Heard {
    fn hear(&mut self, clock: &WallClock, id: RequestId, event: &Event) {
        match event {
            Event::Piece(piece) if piece.token.is_some() => {
                self.tokens.entry(id).or_default().push(clock.now());
            }
            // A figure without it would be about something else.
            Event::Failed(failure) => panic!("{}", failure.error),
            event if event.is_last() => self.last = Some(clock.now()),
            _ => {}
        }
    }
}

/// Runs until nothing is left. Returns the time it took beside the layers, of those before which another model ran, and of others.
fn run(host: &mut Host, clock: &WallClock, heard: &mut Heard) -> [Vec<Duration>; 2] {
    let mut beside = [Vec::new(), Vec::new()];
    loop {
        let began = clock.now();
        match host.work(clock, &mut |id, event| heard.hear(clock, id, &event)) {
            Worked::Layer { took, switched } => {
                beside[usize::from(switched)].push((clock.now() - began).saturating_sub(took));
            }
            Worked::Waiting => std::thread::sleep(Duration::from_micros(100)),
            Worked::Idle => return beside,
        }
    }
}

/// Seconds for so many requests, asked at once, none of which was asked before.
fn answered(
    host: &mut Host,
    vocab: usize,
    asked: &mut usize,
    count: usize,
    tokens: usize,
) -> Result<f64, Box<dyn Error>> {
    let (clock, mut heard) = (WallClock::default(), Heard::default());
    let began = clock.now();
    for _ in 0..count {
        *asked += 1;
        submit(host, request("model", vocab, *asked * 37, PROMPT, tokens), &clock)?;
    }
    run(host, &clock, &mut heard);
    Ok((heard.last.ok_or("nothing was answered")? - began).as_secs_f64())
}

fn together(model: &Model, rounds: usize, tokens: usize) -> Result<(), Box<dyn Error>> {
    let vocab = model.decoder()?.config().vocab_size;
    // Pages stay with the host: memory that was never used before comes slowly.
    let (mut host, mut asked) = (host(model)?, 0);
    for count in [1, 2, 3, 4, 8] {
        answered(&mut host, vocab, &mut asked, count, tokens)?;
    }
    for count in [2, 3, 4, 8] {
        let (mut faster, mut slower, mut speed) = (Vec::new(), Vec::new(), Vec::new());
        for _ in 0..rounds {
            let mut in_turn = 0.0;
            for _ in 0..count {
                in_turn += answered(&mut host, vocab, &mut asked, 1, tokens)?;
            }
            let at_once = answered(&mut host, vocab, &mut asked, count, tokens)?;
            faster.push(in_turn / at_once);
            // All of them end together, so the time of all is that of each.
            slower.push(at_once / (in_turn / count as f64));
            speed.push((count * tokens) as f64 / at_once);
        }
        let (faster, slower) = (spread(&mut faster), spread(&mut slower));
        let speed = spread(&mut speed);
        say(format!(
            "{count} requests of {tokens} tokens: in turn / at once {faster}, each / alone {slower}, tok/s {speed}"
        ));
    }
    Ok(())
}

fn switching(model: &Model, tokens: usize) -> Result<(), Box<dyn Error>> {
    let vocab = model.decoder()?.config().vocab_size;
    let schedule = ScheduleConfig { quantum: Duration::from_millis(1), ..ScheduleConfig::default() };
    let mut host = Host::new(HostConfig { schedule, ..HostConfig::default() })?;
    for name in ["one", "other"] {
        host.add(name, model.clone())?;
    }
    let (clock, mut heard) = (WallClock::default(), Heard::default());
    for name in ["one", "other"] {
        submit(&mut host, request(name, vocab, 7, PROMPT, tokens), &clock)?;
    }
    let [mut same, mut switched] = run(&mut host, &clock, &mut heard);
    for (what, times) in
        [("another layer of the same model", &mut same), ("a layer of another model", &mut switched)]
    {
        let median = quantile(times, 0.5).as_secs_f64() * 1e6;
        let (most, count) = (quantile(times, 0.99).as_secs_f64() * 1e6, times.len());
        say(format!("from a layer to {what}: {median:.1} µs, p99 {most:.1} µs of {count}"));
    }
    Ok(())
}

fn beside_a_long_prompt(model: &Model, tokens: usize, long: usize) -> Result<(), Box<dyn Error>> {
    let vocab = model.decoder()?.config().vocab_size;
    let gaps = |heard: &Heard, id: RequestId, until: Duration| -> Vec<Duration> {
        let times = heard.tokens.get(&id).map_or(&[][..], Vec::as_slice);
        let times: Vec<Duration> = times.iter().copied().filter(|at| *at <= until).collect();
        times.windows(2).map(|pair| pair[1] - pair[0]).collect()
    };
    let (mut host, clock, mut heard) = (host(model)?, WallClock::default(), Heard::default());
    // So many tokens that it lasts longer than the prompt.
    let id = submit(&mut host, request("model", vocab, 1, PROMPT, tokens + 2 * long), &clock)?;
    while heard.tokens.get(&id).is_none_or(|tokens| tokens.len() < 8) {
        host.work(&clock, &mut |id, event| heard.hear(&clock, id, &event));
    }
    let began = clock.now();
    let other = submit(&mut host, request("model", vocab, 5, long, 1), &clock)?;
    while !heard.tokens.contains_key(&other) {
        host.work(&clock, &mut |id, event| heard.hear(&clock, id, &event));
    }
    let (took, said) = (clock.now() - began, heard.tokens[&id].len());
    let disturbed: Vec<Duration> = gaps(&heard, id, clock.now());
    let mut disturbed = disturbed.into_iter().skip(8).collect::<Vec<_>>();
    for id in [id, other] {
        host.cancel(id, clock.now(), &mut |_, _| {});
    }
    run(&mut host, &clock, &mut heard);

    // As many tokens as it had beside the other one: the longer an answer is, the longer a token takes.
    let mut alone = Heard::default();
    let id = submit(&mut host, request("model", vocab, 1, PROMPT, said.max(tokens)), &clock)?;
    run(&mut host, &clock, &mut alone);
    let mut undisturbed: Vec<Duration> = gaps(&alone, id, Duration::MAX).into_iter().skip(8).collect();
    let milliseconds = |times: &mut Vec<Duration>, share| quantile(times, share).as_secs_f64() * 1e3;
    let (median, most) = (milliseconds(&mut undisturbed, 0.5), milliseconds(&mut undisturbed, 0.99));
    let (median_beside, most_beside) =
        (milliseconds(&mut disturbed, 0.5), milliseconds(&mut disturbed, 0.99));
    say(format!(
        "from token to token: {median:.1} ms, p99 {most:.1}; beside a prompt of {long} tokens {median_beside:.1}, p99 {most_beside:.1} of {}: {:.2} times; the prompt {:.0} tok/s",
        disturbed.len(),
        most_beside / most,
        long as f64 / took.as_secs_f64(),
    ));
    Ok(())
}

fn quantile(times: &mut [Duration], share: f64) -> Duration {
    times.sort_unstable();
    let at = ((times.len() as f64 * share) as usize).min(times.len().saturating_sub(1));
    times.get(at).copied().unwrap_or_default()
}

fn spread(ratios: &mut [f64]) -> String {
    ratios.sort_by(f64::total_cmp);
    let at = |at: usize| ratios.get(at).copied().unwrap_or_default();
    format!("{:.2} ({:.2}–{:.2})", at(ratios.len() / 2), at(0), at(ratios.len().saturating_sub(1)))
}

#[allow(clippy::print_stdout)]
fn say(line: String) {
    println!("{line}");
}
