//! The pocket model's training data: conversations written by a seeded generator, and a tokenizer made for them.
//!
//! A conversation belongs to one [`Task`], and so does the head that learns from it. Facts are told and asked for in all
//! of them, in the same words; the answer is a sentence, a line of code or a line of a summary. Which of them it is depends
//! on nothing but the head. Beside these, each task has requests of its own.
//!
//! No fact and no program of [`Split::Train`] occurs in [`Split::HeldOut`]: a hash of each says to which of the two it
//! belongs. Names are made up from syllables and letters, so a model cannot learn them by heart and has to copy.

mod conversation;
mod draw;
mod examination;
mod fact;
mod passage;
mod phase_data;
mod program;
mod recipe;
mod talk;
mod tokenizer;
mod words;
mod workshop;

use serde::{Deserialize, Serialize};

pub use firebox_runtime::heads::{FALLBACK, ROUTER};

pub use examination::{Cell, Examination, Report, Score};
pub use passage::{Answer, Passage, Scribe};
pub use recipe::{
    ArchitecturePlan, BasePlan, EvaluationPlan, FallbackPlan, HeadsPlan, InitializationPlan, OptimizerPlan,
    Recipe, RouterPlan, ShapeName, Stage, TokenizerPlan,
};
pub use tokenizer::{PocketTokenizer, TokenizerError};
pub use workshop::{Watch, Workshop};

/// The task of a head.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Task {
    /// Answers in sentences.
    Chat,
    /// Answers in code.
    Code,
    /// Answers in the line of a summary.
    Summarize,
}

impl Task {
    /// Every task, in the order of the router's classes.
    pub const ALL: [Self; 3] = [Self::Chat, Self::Code, Self::Summarize];

    /// As it is spelt in data and as the name of a head.
    pub fn name(self) -> &'static str {
        match self {
            Self::Chat => "chat",
            Self::Code => "code",
            Self::Summarize => "summarize",
        }
    }
}

/// Which facts and programs a conversation is made of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Split {
    /// Seven of eight: to learn from.
    Train,
    /// One of eight: to measure with.
    HeldOut,
}

impl Split {
    /// The split to which a fact or a program belongs, told by its spelling in code.
    fn of(code: &str) -> Self {
        // FNV-1a: the split is part of the recipe and must not change with a library.
        let hash = code.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
        });
        if (hash >> 32).is_multiple_of(8) { Self::HeldOut } else { Self::Train }
    }
}

/// Who says a line.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// The system prompt.
    System,
    /// The person.
    User,
    /// The model.
    Assistant,
}

/// One message of a conversation.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Line {
    /// Who says it.
    pub role: Role,
    /// The text of the message.
    pub content: String,
    /// 0 for an answer that is history only: another head gave it, and nothing is learnt from it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub weight: Option<u8>,
}

/// The kind of request that an answer of a conversation responds to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// The user told something.
    Tell,
    /// The user asked for something told before.
    Ask,
    /// The user asked for something never told.
    Unknown,
    /// Greetings, thanks, questions about the model.
    Talk,
    /// The user wanted a program.
    Program,
    /// The user wanted a summary.
    Summary,
    /// The user asked for all facts about one person or thing.
    About,
}

impl Kind {
    /// The head a router should choose for such a request, found in a conversation of `task`: that task's where nothing
    /// else can be meant, and the one for chat where every head has an answer.
    pub fn route(self, task: Task) -> Task {
        match self {
            Self::Talk | Self::Program | Self::Summary => task,
            Self::Tell | Self::Ask | Self::Unknown | Self::About => Task::Chat,
        }
    }
}

/// A conversation and what it teaches.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Conversation {
    /// The head it is for.
    pub task: Task,
    /// The kind of each answer whose [weight](Line::weight) is not 0.
    pub kinds: Vec<Kind>,
    /// The messages.
    pub messages: Vec<Line>,
}

/// Facts that are to be remembered for long, and what is said meanwhile.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Persistent {
    /// Tells the facts.
    pub system: Line,
    /// Exchanges that have nothing to do with the facts.
    pub exchanges: Vec<[Line; 2]>,
    /// Questions for the facts, and the answers.
    pub questions: Vec<[Line; 2]>,
}

/// The length and difficulty of conversations. Ranges include both ends.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Shape {
    /// The number of facts in the system prompt.
    pub system_facts: (usize, usize),
    /// The number of turns.
    pub turns: (usize, usize),
    /// No turn begins after this many characters.
    pub characters: usize,
    /// The maximum number of facts in a summary.
    pub summary_facts: usize,
    /// The percentage of facts that replace one told before.
    pub percent_revised: usize,
}

impl Shape {
    /// One or two turns, for the first steps of a training.
    pub fn short() -> Self {
        Self { system_facts: (0, 2), turns: (1, 3), characters: 200, summary_facts: 2, percent_revised: 10 }
    }

    /// The shape that the pocket model is made for.
    pub fn full() -> Self {
        Self { system_facts: (0, 6), turns: (3, 12), characters: 600, summary_facts: 3, percent_revised: 25 }
    }

    /// Long conversations after a system prompt full of facts.
    pub fn distant() -> Self {
        Self { system_facts: (4, 6), turns: (16, 24), characters: 1200, ..Self::full() }
    }
}

/// Writes conversations, the same ones for the same seed.
///
/// ```
/// use firebox_train::pocket::{Generator, Shape, Split, Task};
///
/// let mut generator = Generator::new(7, Split::Train, Shape::short());
/// let conversation = generator.conversation(Task::Chat);
/// assert_eq!(conversation, Generator::new(7, Split::Train, Shape::short()).conversation(Task::Chat));
/// ```
#[derive(Debug, Clone)]
pub struct Generator {
    draw: draw::Draw,
    split: Split,
    shape: Shape,
}

impl Generator {
    /// A generator of conversations of one shape.
    pub fn new(seed: u64, split: Split, shape: Shape) -> Self {
        Self { draw: draw::Draw::new(seed), split, shape }
    }

    /// A system text with facts, so many exchanges that have nothing to do with them, and questions for the facts.
    pub fn persistent(&mut self, exchanges: usize) -> Persistent {
        let mut shape = Shape { percent_revised: 0, ..self.shape.clone() };
        shape.system_facts.0 = shape.system_facts.0.max(1);
        conversation::Writer::new(Task::Chat, self.split, &shape, &mut self.draw).write_persistent(exchanges)
    }

    /// The next conversation for `task`.
    pub fn conversation(&mut self, task: Task) -> Conversation {
        conversation::Writer::new(task, self.split, &self.shape, &mut self.draw).write()
    }
}
