//! From a recipe to a model with its heads.

use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;

use burn::module::Module as _;
use burn::tensor::Device;
use firebox_model::{HeadForm, Tower, Trained};
use firebox_runtime::heads::{FALLBACK, ROUTER};
use firebox_store::{Checkpoint, Dtype, Encoding, Heads, NewHead, encode, files};
use firebox_text::{TextAssets, Tokenizer, TokenizerSource};
use serde_json::json;

use super::phase_data::{PhaseData, PhasePassages, Requests, Text};
use super::{Generator, PocketTokenizer, Recipe, Scribe, ShapeName, Split, Task};
use crate::ending::Ending;
use crate::error::TrainError;
use crate::export::{export_head, export_model};
use crate::files::{beside, create_folder, remove_folder, sync_folder, write_text};
use crate::network::Source;
use crate::progress::Progress;
use crate::run::Run;
use crate::settings::Settings;
use crate::trainer::train;
use crate::training_batch::TrainingBatch;

const RECIPE: &str = "recipe.toml";
const RUNS: &str = "runs";
const MODEL: &str = "model";

/// Steps between two checkpoints: some ten seconds.
const CHECKPOINT_EVERY: u64 = 50;

/// A folder in which a model is made by a recipe:
///
/// ```text
/// recipe.toml        what is made
/// tokenizer/         the vocabulary, learnt first
/// runs/base/ …       the runs of the phases
/// model/             what comes out, with its heads
/// ```
///
/// However often it ends before its end, the same model comes out.
#[derive(Debug)]
pub struct Workshop<'a> {
    recipe: &'a Recipe,
    folder: PathBuf,
    device: Device,
}

/// Who is told how it goes, and says when to stop.
pub struct Watch<'a> {
    /// Is told of every phase, and gives who is told of its steps.
    pub begin: &'a mut dyn FnMut(&str) -> Box<dyn Progress>,
    /// Set to stop after a step.
    pub stop: &'a AtomicBool,
}

impl std::fmt::Debug for Watch<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Watch").field("stop", self.stop).finish_non_exhaustive()
    }
}

impl<'a> Workshop<'a> {
    /// Opens a folder for a recipe. One that something else is made in is refused.
    pub fn open(recipe: &'a Recipe, folder: impl Into<PathBuf>, device: &Device) -> Result<Self, TrainError> {
        let folder = folder.into();
        create_folder(&folder)?;
        let path = folder.join(RECIPE);
        let refuse = |reason: String| TrainError::malformed(&path, reason);
        match files::read_to_string(&path) {
            Ok(text) if Recipe::parse(&text).map_err(refuse)? != *recipe => {
                return Err(refuse("another recipe is at work here; choose another folder".into()));
            }
            Ok(_) => {}
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                let text = toml::to_string_pretty(recipe).map_err(|error| refuse(error.to_string()))?;
                write_text(&path, &text)?;
            }
            Err(error) => return Err(TrainError::io(&path, "read", error)),
        }
        Ok(Self { recipe, folder, device: device.clone().without_autodiff() })
    }

    /// Makes the model, as far as it is not there, and says where it is; nothing if it was stopped before.
    pub fn make(&self, watch: &mut Watch<'_>) -> Result<Option<PathBuf>, TrainError> {
        let model = self.folder.join(MODEL);
        if !model.exists() && !self.base(&model, watch)? {
            return Ok(None);
        }
        let heads = Heads::open(&model)?;
        for &task in &self.recipe.heads.tasks {
            if !installed(&heads, task.name())? && !self.head(task, &heads, watch)? {
                return Ok(None);
            }
        }
        if !installed(&heads, FALLBACK)? && !self.fallback(&heads, watch)? {
            return Ok(None);
        }
        if !installed(&heads, ROUTER)? && !self.router(&heads, watch)? {
            return Ok(None);
        }
        Ok(Some(model))
    }

    fn split(&self) -> usize {
        self.recipe.architecture.trunk_layers
    }

    fn run_folder(&self, phase: &str) -> PathBuf {
        self.folder.join(RUNS).join(phase)
    }

    /// The vocabulary, learnt if it is not there yet.
    fn vocabulary(&self) -> Result<PocketTokenizer, TrainError> {
        let folder = self.folder.join("tokenizer");
        let (tokenizer, config) = (folder.join("tokenizer.json"), folder.join("tokenizer_config.json"));
        let read = |path: &Path| files::read_to_string(path);
        if let (Ok(tokenizer), Ok(config)) = (read(&tokenizer), read(&config)) {
            return Ok(PocketTokenizer { tokenizer, config });
        }
        let plan = self.recipe.tokenizer;
        let learnt = PocketTokenizer::learn(
            self.recipe.seed_of("tokenizer"),
            plan.pieces,
            plan.conversations_per_task,
        )
        .map_err(TrainError::network)?;
        create_folder(&folder)?;
        write_text(&tokenizer, &learnt.tokenizer)?;
        write_text(&config, &learnt.config)?;
        Ok(learnt)
    }

    /// The whole model, with the fallback beside it. False if it was stopped.
    fn base(&self, model: &Path, watch: &mut Watch<'_>) -> Result<bool, TrainError> {
        let phase = "base";
        let vocabulary = self.vocabulary()?;
        let tokenizer = tokenizer_of(&vocabulary)?;
        let scribe = Scribe::new(&tokenizer)?;
        let plan = &self.recipe.base;
        let mut passages = PhasePassages::default();
        for (number, stage) in plan.stages.iter().enumerate() {
            let shapes: Vec<_> = stage.shapes.iter().map(|shape| shape.shape()).collect();
            let seed = self.recipe.seed_of(&format!("{phase} {number}"));
            let text = Text {
                seed,
                tasks: &Task::ALL,
                shapes: &shapes,
                tokens: stage.tokens,
                one_task_per_batch: false,
            };
            passages.add(&scribe, &text, plan.tokens_per_step)?;
        }
        let steps = passages.batches() as u64;
        let settings = self.recipe.settings(phase, steps, plan.learning_rate, plan.warm_up_steps, None);
        let end = scribe.end();
        let config = self.recipe.config(tokenizer.vocab_size(), tokenizer.pad_id().unwrap_or(end), end);
        let device = self.device.clone().autodiff();
        let network = Tower::begin_with_exit(&config, &device, self.recipe.seeded(phase), self.recipe.exit());
        let network = network.map_err(TrainError::network)?;
        let prompt_weight = plan.prompt_weight;
        let data = PhaseData {
            passages,
            prompt_weight,
            trunk: None,
            teachers: Vec::new(),
            device: self.device.clone(),
        };
        let Some(tower) = self.phase(phase, network, data, settings, watch)? else { return Ok(false) };

        let unfinished = beside(model);
        remove_folder(&unfinished)?;
        export_model(&tower, &config, Dtype::F16, &unfinished)?;
        write_text(&unfinished.join("tokenizer.json"), &vocabulary.tokenizer)?;
        write_text(&unfinished.join("tokenizer_config.json"), &vocabulary.config)?;
        // Its answers are right or wrong, so tokens are not sampled.
        let generation =
            json!({ "do_sample": false, "eos_token_id": end, "pad_token_id": config["pad_token_id"] });
        write_text(&unfinished.join("generation_config.json"), &format!("{generation:#}\n"))?;
        let checkpoint = Checkpoint::open(&unfinished)?;
        self.write_head(&checkpoint, tower.trained_exit().map_err(TrainError::network)?)?;
        sync_folder(&unfinished)?;
        files::rename(&unfinished, model)
            .map_err(|error| TrainError::io(model, "rename the new model to", error))?;
        sync_folder(&self.folder)?;
        Ok(true)
    }

    /// Where the fallback lies that has learnt along with the base.
    fn beginning_of_fallback(&self) -> PathBuf {
        self.folder.join(RUNS).join("fallback-begun")
    }

    fn write_head(&self, trunk: &Checkpoint, tensors: Vec<Trained>) -> Result<(), TrainError> {
        let path = self.beginning_of_fallback();
        remove_folder(&path)?;
        let form = serde_json::to_value(self.bridge())
            .map_err(|error| TrainError::io(&path, "write", error.into()))?;
        let mut head = NewHead::new(trunk, self.split(), form)?;
        for Trained { name, shape, values } in tensors {
            head.push(encode(&name, &values, &shape, Encoding::Plain(Dtype::F32))?)?;
        }
        head.write(&path)?;
        Ok(())
    }

    fn bridge(&self) -> HeadForm {
        HeadForm::Bridge { width: self.recipe.fallback.rank }
    }

    /// The last layers for one task.
    fn head(&self, task: Task, heads: &Heads, watch: &mut Watch<'_>) -> Result<bool, TrainError> {
        let plan = &self.recipe.heads;
        let phase = task.name();
        let budget = plan.tokens_per_step;
        let passages =
            self.phase_passages(phase, &[task], &plan.shapes, plan.steps, budget, heads.model())?;
        let settings = self.recipe.settings(phase, plan.steps, plan.learning_rate, plan.warm_up_steps, None);
        let data = PhaseData {
            passages,
            prompt_weight: plan.prompt_weight,
            trunk: Some((self.trunk(heads.model())?, self.split())),
            teachers: Vec::new(),
            device: self.device.clone(),
        };
        self.learn_head(phase, &HeadForm::Blocks, None, data, settings, heads, watch)
    }

    /// Trains the fallback, which is used while a head is not available.
    fn fallback(&self, heads: &Heads, watch: &mut Watch<'_>) -> Result<bool, TrainError> {
        let plan = &self.recipe.fallback;
        let tasks = &self.recipe.heads.tasks;
        let budget = plan.tokens_per_step;
        let passages =
            self.phase_passages(FALLBACK, tasks, &plan.shapes, plan.steps, budget, heads.model())?;
        let (rate, decay) = (plan.learning_rate, Some(plan.weight_decay));
        let settings = self.recipe.settings(FALLBACK, plan.steps, rate, plan.warm_up_steps, decay);
        let mut teachers = Vec::new();
        for &task in tasks {
            let files = heads.head(task.name())?;
            let teacher = self.tower(&HeadForm::Blocks, Some(&files), task.name(), heads.model())?;
            teachers.push((task, teacher.valid()));
        }
        let data = PhaseData {
            passages,
            prompt_weight: 0.0,
            trunk: Some((self.trunk(heads.model())?, self.split())),
            teachers,
            device: self.device.clone(),
        };
        let begun = firebox_store::HeadFiles::open(self.beginning_of_fallback())?;
        self.learn_head(FALLBACK, &self.bridge(), Some(&begun), data, settings, heads, watch)
    }

    /// Trains the router, which chooses the head for a request.
    fn router(&self, heads: &Heads, watch: &mut Watch<'_>) -> Result<bool, TrainError> {
        let plan = &self.recipe.router;
        let scribe = self.scribe(heads.model())?;
        let shape = plan.shape.shape();
        let mut generator = Generator::new(self.recipe.seed_of(ROUTER), Split::Train, shape);
        let passages = (0..plan.conversations)
            .map(|at| scribe.write(&generator.conversation(Task::ALL[at % Task::ALL.len()])))
            .collect::<Result<Vec<_>, _>>()?;
        let trunk = self.trunk(heads.model())?;
        let requests = Requests::new(&passages, &trunk, self.split(), &self.device)?;
        let settings =
            self.recipe.settings(ROUTER, plan.steps, plan.learning_rate, 0, Some(plan.weight_decay));
        let form =
            HeadForm::Classifier { labels: Task::ALL.iter().map(|task| task.name().to_owned()).collect() };
        self.learn_head(ROUTER, &form, None, requests, settings, heads, watch)
    }

    fn scribe(&self, model: &Checkpoint) -> Result<Scribe, TrainError> {
        Scribe::new(&Tokenizer::new(model.text(), model.config())?)
    }

    fn phase_passages(
        &self,
        phase: &str,
        tasks: &[Task],
        shapes: &[ShapeName],
        steps: u64,
        budget: usize,
        model: &Checkpoint,
    ) -> Result<PhasePassages, TrainError> {
        let shapes: Vec<_> = shapes.iter().map(|shape| shape.shape()).collect();
        // Batches are not fuller than full, so there are enough of them.
        let tokens = steps as usize * budget;
        let mut passages = PhasePassages::default();
        let text = Text {
            seed: self.recipe.seed_of(phase),
            tasks,
            shapes: &shapes,
            tokens,
            one_task_per_batch: true,
        };
        passages.add(&self.scribe(model)?, &text, budget)?;
        Ok(passages)
    }

    fn tower(
        &self,
        form: &HeadForm,
        own: Option<&firebox_store::HeadFiles>,
        phase: &str,
        model: &Checkpoint,
    ) -> Result<Tower, TrainError> {
        let device = self.device.clone().autodiff();
        let own = own.map(|files| files as &dyn firebox_store::Tensors);
        Tower::head(model, own, form, None, self.split(), &device, self.recipe.seeded(phase))
            .map_err(TrainError::network)
    }

    /// The whole model, to run its first layers.
    fn trunk(&self, model: &Checkpoint) -> Result<Tower, TrainError> {
        let whole = Tower::whole(model, &self.device.clone().autodiff());
        Ok(whole.map_err(TrainError::network)?.valid())
    }

    #[expect(clippy::too_many_arguments, reason = "what a head is trained from, and only here")]
    fn learn_head<S: Source<Batch = TrainingBatch>>(
        &self,
        phase: &str,
        form: &HeadForm,
        own: Option<&firebox_store::HeadFiles>,
        source: S,
        settings: Settings,
        heads: &Heads,
        watch: &mut Watch<'_>,
    ) -> Result<bool, TrainError> {
        let network = self.tower(form, own, phase, heads.model())?;
        let Some(tower) = self.phase(phase, network, source, settings, watch)? else { return Ok(false) };
        let files = self.run_folder(phase).join("head");
        remove_folder(&files)?;
        export_head(&tower, form, heads.model(), Dtype::F16, &files)?;
        heads.install(&files, phase)?;
        Ok(true)
    }

    /// Trains a phase; nothing if it was stopped.
    fn phase<S: Source<Batch = TrainingBatch>>(
        &self,
        phase: &str,
        network: Tower,
        mut source: S,
        settings: Settings,
        watch: &mut Watch<'_>,
    ) -> Result<Option<Tower>, TrainError> {
        let settings = Settings { checkpoint_every: CHECKPOINT_EVERY, ..settings };
        let mut run = Run::create_or_open(self.run_folder(phase), settings)?;
        let mut progress = (watch.begin)(phase);
        let trained = train(network, &mut source, &mut run, &mut *progress, watch.stop)?;
        Ok((trained.ending != Ending::Stopped).then_some(trained.network))
    }
}

fn installed(heads: &Heads, name: &str) -> Result<bool, TrainError> {
    Ok(heads.list()?.iter().any(|head| head.name == name))
}

/// Builds the tokenizer of a vocabulary.
fn tokenizer_of(vocabulary: &PocketTokenizer) -> Result<Tokenizer, TrainError> {
    let assets = TextAssets {
        tokenizer: Some(TokenizerSource::Json(vocabulary.tokenizer.clone().into_bytes())),
        tokenizer_config: serde_json::from_str(&vocabulary.config).map_err(TrainError::network)?,
        ..TextAssets::default()
    };
    Ok(Tokenizer::new(&assets, &serde_json::Value::Null)?)
}
