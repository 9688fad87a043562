//! `firebox head swap`

use std::path::PathBuf;
use std::time::Instant;

use clap::Args;
use firebox_runtime::heads::RackConfig;
use firebox_runtime::{Model, OWN_HEAD, Session};
use firebox_store::{Checkpoint, Heads};
use serde_json::json;

use crate::args::DeviceArgs;
use crate::columns::table;
use crate::console::Console;
use crate::doctor::disk;
use crate::generating::{opened_device, patient};
use crate::hub;
use crate::outcome::Outcome;

/// Options of `firebox head swap`.
#[derive(Debug, Args)]
pub struct SwapArgs {
    /// The model
    #[arg(value_name = "MODEL")]
    model: PathBuf,
    /// The head to change to
    #[arg(value_name = "NAME")]
    name: String,
    /// How many tokens were said before
    #[arg(long, value_name = "N", default_value_t = 16)]
    depth: usize,
    /// How often everything is measured; medians are shown
    #[arg(long, value_name = "N", default_value_t = 5)]
    repeat: usize,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    device: DeviceArgs,
}

/// What was measured, in seconds.
#[derive(Debug, Default)]
struct Measured {
    warm: Vec<f64>,
    warm_first_token: Vec<f64>,
    cold: Vec<f64>,
    cold_first_token: Vec<f64>,
    reload: Vec<f64>,
    reading: Vec<f64>,
    head_bytes: u64,
}

/// Measures changes of heads.
pub fn swap(args: &SwapArgs, console: &Console) -> anyhow::Result<Outcome> {
    let path = hub::resolve(&args.model)?;
    let device = opened_device(&args.device)?;
    let config = patient(RackConfig::default());
    let heads = Heads::open(&path)?;
    let mut measured = Measured { head_bytes: heads.head(&args.name)?.bytes(), ..Measured::default() };
    let prompt: Vec<u32> = (0..args.depth.max(1) as u32).map(|token| 1 + token % 64).collect();
    for _ in 0..args.repeat.max(1) {
        // Of a model that is opened with nothing of it in memory.
        Checkpoint::open(&path)?.evict()?;
        heads.head(&args.name)?.release()?;
        let began = Instant::now();
        let model = Model::open(&path, &device)?.with_heads(config.clone())?;
        let mut session = model.session()?;
        worn(&mut session, &args.name)?;
        session.feed(&prompt)?;
        measured.reload.push(began.elapsed().as_secs_f64());

        let Some(rack) = model.heads() else {
            anyhow::bail!("the model has no heads; install one by `firebox head add`")
        };
        // In memory already, and the trunk as well.
        session.use_head(OWN_HEAD);
        session.feed(&[1])?;
        let began = Instant::now();
        worn(&mut session, &args.name)?;
        measured.warm.push(began.elapsed().as_secs_f64());
        session.feed(&[1])?;
        measured.warm_first_token.push(began.elapsed().as_secs_f64());

        session.use_head(OWN_HEAD);
        session.feed(&[1])?;
        let files = heads.head(&args.name)?;
        rack.let_go(&args.name);
        files.release()?;
        let began = Instant::now();
        worn(&mut session, &args.name)?;
        measured.cold.push(began.elapsed().as_secs_f64());
        session.feed(&[1])?;
        measured.cold_first_token.push(began.elapsed().as_secs_f64());

        measured.reading.push(measured.head_bytes as f64 / disk::rate(model.checkpoint())?);
    }
    report(args, measured, console)?;
    Ok(Outcome::Done)
}

fn worn(session: &mut Session, name: &str) -> anyhow::Result<()> {
    match session.use_head(name).instead {
        Some(reason) => anyhow::bail!("{reason}"),
        None => Ok(()),
    }
}

fn report(args: &SwapArgs, measured: Measured, console: &Console) -> anyhow::Result<()> {
    let bytes = measured.head_bytes;
    let rows = [
        ("warm", measured.warm),
        ("warm, to the first token", measured.warm_first_token),
        ("cold", measured.cold),
        ("cold, to the first token", measured.cold_first_token),
        ("reading the head's bytes", measured.reading),
        ("opening the model, to the first token", measured.reload),
    ]
    .map(|(what, times)| (what, median(times)));
    let reload = rows[5].1;
    if args.json {
        let [warm, warm_first_token, cold, cold_first_token, reading, reload] = rows.map(|(_, time)| time);
        return console.json(&json!({
            "head": args.name,
            "head_bytes": bytes,
            "depth": args.depth,
            "seconds": {
                "warm": warm,
                "warm_first_token": warm_first_token,
                "cold": cold,
                "cold_first_token": cold_first_token,
                "reading": reading,
                "reload": reload,
            },
        }));
    }
    let rows = rows.map(|(what, time)| {
        [what.to_owned(), format!("{:.3} ms", time * 1e3), format!("{:.1}x", reload / time)]
    });
    console.line(table(Some(["change", "time", "faster than opening"]), &[1, 2], rows))
}

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}
