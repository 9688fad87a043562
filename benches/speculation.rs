//! The gain of drafts: tokens per second with them as a multiple of those without, in one run, one after the other.
//!
//! `FIREBOX_BENCH_MODEL=DIR cargo bench --bench speculation -- [ROUNDS [TOKENS]]`. Every round generates each text with and
//! without drafts, in turn, from a drafter that knows nothing yet; the tokens are compared, and the median of the rounds'
//! ratios is printed with the lowest and the highest. Passes of several rows are measured beside it, because they decide
//! what can be gained.

use std::error::Error;
use std::path::PathBuf;
use std::time::Instant;

use firebox::engine::{Engine, EngineConfig, Request};
use firebox::internals::runtime::{DRAFT_TOKENS, LookupDrafter};
use firebox::{
    Draft, Drafter, Generation, GenerationConfig, Model, RuntimeError, Sampler, SamplerConfig, Speculation,
    Summary, device,
};

/// What the command line uses too.
#[global_allocator]
static ALLOCATOR: firebox_allocator::Allocator = firebox_allocator::Allocator;

const PROMPT: usize = 64;
/// Random weights take about as many tokens to begin repeating themselves.
const SETTLING: usize = 512;
const ROWS: usize = 20;
/// Requests that an engine answers together.
const STREAMS: [usize; 3] = [1, 4, 8];
/// Texts that are measured in an engine, too: one on which drafts help, and one on which they do not.
const NAMES_OF_STREAMS: [&str; 2] = ["repetitive", "sampled"];

/// Always says something, and nothing that is ever right.
#[derive(Debug)]
struct Wrong;

impl Drafter for Wrong {
    fn propose(&mut self, tokens: &[u32], most: usize, _: &Sampler) -> Result<Draft, RuntimeError> {
        Ok(vec![tokens[0]; most].into())
    }
}

/// A text, and who drafts for it.
struct Case {
    name: &'static str,
    prompt: Vec<u32>,
    sampler: SamplerConfig,
    drafts: fn() -> Speculation,
}

/// Tokens a second, the tokens of every stream, and how many tokens were drafted and accepted.
type Run = (f64, Vec<Vec<u32>>, (usize, usize));

fn cases(model: &Model, prompt: &[u32]) -> Result<Vec<Case>, RuntimeError> {
    let vocab = model.decoder()?.config().vocab_size;
    let lookup = || Speculation::new(LookupDrafter::new());
    let warm = SamplerConfig::default().with_temperature(1.0).with_seed(7);
    // Eight tokens in random order repeat every three of them sooner or later, and go on differently.
    let few = (0..8).map(|at| ((at * 37 + 11) % vocab as u32, 1000.0));
    let restless = few
        .fold(SamplerConfig::default(), |config, (token, bias)| config.with_logit_bias(token, bias))
        .with_temperature(20.0)
        .with_seed(7)
        .with_top_k(8);
    let greedy = SamplerConfig::greedy();
    // Random weights say one token over and over; what may not be said again at once comes back in turn.
    let cycle = greedy.clone().with_presence_penalty(100.0).with_penalty_window(4);
    let sampled = warm.with_top_k(40);
    let wrong = || Speculation::new(Wrong);
    let fresh = || prompt.to_vec();
    Ok(vec![
        Case { name: "repetitive", prompt: settled(model, prompt, &cycle)?, sampler: cycle, drafts: lookup },
        Case {
            name: "one token",
            prompt: settled(model, prompt, &greedy)?,
            sampler: greedy.clone(),
            drafts: lookup,
        },
        Case { name: "greedy", prompt: fresh(), sampler: greedy, drafts: lookup },
        Case { name: "sampled", prompt: fresh(), sampler: sampled.clone(), drafts: lookup },
        Case { name: "eight at random", prompt: fresh(), sampler: restless, drafts: lookup },
        Case { name: "always wrong", prompt: fresh(), sampler: sampled, drafts: wrong },
    ])
}

/// A prompt with what a model says first, until it repeats itself.
fn settled(model: &Model, prompt: &[u32], sampler: &SamplerConfig) -> Result<Vec<u32>, RuntimeError> {
    let mut session = model.session()?;
    let config = GenerationConfig::new().with_max_tokens(SETTLING).with_sampler(sampler.clone());
    let mut generation = Generation::begin(&mut session, None, prompt, config)?;
    while generation.next_piece()?.is_some() {}
    generation.finish()?;
    Ok(session.tokens().to_vec())
}

fn main() -> Result<(), Box<dyn Error>> {
    let numbers: Vec<usize> = std::env::args().skip(1).filter_map(|arg| arg.parse().ok()).collect();
    let (rounds, tokens) = (numbers.first().copied().unwrap_or(5), numbers.get(1).copied().unwrap_or(128));
    let path = std::env::var_os("FIREBOX_BENCH_MODEL").map_or_else(
        || PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/reference/qwen3")),
        PathBuf::from,
    );
    let model = Model::open(&path, &device("cpu")?)?;
    let vocab = model.decoder()?.config().vocab_size;
    let prompt: Vec<u32> = (0..PROMPT).map(|at| ((100 + at * 7919 % 7000) % vocab) as u32).collect();
    say(format!("{}, {rounds} rounds of {tokens} tokens", path.display()));
    rows(&model, &prompt, rounds)?;
    proposing()?;
    for case in cases(&model, &prompt)? {
        let config = GenerationConfig::new().with_max_tokens(tokens).with_sampler(case.sampler.clone());
        let mut ratios = Vec::new();
        let mut last = None;
        for _ in 0..rounds {
            let (ratio, plain, drafted) = compared(&model, &case, &config)?;
            if plain.tokens != drafted.tokens {
                return Err(format!("{}: drafts changed the tokens", case.name).into());
            }
            ratios.push(ratio);
            last = Some((plain, drafted));
        }
        let Some((plain, drafted)) = last else { continue };
        let mut kinds = plain.tokens;
        kinds.sort_unstable();
        kinds.dedup();
        say(format!(
            "{:16} {}; {} kinds of tokens, {} of {} drafted were accepted",
            case.name,
            spread(&mut ratios),
            kinds.len(),
            drafted.accepted_tokens,
            drafted.drafted_tokens,
        ));
        if NAMES_OF_STREAMS.contains(&case.name) {
            for streams in STREAMS {
                let (mut ratios, mut last) = (Vec::new(), (0, 0));
                for _ in 0..rounds {
                    let (ratio, drafts) = streamed(&model, &case, &config, streams)?;
                    ratios.push(ratio);
                    last = drafts;
                }
                let (drafted, accepted) = last;
                say(format!(
                    "{:16} {}; {accepted} of {drafted} drafted were accepted",
                    format!("  {streams} streams"),
                    spread(&mut ratios),
                ));
            }
        }
    }
    Ok(())
}

/// Returns how many times as fast several streams of an engine are with lookup as without, one after the other, and how many
/// tokens were drafted and accepted.
fn streamed(
    model: &Model,
    case: &Case,
    config: &GenerationConfig,
    streams: usize,
) -> Result<(f64, (usize, usize)), Box<dyn Error>> {
    let engine = Engine::start(EngineConfig::default())?;
    engine.add("model", model.clone())?;
    let run = |lookup: bool| -> Result<Run, Box<dyn Error>> {
        let request = || {
            let config = config.clone().with_ignore_end(true);
            Request::new("model", case.prompt.clone()).with_config(config).with_lookup(lookup)
        };
        let answers: Vec<_> = (0..streams).map(|_| engine.generate(request())).collect();
        let (mut speed, mut tokens, mut drafts) = (0.0, Vec::new(), (0, 0));
        for answer in answers {
            let summary = answer.wait()?.summary;
            speed += summary.decode_tps;
            drafts = (drafts.0 + summary.drafted_tokens, drafts.1 + summary.accepted_tokens);
            tokens.push(summary.tokens);
        }
        Ok((speed, tokens, drafts))
    };
    // The prompt is in the prefix cache from here on, and both ways are measured twice, in turn.
    run(true)?;
    let (mut with, mut without, mut drafts) = (0.0, 0.0, (0, 0));
    for _ in 0..2 {
        let (plain, expected, _) = run(false)?;
        let (drafted, tokens, counts) = run(true)?;
        if tokens != expected {
            return Err(format!("{}: drafts changed the tokens of {streams} streams", case.name).into());
        }
        (without, with, drafts) = (without + plain, with + drafted, counts);
    }
    Ok((with / without, drafts))
}

/// How many times as fast a text comes with drafts, and what came. Both take turns token by token, so that whatever else
/// the machine does slows both.
fn compared(
    model: &Model,
    case: &Case,
    config: &GenerationConfig,
) -> Result<(f64, Summary, Summary), RuntimeError> {
    let (mut session, mut session_drafted) = (model.session()?, model.session()?);
    let mut speculation = (case.drafts)();
    let mut plain = Generation::begin(&mut session, None, &case.prompt, config.clone())?;
    let mut drafted = Generation::begin(&mut session_drafted, None, &case.prompt, config.clone())?
        .with_speculation(&mut speculation);
    // The first comes of the prompt.
    plain.next_piece()?;
    drafted.next_piece()?;
    let (mut took_plain, mut took_drafted) = (0.0, 0.0);
    loop {
        let began = Instant::now();
        let more = plain.next_piece()?.is_some();
        took_plain += began.elapsed().as_secs_f64();
        let began = Instant::now();
        drafted.next_piece()?;
        took_drafted += began.elapsed().as_secs_f64();
        if !more {
            return Ok((took_plain / took_drafted, plain.finish()?, drafted.finish()?));
        }
    }
}

/// What a pass of several rows of one sequence costs, as a multiple of one of a single row.
fn rows(model: &Model, prompt: &[u32], rounds: usize) -> Result<(), RuntimeError> {
    let mut session = model.session()?;
    session.feed(prompt)?;
    let mut taken = vec![Vec::new(); ROWS + 1];
    for _ in 0..rounds * 4 {
        for (rows, taken) in taken.iter_mut().enumerate().skip(1) {
            let began = Instant::now();
            session.feed_each_row(&prompt[..rows], |_| {})?;
            taken.push(began.elapsed().as_secs_f64());
            session.rewind(prompt.len());
        }
    }
    let seconds: Vec<f64> = taken.iter_mut().skip(1).map(|taken| median(taken)).collect();
    let costs: Vec<String> = seconds.iter().map(|taken| format!("{:.2}", taken / seconds[0])).collect();
    say(format!("a pass of 1 to {ROWS} rows: {} ({:.1} ms)", costs.join(" "), 1000.0 * seconds[0]));
    Ok(())
}

/// What looking a draft up costs in a long text of few kinds of tokens, where there is most to compare.
fn proposing() -> Result<(), RuntimeError> {
    let sampler = Sampler::new(SamplerConfig::greedy())?;
    let mut drafter = LookupDrafter::new();
    let mut random = 1u32;
    let mut tokens: Vec<u32> = Vec::new();
    let mut taken = Vec::new();
    while tokens.len() < 32_768 + 1000 {
        random = random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        tokens.push(random >> 29);
        if tokens.len() < 32_768 {
            continue;
        }
        let began = Instant::now();
        drafter.grade(&tokens);
        drafter.propose(&tokens, DRAFT_TOKENS, &sampler)?;
        taken.push(1e6 * began.elapsed().as_secs_f64());
    }
    let all = taken[0];
    let each = median(&mut taken);
    say(format!(
        "a draft from 32768 tokens: {each:.1} µs, {all:.0} µs where none of them is in the index yet"
    ));
    Ok(())
}

fn median(numbers: &mut [f64]) -> f64 {
    numbers.sort_unstable_by(f64::total_cmp);
    numbers[numbers.len() / 2]
}

fn spread(ratios: &mut [f64]) -> String {
    let middle = median(ratios);
    format!("{middle:.2} ({:.2}–{:.2})", ratios[0], ratios[ratios.len() - 1])
}

#[allow(clippy::print_stdout)] // A benchmark's result.
fn say(line: String) {
    println!("{line}");
}
