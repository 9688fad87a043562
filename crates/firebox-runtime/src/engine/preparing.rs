use std::sync::Arc;
use std::sync::mpsc::{Receiver, TryRecvError, channel};
use std::thread;
use std::time::Duration;

use firebox_text::Tokenizer;

use crate::answer::Answer;
use crate::engine::event::Failure;
use crate::engine::sequence::RequestId;
use crate::schedule::{Task, Ticket};
use crate::{GenerationConfig, OWN_HEAD, RuntimeError, Session};

/// What a request needs before it can wait for its turn, and what may take long: a head that is not in memory, and a
/// grammar, for the first of which the whole vocabulary is sorted.
pub(crate) struct Preparation {
    pub session: Box<Session>,
    pub prompt: Vec<u32>,
    pub head: Option<String>,
    pub config: GenerationConfig,
    pub tokenizer: Option<Arc<Tokenizer>>,
}

/// A request that is ready to wait for its turn.
#[derive(Debug)]
pub(crate) struct Prepared {
    pub session: Box<Session>,
    pub prompt: Vec<u32>,
    pub answer: Answer,
}

/// A request that is being prepared beside the engine, which answers others meanwhile.
#[derive(Debug)]
pub(crate) struct Preparing {
    pub id: RequestId,
    pub ticket: Ticket,
    pub task: Task,
    pub scope: String,
    pub since: Duration,
    /// When it fails, unless its first token is there.
    pub late_at: Option<Duration>,
    pub cancelled: bool,
    prepared: Receiver<Result<Prepared, Box<Failure>>>,
}

impl Preparation {
    /// Whether it may take longer than others should have to wait for it.
    pub fn takes_long(&self) -> bool {
        let is_there =
            |head: &String| head == OWN_HEAD || self.session.heads().is_none_or(|rack| rack.is_at_hand(head));
        self.config.grammar.is_some() || self.head.as_ref().is_some_and(|head| !is_there(head))
    }

    /// Does what is needed, however long it takes. A session that is refused comes back.
    pub fn run(self) -> Result<Prepared, Box<Failure>> {
        let Self { mut session, prompt, head, config, tokenizer } = self;
        match answer(&mut session, &prompt, head.as_deref(), config, tokenizer) {
            Ok(answer) => Ok(Prepared { session, prompt, answer }),
            Err(error) => Err(Box::new(Failure { error, session: Some(session) })),
        }
    }

    /// Does it on a thread of its own, or here where there is none left.
    pub fn begin(self) -> Receiver<Result<Prepared, Box<Failure>>> {
        let (done, prepared) = channel();
        let ((given, taken), here) = (channel(), done.clone());
        let beside = move || {
            if let Ok(preparation) = taken.recv() {
                let preparation: Self = preparation;
                let _ = done.send(preparation.run());
            }
        };
        match thread::Builder::new().name("firebox-prepare".into()).spawn(beside) {
            Ok(_) => drop(given.send(self)),
            Err(_) => drop(here.send(self.run())),
        }
        prepared
    }
}

fn answer(
    session: &mut Session,
    prompt: &[u32],
    head: Option<&str>,
    config: GenerationConfig,
    tokenizer: Option<Arc<Tokenizer>>,
) -> Result<Answer, RuntimeError> {
    // Whoever names a head wants no other.
    if let Some(name) = head
        && let Some(source) = session.use_head(name).instead
    {
        return Err(RuntimeError::HeadNotWorn { name: name.into(), source });
    }
    session.expect_answer(prompt.len(), config.context)?;
    Answer::new(config, tokenizer)
}

impl Preparing {
    pub fn new(
        (id, ticket, task): (RequestId, Ticket, Task),
        scope: String,
        since: Duration,
        late_at: Option<Duration>,
        preparation: Preparation,
    ) -> Self {
        let prepared = preparation.begin();
        Self { id, ticket, task, scope, since, late_at, cancelled: false, prepared }
    }

    pub fn is_late(&self, now: Duration) -> bool {
        self.late_at.is_some_and(|late_at| now >= late_at)
    }

    /// What came of it, once it is done.
    pub fn prepared(&self) -> Option<Result<Prepared, Box<Failure>>> {
        match self.prepared.try_recv() {
            Ok(prepared) => Some(prepared),
            Err(TryRecvError::Empty) => None,
            Err(TryRecvError::Disconnected) => {
                let reason = "the thread that prepares a request is gone".into();
                Some(Err(RuntimeError::Threads { reason }.into()))
            }
        }
    }
}
