//! `firebox doctor`

pub mod disk;
mod machine;
mod outlook;

use std::path::PathBuf;

use clap::Args;
use firebox_model::Architecture;
use firebox_runtime::planner::{Mode, Plan, decoder_shape, plan};
use firebox_runtime::{KvType, residency};
use firebox_store::Checkpoint;
use serde::Serialize;

use crate::columns::table;
use crate::console::{Console, human_bytes};
use crate::hub;
use crate::opening::opened_device;
use crate::outcome::Outcome;
use crate::{compute::DeviceArgs, console::Style};
use machine::Machine;
use outlook::{CONTEXT, Outlook, outlook};

/// Options of `firebox doctor`.
#[derive(Debug, Args)]
pub struct DoctorArgs {
    /// A model to say more about; its files show how fast the disk is
    #[arg(value_name = "MODEL")]
    model: Option<PathBuf>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Serialize)]
struct Report {
    #[serde(flatten)]
    machine: Machine,
    /// Estimates for models of common sizes, with four bits a weight.
    outlook: Vec<Outlook>,
    model: Option<ModelOutlook>,
    warnings: Vec<String>,
}

/// The planned speed and memory use of a given model.
#[derive(Debug, Serialize)]
struct ModelOutlook {
    path: PathBuf,
    layers: usize,
    kept_layers: usize,
    tokens_per_second: f64,
    peak_bytes: u64,
}

/// Runs `firebox doctor`: measures the machine, and prints how fast models are expected to run on it.
pub fn doctor(args: &DoctorArgs, console: &Console) -> anyhow::Result<Outcome> {
    let checkpoint = match &args.model {
        Some(name) => Some(Checkpoint::open(hub::resolve(name)?)?),
        None => None,
    };
    let waiting = console.waiting("measuring memory and disk");
    let machine = Machine::measured(checkpoint.as_ref());
    let mut warnings = machine.warnings();
    let outlook = outlook(&machine);
    let model = match &checkpoint {
        Some(checkpoint) => match of_model(checkpoint, &machine) {
            Ok(model) => model,
            Err(error) => {
                warnings.push(crate::outcome::in_one_line(&error));
                None
            }
        },
        None => None,
    };
    waiting.finish_and_clear();
    let report = Report { machine, outlook, model, warnings };
    if args.json {
        console.json(&report)?;
    } else {
        console.line(report.readable(console))?;
    }
    Ok(Outcome::Done)
}

/// Plans a model in the available memory. Returns `None` if it is no decoder.
fn of_model(checkpoint: &Checkpoint, machine: &Machine) -> anyhow::Result<Option<ModelOutlook>> {
    let (Architecture::Decoder(config), Some(memory)) =
        (Architecture::from_json(checkpoint.config())?, machine.memory.available_bytes)
    else {
        return Ok(None);
    };
    let shape = decoder_shape(checkpoint, &config, KvType::default())?;
    let device = opened_device(&DeviceArgs { device: "cpu".into(), threads: None })?;
    let rates = residency::measure(checkpoint, &device, &shape)?;
    let context = config.max_positions.min(CONTEXT);
    let Plan { kept_layers, prediction, .. } = plan(&shape, &rates, memory, Mode::Context, context)?;
    Ok(Some(ModelOutlook {
        path: checkpoint.path().to_owned(),
        layers: shape.layers(),
        kept_layers: kept_layers.len(),
        tokens_per_second: prediction.tokens_per_second,
        peak_bytes: prediction.peak_bytes,
    }))
}

impl Report {
    fn readable(&self, console: &Console) -> String {
        let facts = table(None, &[], self.machine.facts());
        let rows = self.outlook.iter().map(Outlook::row);
        let outlook = table(Some(["model", "weights", "kept", "tokens/s"]), &[1, 3], rows);
        let mut text = format!(
            "{facts}\n\nWhat is to be expected of models of four bits a weight, with {CONTEXT} tokens of context:\n\n\
             {outlook}"
        );
        if let Some(model) = &self.model {
            text += &format!(
                "\n\n{}: {} of {} layers kept in {}, about {} tokens a second",
                model.path.display(),
                model.kept_layers,
                model.layers,
                human_bytes(model.peak_bytes),
                outlook::speed(model.tokens_per_second),
            );
        }
        for warning in &self.warnings {
            text += &format!("\n\n{} {warning}", console.styled(Style::Strong, "warning:"));
        }
        text
    }
}
