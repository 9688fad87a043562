//! `firebox train`

use std::path::{Path, PathBuf};

use clap::Args;
use firebox_runtime::heads::HeadPoolConfig;
use firebox_runtime::{Device, Model, OWN_HEAD};
use firebox_train::pocket::{Examination, Recipe, Report, Score, Task, Watch, Workshop};
use serde_json::json;

use crate::columns::table;
use crate::compute::{CacheType, DeviceArgs};
use crate::console::Console;
use crate::hub;
use crate::interrupt::Interrupt;
use crate::opening::opened_device;
use crate::outcome::Outcome;

/// The number of steps between two plain progress lines.
const LINES_EVERY: u64 = 50;

/// Conversations in which facts are asked for long after they were told.
const LONG_CONVERSATIONS: usize = 40;

/// Tokens of turns that such a conversation remembers.
const TURN_CAPACITY: usize = 256;

/// Options of `firebox train`.
#[derive(Debug, Args)]
pub struct TrainArgs {
    /// The recipe, such as assets/pocket/recipe.toml
    #[arg(value_name = "RECIPE")]
    recipe: PathBuf,
    /// The folder to work in; what ended early goes on
    #[arg(short, long, value_name = "DIR", default_value = "runs/pocket")]
    out: PathBuf,
    /// Make nothing, and measure how well a model does what the recipe is for
    #[arg(long, value_name = "MODEL", conflicts_with = "out")]
    evaluate: Option<PathBuf>,
    /// What keys and values are kept in while it is measured
    #[arg(long, value_name = "TYPE", env = "FIREBOX_CACHE_TYPE", value_enum, default_value_t)]
    cache_type: CacheType,
    /// Ask for facts after so many turns were forgotten; 0 leaves that out
    #[arg(long, value_name = "N", default_value_t = 200)]
    forgotten: usize,
    /// Measure on so many conversations of every task [default: as the recipe says]
    #[arg(long, value_name = "N")]
    conversations: Option<usize>,
    /// Print what was measured as one JSON object
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    device: DeviceArgs,
}

/// Makes a model by a recipe and measures it, or measures one that is there.
pub fn train(args: &TrainArgs, console: &Console) -> anyhow::Result<Outcome> {
    let mut recipe = Recipe::open(&args.recipe)?;
    let device = opened_device(&args.device)?;
    let model = match &args.evaluate {
        Some(model) => hub::resolve(model)?,
        None => match make(args, &recipe, &device, console)? {
            Some(model) => model,
            None => {
                console.note("stopped; the same command goes on");
                return Ok(Outcome::Interrupted);
            }
        },
    };
    if let Some(conversations) = args.conversations {
        recipe.evaluation.conversations_per_task = conversations;
    }
    evaluate(args, &recipe, &model, &device, console)?;
    Ok(Outcome::Done)
}

/// The finished model; nothing if it was stopped.
fn make(
    args: &TrainArgs,
    recipe: &Recipe,
    device: &Device,
    console: &Console,
) -> anyhow::Result<Option<PathBuf>> {
    let interrupt = Interrupt::install()?;
    let workshop = Workshop::open(recipe, &args.out, device)?;
    let mut begin = |phase: &str| {
        console.note(phase);
        console.training(LINES_EVERY)
    };
    let _working = interrupt.work();
    Ok(workshop.make(&mut Watch { begin: &mut begin, stop: &interrupt.flag() })?)
}

fn evaluate(
    args: &TrainArgs,
    recipe: &Recipe,
    path: &Path,
    device: &Device,
    console: &Console,
) -> anyhow::Result<()> {
    let model = Model::open(path, device)?.with_heads(HeadPoolConfig::patient())?;
    let examination = Examination { model: &model, plan: &recipe.evaluation, kept: args.cache_type.into() };
    let report = examination.hold(&mut |head| console.detail(format!("asking {}", named(head))))?;
    let remembered = |naive| -> anyhow::Result<Option<Score>> {
        if args.forgotten == 0 || report.score(Task::Chat.name(), Task::Chat).is_none() {
            return Ok(None);
        }
        let head = Task::Chat.name();
        let asked =
            examination.persistence(head, LONG_CONVERSATIONS, args.forgotten, TURN_CAPACITY, naive)?;
        Ok(Some(asked))
    };
    let (kept, naive) = (remembered(false)?, remembered(true)?);
    if args.json {
        let forgotten = json!({ "turns": args.forgotten, "facts_kept": kept, "sliding_window": naive });
        return console.json(&json!({ "model": path, "report": report, "after_forgotten_turns": forgotten }));
    }
    console.line(path.display().to_string())?;
    console.line(heads_by_tasks(&report))?;
    if let Some(router) = report.router {
        console.line(format!("router: {}", share(router)))?;
    }
    if let (Some(kept), Some(naive)) = (kept, naive) {
        console.line(format!(
            "facts after {} forgotten turns: {}; with a sliding window: {}",
            args.forgotten,
            share(kept),
            share(naive)
        ))?;
    }
    console.line(format!("perplexity of all that is said: {:.4}", report.perplexity))
}

fn heads_by_tasks(report: &Report) -> String {
    let mut heads: Vec<&str> = report.cells.iter().map(|cell| cell.head.as_str()).collect();
    heads.dedup();
    let rows = heads.into_iter().map(|head| {
        let cell = |task| report.score(head, task).map(share).unwrap_or_default();
        [named(head).to_owned(), cell(Task::Chat), cell(Task::Code), cell(Task::Summarize)]
    });
    table(Some(["head", "chat", "code", "summarize"]), &[1, 2, 3], rows)
}

fn named(head: &str) -> &str {
    if head == OWN_HEAD { "its own layers" } else { head }
}

fn share(score: Score) -> String {
    format!("{:.1} % of {}", 100.0 * score.share(), score.asked)
}
