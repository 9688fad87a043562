//! Turns that have nothing to do with the question are hidden, as an encoder from an ONNX file judges them.
//!
//! `cargo run --manifest-path examples/onnx_scorer/Cargo.toml`

#![allow(clippy::print_stdout, reason = "an example prints its output")]

mod words;

use burn::tensor::{Device, Int, Tensor};
use firebox::relevance::{LabelledPair, Similarity, TurnContent, TurnEncoder};
use firebox::{Generation, GenerationConfig, Model, Role, RuntimeError, device};

/// What the build script made of the file.
mod encoder {
    #![allow(warnings, clippy::all, reason = "generated code")]
    include!(concat!(env!("OUT_DIR"), "/encoder/encoder.rs"));
}

/// The encoder, and where it computes.
#[derive(Debug)]
struct OnnxEncoder {
    model: encoder::Model,
    device: Device,
}

impl OnnxEncoder {
    fn new(device: Device) -> Self {
        Self { model: encoder::Model::from_embedded(&device), device }
    }

    fn direction(&self, pieces: &[i32]) -> Result<Vec<f32>, RuntimeError> {
        let pieces = Tensor::<1, Int>::from_data(pieces, &self.device);
        let direction = self.model.forward(pieces);
        direction
            .try_into_vec_as::<f32>()
            .map_err(|error| RuntimeError::Readback { reason: error.to_string() })
    }
}

impl TurnEncoder for OnnxEncoder {
    fn encode(&mut self, content: TurnContent<'_>) -> Result<Vec<f32>, RuntimeError> {
        let pieces = words::pieces(content.text);
        if pieces.is_empty() { Ok(Vec::new()) } else { self.direction(&pieces) }
    }

    /// Texts that share nothing point in unrelated directions.
    fn has_background(&self) -> bool {
        false
    }
}

/// Messages and earlier turns about the same: which similarity is one is learned from them.
const ABOUT_THE_SAME: [(&str, &str); 8] = [
    (
        "How long does the train to Hamburg take?",
        "I go to Hamburg by train on Friday. Trains to Hamburg leave every hour.",
    ),
    (
        "Does the bread have to rise before I bake it?",
        "My bread does not rise. Bake the bread later and let the dough rest.",
    ),
    (
        "Which guitar strings are the softest?",
        "I bought an old guitar. Put new strings on the guitar before you play.",
    ),
    (
        "Should tomatoes be watered in the evening?",
        "The tomatoes in my garden are yellow. Water tomatoes early, not at noon.",
    ),
    ("How many goals were there in the match?", "Our team won the match. Both goals came in its first half."),
    ("Which paint dries on a wet wall?", "I want to paint the kitchen wall. Wash the wall before you paint."),
    (
        "Is the fever dangerous for children?",
        "The children have a fever. Fever in children goes down at night.",
    ),
    ("How deep is the lake where we swim?", "We swim in the lake on Sunday. The lake is cold, and not deep."),
];

/// The scorer, fitted to those pairs and to as many that have nothing to do with each other.
fn scorer(device: Device) -> Result<Similarity<OnnxEncoder>, RuntimeError> {
    let said = |text| TurnContent { text, tokens: &[] };
    let pair = |newest: usize, apart: usize| {
        let earlier = (newest + apart) % ABOUT_THE_SAME.len();
        LabelledPair {
            newest: said(ABOUT_THE_SAME[newest].0),
            earlier: said(ABOUT_THE_SAME[earlier].1),
            related: apart == 0,
        }
    };
    let pairs: Vec<_> =
        (0..ABOUT_THE_SAME.len()).flat_map(|newest| [0, 1, 3].map(|apart| pair(newest, apart))).collect();
    Similarity::fit(OnnxEncoder::new(device), &pairs)
}

const TURNS: [(&str, &str); 4] = [
    ("My dog is called Biscuit.", "Noted."),
    ("I live in Oslo.", "Noted."),
    ("Write a loop from 3 to 12.", "for i = 3 to 12 do print i; end"),
    ("The train leaves at nine.", "Noted."),
];

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let root = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");
    let device = device("cpu")?;
    let model = Model::open(format!("{root}/assets/pocket"), &device)?;
    let tokenizer = model.tokenizer()?.clone();
    let mut scorer = scorer(device)?;
    println!("{:.0} % of the pairs are told apart", 100.0 * scorer.calibration().accuracy);

    let mut session = model.session()?;
    for (said, answer) in TURNS {
        session.begin_turn(&[Role::User, Role::Assistant])?;
        let turn = format!("<|user|>{said}<|end|><|assistant|>{answer}<|end|>");
        session.feed(&tokenizer.encode(&turn, false)?)?;
    }
    let question = "What is my dog called?";
    session.begin_turn(&[Role::User, Role::Assistant])?;
    let said = |tokens: &[u32]| Ok(tokenizer.decode(tokens, true));
    let newest = TurnContent { text: question, tokens: &[] };
    let hidden = session.mask_irrelevant(&mut scorer, newest, said)?;
    for (turn, (said, _)) in session.turns().zip(TURNS) {
        let seen = if turn.hidden.is_some() { "hidden" } else { "seen" };
        println!("{seen:6} {:.2} {said}", turn.relevance);
    }
    println!("{hidden} of {} turns are hidden", TURNS.len());

    let prompt = tokenizer.encode(&format!("<|user|>{question}<|end|><|assistant|>"), false)?;
    let config = GenerationConfig::new().with_max_tokens(24);
    let generation = Generation::begin(&mut session, Some(tokenizer), &prompt, config)?;
    println!("{question} {}", generation.complete()?.text);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As `onnx`'s own evaluator has it: `encoder/make_encoder.py` prints this.
    #[test]
    fn the_code_computes_what_the_file_says() {
        let encoder = OnnxEncoder::new(device("cpu").unwrap());
        let found = encoder.direction(&[0, 7, 7, 300, 511]).unwrap();
        assert_eq!(found.len(), 32);
        for (found, expected) in found.iter().zip([0.160649, 0.202681, -0.006734, -0.041297]) {
            assert!((found - expected).abs() < 1e-5, "{found} instead of {expected}");
        }
    }

    #[test]
    fn what_shares_words_is_related() {
        let mut scorer = scorer(device("cpu").unwrap()).unwrap();
        assert!(scorer.calibration().accuracy >= 0.9, "{:?}", scorer.calibration());
        let said = |text| TurnContent { text, tokens: &[] };
        let similarity =
            |scorer: &mut Similarity<_>, text| scorer.similarity(said("my dog"), said(text)).unwrap();
        let threshold = scorer.calibration().threshold;
        assert!(similarity(&mut scorer, "the name of the dog") > threshold);
        assert!(similarity(&mut scorer, "a loop that counts") < threshold);
        assert_eq!(similarity(&mut scorer, ""), 0.0);
    }
}
