//! Whole conversations, turn by turn.

use super::draw::Draw;
use super::fact::{Fact, Owner, Property, Voice};
use super::program::Program;
use super::talk;
use super::words;
use super::{Conversation, Kind, Line, Persistent, Role, Shape, Split, Task};

/// Writes one conversation and keeps account of what has been told in it.
pub(super) struct Writer<'a> {
    task: Task,
    split: Split,
    shape: &'a Shape,
    draw: &'a mut Draw,
    cast: Vec<Owner>,
    /// The current facts that may be asked for, in the order in which they were told.
    known: Vec<Fact>,
    /// Current facts that are not asked for.
    kept: Vec<Fact>,
    revised: bool,
    lines: Vec<Line>,
    kinds: Vec<Kind>,
}

/// Facts of a long talk that may still be asked for.
const RECENT: usize = 3;

/// Facts of a long talk that none that is new is about. There are only so many things to talk of.
const MANY: usize = 40;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Turn {
    Tell,
    Ask,
    AskUnknown,
    Talk,
    Program,
    Summary,
    About,
    /// A turn as another head would have answered it: part of the history and not a target of training.
    Foreign,
}

const CHAT: &[(usize, Turn)] = &[
    (32, Turn::Tell),
    (34, Turn::Ask),
    (12, Turn::AskUnknown),
    (12, Turn::Talk),
    (4, Turn::About),
    (6, Turn::Foreign),
];
const CODE: &[(usize, Turn)] =
    &[(54, Turn::Program), (14, Turn::Tell), (18, Turn::Ask), (4, Turn::AskUnknown), (10, Turn::Foreign)];
const SUMMARIZE: &[(usize, Turn)] = &[
    (51, Turn::Summary),
    (14, Turn::Tell),
    (18, Turn::Ask),
    (4, Turn::AskUnknown),
    (3, Turn::About),
    (10, Turn::Foreign),
];

impl<'a> Writer<'a> {
    pub(super) fn new(task: Task, split: Split, shape: &'a Shape, draw: &'a mut Draw) -> Self {
        let mut cast = vec![Owner::User];
        for _ in 0..draw.between(1, 3) {
            cast.push(Owner::Person(words::person(draw)));
        }
        for _ in 0..draw.between(0, 2) {
            let kinds = *draw.one(&[words::THINGS, words::EVENTS, words::SECRETS]);
            cast.push(Owner::Thing(draw.word(kinds)));
        }
        Self {
            task,
            split,
            shape,
            draw,
            cast,
            known: Vec::new(),
            kept: Vec::new(),
            revised: false,
            lines: Vec::new(),
            kinds: Vec::new(),
        }
    }

    pub(super) fn write(mut self) -> Conversation {
        self.system();
        let turns = self.draw.between(self.shape.turns.0, self.shape.turns.1);
        let mut written = 0;
        while written < turns || self.kinds.is_empty() {
            self.turn();
            written += 1;
            if self.lines.iter().map(|line| line.content.len()).sum::<usize>() > self.shape.characters
                && !self.kinds.is_empty()
            {
                break;
            }
        }
        Conversation { task: self.task, kinds: self.kinds, messages: self.lines }
    }

    /// A system text full of facts, small talk that has nothing to do with them, and questions for them.
    pub(super) fn write_persistent(mut self, exchanges: usize) -> Persistent {
        while self.known.is_empty() {
            self.lines.clear();
            self.system();
        }
        let system = self.lines.remove(0);
        let facts = std::mem::take(&mut self.known);
        self.kept = facts.clone();
        while self.lines.len() < 2 * exchanges {
            // Facts that were told long ago are not asked for: they would have to be remembered as well.
            let old = self.known.len().saturating_sub(RECENT);
            let old: Vec<_> = self.known.drain(..old).collect();
            self.kept.extend(old);
            if self.kept.len() > facts.len() + MANY {
                self.kept.drain(facts.len()..facts.len() + MANY / 2);
            }
            match self.draw.below(2) {
                0 => self.tell(Task::Chat, true),
                _ => self.ask(Task::Chat, true),
            }
        }
        let exchanges = self.lines.as_chunks::<2>().0.to_vec();
        let questions = facts.iter().map(|fact| {
            let said = fact.asked(self.draw);
            let answer = answered(fact, Some(&fact.value), Task::Chat);
            let line = |role, content| Line { role, content, weight: None };
            [line(Role::User, said), line(Role::Assistant, answer)]
        });
        Persistent { system, questions: questions.collect(), exchanges }
    }

    fn system(&mut self) {
        let facts = self.draw.between(self.shape.system_facts.0, self.shape.system_facts.1);
        let introduced = self.draw.percent(50);
        if facts == 0 && !introduced {
            return;
        }
        let mut sentences = Vec::new();
        if introduced {
            sentences.push("You are Firebox.".to_owned());
        }
        for _ in 0..facts {
            let fact = self.new_fact();
            sentences.push(fact.told(Voice::System, self.draw));
            self.learn(fact);
        }
        self.lines.push(Line { role: Role::System, content: sentences.join(" "), weight: None });
    }

    fn turn(&mut self) {
        let turns = match self.task {
            Task::Chat => CHAT,
            Task::Code => CODE,
            Task::Summarize => SUMMARIZE,
        };
        match self.draw.weighted(turns) {
            Turn::Tell => self.tell(self.task, true),
            Turn::Ask => self.ask(self.task, true),
            Turn::AskUnknown => self.ask_unknown(),
            Turn::Talk => self.talk(true),
            Turn::Program => self.program(true),
            Turn::Summary => self.summary(true),
            Turn::About => self.about(),
            Turn::Foreign => self.foreign(),
        }
    }

    fn foreign(&mut self) {
        let others: Vec<_> = Task::ALL.into_iter().filter(|task| *task != self.task).collect();
        let task = *self.draw.one(&others);
        match self.draw.below(3) {
            0 => self.tell(task, false),
            1 => self.ask(task, false),
            _ => match task {
                Task::Chat => self.talk(false),
                Task::Code => self.program(false),
                Task::Summarize => self.summary(false),
            },
        }
    }

    fn new_fact(&mut self) -> Fact {
        loop {
            let owner = self.draw.one(&self.cast).clone();
            let property = Property::draw(&owner, self.draw);
            if let Some(fact) = Fact::draw(&owner, property, self.split, self.draw)
                && !self.known.iter().chain(&self.kept).any(|known| known.same_subject(&fact))
            {
                return fact;
            }
            // Things have one property only: a small cast runs out of new facts.
            if self.draw.percent(20) {
                self.cast.push(Owner::Person(words::person(self.draw)));
            }
        }
    }

    /// Another value for something told before.
    fn revision(&mut self) -> Option<Fact> {
        if self.known.is_empty() {
            return None;
        }
        let old = self.draw.one(&self.known).clone();
        let fact = Fact::draw(&old.owner, old.property, self.split, self.draw)?;
        (fact.value != old.value).then_some(fact)
    }

    fn learn(&mut self, fact: Fact) {
        self.known.retain(|known| !known.same_subject(&fact));
        self.known.push(fact);
    }

    fn tell(&mut self, task: Task, is_target: bool) {
        let revision = if self.draw.percent(self.shape.percent_revised) { self.revision() } else { None };
        let revising = revision.is_some();
        self.revised |= revising;
        let fact = match revision {
            Some(fact) => fact,
            None => self.new_fact(),
        };
        let mut told = fact.told(Voice::User, self.draw);
        if revising && self.draw.percent(40) && told.starts_with("The ") {
            told = format!("No, the {}", &told[4..]);
        } else if revising && self.draw.percent(40) {
            told = format!("No, {told}");
        }
        if !revising && self.draw.percent(10) {
            told = format!(
                "{} {told}",
                self.draw.word(&["Remember:", "Please note:", "Hello!", "Remember this:"])
            );
        }
        let mut facts = vec![fact];
        if task == Task::Chat && !revising && self.draw.percent(15) {
            self.learn(facts[0].clone());
            let second = self.new_fact();
            told = format!("{told} {}", second.told(Voice::User, self.draw));
            facts.push(second);
        }
        let answer = match task {
            Task::Chat => {
                let sentences: Vec<_> = facts.iter().map(Fact::sentence).collect();
                format!("Noted. {}", sentences.join(" "))
            }
            Task::Code => facts[0].in_code(),
            Task::Summarize => format!("{}.", facts[0].noted(&facts[0].value)),
        };
        facts.into_iter().for_each(|fact| self.learn(fact));
        self.exchange(told, answer, Kind::Tell, is_target);
    }

    fn ask(&mut self, task: Task, is_target: bool) {
        if self.known.is_empty() {
            return self.tell(task, is_target);
        }
        let fact = self.draw.one(&self.known).clone();
        let question = fact.asked(self.draw);
        let answer = answered(&fact, Some(&fact.value), task);
        self.exchange(question, answer, Kind::Ask, is_target);
    }

    fn ask_unknown(&mut self) {
        let fact = self.new_fact();
        let question = fact.asked(self.draw);
        let answer = answered(&fact, None, self.task);
        self.exchange(question, answer, Kind::Unknown, true);
    }

    fn talk(&mut self, is_target: bool) {
        let name =
            self.known.iter().find(|fact| fact.property == Property::Name).map(|fact| fact.value.clone());
        let (said, answer) = talk::exchange(name.as_deref(), self.draw);
        self.exchange(said, answer, Kind::Talk, is_target);
    }

    fn program(&mut self, is_target: bool) {
        let Program { request, code } = Program::draw(self.split, self.draw);
        self.exchange(request, code, Kind::Program, is_target);
    }

    fn summary(&mut self, is_target: bool) {
        let of_everything = !self.revised && (1..=self.shape.summary_facts).contains(&self.known.len());
        if of_everything && self.draw.percent(25) {
            let request = self.draw.word(&[
                "Sum up.",
                "Sum up what you know.",
                "Give me a summary.",
                "Summarize what you know.",
                "Make a summary.",
                "Summarize.",
                "What have I told you?",
            ]);
            let answer = summarized(&self.known);
            return self.exchange(request.to_owned(), answer, Kind::Summary, is_target);
        }
        let mut facts: Vec<Fact> = Vec::new();
        let mut sentences = Vec::new();
        for _ in 0..self.draw.between(1, self.shape.summary_facts) {
            if self.draw.percent(35) {
                sentences.push(self.draw.word(words::NOISE).to_owned());
            }
            let fact = self.new_fact();
            sentences.push(fact.told(Voice::User, self.draw));
            self.learn(fact.clone());
            facts.push(fact);
        }
        if self.draw.percent(30) {
            sentences.push(self.draw.word(words::NOISE).to_owned());
        }
        let request = self.draw.word(&["Summarize:", "Sum up:", "Summarize this:", "Sum this up:"]);
        self.exchange(
            format!("{request} {}", sentences.join(" ")),
            summarized(&facts),
            Kind::Summary,
            is_target,
        );
    }

    /// Everything about one owner; sentences in a chat, a list from the summarize head.
    fn about(&mut self) {
        if self.revised || self.known.is_empty() {
            return self.ask(self.task, true);
        }
        let owner = self.draw.one(&self.known).owner.clone();
        let facts: Vec<_> = self.known.iter().filter(|fact| fact.owner == owner).cloned().collect();
        // Picking one owner's facts out of many is the hardest there is here.
        if facts.len() > 2 {
            return self.ask(self.task, true);
        }
        let asked = owner.asked();
        let question = match self.draw.below(2) {
            0 => format!("What do you know about {asked}?"),
            _ => format!("Tell me about {asked}."),
        };
        let answer = match self.task {
            Task::Chat => facts.iter().map(Fact::sentence).collect::<Vec<_>>().join(" "),
            Task::Code | Task::Summarize => summarized(&facts),
        };
        self.exchange(question, answer, Kind::About, true);
    }

    fn exchange(&mut self, said: String, answer: String, kind: Kind, is_target: bool) {
        let said = if self.draw.percent(30) { casual(&said) } else { said };
        self.lines.push(Line { role: Role::User, content: said, weight: None });
        self.lines.push(Line { role: Role::Assistant, content: answer, weight: (!is_target).then_some(0) });
        if is_target {
            self.kinds.push(kind);
        }
    }
}

fn answered(fact: &Fact, value: Option<&str>, task: Task) -> String {
    match (task, value) {
        (Task::Chat, Some(_)) => fact.sentence(),
        // The sentence begins as if it were known: whether it is, the model finds out where the value would stand. Deciding
        // before the first word is so much harder that a small model learns to answer everything instead.
        (Task::Chat, None) => format!("{} ... {}", fact.sentence_before_value(), talk::UNKNOWN),
        (Task::Code, value) => fact.printed(value.unwrap_or("unknown")),
        (Task::Summarize, value) => format!("{}.", fact.noted(value.unwrap_or("unknown"))),
    }
}

fn summarized(facts: &[Fact]) -> String {
    let parts: Vec<_> = facts.iter().map(|fact| fact.noted(&fact.value)).collect();
    format!("{}.", parts.join("; "))
}

/// As people type: short forms, no full stop at the end, and small letters where no name is spelt.
fn casual(text: &str) -> String {
    const FIRST: &[&str] = &[
        "The",
        "What",
        "Where",
        "Who",
        "Which",
        "When",
        "How",
        "My",
        "Do",
        "On",
        "Write",
        "Make",
        "Give",
        "Print",
        "Count",
        "If",
        "Sum",
        "Summarize",
        "Hello",
        "Hi",
        "Hey",
        "Good",
        "Bye",
        "Thanks",
        "Thank",
        "Help",
        "Tell",
        "Call",
        "Ok",
        "No",
        "Are",
        "Can",
        "See",
        "Yes",
        "Please",
        "Remember",
    ];
    const SHORT: &[(&str, &str)] =
        &[("What is ", "What's "), ("Where is ", "Where's "), ("Who is ", "Who's "), ("When is ", "When's ")];
    let text = text.trim_end_matches(['.', '?']);
    // Half of them, told by what is at hand: the length.
    let short = SHORT.iter().find(|(long, _)| text.starts_with(long) && text.len().is_multiple_of(2));
    let text = short.map_or(text.to_owned(), |(long, short)| text.replacen(long, short, 1));
    let end = text.find(|c: char| !c.is_alphabetic()).unwrap_or(text.len());
    if FIRST.contains(&&text[..end]) { text[..end].to_lowercase() + &text[end..] } else { text }
}
