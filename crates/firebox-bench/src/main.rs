//! The command `firebox-report`: measures what was published of systems like this one, beside what is here, in one run on
//! one machine.
//!
//! `published.toml` holds the published results and the bounds that our figures should meet. Every measure compares two ways
//! in turn, in a process of its own; this program runs them one after the other, and writes a table and images.

mod child;
mod claim;
mod energy;
mod figure;
mod machine;
mod markers;
mod measures;
mod plots;
mod report;
mod setup;
mod task;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;

use anyhow::Context as _;
use clap::Parser;

use crate::claim::Claims;
use crate::figure::Measured;
use crate::machine::Machine;
use crate::measures::Measure;
use crate::report::Report;
use crate::setup::Setup;

/// The allocator that the command `firebox` uses.
#[global_allocator]
static ALLOCATOR: firebox_allocator::Allocator = firebox_allocator::Allocator;

/// Where images stand beside a file that the report is written into.
const IMAGES: &str = "docs/report";

/// Measures what was published, beside what is here, in one run on this machine
///
/// Let nothing else run meanwhile. It takes about half an hour, and some 6 GB of disk for random models, which stay for the
/// next time.
#[derive(Debug, Parser)]
#[command(name = "firebox-report")]
struct Args {
    /// Where models are made and results are written; it should lie on the disk that is to be measured
    #[arg(long, value_name = "DIR", default_value = "target/report")]
    out: PathBuf,
    /// A Markdown file that takes the report between its two markers, with images in docs/report beside it
    #[arg(long, value_name = "FILE", conflicts_with = "only")]
    write: Option<PathBuf>,
    /// Measure these and no others
    #[arg(long, value_name = "NAME", value_delimiter = ',', value_parser = names())]
    only: Vec<String>,
    /// Tiny models and one round: shows that it works, and nothing else
    #[arg(long)]
    quick: bool,
    /// A model of one's own instead of a made one, its weights not quantized
    #[arg(long, value_name = "DIR")]
    model: Option<PathBuf>,
    /// A Python that has llama-cpp-python and gguf, to measure llama.cpp beside it
    #[arg(long, value_name = "PYTHON")]
    peer: Option<PathBuf>,
    /// Tokens of the prompt that answers are measured beside, 2048 by default; 32768 take a good while
    #[arg(long, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(1..))]
    long: Option<u32>,
    /// How often everything is measured; medians are shown
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    rounds: Option<u16>,
    /// What the program has itself do
    #[arg(long, hide = true)]
    task: Option<String>,
}

fn names() -> clap::builder::PossibleValuesParser {
    clap::builder::PossibleValuesParser::new(measures::ALL.iter().map(|measure| measure.name))
}

fn main() -> ExitCode {
    firebox_runtime::set_release_to_os(firebox_allocator::release_to_os);
    let args = Args::parse();
    let done = match &args.task {
        Some(task) => task::perform(task).map(|answer| {
            say(&answer);
            true
        }),
        None => reported(&args),
    };
    match done {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            note(&format!("error: {error:#}"));
            ExitCode::FAILURE
        }
    }
}

/// Measures and writes. Whether everything could be measured.
fn reported(args: &Args) -> anyhow::Result<bool> {
    let began = Instant::now();
    let machine = Machine::look();
    let absolute = |path: &PathBuf| std::path::absolute(path);
    let setup = Setup {
        out: absolute(&args.out)?,
        model: args.model.as_ref().map(absolute).transpose()?,
        // A name without a folder is looked for where programs are.
        peer: args.peer.clone(),
        long: args.long.map(|tokens| tokens as usize),
        rounds: args.rounds.map_or(if args.quick { 1 } else { 3 }, usize::from),
        is_quick: args.quick,
    };
    // The target is checked first, before half an hour of measuring.
    let target = args.write.as_deref().map(Target::open).transpose()?;
    note("making models, unless they are there");
    setup.prepare()?;
    let (mut all, mut failed) = (Measured::default(), 0);
    for Measure { name, says, .. } in measures::ALL {
        if !args.only.is_empty() && !args.only.iter().any(|only| only == name) {
            continue;
        }
        note(&format!("{:5.0} s  {name}: {says}", began.elapsed().as_secs_f64()));
        match task::measured(name, &setup) {
            Ok(measured) => {
                all.figures.extend(measured.figures);
                all.left_out.extend(measured.left_out);
            }
            Err(error) => {
                note(&format!("error: {name}: {error:#}"));
                all.left_out.push(format!("`{name}` failed: {error:#}").replace('\n', " "));
                failed += 1;
            }
        }
    }
    let minutes = began.elapsed().as_secs_f64() / 60.0;
    let mut report = Report {
        conditions: conditions(&machine, &setup, minutes),
        claims: Claims::published()?,
        figures: all.figures,
        left_out: all.left_out,
        images: Vec::new(),
    };
    if !args.only.is_empty() {
        report.claims.retain_measured(&report.figures);
    }
    let figures = serde_json::to_string_pretty(&report.figures)?;
    written(&setup.out.join("figures.json"), &figures)?;
    report.images = images(&report, &setup.out, "")?;
    let path = setup.out.join("report.md");
    written(&path, &report.markdown())?;
    say(&report.markdown());
    let (held, measured) = report.score();
    note(&format!("{held} of {measured} held, in {minutes:.0} minutes; {}", path.display()));
    if let Some(target) = target.filter(|_| failed == 0) {
        report.images = images(&report, &target.folder.join(IMAGES), &format!("{IMAGES}/"))?;
        target.write(&report)?;
    }
    Ok(failed == 0)
}

/// A file that the report is written into.
struct Target {
    path: PathBuf,
    folder: PathBuf,
}

impl Target {
    fn open(path: &Path) -> anyhow::Result<Self> {
        let folder = path.parent().unwrap_or(Path::new("")).to_owned();
        let target = Self { path: path.to_owned(), folder };
        target.with("")?;
        Ok(target)
    }

    /// Returns the file's text with the report inserted. The file is read again, since it may have changed.
    fn with(&self, report: &str) -> anyhow::Result<String> {
        let shown = || self.path.display().to_string();
        let text = fs::read_to_string(&self.path).with_context(|| format!("cannot read {}", shown()))?;
        markers::replaced(&text, report).with_context(shown)
    }

    fn write(&self, report: &Report) -> anyhow::Result<()> {
        written(&self.path, &self.with(&report.markdown())?)
    }
}

fn conditions(machine: &Machine, setup: &Setup, minutes: f64) -> Vec<String> {
    let build = if cfg!(debug_assertions) { "a build without optimisation" } else { "a release build" };
    let rounds = if setup.rounds == 1 { "one round".into() } else { format!("{} rounds", setup.rounds) };
    let long = setup.long.map_or(String::new(), |tokens| format!("; the long prompt has {tokens} tokens"));
    vec![
        format!("{machine}."),
        format!(
            "{}{long}; {build}, {rounds} of each in turn, medians, {minutes:.0} minutes in all. `firebox-report` wrote this; \
             change nothing by hand.",
            setup.described()
        ),
    ]
}

/// Writes the images into a folder. Returns where they are, as Markdown has it.
fn images(report: &Report, folder: &Path, prefix: &str) -> anyhow::Result<Vec<(String, &'static str)>> {
    let images = [
        (
            "cleared.svg",
            "Every figure beside its bar",
            plots::cleared(&report.claims.measured, &report.figures),
        ),
        ("sweep.svg", "Speed by how many layers are kept", plots::swept(&report.figures)),
    ];
    let mut drawn = Vec::new();
    for (name, what, image) in images {
        if let Some(image) = image {
            written(&folder.join(name), &image)?;
            drawn.push((format!("{prefix}{name}"), what));
        }
    }
    Ok(drawn)
}

fn written(path: &Path, text: &str) -> anyhow::Result<()> {
    let folder = path.parent().unwrap_or(Path::new(""));
    let done = fs::create_dir_all(folder).and_then(|()| fs::write(path, text));
    done.with_context(|| format!("cannot write {}", path.display()))
}

#[allow(clippy::print_stdout)]
fn say(text: &str) {
    println!("{text}");
}

#[allow(clippy::print_stderr)]
fn note(text: &str) {
    eprintln!("{text}");
}
