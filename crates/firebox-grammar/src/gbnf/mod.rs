//! Translates GBNF, the grammars of llama.cpp, to Lark.
//!
//! GBNF describes single characters; `llguidance` describes words, which its lexer matches first, each as long as possible.
//! As much of a rule as possible therefore becomes one word. A word that could swallow the beginning of the text after it is
//! divided. Words that begin alike at the same position are not divided: the lexer finds the longer one.

mod characters;
mod effort;
mod facts;
mod parser;

use std::collections::HashMap;
use std::fmt::Write as _;
use std::slice;

use characters::Characters;
use facts::Facts;
use parser::{Node, Rules};

/// The most parts at the end of a word that become words of their own, before the whole word is divided.
const MAX_CUTS: usize = 8;

/// The most bytes of a translation. A parser builds structures many times as large, and a grammar within its own limit grows
/// a few times in translation.
const MAX_BYTES: usize = 1 << 20;

/// Translates a grammar. The error describes what is wrong with it.
pub fn to_lark(text: &str) -> Result<String, String> {
    let rules = Rules::parse(text)?;
    let facts = Facts::of(&rules);
    facts.effort().check()?;
    let mut lark = Lark { rules: &rules, facts: &facts, words: HashMap::new(), text: String::new() };
    lark.write();
    facts.effort().check()?;
    if lark.text.len() > MAX_BYTES {
        return Err(format!(
            "taken apart it has {} bytes, more than {MAX_BYTES}; put what is there several times, sets of characters above all, \
             into rules of their own",
            lark.text.len()
        ));
    }
    Ok(lark.text)
}

struct Lark<'r> {
    rules: &'r Rules,
    facts: &'r Facts,
    /// The number of each word.
    words: HashMap<String, usize>,
    text: String,
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

    /// Writes a node as part of a rule that `follow` may follow.
    fn node(&mut self, node: &Node, follow: &Characters) -> String {
        let effort = self.facts.effort();
        if effort.is_spent() {
            return String::new();
        }
        if let Some(word) = self.word_before(slice::from_ref(node), follow) {
            return word;
        }
        match node {
            // A single character cannot be longer, so that it was a word already.
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
                effort.spend(follow.ranges());
                let mut behind = follow.clone();
                if *most != Some(1) {
                    effort.add(&mut behind, &self.facts.first(part));
                }
                let part = self.node(part, &behind);
                format!("({part}){}", times(*least, *most))
            }
        }
    }

    fn sequence(&mut self, parts: &[Node], follow: &Characters) -> String {
        let effort = self.facts.effort();
        let regular: Vec<bool> = parts.iter().map(|part| self.facts.is_regular(part)).collect();
        let mut written = Vec::new();
        let mut at = 0;
        while at < parts.len() && !effort.is_spent() {
            let rest = &parts[at..];
            let run = regular[at..].iter().take_while(|is_regular| **is_regular).count();
            effort.spend(1 + run);
            let found = (2..=run).rev().take(MAX_CUTS).find_map(|count| {
                let behind = self.first_of(&rest[count..], follow);
                Some((self.word_before(&rest[..count], &behind)?, count))
            });
            let (part, count) = found.unwrap_or_else(|| {
                let behind = self.first_of(&rest[1..], follow);
                (self.node(&rest[0], &behind), 1)
            });
            written.push(part);
            at += count;
        }
        if written.is_empty() { "\"\"".into() } else { format!("({})", written.join(" ")) }
    }

    /// Returns the characters that parts and then the rest may begin with.
    fn first_of(&self, parts: &[Node], follow: &Characters) -> Characters {
        let mut first = Characters::default();
        if self.facts.add_first_of_row(parts, &mut first) {
            self.facts.effort().add(&mut first, follow);
        }
        first
    }

    /// Writes a sequence of nodes as one word, if they are regular and the word ends where it should.
    fn word_before(&mut self, parts: &[Node], follow: &Characters) -> Option<String> {
        let shape = self.facts.shape_of_row(parts)?;
        if self.facts.effort().meet(shape.longer(), follow) {
            return None;
        }
        let body = row(parts);
        let next = self.words.len();
        let number = *self.words.entry(body).or_insert(next);
        // Words are not empty; an option in the rule expresses an empty text.
        Some(if shape.may_be_empty { format!("W{number}?") } else { format!("W{number}") })
    }
}

/// Writes a regular node as part of a word.
fn word(node: &Node) -> String {
    match node {
        Node::Characters(set) => {
            let mut text = "/".to_owned();
            set.write(&mut text);
            text + "/"
        }
        Node::Sequence(parts) => row(parts),
        Node::Choice(choices) => {
            format!("({})", choices.iter().map(word).collect::<Vec<_>>().join(" | "))
        }
        Node::Repeat(_, _, Some(0)) => "\"\"".into(),
        Node::Repeat(part, least, most) => format!("({}){}", word(part), times(*least, *most)),
        Node::Rule(rule) => format!("R{rule}"),
        Node::Token(name) => name.clone(),
    }
}

/// Writes a sequence of regular nodes as part of a word.
fn row(parts: &[Node]) -> String {
    match parts {
        [] => return "\"\"".into(),
        [part] => return word(part),
        _ => {}
    }
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

fn times(least: u32, most: Option<u32>) -> String {
    match (least, most) {
        (0, None) => "*".into(),
        (1, None) => "+".into(),
        (0, Some(1)) => "?".into(),
        (least, None) => format!("{{{least},}}"),
        (least, Some(most)) => format!("{{{least},{most}}}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns a grammar with a rule for each of `count` kinds of objects, as a schema would have it.
    fn objects(count: usize) -> String {
        let names: Vec<String> = (0..count).map(|at| format!("object-{at}")).collect();
        let object = |(at, name): (usize, &String)| {
            format!(
                "{name} ::= \"{{\" ws \"\\\"field-{at}\\\"\" ws \":\" ws value (\",\" ws \"\\\"kind\\\"\" ws \":\" ws string)? \"}}\" ws\n"
            )
        };
        let objects: String = names.iter().enumerate().map(object).collect();
        format!(
            "root ::= \"[\" ws value (\",\" ws value)* \"]\" ws\nvalue ::= string | root | {}\n\
             string ::= \"\\\"\" ([^\"\\\\\\x00-\\x1F] | \"\\\\\" [\"\\\\/bfnrt])* \"\\\"\" ws\nws ::= [ \\t\\n]*\n{objects}",
            names.join(" | ")
        )
    }

    /// Returns Chinese characters that do not touch each other.
    fn apart(number: usize) -> char {
        char::from_u32(0x3400 + 2 * number as u32).unwrap()
    }

    #[test]
    fn long_plain_grammars_are_translated() {
        let grammar = objects(900);
        assert!((90 << 10..128 << 10).contains(&grammar.len()), "{}", grammar.len());
        let lark = to_lark(&grammar).unwrap();
        assert!(lark.len() < MAX_BYTES / 2, "{}", lark.len());
    }

    #[test]
    fn long_lists_of_words_in_many_letters_are_translated() {
        let words: Vec<String> =
            (0..6000).map(|at| format!("\"{}{}\"", apart(at % 3000), apart(at * 7 % 3000))).collect();
        to_lark(&format!("root ::= {}", words.join(" | "))).unwrap();
    }

    /// Each rule may begin with what all rules after it begin with, in ranges that do not touch.
    #[test]
    fn sets_that_grow_from_rule_to_rule_are_refused_by_a_limit() {
        let rule = |at: usize| {
            let letters: String = (0..40).map(|letter| apart(at % 160 * 40 + letter)).collect();
            format!("r{at} ::= [{letters}] | r{}\n", at + 1)
        };
        let rules: String = (0..850).map(rule).collect();
        let grammar = format!("root ::= r0\n{rules}r850 ::= \"x\"");
        assert!(Rules::parse(&grammar).is_ok());
        let reason = to_lark(&grammar).unwrap_err();
        assert!(reason.contains("more than 67108864 ranges of characters"), "{reason}");
    }

    /// From each part on, as much of the following parts as possible is visited.
    #[test]
    fn long_sequences_that_swallow_each_other_are_refused_by_a_limit() {
        let part = format!("(\"{}\")? ", "abcdefghij".repeat(18));
        let grammar = format!("root ::= x root | \"a\"\nx ::= {}", part.repeat(600));
        assert!(Rules::parse(&grammar).is_ok());
        let reason = to_lark(&grammar).unwrap_err();
        assert!(reason.contains("more than 67108864 ranges of characters"), "{reason}");
    }

    #[test]
    fn long_translations_are_refused_by_a_limit() {
        let any = ". ".repeat(60_000);
        let grammar = format!("root ::= \"(\" root \")\" | {any}");
        let reason = to_lark(&grammar).unwrap_err();
        assert!(reason.contains("more than 1048576"), "{reason}");
    }
}
