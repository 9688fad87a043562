//! The part that `/v1/chat/completions` and `/v1/responses` share: from messages to choices.

use std::sync::Arc;

use firebox_runtime::GenerationConfig;
use firebox_text::{CallSyntax, Message, TemplateOptions, Tokenizer};

use crate::answer_grammar::answer_grammar;
use crate::answer_parser::AnswerFormat;
use crate::app::App;
use crate::catalog::SelectedModel;
use crate::choices::Choices;
use crate::error::ApiError;
use crate::sampling_params::ResponseOptions;
use crate::tools::Tools;

/// A conversation to be continued by the model.
#[derive(Debug)]
pub(crate) struct ConversationRequest {
    pub selected: SelectedModel,
    pub messages: Vec<Message>,
    pub options: TemplateOptions,
    pub tools: Tools,
    pub config: GenerationConfig,
    /// The request field that asked for a grammar.
    pub grammar_field: &'static str,
}

/// The choices, and how to interpret them.
#[derive(Debug)]
pub(crate) struct ConversationResponse {
    pub choices: Choices,
    pub answer: AnswerFormat,
    pub tokenizer: Arc<Tokenizer>,
}

impl ConversationRequest {
    /// Submits the request and waits until the engine accepts it.
    pub async fn begin(
        mut self,
        app: &App,
        scope: &str,
        response_options: ResponseOptions,
    ) -> Result<ConversationResponse, ApiError> {
        let served = self.selected.served.clone();
        let syntax = served.call_syntax();
        let needed = self.tools.grammar(syntax);
        let opened = needed.is_some();
        let format = self.config.grammar.as_ref();
        // A grammar of the whole answer has no place for thoughts.
        let may_think = !opened && format.is_none();
        let of_tools = match needed {
            Some(needed) => Some(needed),
            None => answer_grammar(&self.tools, syntax, served.tokenizer()?, format, self.grammar_field)?,
        };
        let grammar_field = if of_tools.is_some() { "tools" } else { self.grammar_field };
        self.config.grammar = of_tools.or(self.config.grammar);
        let grammar = self.config.grammar.as_ref();
        let compiled = app.compile_grammar(grammar_field, grammar, &served, scope).await?;
        let opening = opened.then(|| syntax.opening(self.tools.single_required()).into_owned());
        let tools = self.options.tools.clone();
        let parallel = self.tools.parallel;
        let (tokenizer, model) = (served.tokenizer()?.clone(), served.clone());
        let (messages, options) = (self.messages, self.options);
        let bytes = messages.iter().map(|message| message.text().len()).sum();
        let first = opening.clone();
        let encode = move || {
            let mut prompt = served.prompt(&messages, &options)?;
            if let Some(opening) = first
                && !prompt.is_empty()
            {
                prompt.extend(served.tokenizer()?.encode(&opening, false)?);
            }
            Ok(prompt)
        };
        let prompt = app.over_text(scope, bytes, encode).await?;
        if prompt.is_empty() {
            return Err(ApiError::field("messages", "they render to an empty prompt"));
        }
        let template = model.script.template();
        let mut reader = template.answer_reader(&tokenizer, &prompt, tools.as_deref());
        if !may_think {
            reader = reader.without_thoughts();
        }
        let has_short_ids = syntax == CallSyntax::Listed;
        let answer = AnswerFormat { reader, opening, parallel, has_short_ids };
        let (prompts, config) = (vec![prompt], &self.config);
        let choices =
            Choices::begin(app, &self.selected, scope, prompts, config, compiled, response_options).await?;
        Ok(ConversationResponse { choices, answer, tokenizer })
    }
}
