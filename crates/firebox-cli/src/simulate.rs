//! `firebox simulate`

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::anyhow;
use clap::Args;
use firebox_runtime::RuntimeError;
use firebox_runtime::schedule::simulation::{ClassReport, Mix, ModelReport, Profile, Report, simulate};

use crate::columns::table;
use crate::console::{Console, Style, grouped, human_bytes};
use crate::outcome::Outcome;

/// Devices that come with the command, under the names of their files.
const DEVICES: [(&str, &str); 3] = [
    ("iphone-a17", include_str!("../../../assets/devices/iphone-a17.toml")),
    ("ipad-m3", include_str!("../../../assets/devices/ipad-m3.toml")),
    ("mac-studio", include_str!("../../../assets/devices/mac-studio.toml")),
];

/// Demotions and the like that are told one by one with `--verbose`.
const MOST_EVENTS: usize = 40;

/// Options of `firebox simulate`.
#[derive(Debug, Args)]
pub struct SimulateArgs {
    /// iphone-a17, ipad-m3, mac-studio, or a TOML file such as assets/devices/ipad-m3.toml
    #[arg(value_name = "PROFILE")]
    profile: String,
    /// Hours that pass, from midnight on
    #[arg(long, value_name = "N", default_value_t = 24.0)]
    hours: f64,
    /// What chance begins with
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
    /// How many times as much is asked for as on an ordinary day
    #[arg(long, value_name = "FACTOR", default_value_t = 1.0)]
    load: f64,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Runs the scheduler and the governors through some hours on a device that is not there, and says what came of it.
pub fn run(args: &SimulateArgs, console: &Console) -> anyhow::Result<Outcome> {
    if !(args.load.is_finite() && args.load > 0.0) {
        let (setting, value) = ("load", args.load.to_string());
        return Err(RuntimeError::Setting { setting, value, reason: "should be above 0" }.into());
    }
    let profile = match DEVICES.iter().find(|(name, _)| *name == args.profile) {
        Some((name, text)) => Profile::parse(name, text)?,
        None if Path::new(&args.profile).exists() => Profile::open(&args.profile)?,
        None => {
            let known = DEVICES.map(|(name, _)| name).join(", ");
            let profile = &args.profile;
            return Err(anyhow!(
                "{profile}: there is no such device; there are {known}, or give a TOML file"
            ));
        }
    };
    let began = Instant::now();
    let report = simulate(&profile, &Mix::everyday().times(args.load), args.hours, args.seed)?;
    console.detail(format!("{} hours in {:.1} s", args.hours, began.elapsed().as_secs_f64()));
    if args.json {
        console.json(&report)?;
    } else {
        console.line(readable(&report, console))?;
    }
    let events = &report.schedule.events;
    for event in events.iter().skip(events.len().saturating_sub(MOST_EVENTS)) {
        console.detail(event.to_string());
    }
    if report.violations == 0 {
        return Ok(Outcome::Done);
    }
    for example in &report.examples {
        console.note(example);
    }
    Ok(Outcome::CheckFailed)
}

fn readable(report: &Report, console: &Console) -> String {
    let percent = |share: f64| format!("{:.1} %", share * 100.0);
    let schedule = &report.schedule;
    let heat = report.heat.iter().filter(|(_, share)| *share > 0.0);
    let heat: Vec<String> =
        heat.map(|(heat, share)| format!("{heat:?} {}", percent(*share)).to_lowercase()).collect();
    let violations = match report.violations {
        0 => "none".into(),
        some => console.styled(Style::Alarm, &some.to_string()),
    };
    let facts = [
        ("device", format!("{}, {} cores", report.device, report.cores)),
        ("time", format!("{:.1} hours, seed {}", report.hours, report.seed)),
        ("asked for", format!("{} of what it can do", percent(report.asked))),
        (
            "computed",
            format!("{} of the time, {} waiting for the disk", percent(report.busy), percent(report.waiting)),
        ),
        ("memory", format!("{} of {} at most", human_bytes(report.most_held), human_bytes(report.budget))),
        (
            "others' memory",
            format!("short for {} s, {} warnings", grouped(report.short_seconds), report.warnings),
        ),
        ("heat", format!("{}; {:.1} °C at most", heat.join(", "), report.hottest)),
        ("quanta", format!("{}, {} overran", grouped(schedule.quanta), grouped(schedule.overruns))),
        (
            "preemptions",
            format!(
                "{}, and {} quanta for having waited",
                grouped(schedule.preemptions),
                grouped(schedule.shares)
            ),
        ),
        ("demotions", format!("{}, of which {} came back", schedule.demotions, schedule.returns)),
        (
            "ready at once",
            format!("{} of {} models that usually follow", report.ready_at_once, report.changes),
        ),
        ("violations", violations),
    ];
    let facts = table(None, &[], facts.map(|(name, value)| [name.to_owned(), value]));
    let header =
        ["requests", "came", "done", "refused", "open", "tokens", "deadlines", "first p50", "first p99"];
    let classes = table(
        Some(header),
        &[1, 2, 3, 4, 5, 6, 7, 8],
        report.classes.iter().rev().map(|class| row(report, class)),
    );
    let header =
        ["model", "layers", "planned", "fewest", "at the end", "shed", "grown", "tokens", "streamed"];
    let models = table(Some(header), &[1, 2, 3, 4, 5, 6, 7, 8], report.models.iter().map(model_row));
    format!("{facts}\n\n{classes}\n\n{models}")
}

fn row(report: &Report, class: &ClassReport) -> [String; 9] {
    let counters = report.schedule.class(class.priority);
    let has_deadlines = counters.met + counters.slips > 0;
    let seconds = |time: Duration| format!("{:.3} s", time.as_secs_f64());
    [
        class.priority.to_string(),
        grouped(class.arrived),
        grouped(class.done),
        grouped(class.refused),
        grouped(class.open),
        grouped(class.tokens),
        if has_deadlines { format!("{:.2} %", class.met * 100.0) } else { "-".into() },
        seconds(class.first_token.0),
        seconds(class.first_token.1),
    ]
}

fn model_row(model: &ModelReport) -> [String; 9] {
    [
        model.name.clone(),
        model.layers.to_string(),
        model.planned.to_string(),
        model.fewest_kept.to_string(),
        model.kept.to_string(),
        grouped(model.sheds),
        grouped(model.growths),
        grouped(model.tokens),
        human_bytes(model.streamed_bytes),
    ]
}
