//! The transcript of a session: what was said, and its state.

use std::collections::BTreeSet;

use firebox_runtime::{HiddenReason, Role, Session, TurnId, TurnKind};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

/// Limit for evicted turns in bytes. They are kept for people to read, and every response contains all of them.
const MAX_EVICTED_BYTES: usize = 256 << 10;
/// Approximate size of an entry without its texts.
const ENTRY_OVERHEAD: usize = 256;

/// What was said in one branch, including the newest evicted turns.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(crate) struct Transcript {
    pub entries: Vec<Entry>,
    /// The selected head; absent for the model's own.
    pub head: Option<String>,
    /// True if the template's text after the last answer is still missing.
    pub open: bool,
}

/// A turn of a session with its text.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Entry {
    /// Id of the turn in the session.
    pub turn: u64,
    pub kind: Kind,
    /// The text of the user or the system.
    pub text: String,
    pub answer: Option<Answer>,
    /// Length when last measured, in tokens.
    pub tokens: usize,
    /// The fact that superseded it.
    pub superseded_by: Option<u64>,
    /// True if the client hid it. Absent in older files.
    #[serde(default)]
    pub hidden: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Kind {
    /// The part before the first question.
    Opening,
    Fact,
    Turn,
}

/// The texts of an answer.
#[derive(Debug, Clone, Default)]
pub(crate) struct Said {
    pub thoughts: String,
    pub text: String,
}

impl Said {
    /// Returns the thoughts, if there are any.
    pub fn thoughts(&self) -> Option<&str> {
        Some(self.thoughts.as_str()).filter(|thoughts| !thoughts.is_empty())
    }
}

/// The model's answer.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Answer {
    pub text: String,
    /// The thoughts before it. Absent in older files.
    #[serde(default)]
    pub reasoning_content: Option<String>,
    /// The head that answered; absent for the model's own.
    pub head: Option<String>,
    pub finish: String,
    pub tokens: usize,
    pub ttft_ms: f64,
    pub tokens_per_second: f64,
}

impl Entry {
    fn bytes(&self) -> usize {
        let answer = self
            .answer
            .as_ref()
            .map_or(0, |answer| answer.text.len() + answer.reasoning_content.as_ref().map_or(0, String::len));
        ENTRY_OVERHEAD + self.text.len() + answer
    }
}

impl Transcript {
    pub fn entry(&self, turn: u64) -> Option<&Entry> {
        self.entries.iter().find(|entry| entry.turn == turn)
    }

    /// Adds an entry, and drops the oldest evicted ones above the limit.
    pub fn push_entry(&mut self, entry: Entry, session: &Session) {
        self.entries.push(entry);
        let token_counts = session.all_turns().map(|turn| turn.id.0).collect();
        self.trim(&token_counts, MAX_EVICTED_BYTES);
    }

    fn trim(&mut self, token_counts: &BTreeSet<u64>, most: usize) {
        let mut kept = 0;
        // Count from the newest entry; `retain` goes from the first.
        self.entries.reverse();
        self.entries.retain(|entry| {
            if token_counts.contains(&entry.turn) {
                return true;
            }
            kept += entry.bytes();
            kept <= most
        });
        self.entries.reverse();
    }

    /// Notes that several facts were condensed to one, which takes the place of the first of them.
    pub fn replace_facts(&mut self, condensed: Entry, facts: &[TurnId]) {
        let is_replaced = |entry: &Entry| facts.contains(&TurnId(entry.turn));
        for entry in self.entries.iter_mut().filter(|entry| is_replaced(entry)) {
            entry.superseded_by = Some(condensed.turn);
        }
        let after = self.entries.iter().position(is_replaced).map_or(self.entries.len(), |first| first + 1);
        self.entries.insert(after, condensed);
    }

    /// Updates the lengths of turns.
    pub fn measure(&mut self, session: &Session) {
        for turn in session.all_turns() {
            if let Some(entry) = self.entries.iter_mut().find(|entry| entry.turn == turn.id.0) {
                entry.tokens = turn.tokens;
            }
        }
    }

    /// Removes an entry and all after it. Returns the facts that are no longer superseded.
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

    /// Returns all entries with their state in the session.
    pub fn value(&self, session: &Session) -> Value {
        let mut start = 0;
        let token_counts: Vec<_> = session
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
            if let Some((turn, tokens)) = token_counts.iter().find(|(turn, _)| turn.id.0 == entry.turn) {
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

/// Returns the tokens of turns and of facts.
pub(crate) fn token_counts(session: &Session) -> (usize, usize) {
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
    fn the_oldest_evicted_entries_are_dropped_first() {
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
        told.trim(&[0, 2, 8, 9].into(), 3 * (ENTRY_OVERHEAD + 100) + 1);
        let left: Vec<u64> = told.entries.iter().map(|entry| entry.turn).collect();
        assert_eq!(left, [0, 2, 5, 6, 7, 8, 9]);
        told.trim(&BTreeSet::new(), 0);
        assert!(told.entries.is_empty());
    }
}
