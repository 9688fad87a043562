use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use firebox_runtime::engine::{Engine, Request};
use firebox_runtime::schedule::Priority;
use firebox_runtime::telemetry::Telemetry;
use firebox_runtime::{Model, RuntimeError, Script};
use firebox_store::SegmentId;
use firebox_text::{CallSyntax, Message, TemplateOptions, Tokenizer};
use tokio::sync::Semaphore;

use crate::error::ApiError;
use crate::weight::expect_light_arguments;

/// A model that is served.
#[derive(Debug)]
pub(crate) struct Served {
    pub name: String,
    pub model: Model,
    priority: Priority,
    /// What conversations with it are written by.
    pub script: Script,
    /// Longest sequence, prompt included; nothing for what only embeds.
    pub context: Option<usize>,
    /// What its sessions compute beside the engine, one at a time: a few tokens behind an answer, a fact. Those of other
    /// models do not wait for it.
    pub computing: Arc<Semaphore>,
    /// The parts of its weights, and bytes of each.
    segments: Vec<(SegmentId, u64)>,
    /// How much of each was in memory when the system was asked last.
    residency: Mutex<Option<(Instant, Vec<f64>)>>,
}

/// The system goes through all pages of a model when it is asked, so that several who watch share an answer.
const RESIDENCY_CHECK: Duration = Duration::from_secs(1);

impl Served {
    /// Takes a model in. One that continues text goes to the engine.
    pub fn new(
        name: &str,
        model: Model,
        priority: Priority,
        engine: &Engine,
        telemetry: &Telemetry,
    ) -> Result<Self, RuntimeError> {
        let script = Script::of(&model)?;
        let model = model.with_telemetry(telemetry, name);
        let segments = model.checkpoint().segments();
        let segments = segments.into_iter().map(|segment| (segment.id, segment.bytes)).collect();
        let context = match model.decoder() {
            Ok(decoder) => {
                engine.add(name, model.clone()).inspect_err(|_| telemetry.forget(name))?;
                Some(decoder.config().max_positions)
            }
            Err(_) => None,
        };
        let (name, residency) = (name.to_owned(), Mutex::default());
        let computing = Arc::new(Semaphore::new(1));
        Ok(Self { name, model, priority, script, context, computing, segments, residency })
    }

    /// An answer that is asked of it, as urgent as its requests are.
    pub fn request(&self, prompt: Vec<u32>) -> Request {
        Request::new(&self.name, prompt).with_priority(self.priority)
    }

    pub fn heads(&self) -> Vec<String> {
        self.model.heads().map(|heads| heads.names()).unwrap_or_default()
    }

    /// The parts of its weights: bytes of each, and how much of it is in memory, from 0 to 1, whoever brought it there. Where
    /// the system does not say, all is.
    pub fn residency(&self) -> Vec<(SegmentId, u64, f64)> {
        let mut known = self.residency.lock().unwrap_or_else(PoisonError::into_inner);
        if known.as_ref().is_none_or(|(asked, _)| asked.elapsed() > RESIDENCY_CHECK) {
            let share = |(id, _): &(SegmentId, u64)| match self.model.checkpoint().resident_bytes(*id) {
                Some((there, all)) if all > 0 => there as f64 / all as f64,
                _ => 1.0,
            };
            *known = Some((Instant::now(), self.segments.iter().map(share).collect()));
        }
        let shares = known.iter().flat_map(|(_, shares)| shares);
        self.segments.iter().zip(shares).map(|((id, bytes), share)| (*id, *bytes, *share)).collect()
    }

    pub fn tokenizer(&self) -> Result<&Arc<Tokenizer>, ApiError> {
        Ok(self.model.tokenizer()?)
    }

    /// The longest sequence, if it continues text.
    pub fn expect_context(&self) -> Result<usize, ApiError> {
        self.context.ok_or_else(|| match self.model.decoder() {
            Err(error) => error.into(),
            Ok(_) => ApiError::internal("the model has no context"),
        })
    }

    /// How it writes calls of tools.
    pub fn call_syntax(&self) -> CallSyntax {
        self.script.template().call_syntax()
    }

    /// The tokens of a conversation, up to where the answer begins.
    pub fn prompt(&self, messages: &[Message], options: &TemplateOptions) -> Result<Vec<u32>, ApiError> {
        expect_light_arguments(messages)?;
        let (tokenizer, template) = (self.tokenizer()?, self.script.template());
        let told = template.told(messages, options.tools.as_deref().unwrap_or_default());
        let mut tokens = template.encode(tokenizer, &told, options)?;
        tokens.splice(0..0, self.script.beginning()?);
        Ok(tokens)
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use firebox_runtime::device;
    use firebox_runtime::engine::HostConfig;

    use super::*;

    #[test]
    fn requests_are_as_urgent_as_their_model() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../assets/pocket");
        let model = Model::open(path, &device("cpu").unwrap()).unwrap();
        let engine = Engine::start(HostConfig::default()).unwrap();
        let telemetry = Telemetry::default();
        let served = Served::new("pocket", model, Priority::Background, &engine, &telemetry).unwrap();
        let request = served.request(vec![1, 2]);
        assert_eq!((&*request.model, request.task.priority), ("pocket", Priority::Background));
    }
}
