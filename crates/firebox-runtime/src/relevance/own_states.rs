//! Encodes turns by the hidden states of the conversation's model.

use std::sync::Arc;

use burn::tensor::Tensor;
use firebox_model::{Decoder, Pooling};
use firebox_text::Tokenizer;

use super::{Similarity, TurnContent, TurnEncoder, examples};
use crate::embed::{Framed, add_share};
use crate::readback::read_floats;
use crate::residency::Residency;
use crate::{Model, RuntimeError};

/// The most tokens that are encoded together; a longer turn is the mean of its pieces. Attention within a piece costs
/// little compared with the matrix products, so the cost grows linearly with the length of a turn.
const PIECE: usize = 256;

/// Encodes turns with the conversation's model: the mean of its tokens' hidden states after a middle layer, where
/// they carry most of the meaning.
///
/// A turn is encoded on its own, so that its vector does not depend on its neighbours. By default that costs a pass
/// through half of the layers, once: half of the cost of prefilling the turn.
#[derive(Debug, Clone)]
pub struct OwnStates {
    decoder: Arc<Decoder>,
    layers: usize,
    /// What passes are charged to.
    residency: Option<Arc<Residency>>,
}

impl OwnStates {
    /// Uses the states after half of the layers.
    pub fn new(decoder: Arc<Decoder>) -> Self {
        let layers = decoder.layers().div_ceil(2);
        Self { decoder, layers, residency: None }
    }

    /// Uses the states of a model after half of its layers. In a model with a memory budget, each pass is charged to it, or
    /// refused if too little memory can be freed.
    pub fn of_model(model: &Model) -> Result<Self, RuntimeError> {
        Ok(Self { residency: model.residency.clone(), ..Self::new(model.decoder()?) })
    }

    /// Uses the states after `layers` layers. Fewer cost less; with none, the vector is the mean embedding, which
    /// only shows which tokens two turns share.
    pub fn with_layers(self, layers: usize) -> Self {
        Self { layers: layers.min(self.decoder.layers()), ..self }
    }

    /// Returns a scorer fitted to English sentence pairs that come with the library. For other languages
    /// [fit](Similarity::fit) pairs in those.
    pub fn calibrated(self, tokenizer: &Tokenizer) -> Result<Similarity<Self>, RuntimeError> {
        let tokens = |text: &str| tokenizer.encode_literal(text, false);
        Similarity::fit(self, &examples::tokenized(tokens)?.pairs())
    }
}

impl TurnEncoder for OwnStates {
    fn encode(&mut self, content: TurnContent<'_>) -> Result<Vec<f32>, RuntimeError> {
        let mut mean = Vec::new();
        for (piece, share) in Framed::unframed(content.tokens).pieces(PIECE) {
            let paid = self.residency.as_ref().map(|residency| residency.pay_for_text(piece.len()));
            let _paid = paid.transpose()?;
            let states = directions(self.decoder.hidden_after(&piece, self.layers)?);
            add_share(&mut mean, &read_floats(Pooling::Mean.pool(states))?, share);
        }
        Ok(mean)
    }
}

/// Scales rows to equal length. The first row is omitted if there are others: attention sinks make its state about a
/// thousand times as long, independent of the token.
fn directions(hidden: Tensor<2>) -> Tensor<2> {
    let [rows, _] = hidden.dims();
    let hidden = if rows > 1 { hidden.narrow(0, 1, rows - 1) } else { hidden };
    // Avoids NaN for a zero row.
    let length = hidden.clone().square().mean_dim(1).sqrt().clamp_min(1e-12);
    hidden.div(length)
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::super::{EarlierTurn, LabelledPair, RelevanceScorer};
    use super::*;
    use crate::residency::{ShareOptions, SharedBudget};
    use crate::{Account, Budget, MemoryError, device};

    const FIXTURES: [&str; 2] = ["reference/llama", "reference/qwen3_5_text"];

    fn decoder(fixture: &str) -> Arc<Decoder> {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures").join(fixture);
        Model::open(root, &device("cpu").unwrap()).unwrap().decoder().unwrap()
    }

    fn spoken(tokens: &[u32]) -> TurnContent<'_> {
        TurnContent { text: "", tokens }
    }

    /// Some tokens of one of eight vocabularies that have none in common.
    fn about(topic: u32, seed: u32) -> Vec<u32> {
        (0..24).map(|at| 30 * topic + 5 + (seed * 13 + at * (seed % 5 + 7)) % 29).collect()
    }

    /// The mean, by plain loops, of what a whole pass holds after some layers.
    fn by_hand(decoder: &Decoder, tokens: &[u32], layers: usize) -> Vec<f32> {
        let input = firebox_model::Input::new(tokens, 0, tokens.len());
        let mut pass = firebox_model::Pass::begin(decoder, &[input]).unwrap();
        let mut cache = decoder.cache();
        while pass.next_layer() < layers {
            pass.step(decoder, &mut [&mut cache]).unwrap();
        }
        let width = decoder.config().hidden_size;
        let hidden = pass.hidden().clone().try_into_vec_as::<f32>().unwrap();
        let rows: Vec<&[f32]> = hidden.chunks(width).skip(usize::from(tokens.len() > 1)).collect();
        let mut mean = vec![0.0; width];
        for row in &rows {
            let square: f32 = row.iter().map(|element| element * element).sum();
            let length = (square / width as f32).sqrt();
            mean.iter_mut()
                .zip(*row)
                .for_each(|(mean, element)| *mean += element / length / rows.len() as f32);
        }
        mean
    }

    fn close(found: &[f32], expected: &[f32]) -> bool {
        found.len() == expected.len() && found.iter().zip(expected).all(|(a, b)| (a - b).abs() < 1e-4)
    }

    #[test]
    fn a_turn_is_the_mean_of_its_states_after_some_layers() {
        for fixture in FIXTURES {
            let decoder = decoder(fixture);
            let states = OwnStates::new(decoder.clone());
            assert_eq!(states.layers, decoder.layers() / 2);
            for (layers, kept) in
                [(0, 0), (1, 1), (decoder.layers(), decoder.layers()), (99, decoder.layers())]
            {
                let mut states = states.clone().with_layers(layers);
                for count in [1, 2, 24] {
                    let tokens = &about(2, 3)[..count];
                    let found = states.encode(spoken(tokens)).unwrap();
                    assert!(close(&found, &by_hand(&decoder, tokens, kept)), "{fixture}, {layers}, {count}");
                }
            }
        }
    }

    #[test]
    fn a_pass_beside_the_engine_is_charged_or_refused() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/gguf/llama/model.gguf");
        let shared = SharedBudget::beside(&Budget::new(256 << 20)).unwrap();
        let options = ShareOptions { rows: PIECE, ..ShareOptions::pinned() };
        let model = shared.open(path, &device("cpu").unwrap(), &options).unwrap();
        let tokens: Vec<u32> = (0..PIECE as u32).map(|at| at * 7 % 150).collect();
        let mut states = OwnStates::of_model(&model).unwrap();
        let expected = OwnStates::new(model.decoder().unwrap()).encode(spoken(&tokens)).unwrap();
        let budget = model.residency().unwrap().budget();
        let held = || Account::ALL.iter().map(|account| budget.held(*account)).sum::<u64>();
        let before = held();
        // Though a pass of the engine has as many rows.
        let rows = (PIECE * model.decoder().unwrap().config().hidden_size * size_of::<f32>()) as u64;
        assert!(budget.most_held() < before + rows);
        assert_eq!(states.encode(spoken(&tokens)).unwrap(), expected);
        assert!(budget.most_held() >= before + rows, "{} of {rows}", budget.most_held() - before);
        assert_eq!(held(), before);
        let all = shared.budget();
        let _taken = all.charge(Account::Scratch, all.left()).unwrap();
        let refused = states.encode(spoken(&tokens)).unwrap_err();
        assert!(matches!(refused, RuntimeError::Memory(MemoryError::OverBudget { .. })), "{refused}");
    }

    #[test]
    fn a_long_turn_is_the_mean_of_its_pieces() {
        let decoder = decoder("reference/llama");
        let tokens: Vec<u32> = (0..PIECE as u32 + 40).map(|at| at * 7 % 300).collect();
        let found = OwnStates::new(decoder.clone()).encode(spoken(&tokens)).unwrap();
        let pieces = [&tokens[..PIECE], &tokens[PIECE..]];
        let vectors = pieces.map(|piece| by_hand(&decoder, piece, decoder.layers() / 2));
        let part = PIECE as f32 / tokens.len() as f32;
        let expected: Vec<f32> =
            vectors[0].iter().zip(&vectors[1]).map(|(a, b)| a * part + b * (1.0 - part)).collect();
        assert!(close(&found, &expected));
    }

    /// Of random weights no more can be asked than that turns of the same words are alike, and nothing of their layers,
    /// which mix words without regard to what they mean.
    #[test]
    fn turns_of_the_same_words_are_related() {
        for fixture in FIXTURES {
            let said: Vec<[Vec<u32>; 2]> =
                (0..8).map(|topic| [about(topic, topic + 1), about(topic, topic + 40)]).collect();
            let mut pairs = Vec::new();
            for topic in 0..8 {
                for apart in [0, 1, 3] {
                    let earlier = spoken(&said[(topic + apart) % 8][1]);
                    pairs.push(LabelledPair {
                        newest: spoken(&said[topic][0]),
                        earlier,
                        related: apart == 0,
                    });
                }
            }
            let mut scorer =
                Similarity::fit(OwnStates::new(decoder(fixture)).with_layers(0), &pairs).unwrap();
            assert_eq!(scorer.calibration().accuracy, 1.0, "{fixture}: {:?}", scorer.calibration());
            let turns: Vec<Vec<u32>> = (0..8).map(|topic| about(topic, topic + 90)).collect();
            let turns: Vec<_> = turns
                .iter()
                .enumerate()
                .map(|(topic, tokens)| EarlierTurn { id: topic as u64, content: spoken(tokens) })
                .collect();
            for topic in 0..8 {
                let scores = scorer.score(spoken(&about(topic, 200 + topic)), &turns).unwrap();
                for (other, score) in scores.into_iter().enumerate() {
                    let related = other == topic as usize;
                    assert_eq!(score >= scorer.threshold(), related, "{fixture}, {topic}, {other}: {score}");
                }
            }
        }
    }

    #[test]
    fn nothing_said_is_no_vector_and_foreign_tokens_are_refused() {
        let mut states = OwnStates::new(decoder("reference/llama"));
        assert_eq!(states.encode(spoken(&[])).unwrap(), Vec::<f32>::new());
        assert!(matches!(states.encode(spoken(&[5, 320])), Err(RuntimeError::Model(_))));
    }
}
