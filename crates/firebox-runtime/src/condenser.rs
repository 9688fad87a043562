//! Shortens facts until they fit.

use std::collections::{HashMap, HashSet};
use std::fmt::Debug;

use firebox_cache::CacheError;
use firebox_text::Tokenizer;

use crate::RuntimeError;

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

/// The tokens of facts, at most `capacity` of them: where the text has more, what the condenser makes of it.
pub fn fit_facts(
    text: &str,
    tokenizer: &Tokenizer,
    capacity: usize,
    condenser: &dyn Condenser,
) -> Result<Vec<u32>, RuntimeError> {
    let whole = tokenizer.encode(text, true)?;
    if whole.len() <= capacity {
        return Ok(whole);
    }
    let encoded = |text: &str| tokenizer.encode(text, true).ok().filter(|tokens| tokens.len() <= capacity);
    let condensed = condenser.condense(text, &mut |text| encoded(text).is_some());
    // Another's condenser may say it fits without having asked.
    let full = CacheError::FactsFull { tokens: whole.len(), capacity };
    condensed.and_then(|text| encoded(&text)).ok_or_else(|| full.into())
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
