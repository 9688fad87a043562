use std::collections::BTreeSet;

use firebox_runtime::{HiddenReason, Role, Session, TurnKind};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

/// What is kept of turns that a session no longer remembers, in bytes. They are for people to read; all of them are sent
/// with every change.
const FORGOTTEN: usize = 256 << 10;
/// What a turn takes beside its texts, about.
const AROUND: usize = 256;

/// What was said in one branch, the newest included of what the session no longer remembers.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(super) struct Transcript {
    pub entries: Vec<Entry>,
    /// The head that was put on last; absent for the model's own.
    pub head: Option<String>,
    /// Whether the last answer is still without what a template writes behind answers.
    pub open: bool,
}

/// A turn of a session, and what was said in it.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Entry {
    /// Its id in the session.
    pub turn: u64,
    pub kind: Kind,
    /// What somebody else than the model said.
    pub text: String,
    pub answer: Option<Answer>,
    /// Tokens it had when it was last seen.
    pub tokens: usize,
    /// The fact that took its place.
    pub superseded_by: Option<u64>,
    /// Whether the client has hidden it. Files of before say nothing of it.
    #[serde(default)]
    pub hidden: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Kind {
    /// What comes before the first question.
    Opening,
    Fact,
    Turn,
}

/// What the model said.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Answer {
    pub text: String,
    /// The head that said it; absent for the model's own.
    pub head: Option<String>,
    pub finish: String,
    pub tokens: usize,
    pub ttft_ms: f64,
    pub tokens_per_second: f64,
}

impl Entry {
    fn bytes(&self) -> usize {
        AROUND + self.text.len() + self.answer.as_ref().map_or(0, |answer| answer.text.len())
    }
}

impl Transcript {
    pub fn entry(&self, turn: u64) -> Option<&Entry> {
        self.entries.iter().find(|entry| entry.turn == turn)
    }

    /// Adds what was said last, and lets go of the oldest of what the session no longer remembers, where that is too much.
    pub fn enter(&mut self, entry: Entry, session: &Session) {
        self.entries.push(entry);
        let held = session.all_turns().map(|turn| turn.id.0).collect();
        self.trim(&held, FORGOTTEN);
    }

    fn trim(&mut self, held: &BTreeSet<u64>, most: usize) {
        let mut kept = 0;
        // From the newest on: `retain` knows no other way than from the oldest.
        self.entries.reverse();
        self.entries.retain(|entry| {
            if held.contains(&entry.turn) {
                return true;
            }
            kept += entry.bytes();
            kept <= most
        });
        self.entries.reverse();
    }

    /// Notes how long turns are now.
    pub fn measure(&mut self, session: &Session) {
        for turn in session.all_turns() {
            if let Some(entry) = self.entries.iter_mut().find(|entry| entry.turn == turn.id.0) {
                entry.tokens = turn.tokens;
            }
        }
    }

    /// Forgets an entry and all behind it. Returns facts whose place nobody has taken any more.
    pub fn rewind(&mut self, turn: u64) -> Vec<u64> {
        let Some(at) = self.entries.iter().position(|entry| entry.turn == turn) else { return Vec::new() };
        let gone: Vec<u64> = self.entries.drain(at..).map(|entry| entry.turn).collect();
        let mut back = Vec::new();
        for entry in &mut self.entries {
            if entry.superseded_by.is_some_and(|by| gone.contains(&by)) {
                entry.superseded_by = None;
                back.push(entry.turn);
            }
        }
        back
    }

    /// All that was said, with what has become of it in the session.
    pub fn value(&self, session: &Session) -> Value {
        let mut start = 0;
        let held: Vec<_> = session
            .all_turns()
            .map(|turn| {
                let tokens = start..start + turn.tokens;
                start = tokens.end;
                (turn, tokens)
            })
            .collect();
        let entries = self.entries.iter().map(|entry| {
            let mut value = json!({
                "id": entry.turn,
                "kind": entry.kind,
                "text": entry.text,
                "answer": entry.answer,
                "tokens": entry.tokens,
                "superseded_by": entry.superseded_by,
                "evicted": true,
                "range": null,
                "relevance": null,
                "pinned": false,
                "hidden": null,
                "roles": [],
            });
            if let Some((turn, tokens)) = held.iter().find(|(turn, _)| turn.id.0 == entry.turn) {
                value["evicted"] = false.into();
                value["tokens"] = turn.tokens.into();
                value["range"] = json!([tokens.start, tokens.end]);
                value["relevance"] = f64::from(turn.relevance).into();
                value["pinned"] = turn.pinned.into();
                value["hidden"] = turn.hidden.map(reason).into();
                value["roles"] = turn.roles.iter().copied().map(role).collect();
                let began = turn.began.duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
                value["began"] = began.as_secs_f64().into();
            }
            value
        });
        entries.collect()
    }
}

/// Tokens of turns, and tokens of facts.
pub(super) fn held(session: &Session) -> (usize, usize) {
    let of = |kind: TurnKind| {
        session.all_turns().filter(|turn| turn.kind == kind).map(|turn| turn.tokens).sum::<usize>()
    };
    (of(TurnKind::Turn), of(TurnKind::Fact))
}

fn reason(hidden: HiddenReason) -> &'static str {
    match hidden {
        HiddenReason::Irrelevant => "irrelevant",
        HiddenReason::Superseded => "superseded",
    }
}

fn role(role: Role) -> &'static str {
    match role {
        Role::System => "system",
        Role::User => "user",
        Role::Assistant => "assistant",
        Role::Tool => "tool",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_of_what_is_forgotten_goes_first() {
        let entry = |turn| Entry {
            turn,
            kind: Kind::Turn,
            text: "a".repeat(100),
            answer: None,
            tokens: 0,
            superseded_by: None,
            hidden: false,
        };
        let mut told = Transcript { entries: (0..10).map(entry).collect(), ..Transcript::default() };
        told.trim(&[0, 2, 8, 9].into(), 3 * (AROUND + 100) + 1);
        let left: Vec<u64> = told.entries.iter().map(|entry| entry.turn).collect();
        assert_eq!(left, [0, 2, 5, 6, 7, 8, 9]);
        told.trim(&BTreeSet::new(), 0);
        assert!(told.entries.is_empty());
    }
}
