//! A model in service: its engine entry, prompts and residency.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use firebox_engine::{Engine, EngineError, Request};
use firebox_runtime::schedule::Priority;
use firebox_runtime::telemetry::Telemetry;
use firebox_runtime::{Embedding, Model, Script};
use firebox_store::SegmentId;
use firebox_text::{CallSyntax, Message, TemplateOptions, Tokenizer};
use tokio::sync::Semaphore;

use crate::error::ApiError;
use crate::json_limits::check_arguments_memory;
use crate::prompt_length;

/// A model in service.
#[derive(Debug)]
pub(crate) struct ServedModel {
    pub name: String,
    pub model: Model,
    priority: Priority,
    /// Renders conversations for the model.
    pub script: Script,
    /// The longest sequence with its prompt; absent for encoders.
    pub context: Option<usize>,
    /// Serializes what sessions of this model compute outside the engine, such as facts and closing tokens.
    pub computing: Arc<Semaphore>,
    /// The segments of the weights and their sizes in bytes.
    segments: Vec<(SegmentId, u64)>,
    /// The resident share of each segment, and when it was measured.
    residency: Mutex<Option<(Instant, Vec<f64>)>>,
}

/// Measuring residency walks all pages of a model, so watchers share the result for this long.
const RESIDENCY_MAX_AGE: Duration = Duration::from_secs(1);

impl ServedModel {
    /// Prepares a model. One that generates text is added to the engine.
    pub fn new(
        name: &str,
        model: Model,
        priority: Priority,
        engine: &Engine,
        telemetry: &Telemetry,
    ) -> Result<Self, EngineError> {
        let script = Script::new(&model)?;
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

    /// Returns a request with the model's priority.
    pub fn request(&self, prompt: Vec<u32>) -> Request {
        Request::new(&self.name, prompt).with_priority(self.priority)
    }

    /// Returns a request for vectors with the model's priority.
    pub fn embedding_request(&self, embedding: Embedding) -> Request {
        Request::embedding(&self.name, embedding).with_priority(self.priority)
    }

    pub fn heads(&self) -> Vec<String> {
        self.model.heads().map(|heads| heads.names()).unwrap_or_default()
    }

    /// Returns each segment's size and resident share, from 0 to 1. Systems that do not report residency count
    /// as fully resident.
    pub fn residency(&self) -> Vec<(SegmentId, u64, f64)> {
        let mut known = self.residency.lock().unwrap_or_else(PoisonError::into_inner);
        if known.as_ref().is_none_or(|(asked, _)| asked.elapsed() > RESIDENCY_MAX_AGE) {
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

    /// Returns the longest sequence, or an error for encoders.
    pub fn require_context(&self) -> Result<usize, ApiError> {
        self.context.ok_or_else(|| match self.model.decoder() {
            Err(error) => error.into(),
            Ok(_) => ApiError::internal("the model has no context"),
        })
    }

    /// Returns the syntax of the model's tool calls.
    pub fn call_syntax(&self) -> CallSyntax {
        self.script.template().call_syntax()
    }

    /// Renders a conversation to tokens, up to where the answer begins.
    pub fn prompt(&self, messages: &[Message], options: &TemplateOptions) -> Result<Vec<u32>, ApiError> {
        check_arguments_memory(messages)?;
        if let Some(context) = self.context {
            let texts: Vec<String> = messages.iter().map(Message::text).collect();
            let texts: Vec<&str> = texts.iter().map(String::as_str).collect();
            prompt_length::check(self.tokenizer()?, &texts, context)?;
        }
        let (tokenizer, template) = (self.tokenizer()?, self.script.template());
        let told = template.messages_with_tools(messages, options.tools.as_deref().unwrap_or_default());
        let mut tokens = template.encode(tokenizer, &told, options)?;
        tokens.splice(0..0, self.script.beginning()?);
        Ok(tokens)
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use firebox_engine::EngineConfig;
    use firebox_runtime::device;

    use super::*;

    #[test]
    fn requests_have_the_priority_of_their_model() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../assets/pocket");
        let model = Model::open(path, &device("cpu").unwrap()).unwrap();
        let engine = Engine::start(EngineConfig::default()).unwrap();
        let telemetry = Telemetry::default();
        let served = ServedModel::new("pocket", model, Priority::Background, &engine, &telemetry).unwrap();
        let request = served.request(vec![1, 2]);
        assert_eq!((&*request.model, request.task.priority), ("pocket", Priority::Background));
    }
}
