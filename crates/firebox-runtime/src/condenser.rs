//! Shortens facts until they fit.

use std::collections::{HashMap, HashSet};
use std::fmt::Debug;
use std::sync::Arc;
use std::thread::{self, JoinHandle};

use firebox_cache::{CacheError, TurnId};
use firebox_text::Tokenizer;

use crate::{RuntimeError, Session};

/// Makes a text shorter.
pub trait Condenser: Debug + Send + Sync {
    /// What matters most of `text`, in so few words that `fits` says yes; nothing where that is not possible.
    fn condense(&self, text: &str, fits: &mut dyn FnMut(&str) -> bool) -> Option<String>;
}

/// Keeps those sentences, as they stand and in their order, whose words are the most common in the text. Needs no
/// model, and says nothing that was not said.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Extract;

/// Words that are common in every text are short.
const SHORTEST_WORD: usize = 4;

impl Condenser for Extract {
    fn condense(&self, text: &str, fits: &mut dyn FnMut(&str) -> bool) -> Option<String> {
        if fits(text) {
            return Some(text.to_owned());
        }
        let sentences = sentences(text);
        let mut counts: HashMap<String, usize> = HashMap::new();
        for word in sentences.iter().flat_map(|sentence| words(sentence)) {
            *counts.entry(word).or_default() += 1;
        }
        // The mean over its words, so that a sentence is not central for being long.
        let weight = |sentence: &str| {
            let words: HashSet<String> = words(sentence).collect();
            let sum: usize = words.iter().filter_map(|word| counts.get(word)).sum();
            sum as f64 / words.len().max(1) as f64
        };
        let mut order: Vec<(usize, f64)> =
            sentences.iter().enumerate().map(|(index, sentence)| (index, weight(sentence))).collect();
        // Stable: of sentences that weigh the same, the earlier comes first.
        order.sort_by(|(_, one), (_, other)| other.total_cmp(one));
        let mut kept: Vec<usize> = Vec::new();
        let mut condensed = None;
        for (index, _) in order {
            let at = kept.partition_point(|&other| other < index);
            kept.insert(at, index);
            let longer = kept.iter().map(|&index| sentences[index]).collect::<Vec<_>>().join(" ");
            if fits(&longer) {
                condensed = Some(longer);
            } else {
                kept.remove(at);
            }
        }
        condensed
    }
}

/// The tokens of facts, at most `capacity` of them: where the text has more, what the condenser makes of it. They stand for
/// themselves: no text poses as a control token.
pub fn fit_facts(
    text: &str,
    tokenizer: &Tokenizer,
    capacity: usize,
    condenser: &dyn Condenser,
) -> Result<Vec<u32>, RuntimeError> {
    let encode = |text: &str| tokenizer.encode_literal(text, false);
    let whole = encode(text)?;
    if whole.len() <= capacity {
        return Ok(whole);
    }
    let encoded = |text: &str| encode(text).ok().filter(|tokens| tokens.len() <= capacity);
    let condensed = condenser.condense(text, &mut |text| encoded(text).is_some());
    // Another's condenser may say it fits without having asked.
    let full = CacheError::FactsFull { tokens: whole.len(), capacity };
    condensed.and_then(|text| encoded(&text)).ok_or_else(|| full.into())
}

/// The facts of a session being condensed, on a thread of their own, while the session goes on.
#[derive(Debug)]
pub struct CondenseJob {
    condensed: JoinHandle<Result<Vec<u32>, RuntimeError>>,
    /// What it is made from.
    facts: Vec<TurnId>,
}

impl CondenseJob {
    /// Begins with the facts that the session has now.
    pub fn begin(
        session: &Session,
        tokenizer: Arc<Tokenizer>,
        capacity: usize,
        condenser: Arc<dyn Condenser>,
    ) -> Result<Self, RuntimeError> {
        let facts = session.visible_facts();
        let mut text = String::new();
        for &fact in &facts {
            let tokens = &session.tokens()[session.cache().tokens_of(fact)?];
            text.push_str(tokenizer.decode(tokens, true).trim());
            text.push('\n');
        }
        let condense = move || fit_facts(&text, &tokenizer, capacity, &*condenser);
        let condensed = thread::Builder::new().name("firebox-facts".into()).spawn(condense);
        let condensed = condensed.map_err(|error| RuntimeError::Threads { reason: error.to_string() })?;
        Ok(Self { condensed, facts })
    }

    /// Whether putting it in place need not wait.
    pub fn is_finished(&self) -> bool {
        self.condensed.is_finished()
    }
}

impl Session {
    /// Puts condensed facts in the place of those they were made from, and computes again what was said after them: between
    /// two turns, and as a whole, or not at all. Facts that have come since stay; turns that are hidden are forgotten. Waits
    /// until the condensing is done.
    ///
    /// Returns whether it was done: not if one of the facts is no longer there, for what was made of it is out of date.
    pub fn condense(&mut self, condensing: CondenseJob) -> Result<bool, RuntimeError> {
        let CondenseJob { condensed, facts } = condensing;
        let condensed = condensed.join().map_err(|_| RuntimeError::CondenserPanicked)?;
        let now = self.visible_facts();
        if facts.is_empty() || !facts.iter().all(|fact| now.contains(fact)) {
            return Ok(false);
        }
        self.replace_facts(&facts, &condensed?)?;
        Ok(true)
    }
}

/// Parts that end in a full stop or a line.
fn sentences(text: &str) -> Vec<&str> {
    let mut sentences = Vec::new();
    for line in text.lines() {
        let mut rest = line.trim();
        while !rest.is_empty() {
            let ends = |(at, end): (usize, &str)| {
                let after = at + end.len();
                // Where words have no space between them, sentences have none either.
                (end.len() > 1 || rest[after..].starts_with(char::is_whitespace)).then_some(after)
            };
            let end = rest.match_indices(['.', '!', '?', '。', '！', '？']).find_map(ends);
            let (sentence, others) = rest.split_at(end.unwrap_or(rest.len()));
            sentences.push(sentence);
            rest = others.trim_start();
        }
    }
    sentences
}

fn words(sentence: &str) -> impl Iterator<Item = String> {
    let words = sentence.split(|c: char| !c.is_alphanumeric()).map(str::to_lowercase);
    words.filter(|word| word.chars().count() >= SHORTEST_WORD)
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "The library closes at nine. Version 1.5 of the library runs models!\nMy cat likes fish. \
                        The models of the library run on phones. Rain fell.";

    /// Takes its time, and the first word of every line.
    #[derive(Debug)]
    struct Slow(std::sync::mpsc::SyncSender<()>);

    impl Condenser for Slow {
        fn condense(&self, text: &str, fits: &mut dyn FnMut(&str) -> bool) -> Option<String> {
            self.0.send(()).unwrap();
            let short: Vec<&str> = text.lines().filter_map(|line| line.split_whitespace().next()).collect();
            let short = short.join(" ");
            fits(&short).then_some(short)
        }
    }

    #[test]
    fn facts_are_condensed_beside_a_conversation_and_put_in_place_between_turns() {
        let model = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fixtures/gguf/qwen3/model.gguf");
        let model = crate::Model::open(model, &crate::device("cpu").unwrap()).unwrap();
        let tokenizer = model.tokenizer().unwrap().clone();
        let encode = |text: &str| tokenizer.encode_literal(text, false).unwrap();
        let session = || model.session().unwrap().with_kv_type(firebox_cache::KvType::F32);
        let mut talk = session();
        talk.add_fact(&encode("hello there, whoever you are")).unwrap();
        let said = [vec![5, 6, 7], vec![8, 9], vec![10, 11]];
        talk.feed(&said[0]).unwrap();
        let old = talk.add_fact(&encode("the lazy dog is lazy")).unwrap();

        let (done, started) = std::sync::mpsc::sync_channel(0);
        let begin = |talk: &Session, done| {
            CondenseJob::begin(talk, tokenizer.clone(), 8, Arc::new(Slow(done))).unwrap()
        };
        let condensing = begin(&talk, done.clone());
        // The condenser waits to be received; the conversation does not.
        talk.feed(&said[1]).unwrap();
        assert!(!condensing.is_finished());
        started.recv().unwrap();
        assert!(talk.condense(condensing).unwrap());
        let logits = talk.feed(&said[2]).unwrap();
        let condensed = encode("hello the");
        assert_eq!(talk.tokens(), [&condensed[..], &said.concat()].concat());
        let mut fresh = session();
        let expected = fresh.feed(talk.tokens()).unwrap();
        for (found, expected) in logits.iter().zip(expected) {
            assert!((found - expected).abs() < 1e-3, "{found} instead of {expected}");
        }

        // What was made of a fact that is gone is not put in place.
        let fact = talk.add_fact(&encode("hello")).unwrap();
        let condensing = begin(&talk, done);
        started.recv().unwrap();
        talk.supersede(fact, &encode("the")).unwrap();
        let before = talk.tokens().to_vec();
        assert!(!talk.condense(condensing).unwrap());
        assert_eq!(talk.tokens(), before);
        assert!(talk.forget(old).is_err(), "it was condensed");
    }

    #[test]
    fn sentences_end_where_they_do() {
        assert_eq!(sentences(TEXT).len(), 5);
        assert_eq!(sentences(TEXT)[1], "Version 1.5 of the library runs models!");
        assert!(sentences(" \n ").is_empty());
    }

    #[test]
    fn what_the_text_is_about_stays_whole_and_in_order() {
        let short = |most: usize| Extract.condense(TEXT, &mut |text| text.len() <= most);
        assert_eq!(short(1000).unwrap(), TEXT);
        assert_eq!(
            short(80).unwrap(),
            "Version 1.5 of the library runs models! The models of the library run on phones."
        );
        assert_eq!(short(5), None);
        for most in 0..TEXT.len() {
            let Some(text) = short(most) else { continue };
            assert!(text.len() <= most);
            assert!(sentences(&text).iter().all(|sentence| TEXT.contains(sentence)));
        }
    }
}
