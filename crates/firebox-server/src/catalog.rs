use std::sync::Arc;

use firebox_runtime::engine::Engine;
use firebox_runtime::telemetry::Telemetry;
use firebox_runtime::{Model, RuntimeError};
use firebox_text::{
    CallSyntax, ChatTemplate, Message, TemplateOptions, TextError, Tokenizer, tools_in_words,
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
}

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
            served.push(Arc::new(Served { name, model, template, own_template, context }));
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

    /// The tokens of a conversation, up to where the answer begins.
    pub fn prompt(&self, messages: &[Message], options: &TemplateOptions) -> Result<Vec<u32>, ApiError> {
        let tokenizer = self.tokenizer()?;
        let mut tokens = if self.template.knows_tools() {
            self.template.encode(tokenizer, messages, options)?
        } else {
            let told = tools_in_words(messages, options.tools.as_deref().unwrap_or_default());
            self.template.encode(tokenizer, &told, options)?
        };
        if !self.own_template && tokenizer.adds_bos() {
            tokens.splice(0..0, tokenizer.bos_id());
        }
        Ok(tokens)
    }
}
