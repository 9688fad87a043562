//! From what the user says to the tokens the model reads.

use std::path::PathBuf;
use std::sync::Arc;

use anyhow::Context as _;
use clap::Args;
use firebox_runtime::Model;
use firebox_text::{ChatTemplate, Message, TemplateOptions, TextError, Tokenizer};

use crate::answer_printer::Printing;

/// Options of the chat template.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Prompt")]
pub struct PromptArgs {
    /// What the model is told to be
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
    pub system: Option<String>,
    /// Ask a model that can think aloud to do so
    #[arg(long, overrides_with = "no_think")]
    pub think: bool,
    /// Ask it not to
    #[arg(long, overrides_with = "think")]
    pub no_think: bool,
    /// Show what it thinks before it answers
    #[arg(long)]
    pub show_thinking: bool,
    #[command(flatten)]
    pub template: TemplateArgs,
}

/// Which chat template is used.
#[derive(Debug, Clone, Args)]
pub struct TemplateArgs {
    /// A chat template to use instead of the model's
    #[arg(long, value_name = "FILE")]
    chat_template: Option<PathBuf>,
}

impl PromptArgs {
    /// Returns what is printed of an answer.
    pub fn printing(&self) -> Printing {
        if self.show_thinking { Printing::Thoughts } else { Printing::Text }
    }

    /// Returns the template's thinking option.
    pub fn thinking(&self) -> Option<bool> {
        match (self.think, self.no_think) {
            (true, _) => Some(true),
            (_, true) => Some(false),
            _ => None,
        }
    }
}

impl TemplateArgs {
    /// The template to use, if the model has one or the user gave one.
    pub fn template(&self, model: &Model) -> anyhow::Result<Option<ChatTemplate>> {
        let tokenizer = model.tokenizer()?;
        let mut assets = model.checkpoint().text().clone();
        if let Some(path) = &self.chat_template {
            let source =
                std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
            assets.chat_template = Some(source);
            assets.tools_template = None;
        }
        match ChatTemplate::new(&assets, tokenizer) {
            Ok(template) => Ok(Some(template)),
            Err(TextError::MissingChatTemplate) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// Returns the prompter that writes conversations: by the template or, if there is none, line after line.
    pub fn prompter(&self, model: &Model, thinking: Option<bool>) -> anyhow::Result<Prompter> {
        let tokenizer = model.tokenizer()?.clone();
        let own = self.template(model)?;
        let add_special = own.is_none();
        let template = own.map_or_else(ChatTemplate::plain, Ok)?;
        Ok(Prompter { tokenizer, template, thinking, add_special })
    }
}

/// Turns conversations into tokens.
pub struct Prompter {
    pub tokenizer: Arc<Tokenizer>,
    pub template: ChatTemplate,
    pub thinking: Option<bool>,
    /// Adds the token that begins every text, because the template does not write it.
    pub add_special: bool,
}

impl Prompter {
    /// The tokens of a conversation, up to where the assistant's answer begins.
    pub fn encode(&self, messages: &[Message]) -> anyhow::Result<Vec<u32>> {
        let options = TemplateOptions { enable_thinking: self.thinking, ..TemplateOptions::default() };
        let mut tokens = self.template.encode(&self.tokenizer, messages, &options)?;
        if self.add_special && self.tokenizer.adds_bos() {
            tokens.splice(0..0, self.tokenizer.bos_id());
        }
        Ok(tokens)
    }
}
