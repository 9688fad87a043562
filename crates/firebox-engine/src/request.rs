//! A request to an engine.

use std::time::Duration;

use firebox_runtime::{CompiledGrammar, Embedding, GenerationConfig, Session};
use firebox_schedule::{Client, Priority, Task};

/// A request for an answer of one of an engine's models.
///
/// ```
/// use firebox_engine::Request;
/// use firebox_runtime::schedule::Priority;
///
/// let request = Request::new("chat", vec![1, 2, 3]).with_priority(Priority::Interactive);
/// assert_eq!(request.model, "chat");
/// ```
#[derive(Debug)]
pub struct Request {
    /// The name of the model.
    pub model: String,
    /// The tokens to continue.
    pub prompt: Vec<u32>,
    /// Limits and sampling.
    pub config: GenerationConfig,
    /// Priority and deadlines.
    pub task: Task,
    /// Whether it fails if its first token is late, so that another model can answer.
    pub or_not_at_all: bool,
    /// The session that the prompt continues; a new one if absent.
    pub session: Option<Box<Session>>,
    /// The head that answers; the session's own choice if absent.
    pub head: Option<String>,
    /// Texts to embed instead of a prompt to continue.
    pub embedding: Option<Box<Embedding>>,
    /// The scope within which requests share prefixes. Requests of other scopes cannot observe it.
    pub scope: String,
    /// Who asks. Requests of one client share its part of the batch and of the queue.
    pub client: Client,
    /// The grammar of the configuration, if it is compiled already.
    pub compiled: Option<CompiledGrammar>,
    /// Whether to draft tokens by looking up how the text went on before; if absent, the [engine's
    /// setting](super::EngineConfig::lookup) applies.
    pub lookup: Option<bool>,
}

impl Request {
    /// A request that continues a prompt in a new session.
    pub fn new(model: impl Into<String>, prompt: Vec<u32>) -> Self {
        Self {
            model: model.into(),
            prompt,
            config: GenerationConfig::default(),
            task: Task::default(),
            or_not_at_all: false,
            session: None,
            head: None,
            embedding: None,
            scope: String::new(),
            client: Client::default(),
            compiled: None,
            lookup: None,
        }
    }

    /// A request for the vectors of texts, which come as [`Event::Vectors`](super::Event::Vectors).
    pub fn embedding(model: impl Into<String>, embedding: Embedding) -> Self {
        Self { embedding: Some(Box::new(embedding)), ..Self::new(model, Vec::new()) }
    }

    /// Sets limits and sampling.
    pub fn with_config(self, config: GenerationConfig) -> Self {
        Self { config, ..self }
    }

    /// Sets the priority.
    pub fn with_priority(mut self, priority: Priority) -> Self {
        self.task.priority = priority;
        self
    }

    /// Sets a target rate in tokens per second.
    pub fn with_pace(mut self, pace: f64) -> Self {
        self.task.pace = Some(pace);
        self
    }

    /// Sets a deadline for the first token, counted from submission.
    pub fn with_first_by(mut self, first_by: Duration) -> Self {
        self.task.first_by = Some(first_by);
        self
    }

    /// Fails the request if its first token misses the [deadline](Self::with_first_by).
    pub fn or_not_at_all(self) -> Self {
        Self { or_not_at_all: true, ..self }
    }

    /// Continues a session, which the last event returns.
    pub fn in_session(mut self, session: Session) -> Self {
        self.session = Some(Box::new(session));
        self
    }

    /// Sets whether to draft tokens by looking up how the text went on before. The tokens stay the same, and come
    /// faster if the text repeats itself.
    pub fn with_lookup(mut self, lookup: bool) -> Self {
        self.lookup = Some(lookup);
        self
    }

    /// Chooses the head that answers.
    pub fn with_head(mut self, head: impl Into<String>) -> Self {
        self.head = Some(head.into());
        self
    }

    /// Sets who asks.
    pub fn for_client(self, client: Client) -> Self {
        Self { client, ..self }
    }

    /// Uses a grammar that is compiled already.
    pub fn with_compiled_grammar(self, compiled: Option<CompiledGrammar>) -> Self {
        Self { compiled, ..self }
    }

    /// Sets the scope within which requests share prefixes.
    pub fn in_scope(mut self, scope: impl Into<String>) -> Self {
        self.scope = scope.into();
        self
    }
}
