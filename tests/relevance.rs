//! Tests of relevance scorers: related turns score above the threshold, others below.

#![allow(clippy::unwrap_used, clippy::print_stdout)]

use std::path::{Path, PathBuf};

use firebox::internals::model::{Pooling, of_length_one};
use firebox::relevance::{
    EarlierTurn, LabelledPair, RelevanceScorer, SentenceEncoder, Similarity, TurnContent, TurnEncoder,
};
use firebox::{Model, RuntimeError, device};
use firebox_testing::tool::tool;

/// A message, an earlier exchange that it refers to, and one that it does not refer to.
const CONVERSATIONS: [(&str, &str, &str); 14] = [
    (
        "Can I leave out the cinnamon in the cake?",
        "Do you have a recipe for carrot cake? Mix flour, sugar, grated carrots, cinnamon and eggs, and bake it for \
         forty minutes.",
        "Which bus goes to the airport? Line 50 runs every twenty minutes from the central station.",
    ),
    (
        "Then why does my loop run one time too often?",
        "How do I iterate over a list in Python with an index? Use enumerate, or range with the length of the list.",
        "My knee hurts when I climb stairs. That may be the kneecap; rest it and see a doctor if it lasts.",
    ),
    (
        "Is there a night train from Hamburg as well?",
        "How do I get from Berlin to Stockholm without flying? There are trains via Hamburg and Copenhagen, about \
         fifteen hours in all.",
        "What is the boiling point of ethanol? It boils at 78 degrees Celsius at normal pressure.",
    ),
    (
        "Should I prune the roses before or after the frost?",
        "What has to be done in the garden in autumn? Rake the leaves, plant bulbs and cover sensitive roses.",
        "Who composed The Magic Flute? Mozart wrote the opera in 1791, the year of his death.",
    ),
    (
        "Who became president after the assassination?",
        "When was Abraham Lincoln shot? On 14 April 1865 in Ford's Theatre in Washington, days after the Civil War.",
        "My laptop gets hot while I play games. Clean the fan and put it on a hard surface.",
    ),
    (
        "How often may I take the painkiller?",
        "I have had a migraine since this morning. Lie down in a dark room, drink water and take a painkiller early.",
        "What does a notary cost? That depends on the value of the contract and is fixed by law.",
    ),
    (
        "What happens to the electrons in the outer shell?",
        "Why is sodium so reactive? Its atom has a single outer electron, which it gives away easily.",
        "Please suggest a name for my sailing boat. What about Albatross, Windfall or Marina?",
    ),
    (
        "Would a fixed rate be safer than a variable one?",
        "We need a loan of 200,000 euros for our house. Compare several banks and look at the effective interest rate.",
        "Which birds migrate to Africa? Storks, swallows and cuckoos spend the winter there.",
    ),
    (
        "And how is the offside rule explained to children?",
        "My son starts to play football in a club. He needs shoes, shin guards and a rough idea of the rules.",
        "How does a microwave heat food? It makes water molecules turn back and forth, which warms them.",
    ),
    (
        "Could you make the second verse of the poem funnier?",
        "Write a poem for my father's seventieth birthday. Dear Dad, the years have made you wise, said the first verse.",
        "How do I reset the router? Press the small button on its back for ten seconds.",
    ),
    (
        "Does the dog have to be vaccinated before we cross the border?",
        "We want to take our dog to Norway. Pets need a chip, a passport and a treatment against worms.",
        "What is the capital of Mongolia? Ulaanbaatar, with about one and a half million inhabitants.",
    ),
    (
        "What do I tell my boss when I resign?",
        "I have been offered another job with a better salary. Check your notice period before you sign the contract.",
        "How was the Grand Canyon formed? The Colorado river cut into the plateau over millions of years.",
    ),
    (
        "Which memory does the graphics card need for that?",
        "Can I run a language model on my own computer? Small ones run on any processor, larger ones want a fast GPU.",
        "How do I get red wine out of a carpet? Dab it with cold water and a little soap, and do not rub.",
    ),
    (
        "Is the climate better in the south of the island?",
        "Where should we spend our holiday in Madeira? Funchal has gardens and restaurants, the north is wild and green.",
        "Explain the difference between debit and credit. A debit entry is on the left of an account, credit on the right.",
    ),
];

/// Exchanges as in [`CONVERSATIONS`], but so short that the connection takes some thought.
const TERSE_CONVERSATIONS: [(&str, &str, &str); 16] = [
    (
        "How long should I boil the eggs so that the yolk stays soft?",
        "I would like to make a breakfast with toast and eggs.",
        "The train to Vienna leaves from platform nine.",
    ),
    (
        "And what does the error message about the lifetime mean?",
        "I am learning Rust and my struct holds a reference to a string.",
        "My grandmother was born in a village by the sea.",
    ),
    (
        "Which of these museums is open on Mondays?",
        "We are in Paris for three days and would like to see some paintings.",
        "The washing machine leaves grey stains on my shirts.",
    ),
    (
        "Could the noise come from the exhaust?",
        "My old Volkswagen makes a rattling sound when I start the engine.",
        "Photosynthesis turns carbon dioxide and water into sugar.",
    ),
    (
        "How many goals did she score last season?",
        "Our favourite football player has moved to a club in Barcelona.",
        "Please translate this contract clause into plain English.",
    ),
    (
        "Is ibuprofen better than paracetamol for that?",
        "I have had a headache and a fever since yesterday evening.",
        "The function returns a sorted list of unique integers.",
    ),
    (
        "What is the derivative of the outer function?",
        "Can you explain the chain rule in calculus with an example?",
        "We painted the kitchen walls light green.",
    ),
    (
        "When did the wall come down?",
        "I am writing an essay about the division of Berlin after the war.",
        "My tomato plants have small white insects under the leaves.",
    ),
    (
        "Would a bigger dog be happy in a flat like ours?",
        "We are thinking of adopting a puppy from the shelter.",
        "The deadline for the tax return is at the end of July.",
    ),
    (
        "Should I tune the strings lower?",
        "I just bought a second hand acoustic guitar and want to learn some songs.",
        "The recipe needs two cups of flour and a pinch of salt.",
    ),
    (
        "Does the moon have anything to do with the tides then?",
        "Yesterday the water at the beach rose by three metres within hours.",
        "My manager wants the slides before the meeting on Thursday.",
    ),
    (
        "How can I stop the server from running out of memory?",
        "Our Python web service keeps thousands of connections open.",
        "Her wedding dress was made of ivory silk.",
    ),
    (
        "Is it cheaper to fly or to take the ferry?",
        "In summer we want to spend two weeks on a Greek island.",
        "The neural network overfits after ten epochs.",
    ),
    (
        "What do I do if the bank declines the loan?",
        "I need money to open a small bakery in my town.",
        "The dinosaurs died out after an asteroid hit the earth.",
    ),
    (
        "Which chapter explains who the murderer was?",
        "I could not put down the crime novel you recommended.",
        "Turn the screw clockwise until the shelf sits tight.",
    ),
    (
        "Can snow damage the panels on the roof?",
        "We installed solar power on our house last spring.",
        "He speaks Spanish with his parents and French at school.",
    ),
];

fn said(text: &str) -> TurnContent<'_> {
    TurnContent { text, tokens: &[] }
}

/// Returns what scores on the wrong side of the threshold, and the share of the rest.
fn check(scorer: &mut impl RelevanceScorer, conversations: &[(&str, &str, &str)]) -> (Vec<String>, f64) {
    let mut wrong = Vec::new();
    for (newest, related, unrelated) in conversations {
        let turns = [(0, related), (1, unrelated)].map(|(id, text)| EarlierTurn { id, content: said(text) });
        let scores = scorer.score(said(newest), &turns).unwrap();
        turns.iter().for_each(|turn| scorer.forget(turn.id));
        println!("{:.3} {:.3} {newest}", scores[0], scores[1]);
        for (score, text, expected) in [(scores[0], related, true), (scores[1], unrelated, false)] {
            if (score >= scorer.threshold()) != expected {
                wrong.push(format!("{score:.3} for {newest:?} after {text:?}"));
            }
        }
    }
    let accuracy = 1.0 - wrong.len() as f64 / (2 * conversations.len()) as f64;
    println!("accuracy {accuracy:.3}");
    (wrong, accuracy)
}

#[test]
#[ignore = "tool: all-MiniLM-L6-v2"]
fn minilm_tells_related_turns_from_others() {
    let encoder = SentenceEncoder::open(tool("FIREBOX_MINILM"), &device("cpu").unwrap()).unwrap();
    let mut scorer = encoder.calibrated().unwrap();
    println!("{:?}", scorer.calibration());
    let (wrong, _) = check(&mut scorer, &CONVERSATIONS);
    assert!(wrong.is_empty(), "{wrong:#?}");
    let (wrong, accuracy) = check(&mut scorer, &TERSE_CONVERSATIONS);
    assert!(accuracy >= 0.9, "{wrong:#?}");
}

fn root(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

/// Returns the small encoder of random weights, with a tokenizer.
fn small_encoder() -> (tempfile::TempDir, Model) {
    let folder = tempfile::tempdir().unwrap();
    for name in ["config.json", "model.safetensors"] {
        std::fs::copy(root("tests/fixtures/reference/bert").join(name), folder.path().join(name)).unwrap();
    }
    let recorded = root("crates/firebox-text/tests/fixtures/tokenizers/wordpiece.json");
    let recorded: serde_json::Value = serde_json::from_slice(&std::fs::read(recorded).unwrap()).unwrap();
    std::fs::write(folder.path().join("tokenizer.json"), recorded["tokenizer"].to_string()).unwrap();
    let model = Model::open(folder.path(), &device("cpu").unwrap()).unwrap();
    (folder, model)
}

#[test]
fn a_turn_has_the_vector_of_its_text() {
    let (_folder, model) = small_encoder();
    let mut encoder = SentenceEncoder::new(model.clone()).unwrap();
    let text = "Hello world, this is a turn.";
    let tokens = model.tokenizer().unwrap().encode(text, true).unwrap();
    let states = model.encoder().unwrap().forward(&tokens).unwrap();
    let expected = of_length_one(Pooling::Mean.pool(states)).try_into_vec_as::<f32>().unwrap();
    assert_eq!(encoder.encode(said(text)).unwrap(), expected);
    assert_eq!(encoder.encode(said("")).unwrap(), Vec::<f32>::new());
}

/// Turns of any length are scored, and their end counts as much as their beginning.
#[test]
fn a_long_turn_is_encoded_in_pieces() {
    let (_folder, model) = small_encoder();
    let mut encoder = SentenceEncoder::new(model.clone()).unwrap();
    let (one, other) = ("a ".repeat(126), "b ".repeat(126));
    let longest = model.encoder().unwrap().config().max_positions;
    assert_eq!(model.tokenizer().unwrap().encode(&one, true).unwrap().len(), longest);
    let [one_alone, other_alone, both] =
        [one.clone(), other.clone(), one + &other].map(|text| encoder.encode(said(&text)).unwrap());
    for ((one, other), both) in one_alone.iter().zip(&other_alone).zip(&both) {
        assert!(((one + other) / 2.0 - both).abs() < 1e-6);
    }
}

#[test]
fn an_encoder_scores_turns() {
    let (_folder, model) = small_encoder();
    let encoder = SentenceEncoder::new(model).unwrap();
    let pair =
        |newest, earlier, related| LabelledPair { newest: said(newest), earlier: said(earlier), related };
    let pairs = [
        pair("a b a b a", "b a a b", true),
        pair("7 8 9 7 8", "9 8 7", true),
        pair("a b a b a", "9 8 7", false),
        pair("7 8 9 7 8", "b a a b", false),
    ];
    let mut scorer = Similarity::fit(encoder, &pairs).unwrap();
    let turns =
        [(1, "b b a a a b"), (2, "8 9 9 7 8")].map(|(id, text)| EarlierTurn { id, content: said(text) });
    let scores = scorer.score(said("a a b a"), &turns).unwrap();
    assert!(scores[0] > scorer.threshold() && scores[1] < scorer.threshold(), "{scores:?}");
}

#[test]
fn models_that_cannot_encode_text_are_refused() {
    let refused = |path: &str| SentenceEncoder::open(root(path), &device("cpu").unwrap()).unwrap_err();
    assert!(matches!(refused("tests/fixtures/reference/llama"), RuntimeError::Kind { .. }));
    assert!(matches!(refused("tests/fixtures/reference/bert"), RuntimeError::NoTokenizer { .. }));
}
