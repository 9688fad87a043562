//! Pipelines: a router chooses which model or head answers, with a fallback.

use std::collections::VecDeque;
use std::fmt;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use firebox_runtime::{GenerationConfig, RuntimeError};
use firebox_schedule::Priority;
use futures_core::Stream;

use crate::engine::{Engine, ResponseStream};
use crate::error::EngineError;
use crate::event::Event;
use crate::request::Request;

/// Chooses which stage of a pipeline answers.
pub trait Router: Send {
    /// Returns names of stages with the confidence in each, in any order.
    fn route(&mut self, text: &str) -> Result<Vec<(String, f32)>, RuntimeError>;
}

impl<F: FnMut(&str) -> Result<Vec<(String, f32)>, RuntimeError> + Send> Router for F {
    fn route(&mut self, text: &str) -> Result<Vec<(String, f32)>, RuntimeError> {
        self(text)
    }
}

/// Encodes a question as the prompt of a model.
pub type PromptEncoder = Arc<dyn Fn(&str) -> Result<Vec<u32>, RuntimeError> + Send + Sync>;

/// A model, or one head of a model, that answers in a pipeline.
#[derive(Clone)]
pub struct Stage {
    name: String,
    model: String,
    encoder: PromptEncoder,
    head: Option<String>,
    config: GenerationConfig,
    first_by: Option<Duration>,
    least_confidence: f32,
}

impl Stage {
    /// A stage for a model of an engine, by its name there. The stage has the same name.
    pub fn new(
        model: impl Into<String>,
        encoder: impl Fn(&str) -> Result<Vec<u32>, RuntimeError> + Send + Sync + 'static,
    ) -> Self {
        let model = model.into();
        Self {
            name: model.clone(),
            model,
            encoder: Arc::new(encoder),
            head: None,
            config: GenerationConfig::default(),
            first_by: None,
            least_confidence: 0.0,
        }
    }

    /// Uses one of the model's heads, and names the stage after it.
    pub fn with_head(self, head: impl Into<String>) -> Self {
        let head = head.into();
        Self { name: head.clone(), head: Some(head), ..self }
    }

    /// Renames the stage.
    pub fn named(self, name: impl Into<String>) -> Self {
        Self { name: name.into(), ..self }
    }

    /// Sets limits and sampling.
    pub fn with_config(self, config: GenerationConfig) -> Self {
        Self { config, ..self }
    }

    /// Sets a deadline for the first token, after which the fallback answers.
    pub fn with_first_by(self, first_by: Duration) -> Self {
        Self { first_by: Some(first_by), ..self }
    }

    /// Sets the confidence of the router below which the fallback answers.
    pub fn with_least_confidence(self, least_confidence: f32) -> Self {
        Self { least_confidence, ..self }
    }

    fn request(&self, text: &str) -> Result<Request, RuntimeError> {
        let mut request = Request::new(&self.model, (self.encoder)(text)?)
            .with_config(self.config.clone())
            .with_priority(Priority::Interactive);
        request.head.clone_from(&self.head);
        Ok(match self.first_by {
            Some(first_by) => request.with_first_by(first_by).or_not_at_all(),
            None => request,
        })
    }
}

impl fmt::Debug for Stage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Stage").field("name", &self.name).field("model", &self.model).finish_non_exhaustive()
    }
}

/// A router that chooses one of several stages for each question, and a fallback for when that stage fails.
///
/// ```no_run
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use std::time::Duration;
/// use firebox_engine::{Engine, EngineConfig, Pipeline, PipelineEvent, Stage};
/// use firebox_runtime::{Model, device};
///
/// let engine = Engine::start(EngineConfig::default())?;
/// let cpu = device("cpu")?;
/// let (code, small) = (Model::open("models/code", &cpu)?, Model::open("models/small", &cpu)?);
/// let encoder = |model: &Model| {
///     let tokenizer = model.tokenizer().unwrap().clone();
///     move |text: &str| Ok(tokenizer.encode(text, true)?)
/// };
/// let pipeline = Pipeline::new(&engine, Stage::new("small", encoder(&small)))
///     .with_stage(Stage::new("code", encoder(&code)).with_first_by(Duration::from_secs(2)))
///     .with_router(|text: &str| Ok(vec![("code".into(), if text.contains("fn ") { 0.9 } else { 0.1 })]));
/// engine.add("code", code)?;
/// engine.add("small", small)?;
/// for event in pipeline.ask("fn main") {
///     match event {
///         PipelineEvent::Routed { stage, .. } => println!("[{stage}]"),
///         PipelineEvent::Replaced { by, why, .. } => println!("[{why}; {by} answers]"),
///         _ => {}
///     }
/// }
/// # Ok(()) }
/// ```
#[derive(Debug, Clone)]
pub struct Pipeline {
    engine: Engine,
    stages: Vec<Stage>,
    fallback: Stage,
    router: Option<Shared>,
}

#[derive(Clone)]
struct Shared(Arc<Mutex<dyn Router>>);

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Router")
    }
}

/// An event of a pipeline.
#[derive(Debug)]
#[non_exhaustive]
pub enum PipelineEvent {
    /// A stage was chosen.
    Routed {
        /// The name of the stage.
        stage: String,
        /// The confidence of the router.
        confidence: f32,
    },
    /// Another stage answers from the beginning; what was streamed so far, if anything, is void.
    Replaced {
        /// The stage that failed.
        stage: String,
        /// The stage that answers instead.
        by: String,
        /// Why the stage failed.
        why: EngineError,
    },
    /// An event of the current stage.
    Answer(Event),
}

impl Pipeline {
    /// A pipeline in which the fallback answers everything until there are a router and stages.
    pub fn new(engine: &Engine, fallback: Stage) -> Self {
        Self { engine: engine.clone(), stages: Vec::new(), fallback, router: None }
    }

    /// Adds a stage.
    pub fn with_stage(mut self, stage: Stage) -> Self {
        self.stages.push(stage);
        self
    }

    /// Sets the router.
    pub fn with_router(self, router: impl Router + 'static) -> Self {
        Self { router: Some(Shared(Arc::new(Mutex::new(router)))), ..self }
    }

    /// Asks a question. The router runs on the calling thread, everything else on the engine's.
    pub fn ask(&self, text: &str) -> PipelineStream {
        let (stage, confidence, replaced) = match self.route(text) {
            Ok((stage, confidence)) => (stage, confidence, None),
            Err(why) => {
                let by = self.fallback.name.clone();
                (None, 0.0, Some(PipelineEvent::Replaced { stage: ROUTER.into(), by, why: why.into() }))
            }
        };
        let is_fallback = stage.is_none();
        let mut stream = PipelineStream {
            pipeline: self.clone(),
            text: text.into(),
            queued: replaced.into_iter().collect(),
            response: None,
            stage: stage.unwrap_or_else(|| self.fallback.clone()),
            is_fallback,
        };
        stream.queued.push_back(PipelineEvent::Routed { stage: stream.stage.name.clone(), confidence });
        stream.begin();
        stream
    }

    /// Returns the stage with the highest confidence, if that suffices.
    fn route(&self, text: &str) -> Result<(Option<Stage>, f32), RuntimeError> {
        let Some(Shared(router)) = &self.router else { return Ok((None, 1.0)) };
        let routes = router.lock().unwrap_or_else(PoisonError::into_inner).route(text)?;
        let best = routes.into_iter().max_by(|one, other| one.1.total_cmp(&other.1));
        let chosen = best.and_then(|(name, confidence)| {
            let stage = self.stages.iter().find(|stage| stage.name == name)?;
            (confidence >= stage.least_confidence).then(|| (Some(stage.clone()), confidence))
        });
        Ok(chosen.unwrap_or((None, 1.0)))
    }
}

/// The name of the router in [`PipelineEvent::Replaced`].
const ROUTER: &str = "router";

/// The events of a question, as a [`Stream`] and as a blocking iterator. Dropping it cancels the question.
#[derive(Debug)]
pub struct PipelineStream {
    pipeline: Pipeline,
    text: String,
    queued: VecDeque<PipelineEvent>,
    response: Option<ResponseStream>,
    stage: Stage,
    is_fallback: bool,
}

impl PipelineStream {
    /// Returns the name of the stage that answers.
    pub fn stage(&self) -> &str {
        &self.stage.name
    }

    fn begin(&mut self) {
        match self.stage.request(&self.text) {
            Ok(request) => self.response = Some(self.pipeline.engine.generate(request)),
            Err(why) => self.fall_back(why.into()),
        }
    }

    /// Lets the fallback answer, unless it is what failed.
    fn fall_back(&mut self, why: EngineError) {
        self.response = None;
        let fallback = &self.pipeline.fallback;
        if self.is_fallback {
            self.queued.push_back(PipelineEvent::Answer(Event::Failed(why.into())));
            return;
        }
        self.is_fallback = true;
        let (stage, by) = (self.stage.name.clone(), fallback.name.clone());
        self.stage = fallback.clone();
        self.queued.push_back(PipelineEvent::Replaced { stage, by, why });
        self.begin();
    }

    /// Handles an event of the current stage.
    fn receive(&mut self, event: Option<Event>) {
        match event {
            Some(Event::Failed(failure)) => self.fall_back(failure.error),
            Some(event) => {
                if event.is_last() {
                    self.response = None;
                }
                self.queued.push_back(PipelineEvent::Answer(event));
            }
            None => self.response = None,
        }
    }
}

impl Iterator for PipelineStream {
    type Item = PipelineEvent;

    fn next(&mut self) -> Option<PipelineEvent> {
        while self.queued.is_empty() {
            let event = self.response.as_mut()?.next();
            self.receive(event);
        }
        self.queued.pop_front()
    }
}

impl Stream for PipelineStream {
    type Item = PipelineEvent;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<PipelineEvent>> {
        while self.queued.is_empty() {
            let Some(response) = &mut self.response else { return Poll::Ready(None) };
            let event = ready!(Pin::new(response).poll_next(context));
            self.receive(event);
        }
        Poll::Ready(self.queued.pop_front())
    }
}
