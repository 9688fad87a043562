//! Text assets: tokenizer and chat templates, carried without interpretation. `firebox-text` interprets them.

use serde_json::Value;

use crate::error::{Fault, StoreError};
use crate::folder::{Folder, MAX_JSON, MAX_TEMPLATE, MAX_TOKENIZER};
use crate::gguf::vocabulary::{GgufVocabulary, check};

/// The text side of a model.
#[derive(Debug, Clone, Default)]
pub struct TextAssets {
    /// The tokenizer, as the model's files have it.
    pub tokenizer: Option<TokenizerSource>,
    /// The default chat template, a Jinja source.
    pub chat_template: Option<String>,
    /// The chat template for conversations with tools, if the model has a separate one.
    pub tools_template: Option<String>,
    /// `tokenizer_config.json`.
    pub tokenizer_config: Option<Value>,
    /// `generation_config.json`.
    pub generation_config: Option<Value>,
    /// `special_tokens_map.json`.
    pub special_tokens_map: Option<Value>,
}

/// A tokenizer in one of the forms in which models store it.
#[derive(Debug, Clone)]
#[expect(clippy::large_enum_variant, reason = "a model has one, and a vocabulary is most of it on the heap")]
pub enum TokenizerSource {
    /// The bytes of a `tokenizer.json`.
    Json(Vec<u8>),
    /// The vocabulary in GGUF metadata.
    Gguf(GgufVocabulary),
}

pub(crate) const GENERATION_CONFIG: &str = "generation_config.json";
pub(crate) const CHAT_TEMPLATE: &str = "chat_template.jinja";
/// The only additional template that `transformers` selects by itself.
pub(crate) const TOOLS_TEMPLATE: &str = "additional_chat_templates/tool_use.jinja";

const DEFAULT: &str = "default";
const WITH_TOOLS: &str = "tool_use";

/// The file of a bundle that holds a GGUF vocabulary.
pub(crate) const GGUF_VOCABULARY: &str = "gguf-vocabulary.json";

impl TextAssets {
    /// Reads them from the files of a Hugging Face directory or a bundle.
    pub(crate) fn read(folder: &Folder) -> Result<Self, StoreError> {
        let tokenizer_config = folder.read_object("tokenizer_config.json", MAX_JSON)?;
        let tools_template = folder.read_text(TOOLS_TEMPLATE, MAX_TEMPLATE)?;
        let chat_template = folder.read_text(CHAT_TEMPLATE, MAX_TEMPLATE)?;
        // Template files take precedence over templates in the configuration.
        let configured = match &chat_template {
            Some(_) => Self::default(),
            None => Self::default().with_templates_of(tokenizer_config.as_ref()),
        };
        let tools_template = tools_template.or(configured.tools_template);
        let chat_template = match chat_template.or(configured.chat_template) {
            Some(template) => Some(template),
            None => template_in(folder.read_object("chat_template.json", MAX_TEMPLATE)?.as_ref(), DEFAULT)
                .map(str::to_owned),
        };
        let tokenizer = match folder.read("tokenizer.json", MAX_TOKENIZER)? {
            Some(bytes) => Some(TokenizerSource::Json(bytes)),
            None => read_vocabulary(folder)?.map(TokenizerSource::Gguf),
        };
        Ok(Self {
            tokenizer,
            chat_template,
            tools_template,
            tokenizer_config,
            generation_config: folder.read_object(GENERATION_CONFIG, MAX_JSON)?,
            special_tokens_map: folder.read_object("special_tokens_map.json", MAX_JSON)?,
        })
    }

    /// Adds a `tokenizer_config.json` and its templates.
    pub fn with_config(self, tokenizer_config: Value) -> Self {
        let configured = self.with_templates_of(Some(&tokenizer_config));
        Self { tokenizer_config: Some(tokenizer_config), ..configured }
    }

    fn with_templates_of(self, tokenizer_config: Option<&Value>) -> Self {
        let template = |name| template_in(tokenizer_config, name).map(str::to_owned);
        Self { chat_template: template(DEFAULT), tools_template: template(WITH_TOOLS), ..self }
    }
}

fn read_vocabulary(folder: &Folder) -> Result<Option<GgufVocabulary>, StoreError> {
    let Some(bytes) = folder.read(GGUF_VOCABULARY, MAX_TOKENIZER)? else { return Ok(None) };
    let parse = || {
        let vocabulary = serde_json::from_slice(&bytes).map_err(|error| Fault::json("JSON", &error))?;
        check(&vocabulary)?;
        Ok(Some(vocabulary))
    };
    parse().map_err(|fault: Fault| fault.in_file(&folder.path().join(GGUF_VOCABULARY)))
}

/// The template of a name in a configuration's `chat_template`, which is a single unnamed template or a list of named ones.
fn template_in<'c>(config: Option<&'c Value>, name: &str) -> Option<&'c str> {
    match config?.get("chat_template")? {
        Value::String(template) => (name == DEFAULT).then_some(template.as_str()),
        Value::Array(named) => named
            .iter()
            .find(|entry| entry.get("name").and_then(Value::as_str) == Some(name))
            .and_then(|entry| entry.get("template"))
            .and_then(Value::as_str),
        _ => None,
    }
}
