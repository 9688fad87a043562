//! Grammars of llama.cpp in the notation of Lark.
//!
//! A grammar of llama.cpp is about single characters, one of `llguidance` about words that a lexer finds first, each as long
//! as it can be. So as much of a rule as possible becomes one word; where a word could swallow the beginning of what
//! follows it, it is taken apart. Words that begin alike at the same place are not: of these the longer one is found.

mod characters;
mod facts;
mod parser;

use std::collections::HashMap;
use std::fmt::Write as _;

use characters::Characters;
use facts::Facts;
use parser::{Node, Rules};

/// How many parts at the end of a word are left to be words of their own, before all of it is taken apart.
const CUTS: usize = 8;

/// Parts that are looked at before a grammar is given up: a long row of parts of which none can be a word with the next is
/// looked at anew from each of them.
const MOST_LOOKED_AT: usize = 4 << 20;

/// The same grammar, or what is wrong with it.
pub(super) fn to_lark(text: &str) -> Result<String, String> {
    let rules = Rules::parse(text)?;
    let facts = Facts::of(&rules);
    let mut lark =
        Lark { rules: &rules, facts: &facts, words: HashMap::new(), text: String::new(), looked_at: 0 };
    lark.write();
    if lark.looked_at > MOST_LOOKED_AT {
        return Err("too many parts stand in a row that swallow each other; put them into rules".into());
    }
    Ok(lark.text)
}

struct Lark<'r> {
    rules: &'r Rules,
    facts: &'r Facts,
    /// Numbers of words by what they are.
    words: HashMap<String, usize>,
    text: String,
    /// Parts, each as often as it was looked at.
    looked_at: usize,
}

impl Lark<'_> {
    fn write(&mut self) {
        self.text.push_str("start: r0\n");
        for rule in 0..self.rules.bodies.len() {
            let body = &self.rules.bodies[rule];
            let body = self.node(body, self.facts.follow(rule));
            let _ = writeln!(self.text, "r{rule}: {body}");
        }
        for &rule in self.facts.regular_rules() {
            let body = word(&self.rules.bodies[rule]);
            let _ = writeln!(self.text, "R{rule}: {body}");
        }
        for (body, number) in &self.words {
            let _ = writeln!(self.text, "W{number}: {body}");
        }
    }

    /// A node as rules have it, before what may follow.
    fn node(&mut self, node: &Node, follow: &Characters) -> String {
        if let Some(word) = self.word_before(node, follow) {
            return word;
        }
        match node {
            // A single character is never longer than itself, so that it was a word already.
            Node::Characters(_) => word(node),
            Node::Token(name) => name.clone(),
            Node::Rule(rule) => format!("r{rule}"),
            Node::Sequence(parts) => self.sequence(parts, follow),
            Node::Choice(choices) => {
                let choices: Vec<String> = choices.iter().map(|choice| self.node(choice, follow)).collect();
                format!("({})", choices.join(" | "))
            }
            Node::Repeat(_, _, Some(0)) => "\"\"".into(),
            Node::Repeat(part, least, most) => {
                let mut behind = follow.clone();
                if *most != Some(1) {
                    behind.add(&self.facts.first(part));
                }
                let part = self.node(part, &behind);
                format!("({part}){}", times(*least, *most))
            }
        }
    }

    fn sequence(&mut self, mut parts: &[Node], follow: &Characters) -> String {
        let mut written = Vec::new();
        while !parts.is_empty() && self.looks_at(parts.len()) {
            let regular = parts.iter().take_while(|part| self.facts.is_regular(part)).count();
            let found = (2..=regular).rev().take(CUTS).find_map(|count| {
                if !self.looks_at(parts.len()) {
                    return None;
                }
                let behind = self.first_of(&parts[count..], follow);
                let word = self.word_before(&Node::Sequence(parts[..count].to_vec()), &behind)?;
                Some((word, count))
            });
            let (part, count) = found.unwrap_or_else(|| {
                let behind = self.first_of(&parts[1..], follow);
                (self.node(&parts[0], &behind), 1)
            });
            written.push(part);
            parts = &parts[count..];
        }
        if written.is_empty() { "\"\"".into() } else { format!("({})", written.join(" ")) }
    }

    /// Counts parts that are looked at. False if that were too many by now.
    fn looks_at(&mut self, parts: usize) -> bool {
        self.looked_at += parts;
        self.looked_at <= MOST_LOOKED_AT
    }

    /// What parts and then the rest may begin with.
    fn first_of(&self, parts: &[Node], follow: &Characters) -> Characters {
        let mut first = Characters::default();
        for part in parts {
            first.add(&self.facts.first(part));
            if !self.facts.may_be_empty(part) {
                return first;
            }
        }
        first.and(follow)
    }

    /// A node as one word, if it can be and ends where it should.
    fn word_before(&mut self, node: &Node, follow: &Characters) -> Option<String> {
        let shape = self.facts.shape(node)?;
        if shape.longer().meets(follow) {
            return None;
        }
        let body = word(node);
        let next = self.words.len();
        let number = *self.words.entry(body).or_insert(next);
        // Words are not empty; whether there is one at all is for a rule to say.
        Some(if shape.may_be_empty { format!("W{number}?") } else { format!("W{number}") })
    }
}

/// A regular node as words have it.
fn word(node: &Node) -> String {
    match node {
        Node::Characters(set) => {
            let mut text = "/".to_owned();
            set.write(&mut text);
            text + "/"
        }
        Node::Sequence(parts) if parts.is_empty() => "\"\"".into(),
        Node::Sequence(parts) => {
            let mut written: Vec<String> = Vec::new();
            let mut joins = false;
            for part in parts {
                let part_is_set = matches!(part, Node::Characters(_));
                let text = word(part);
                match written.last_mut() {
                    // One expression instead of one for each letter.
                    Some(last) if joins && part_is_set => {
                        last.pop();
                        last.push_str(&text[1..]);
                    }
                    _ => written.push(text),
                }
                joins = part_is_set;
            }
            format!("({})", written.join(" "))
        }
        Node::Choice(choices) => {
            format!("({})", choices.iter().map(word).collect::<Vec<_>>().join(" | "))
        }
        Node::Repeat(_, _, Some(0)) => "\"\"".into(),
        Node::Repeat(part, least, most) => format!("({}){}", word(part), times(*least, *most)),
        Node::Rule(rule) => format!("R{rule}"),
        Node::Token(name) => name.clone(),
    }
}

fn times(least: u32, most: Option<u32>) -> String {
    match (least, most) {
        (0, None) => "*".into(),
        (1, None) => "+".into(),
        (0, Some(1)) => "?".into(),
        (least, None) => format!("{{{least},}}"),
        (least, Some(most)) => format!("{{{least},{most}}}"),
    }
}
