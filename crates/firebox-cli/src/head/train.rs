//! `firebox head train`

use std::path::PathBuf;
use std::sync::Arc;

use anyhow::Context as _;
use clap::Args;
use firebox_model::{AdapterPlan, HeadForm, Seeded, Tower};
use firebox_runtime::Model;
use firebox_store::{Dtype, Heads, SourceKind, StoreError, trunk_hash};
use firebox_text::{ChatTemplate, TextError};
use firebox_train::{
    Ending, Examples, ExamplesConfig, Format, Packed, Precision, Run, Schedule, Settings, Stored, Subject,
    TrainingData, Which, boundary_states, export_head, train as train_network,
};
use serde::Serialize;

use crate::compute::DeviceArgs;
use crate::console::{Console, human_bytes};
use crate::hub;
use crate::interrupt::Interrupt;
use crate::opening::open;
use crate::outcome::{Outcome, usage};

/// The number of steps between two plain progress lines.
const LINES_EVERY: u64 = 10;

/// The products that get an adapter by default. No family has all of them in every layer.
const TARGETS: &str = "q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj";

/// Options of `firebox head train`.
#[derive(Debug, Args)]
pub struct TrainArgs {
    /// The model, a bundle or a Hugging Face directory
    #[arg(value_name = "MODEL")]
    model: PathBuf,
    /// What to learn: a line of JSON each, with messages, or with prompt and completion
    #[arg(long, value_name = "FILE")]
    data: PathBuf,
    /// The folder of the run; a run that ended early goes on
    #[arg(short, long, value_name = "FOLDER")]
    output: PathBuf,
    /// How many of the last layers belong to the head [default: a quarter]
    #[arg(long, value_name = "N")]
    layers: Option<usize>,
    /// Learn changes of this rank instead of whole layers
    #[arg(long, value_name = "RANK")]
    lora: Option<usize>,
    /// What the changes count, times their rank [default: twice the rank]
    #[arg(long, value_name = "X", requires = "lora")]
    lora_alpha: Option<f32>,
    /// The products that are changed
    #[arg(
        long,
        value_name = "NAMES",
        value_delimiter = ',',
        requires = "lora",
        default_value = TARGETS
    )]
    targets: Vec<String>,
    /// Steps to take
    #[arg(long, value_name = "N", default_value_t = 500)]
    steps: u64,
    /// The highest learning rate
    #[arg(long, value_name = "X", default_value_t = 3e-4)]
    rate: f64,
    /// Steps until it is reached [default: a tenth]
    #[arg(long, value_name = "N")]
    warm_up: Option<u64>,
    /// Most tokens of a batch
    #[arg(long, value_name = "N", default_value_t = 2048)]
    batch_tokens: usize,
    /// Batches that make a step
    #[arg(long, value_name = "N", default_value_t = 1)]
    accumulate: u32,
    /// Samples that are held out, to see what was learned [default: a twentieth]
    #[arg(long, value_name = "N")]
    hold_out: Option<usize>,
    /// End after so many evaluations that were no better
    #[arg(long, value_name = "N")]
    patience: Option<u32>,
    /// Decides whatever is random
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
    /// Compute the loss with weights rounded to bf16, and store the head in it where the model is not quantized
    #[arg(long)]
    bf16: bool,
    /// Keep what the trunk makes of the data exactly, and not in half precision
    #[arg(long)]
    exact_states: bool,
    /// Install the head under this name once it is trained
    #[arg(long, value_name = "NAME")]
    install: Option<String>,
    #[command(flatten)]
    device: DeviceArgs,
}

impl TrainArgs {
    fn form(&self) -> HeadForm {
        match self.lora {
            Some(rank) => {
                HeadForm::Adapter { scale: self.lora_alpha.unwrap_or(2.0 * rank as f32) / rank.max(1) as f32 }
            }
            None => HeadForm::Blocks,
        }
    }

    fn settings(&self, about: &About<'_>) -> anyhow::Result<Settings> {
        let warm_up = self.warm_up.unwrap_or(self.steps / 10);
        Ok(Settings {
            seed: self.seed,
            accumulate: self.accumulate,
            patience: self.patience,
            precision: if self.bf16 { Precision::Bf16 } else { Precision::F32 },
            about: toml::Table::try_from(about)?,
            ..Settings::new(self.steps, Schedule { peak: self.rate, warm_up, floor: self.rate / 10.0 })
        })
    }
}

/// Everything beside the settings that decides which head a run produces. A run is only resumed if it is unchanged.
#[derive(Serialize)]
struct About<'a> {
    trunk: &'a str,
    split: usize,
    /// The hash of the samples.
    data: String,
    batch_tokens: usize,
    hold_out: usize,
    form: &'a HeadForm,
    #[serde(skip_serializing_if = "Option::is_none")]
    rank: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    targets: Option<&'a [String]>,
    states: Stored,
}

/// Trains a head.
pub fn train(args: &TrainArgs, console: &Console) -> anyhow::Result<Outcome> {
    let interrupt = Interrupt::install()?;
    let model = open(&args.model, &args.device, console)?;
    if model.checkpoint().source() == SourceKind::Gguf {
        return Err(StoreError::NotAModel {
            path: model.checkpoint().path().to_owned(),
            reason: "heads need a bundle; write one with `firebox import`".into(),
        }
        .into());
    }
    let decoder = model.decoder()?;
    let layers = args.layers.unwrap_or(decoder.layers().div_ceil(4));
    let Some(split) = decoder.layers().checked_sub(layers).filter(|split| *split > 0 && layers > 0) else {
        return Err(usage(format!("--layers: should be from 1 to {}", decoder.layers() - 1)));
    };
    let mut examples = Examples::open(&args.data, format(&model)?, ExamplesConfig::new(args.batch_tokens))?;
    console.note(examples.summary().to_string());
    let stored = if args.exact_states { Stored::F32 } else { Stored::F16 };
    let trunk = trunk_hash(model.checkpoint(), split)?;
    let form = args.form();
    let adapters = args.lora.map(|rank| AdapterPlan { rank, targets: args.targets.clone() });
    let device = decoder.device().clone().autodiff();
    let seeded = Seeded::new(args.seed);
    let network = || Tower::head(model.checkpoint(), None, &form, adapters.as_ref(), split, &device, seeded);
    let held_out = args.hold_out.unwrap_or(examples.len() / 20);
    let settings = args.settings(&About {
        trunk: &trunk,
        split,
        data: examples.fingerprint(),
        batch_tokens: args.batch_tokens,
        hold_out: held_out,
        form: &form,
        rank: args.lora,
        targets: args.lora.map(|_| &*args.targets),
        states: stored,
    })?;
    // Errors are found before the run's folder is created, and that before the trunk computes its states.
    let begun = network()?;
    if let Some(adapters) = &adapters {
        expect_targets(&begun, &adapters.targets)?;
    }
    let mut run = Run::create_or_open(args.output.join("run"), settings).context("--output")?;

    console.note(format!("what the trunk makes of {} samples is computed once", examples.len()));
    let folder = args.output.join("states");
    let waiting = console.waiting("taking the samples through the trunk");
    let states = boundary_states(&mut examples, folder, &decoder, &trunk, split, stored);
    waiting.finish_and_clear();
    let samples = Packed::new(examples, args.batch_tokens, args.seed).hold_out(held_out);
    let subject = Subject { samples, states: Some(states?) };
    let mut data = TrainingData::new(vec![subject], args.seed, &device);
    let mut progress = console.training(LINES_EVERY);
    let working = interrupt.work();
    let trained = train_network(begun, &mut data, &mut run, &mut *progress, &interrupt.flag())?;
    drop((working, progress));
    if trained.ending == Ending::Stopped {
        console.note("stopped; the same command goes on");
        return Ok(Outcome::Interrupted);
    }
    let best = match trained.position.best {
        Some(_) => run.restore(network()?, Which::Best)?.0,
        None => trained.network,
    };
    let head = args.output.join("head");
    if head.exists() {
        // That of a run before: it is made anew from the run's own checkpoints.
        std::fs::remove_dir_all(&head)?;
    }
    // Weights that were trained in bf16 are stored in bf16.
    let dtype = if args.bf16 { Dtype::BF16 } else { Dtype::F16 };
    let files = export_head(&best, &form, model.checkpoint(), dtype, &head)?;
    console.line(format!("{}: {}", head.display(), human_bytes(files.bytes())))?;
    if let Some(name) = &args.install {
        let info = Heads::open(hub::resolve(&args.model)?)?.install(&head, name)?;
        console.line(format!("{name}: generation {}", info.generation))?;
    }
    Ok(Outcome::Done)
}

/// Refuses names of products that no layer of the head has; of the usual ones a family may lack some.
fn expect_targets(network: &Tower, targets: &[String]) -> anyhow::Result<()> {
    let trained = network.trained()?;
    let is_there = |target: &str| {
        let end = format!(".{target}.lora_A.weight");
        trained.iter().any(|tensor| tensor.name.ends_with(&end))
    };
    let none = !targets.iter().any(|target| is_there(target));
    let is_wrong =
        |target: &str| none || !(is_there(target) || TARGETS.split(',').any(|usual| usual == target));
    match targets.iter().find(|target| is_wrong(target)) {
        Some(target) => Err(usage(format!(
            "--targets: the head's layers have no product {target:?}; `firebox inspect` names what they have"
        ))),
        None => Ok(()),
    }
}

/// Returns the model's format of conversations.
pub(super) fn format(model: &Model) -> anyhow::Result<Format> {
    let tokenizer = model.tokenizer()?;
    let template = match ChatTemplate::new(model.checkpoint().text(), tokenizer) {
        Ok(template) => Some(Arc::new(template)),
        Err(TextError::MissingChatTemplate) => None,
        Err(error) => return Err(error.into()),
    };
    Ok(Format { tokenizer: (**tokenizer).clone(), template, thinking: None })
}
