//! Shortens facts until they fit, in the background.

use std::collections::{HashMap, HashSet};
use std::fmt::Debug;
use std::sync::Arc;
use std::thread::{self, JoinHandle};

use firebox_cache::{CacheError, TurnId};
use firebox_text::Tokenizer;

use crate::{RuntimeError, Session};

/// Shortens texts.
pub trait Condenser: Debug + Send + Sync {
    /// Returns the most important parts of `text`, short enough for `fits`, or `None` if that is not possible.
    fn condense(&self, text: &str, fits: &mut dyn FnMut(&str) -> bool) -> Option<String>;
}

/// An extractive condenser: keeps the sentences whose words are most common in the text, unchanged and in order. Needs no
/// model.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ExtractiveCondenser;

/// The shortest word that counts, in characters. Words that are common in every text are short.
const SHORTEST_WORD: usize = 4;

impl Condenser for ExtractiveCondenser {
    fn condense(&self, text: &str, fits: &mut dyn FnMut(&str) -> bool) -> Option<String> {
        if fits(text) {
            return Some(text.to_owned());
        }
        let sentences = sentences(text);
        let mut counts: HashMap<String, usize> = HashMap::new();
        for word in sentences.iter().flat_map(|sentence| words(sentence)) {
            *counts.entry(word).or_default() += 1;
        }
        // The mean over its words, so that long sentences have no advantage.
        let weight = |sentence: &str| {
            let words: HashSet<String> = words(sentence).collect();
            let sum: usize = words.iter().filter_map(|word| counts.get(word)).sum();
            sum as f64 / words.len().max(1) as f64
        };
        let mut order: Vec<(usize, f64)> =
            sentences.iter().enumerate().map(|(index, sentence)| (index, weight(sentence))).collect();
        // Stable: of sentences with equal weights, the earlier comes first.
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

/// Returns the tokens of facts, condensed if there are more than `capacity`. Control tokens in the text are encoded as plain
/// text.
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
    // A condenser may return a text that does not fit.
    let full = CacheError::FactsFull { tokens: whole.len(), capacity };
    condensed.and_then(|text| encoded(&text)).ok_or_else(|| full.into())
}

/// A session's facts that are condensed on a thread of their own while the session continues.
#[derive(Debug)]
pub struct CondenseJob {
    condensed: JoinHandle<Result<Vec<u32>, RuntimeError>>,
    /// The facts that are condensed.
    facts: Vec<TurnId>,
}

impl CondenseJob {
    /// Begins to condense the facts that the session has now.
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
        Ok(Self { condensed: spawn(condense)?, facts })
    }

    /// Returns whether the facts are condensed, so that [`Session::condense`] does not wait.
    pub fn is_finished(&self) -> bool {
        self.condensed.is_finished()
    }
}

impl Session {
    /// Replaces facts by their condensed form, and recomputes what follows them: between two turns, and completely or not at
    /// all. Facts that were added since stay; hidden turns are removed. Waits until the job is finished.
    ///
    /// Returns `false`, and changes nothing, if one of the facts is no longer there.
    pub fn condense(&mut self, job: CondenseJob) -> Result<bool, RuntimeError> {
        let CondenseJob { condensed, facts } = job;
        let condensed = condensed.join().map_err(|_| RuntimeError::CondenserPanicked)?;
        let now = self.visible_facts();
        if facts.is_empty() || !facts.iter().all(|fact| now.contains(fact)) {
            return Ok(false);
        }
        self.replace_facts(&facts, &condensed?)?;
        Ok(true)
    }
}

/// A text that is condensed on a thread of its own.
#[derive(Debug)]
pub struct TextCondensation(JoinHandle<Option<String>>);

impl TextCondensation {
    /// Begins to condense a text until `fits` accepts it.
    pub fn begin(
        text: String,
        condenser: Arc<dyn Condenser>,
        mut fits: impl FnMut(&str) -> bool + Send + 'static,
    ) -> Result<Self, RuntimeError> {
        Ok(Self(spawn(move || condenser.condense(&text, &mut fits))?))
    }

    /// Returns whether [`finish`](Self::finish) does not wait.
    pub fn is_finished(&self) -> bool {
        self.0.is_finished()
    }

    /// Waits for the condensed text. Returns `None` if the text cannot be made to fit.
    pub fn finish(self) -> Result<Option<String>, RuntimeError> {
        self.0.join().map_err(|_| RuntimeError::CondenserPanicked)
    }
}

/// Facts that are condensed in the background to make room for a new one, while their conversation continues. See
/// [`Conversation::make_room_for_fact`](crate::Conversation::make_room_for_fact).
#[derive(Debug)]
pub struct FactUpdate {
    pub(crate) condensed: TextCondensation,
    /// The facts that are condensed.
    pub(crate) facts: Vec<TurnId>,
    /// The new fact.
    pub(crate) added: String,
}

impl FactUpdate {
    /// Returns whether the facts are condensed, so that applying the update does not wait.
    pub fn is_finished(&self) -> bool {
        self.condensed.is_finished()
    }

    /// Returns the new fact.
    pub fn added(&self) -> &str {
        &self.added
    }
}

fn spawn<T: Send + 'static>(
    condense: impl FnOnce() -> T + Send + 'static,
) -> Result<JoinHandle<T>, RuntimeError> {
    let thread = thread::Builder::new().name("firebox-facts".into()).spawn(condense);
    thread.map_err(|error| RuntimeError::Threads { reason: error.to_string() })
}

/// Splits a text at ends of sentences and lines.
fn sentences(text: &str) -> Vec<&str> {
    let mut sentences = Vec::new();
    for line in text.lines() {
        let mut rest = line.trim();
        while !rest.is_empty() {
            let ends = |(at, end): (usize, &str)| {
                let after = at + end.len();
                // Scripts without spaces between words have none between sentences.
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

    /// Returns the first word of every line, once the test receives from the channel.
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
    fn facts_are_condensed_in_the_background_and_replaced_between_turns() {
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
        // The condenser waits for the test; the conversation continues.
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

        // A job is discarded if one of its facts is gone.
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
    fn texts_are_split_into_sentences() {
        assert_eq!(sentences(TEXT).len(), 5);
        assert_eq!(sentences(TEXT)[1], "Version 1.5 of the library runs models!");
        assert!(sentences(" \n ").is_empty());
    }

    #[test]
    fn central_sentences_stay_unchanged_and_in_order() {
        let short = |most: usize| ExtractiveCondenser.condense(TEXT, &mut |text| text.len() <= most);
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
