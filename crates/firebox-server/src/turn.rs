use std::sync::Arc;

use firebox_runtime::GenerationConfig;
use firebox_text::{Message, TemplateOptions, Tokenizer};

use crate::answers::Answers;
use crate::app::{App, blocking};
use crate::catalog::Chosen;
use crate::error::ApiError;
use crate::listener::Listening;
use crate::tools::Tools;
use crate::wishes::Delivery;

/// A conversation that waits for the model's next turn.
#[derive(Debug)]
pub(crate) struct Turn {
    pub chosen: Chosen,
    pub messages: Vec<Message>,
    pub options: TemplateOptions,
    pub tools: Tools,
    pub config: GenerationConfig,
    /// The field that has asked for the form of the answer.
    pub form: &'static str,
}

/// Answers to it, and what it takes to understand them.
#[derive(Debug)]
pub(crate) struct Answered {
    pub answers: Answers,
    pub listening: Option<Listening>,
    pub tokenizer: Arc<Tokenizer>,
}

impl Turn {
    /// Asks for answers, and waits until it is known that they come.
    pub async fn begin(mut self, app: &App, scope: &str, delivery: Delivery) -> Result<Answered, ApiError> {
        let served = self.chosen.served.clone();
        let syntax = served.call_syntax();
        let needed = self.tools.grammar(syntax);
        let opened = needed.is_some();
        if opened {
            self.config.grammar = needed;
        }
        let form = if opened { "tools" } else { self.form };
        app.check(form, self.config.grammar.as_ref(), &served).await?;
        let opening = opened.then(|| syntax.opening(self.tools.only()).into_owned());
        let tools = self.options.tools.clone();
        let listening = (tools.is_some() || syntax.is_everywhere()).then(|| Listening {
            syntax,
            tools: tools.unwrap_or_default(),
            opening: opening.clone(),
            parallel: self.tools.parallel,
        });
        let tokenizer = served.tokenizer()?.clone();
        let (messages, options) = (self.messages, self.options);
        let prompt = blocking(move || {
            let mut prompt = served.prompt(&messages, &options)?;
            if let Some(opening) = opening
                && !prompt.is_empty()
            {
                prompt.extend(served.tokenizer()?.encode(&opening, false)?);
            }
            Ok(prompt)
        })
        .await?;
        if prompt.is_empty() {
            return Err(ApiError::field("messages", "there is nothing in them to answer"));
        }
        let answers = Answers::begin(app, &self.chosen, scope, vec![prompt], &self.config, delivery).await?;
        Ok(Answered { answers, listening, tokenizer })
    }
}
