//! Scores turns by the cosine of their vectors.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, HashMap};

use super::{Calibration, EarlierTurn, RelevanceScorer, TurnContent, TurnEncoder};
use crate::RuntimeError;

/// Scores turns by the cosine of their vectors.
///
/// Vectors of language models have a common part that is independent of the text: a shared direction, and a few
/// elements much larger than the others. If an encoder [has such a background](TurnEncoder::has_background), the mean
/// of vectors of diverse texts is subtracted first, and every element divided by its standard deviation among them.
#[derive(Debug, Clone)]
pub struct Similarity<E> {
    encoder: E,
    /// `None` if directions are meaningful as they are.
    background: Option<Background>,
    calibration: Calibration,
    /// The unit vectors of scored turns.
    directions: HashMap<u64, Vec<f32>>,
}

/// Two texts, and whether they are related.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LabelledPair<'a> {
    /// The newest message.
    pub newest: TurnContent<'a>,
    /// An earlier turn.
    pub earlier: TurnContent<'a>,
    /// Whether the earlier turn helps to answer the message.
    pub related: bool,
}

impl<E: TurnEncoder> Similarity<E> {
    /// Fits the background and the calibration to labelled pairs. A few dozen pairs about different topics suffice;
    /// each text is encoded once.
    pub fn fit(mut encoder: E, pairs: &[LabelledPair<'_>]) -> Result<Self, RuntimeError> {
        // Pairs share texts, and encoding is expensive. The map is ordered, so that sums round alike every time.
        let mut vectors: BTreeMap<TurnContent<'_>, Vec<f32>> = BTreeMap::new();
        for content in pairs.iter().flat_map(|pair| [pair.newest, pair.earlier]) {
            if let Entry::Vacant(missing) = vectors.entry(content) {
                missing.insert(encoder.encode(content)?);
            }
        }
        let background = encoder
            .has_background()
            .then(|| Background::of(vectors.values().filter(|vector| !vector.is_empty())));
        let direction = |content| direction(background.as_ref(), vectors[&content].clone());
        let similarities: Vec<_> = pairs
            .iter()
            .map(|pair| (cosine(&direction(pair.newest), &direction(pair.earlier)), pair.related))
            .collect();
        let calibration = Calibration::fit(&similarities)?;
        Ok(Self { encoder, background, calibration, directions: HashMap::new() })
    }

    /// Uses another calibration, for example one from the application's own pairs.
    pub fn with_calibration(self, calibration: Calibration) -> Self {
        Self { calibration, ..self }
    }

    /// Returns the calibration.
    pub fn calibration(&self) -> &Calibration {
        &self.calibration
    }

    /// Returns the cosine similarity of two texts.
    pub fn similarity(&mut self, a: TurnContent<'_>, b: TurnContent<'_>) -> Result<f64, RuntimeError> {
        Ok(cosine(&self.direction(a)?, &self.direction(b)?))
    }

    fn direction(&mut self, content: TurnContent<'_>) -> Result<Vec<f32>, RuntimeError> {
        Ok(direction(self.background.as_ref(), self.encoder.encode(content)?))
    }
}

impl<E: TurnEncoder> RelevanceScorer for Similarity<E> {
    fn score(
        &mut self,
        newest: TurnContent<'_>,
        earlier: &[EarlierTurn<'_>],
    ) -> Result<Vec<f32>, RuntimeError> {
        if earlier.is_empty() {
            return Ok(Vec::new());
        }
        let newest = self.direction(newest)?;
        earlier
            .iter()
            .map(|turn| {
                if !self.knows(turn.id) {
                    let direction = self.direction(turn.content)?;
                    self.directions.insert(turn.id, direction);
                }
                Ok(self.calibration.score(cosine(&newest, &self.directions[&turn.id])))
            })
            .collect()
    }

    fn knows(&self, id: u64) -> bool {
        self.directions.contains_key(&id)
    }

    fn forget(&mut self, id: u64) {
        self.directions.remove(&id);
    }
}

/// The part that vectors have in common, independent of their text.
#[derive(Debug, Clone, Default)]
struct Background {
    mean: Vec<f32>,
    spread: Vec<f32>,
}

impl Background {
    fn of<'a>(vectors: impl Iterator<Item = &'a Vec<f32>> + Clone) -> Self {
        let count = vectors.clone().count() as f64;
        let Some(width) = vectors.clone().map(Vec::len).next() else { return Self::default() };
        let (mut mean, mut spread) = (Vec::with_capacity(width), Vec::with_capacity(width));
        for element in 0..width {
            let values = vectors.clone().map(|vector| f64::from(vector[element]));
            let middle = values.clone().sum::<f64>() / count;
            let variance = values.map(|value| (value - middle).powi(2)).sum::<f64>() / count;
            mean.push(middle as f32);
            spread.push(variance.sqrt() as f32);
        }
        Self { mean, spread }
    }

    fn take_off(&self, vector: &mut [f32]) {
        for ((element, mean), spread) in vector.iter_mut().zip(&self.mean).zip(&self.spread) {
            // A constant element carries no information.
            *element = if *spread > 0.0 { (*element - mean) / spread } else { 0.0 };
        }
    }
}

/// Scales a vector to length one after removing the background. A vector without anything beyond it stays zero.
fn direction(background: Option<&Background>, mut vector: Vec<f32>) -> Vec<f32> {
    if let Some(background) = background {
        background.take_off(&mut vector);
    }
    let length = vector.iter().map(|&element| f64::from(element).powi(2)).sum::<f64>().sqrt();
    if length > 0.0 {
        vector.iter_mut().for_each(|element| *element = (f64::from(*element) / length) as f32);
    }
    vector
}

/// Returns the cosine of two unit vectors, and 0 if one is empty or zero.
fn cosine(a: &[f32], b: &[f32]) -> f64 {
    a.iter().zip(b).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum()
}

#[cfg(test)]
mod tests {
    use super::super::RELEVANT;
    use super::*;

    /// Counts letters, beside an element that dwarfs all others and one that never differs.
    #[derive(Debug, Default)]
    struct Letters {
        encoded: usize,
    }

    impl TurnEncoder for Letters {
        fn encode(&mut self, content: TurnContent<'_>) -> Result<Vec<f32>, RuntimeError> {
            self.encoded += 1;
            if content.text.is_empty() {
                return Ok(Vec::new());
            }
            let count = |letter| content.text.matches(letter).count() as f32;
            let letters = ('a'..='h').map(count);
            Ok(letters.chain([1e4 + content.text.len() as f32, 7.0]).collect())
        }
    }

    fn said(text: &str) -> TurnContent<'_> {
        TurnContent { text, tokens: &[] }
    }

    fn scorer() -> Similarity<Letters> {
        let pair =
            |newest, earlier, related| LabelledPair { newest: said(newest), earlier: said(earlier), related };
        let pairs = [
            pair("aaab", "bab", true),
            pair("ccd", "dcdc", true),
            pair("eef", "feef", true),
            pair("gghh", "hg", true),
            pair("aaab", "dcdc", false),
            pair("ccd", "feef", false),
            pair("eef", "hg", false),
            pair("gghh", "bab", false),
        ];
        Similarity::fit(Letters::default(), &pairs).unwrap()
    }

    fn turn(id: u64, text: &str) -> EarlierTurn<'_> {
        EarlierTurn { id, content: said(text) }
    }

    #[test]
    fn related_turns_score_above_the_threshold_and_others_below() {
        let mut scorer = scorer();
        assert_eq!(scorer.threshold(), RELEVANT);
        let turns = [turn(1, "ababa"), turn(2, "cccd"), turn(3, "fefe"), turn(4, "")];
        let scores = scorer.score(said("abba"), &turns).unwrap();
        assert!(scores[0] > RELEVANT, "{scores:?}");
        assert!(scores[1..].iter().all(|&score| score < RELEVANT), "{scores:?}");
    }

    #[test]
    fn a_turn_is_encoded_once_until_it_is_forgotten() {
        let mut scorer = scorer();
        assert_eq!(scorer.encoder.encoded, 8, "a text of the pairs was encoded twice");
        let encoded = |scorer: &mut Similarity<Letters>, turns: &[EarlierTurn<'_>]| {
            scorer.encoder.encoded = 0;
            let scores = scorer.score(said("abba"), turns).unwrap();
            (scorer.encoder.encoded, scores)
        };
        let (count, scores) = encoded(&mut scorer, &[turn(1, "ab"), turn(2, "cd")]);
        assert_eq!(count, 3);
        // Content may be omitted for turns that the scorer knows.
        assert!(scorer.knows(1) && !scorer.knows(3));
        let (count, again) = encoded(&mut scorer, &[turn(1, ""), turn(2, ""), turn(3, "ef")]);
        assert_eq!((count, &again[..2]), (2, &scores[..]));
        scorer.forget(1);
        assert_eq!(scorer.directions.len(), 2);
        let (count, again) = encoded(&mut scorer, &[turn(1, "gh"), turn(2, "cd")]);
        assert_eq!((count, again[1]), (2, scores[1]));
        assert_ne!(again[0], scores[0]);
        assert_eq!(encoded(&mut scorer, &[]), (0, vec![]));
    }

    #[test]
    fn indistinguishable_pairs_are_refused() {
        let pairs =
            [true, false].map(|related| LabelledPair { newest: said("a"), earlier: said("b"), related });
        let refused = Similarity::fit(Letters::default(), &pairs);
        assert!(matches!(refused, Err(RuntimeError::Calibration { related: 1, unrelated: 1, .. })));
    }
}
