use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use firebox_runtime::engine::Engine;
use firebox_runtime::telemetry::Telemetry;
use firebox_runtime::{Model, RuntimeError};
use firebox_store::SegmentId;
use firebox_text::{
    CallSyntax, ChatTemplate, Continued, Message, TemplateOptions, TextError, Tokenizer, tools_in_words,
};
use serde_json::{Map, Value, json};

use crate::ServerError;
use crate::error::ApiError;

/// For models without a template: what is said, line after line, with nobody named.
const PLAIN: &str = "{% for message in messages %}{{ message.content }}\n{% endfor %}";

/// A model that is served.
#[derive(Debug)]
pub(crate) struct Served {
    pub name: String,
    pub model: Model,
    template: ChatTemplate,
    /// Whether the template is the model's own.
    own_template: bool,
    /// Longest sequence, prompt included; nothing for what only embeds.
    pub context: Option<usize>,
    /// The parts of its weights, and bytes of each.
    segments: Vec<(SegmentId, u64)>,
    /// How much of each was in memory when the system was asked last.
    residency: Mutex<Option<(Instant, Vec<f64>)>>,
}

/// The system goes through all pages of a model when it is asked, so that several who watch share an answer.
const RESIDENCY_CHECK: Duration = Duration::from_secs(1);

/// The models that are served, in the order in which they were named.
#[derive(Debug)]
pub(crate) struct Catalog(Vec<Arc<Served>>);

/// A model and the head it is to wear.
#[derive(Debug, Clone)]
pub(crate) struct Chosen {
    pub served: Arc<Served>,
    pub head: Option<String>,
    /// As it was asked for.
    pub name: String,
}

impl Catalog {
    /// Takes models in. Those that continue text go to the engine.
    pub fn new(
        models: Vec<(String, Model)>,
        engine: &Engine,
        telemetry: &Telemetry,
    ) -> Result<Self, ServerError> {
        if models.is_empty() {
            return Err(ServerError::NoModels);
        }
        let mut served: Vec<Arc<Served>> = Vec::new();
        for (name, model) in models {
            if served.iter().any(|other| other.name == name) {
                return Err(RuntimeError::ModelNamed { name }.into());
            }
            let model = model.with_telemetry(telemetry, &name);
            let context = match model.decoder() {
                Ok(decoder) => {
                    engine.add(&name, model.clone())?;
                    Some(decoder.config().max_positions)
                }
                Err(_) => None,
            };
            let own = match model.tokenizer() {
                Ok(tokenizer) => ChatTemplate::new(model.checkpoint().text(), tokenizer),
                Err(_) => Err(TextError::MissingChatTemplate),
            };
            let (template, own_template) = match own {
                Ok(template) => (template, true),
                Err(TextError::MissingChatTemplate) => {
                    (ChatTemplate::from_source(PLAIN, Map::new()).map_err(RuntimeError::from)?, false)
                }
                Err(error) => return Err(RuntimeError::from(error).into()),
            };
            let segments = model.checkpoint().segments();
            let segments = segments.into_iter().map(|segment| (segment.id, segment.bytes)).collect();
            let residency = Mutex::default();
            let made = Served { name, model, template, own_template, context, segments, residency };
            served.push(Arc::new(made));
        }
        Ok(Self(served))
    }

    /// The model of a name, or of `model:head`. Where nobody is named and there is only one, that.
    pub fn find(&self, name: Option<&str>) -> Result<Chosen, ApiError> {
        let Some(name) = name else {
            return match &self.0[..] {
                [only] => Ok(Chosen { served: only.clone(), head: None, name: only.name.clone() }),
                _ => Err(ApiError::field(
                    "model",
                    format!("is missing; there are: {}", self.names().join(", ")),
                )),
            };
        };
        let of = |wanted: &str| self.0.iter().find(|served| served.name == wanted).cloned();
        if let Some(served) = of(name) {
            return Ok(Chosen { served, head: None, name: name.into() });
        }
        if let Some((model, head)) = name.rsplit_once(':')
            && let Some(served) = of(model)
            && served.heads().iter().any(|other| other == head)
        {
            return Ok(Chosen { served, head: Some(head.into()), name: name.into() });
        }
        Err(ApiError::no_model(name, &self.names()))
    }

    /// The models that are served.
    pub fn served(&self) -> impl Iterator<Item = &Arc<Served>> {
        self.0.iter()
    }

    /// All that can be asked for.
    pub fn names(&self) -> Vec<String> {
        let of = |served: &Arc<Served>| {
            let heads = served.heads().into_iter().map(|head| format!("{}:{head}", served.name));
            [served.name.clone()].into_iter().chain(heads).collect::<Vec<_>>()
        };
        self.0.iter().flat_map(of).collect()
    }
}

impl Chosen {
    /// As lists of models have it.
    pub fn value(&self, created: u64) -> Value {
        json!({
            "id": self.name,
            "object": "model",
            "created": created,
            "owned_by": "firebox",
            "root": self.served.name,
            "parent": self.head.as_ref().map(|_| &self.served.name),
            "max_model_len": self.served.context,
        })
    }
}

impl Served {
    fn heads(&self) -> Vec<String> {
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
        self.template.call_syntax()
    }

    /// The parts that conversations are written from.
    pub fn continued<'a>(&'a self, options: &'a TemplateOptions) -> Result<Continued<'a>, ApiError> {
        Ok(Continued::new(&self.template, self.tokenizer()?, options))
    }

    /// What comes before everything where the template does not write it.
    pub fn beginning(&self) -> Result<Vec<u32>, ApiError> {
        let tokenizer = self.tokenizer()?;
        let begins = !self.own_template && tokenizer.adds_bos();
        Ok(tokenizer.bos_id().filter(|_| begins).into_iter().collect())
    }

    /// The tokens of a conversation, up to where the answer begins.
    pub fn prompt(&self, messages: &[Message], options: &TemplateOptions) -> Result<Vec<u32>, ApiError> {
        let tokenizer = self.tokenizer()?;
        let mut tokens = if self.template.knows_tools() {
            self.template.encode(tokenizer, messages, options)?
        } else {
            let told = tools_in_words(messages, options.tools.as_deref().unwrap_or_default());
            self.template.encode(tokenizer, &told, options)?
        };
        tokens.splice(0..0, self.beginning()?);
        Ok(tokens)
    }
}
