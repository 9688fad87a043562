//! The request for an answer of one of an engine's models.

use std::time::Duration;

use crate::schedule::{Priority, Task};
use crate::{GenerationConfig, Session};

/// What an engine is asked for: an answer of one of its models.
///
/// ```
/// use firebox_runtime::engine::Request;
/// use firebox_runtime::schedule::Priority;
///
/// let request = Request::new("chat", vec![1, 2, 3]).with_priority(Priority::Interactive);
/// assert_eq!(request.model, "chat");
/// ```
#[derive(Debug)]
pub struct Request {
    /// Which model.
    pub model: String,
    /// What the answer follows.
    pub prompt: Vec<u32>,
    /// How long it becomes, and how tokens are chosen.
    pub config: GenerationConfig,
    /// How urgent it is.
    pub task: Task,
    /// Whether it fails where its first token is not there in time, so that somebody else can answer.
    pub or_not_at_all: bool,
    /// What the prompt follows; absent where it is the beginning.
    pub session: Option<Box<Session>>,
    /// Which of the model's heads is worn; what the session wears, where none is said.
    pub head: Option<String>,
    /// Who must not notice others: beginnings are shared among requests of the same scope.
    pub scope: String,
    /// Whether to draft tokens by looking up how the text went on before; where nothing is said, as the
    /// [host](super::HostConfig::lookup) does.
    pub lookup: Option<bool>,
}

impl Request {
    /// An answer to a prompt that nothing comes before.
    pub fn new(model: impl Into<String>, prompt: Vec<u32>) -> Self {
        Self {
            model: model.into(),
            prompt,
            config: GenerationConfig::default(),
            task: Task::default(),
            or_not_at_all: false,
            session: None,
            head: None,
            scope: String::new(),
            lookup: None,
        }
    }

    /// The same, with limits and a way to choose tokens.
    pub fn with_config(self, config: GenerationConfig) -> Self {
        Self { config, ..self }
    }

    /// The same, so urgent.
    pub fn with_priority(mut self, priority: Priority) -> Self {
        self.task.priority = priority;
        self
    }

    /// The same, with so many tokens a second in mind.
    pub fn with_pace(mut self, pace: f64) -> Self {
        self.task.pace = Some(pace);
        self
    }

    /// The same, with its first token wanted within some time.
    pub fn with_first_by(mut self, first_by: Duration) -> Self {
        self.task.first_by = Some(first_by);
        self
    }

    /// The same, failing where its first token is not there [in time](Self::with_first_by).
    pub fn or_not_at_all(self) -> Self {
        Self { or_not_at_all: true, ..self }
    }

    /// The same, going on in a session, which comes back with the end.
    pub fn in_session(mut self, session: Session) -> Self {
        self.session = Some(Box::new(session));
        self
    }

    /// Drafts tokens by looking up how the text went on before, or does not. Tokens are the same, and come faster where the
    /// text repeats itself.
    pub fn with_lookup(mut self, lookup: bool) -> Self {
        self.lookup = Some(lookup);
        self
    }

    /// The same, answered by one of the model's heads.
    pub fn wearing(mut self, head: impl Into<String>) -> Self {
        self.head = Some(head.into());
        self
    }

    /// The same, for somebody whom others must not notice.
    pub fn in_scope(mut self, scope: impl Into<String>) -> Self {
        self.scope = scope.into();
        self
    }
}
