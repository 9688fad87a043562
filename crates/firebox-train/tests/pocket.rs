//! Tests of the pocket model's training data: it is reproducible by its seed, the splits do not overlap, and every answer can
//! be known.

#![allow(clippy::unwrap_used, reason = "a test that fails here should say so")]

use firebox_text::{ChatTemplate, Message, TemplateOptions, TextAssets, Tokenizer, TokenizerSource};
use firebox_train::pocket::{
    Conversation, Generator, Kind, PocketTokenizer, Role, Scribe, Shape, Split, Task,
};
use std::collections::HashSet;
use std::sync::LazyLock;

fn conversations(seed: u64, split: Split, shape: Shape, count: usize) -> Vec<Conversation> {
    let mut generator = Generator::new(seed, split, shape);
    (0..count).map(|index| generator.conversation(Task::ALL[index % 3])).collect()
}

/// The answers that are taught, each with its kind and all that was said before.
fn taught(conversation: &Conversation) -> Vec<(Kind, String, &str)> {
    let mut kinds = conversation.kinds.iter();
    let mut said = String::new();
    let mut taught = Vec::new();
    for line in &conversation.messages {
        if line.role == Role::Assistant && line.weight != Some(0) {
            let kind = *kinds.next().expect("a kind for every target");
            taught.push((kind, said.clone(), line.content.as_str()));
        }
        said += &line.content;
        said.push('\n');
    }
    assert_eq!(kinds.next(), None);
    taught
}

fn words(text: &str) -> impl Iterator<Item = &str> {
    text.split(|c: char| !c.is_alphanumeric()).filter(|word| !word.is_empty())
}

#[test]
fn a_seed_always_writes_the_same() {
    for split in [Split::Train, Split::HeldOut] {
        let once = conversations(3, split, Shape::full(), 60);
        assert_eq!(once, conversations(3, split, Shape::full(), 60));
        assert_ne!(once, conversations(4, split, Shape::full(), 60));
    }
}

#[test]
fn what_is_written_does_not_change_unnoticed() {
    let text = serde_json::to_string(&conversations(1, Split::Train, Shape::full(), 300)).unwrap();
    let hash = text.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    });
    assert_eq!(format!("{hash:016x}"), WRITTEN, "the recipe no longer reproduces the model in assets/pocket");
}

const WRITTEN: &str = "9a091786133310a8";

#[test]
fn no_fact_or_program_of_one_split_is_in_the_other() {
    // Only answers about facts and programs: greetings and what is not known are the same in both.
    let stated = |split| -> HashSet<String> {
        conversations(1, split, Shape::full(), 3000)
            .iter()
            .flat_map(taught)
            .filter(|(kind, _, answer)| {
                matches!(kind, Kind::Tell | Kind::Ask | Kind::Program) && !answer.contains("unknown")
            })
            .flat_map(|(kind, _, answer)| match kind {
                Kind::Tell => answer
                    .trim_start_matches("Noted. ")
                    .split(". ")
                    .map(|s| s.trim_end_matches('.').to_owned())
                    .collect(),
                _ => vec![answer.trim_end_matches('.').to_owned()],
            })
            .collect()
    };
    let (train, held_out) = (stated(Split::Train), stated(Split::HeldOut));
    assert!(train.len() > 3000 && held_out.len() > 3000, "{} and {}", train.len(), held_out.len());
    assert_eq!(train.intersection(&held_out).collect::<Vec<_>>(), Vec::<&String>::new());
}

#[test]
fn every_answer_can_be_known_from_what_was_said() {
    let own: HashSet<&str> = OWN_WORDS.split_whitespace().collect();
    for split in [Split::Train, Split::HeldOut] {
        for conversation in conversations(2, split, Shape::full(), 1500) {
            for (kind, said, answer) in taught(&conversation) {
                if kind == Kind::Talk {
                    continue;
                }
                let said: HashSet<&str> = words(&said).collect();
                let missing: Vec<_> =
                    words(answer).filter(|word| !said.contains(word) && !own.contains(word)).collect();
                assert!(missing.is_empty(), "{missing:?} in `{answer}`, {kind:?} of {conversation:?}");
            }
        }
    }
}

/// The words that the styles of the three heads use by themselves.
const OWN_WORDS: &str = "Noted You Your The I do not know that yet s is are called favourite colour live lives in work \
    works as a years old like likes play plays the name on home job age place day word let me print unknown fn f x \
    return 1 2 3 for i to if list";

#[test]
fn the_latest_value_counts() {
    let mut revised = 0;
    for conversation in conversations(5, Split::Train, Shape::full(), 4500) {
        let mut latest = std::collections::HashMap::new();
        for (kind, _, answer) in taught(&conversation) {
            if conversation.task != Task::Code {
                continue;
            }
            match kind {
                Kind::Tell => {
                    let (subject, value) = answer[4..].trim_end_matches(';').split_once(" = ").unwrap();
                    revised += usize::from(latest.insert(subject.to_owned(), value.to_owned()).is_some());
                }
                Kind::Ask => {
                    let (subject, value) = answer[6..].split_once("; // ").unwrap();
                    if let Some(told) = latest.get(subject) {
                        let elsewhere = conversation.messages.iter().any(|line| line.weight == Some(0));
                        assert!(told == value || elsewhere, "{subject} is {told} in {conversation:?}");
                    }
                }
                Kind::Unknown => {
                    let (subject, value) = answer[6..].split_once("; // ").unwrap();
                    assert!(value == "unknown" && !latest.contains_key(subject), "{conversation:?}");
                }
                _ => {}
            }
        }
    }
    assert!(revised > 20, "{revised}");
}

static LEARNT: LazyLock<PocketTokenizer> =
    LazyLock::new(|| PocketTokenizer::learn(1, 768, 300).expect("text to learn from"));

fn assets() -> TextAssets {
    let tokenizer = Some(TokenizerSource::Json(LEARNT.tokenizer.clone().into_bytes()));
    let assets = TextAssets { tokenizer, ..TextAssets::default() };
    assets.with_config(serde_json::from_str(&LEARNT.config).unwrap())
}

#[test]
fn the_tokenizer_is_the_same_every_time() {
    assert_eq!(*LEARNT, PocketTokenizer::learn(1, 768, 300).expect("text to learn from"));
}

#[test]
fn whatever_is_written_comes_back() {
    let tokenizer = Tokenizer::new(&assets(), &serde_json::Value::Null).unwrap();
    assert_eq!(tokenizer.vocab_size(), 768);
    let generated = conversations(9, Split::HeldOut, Shape::full(), 200);
    let lines = generated.iter().flat_map(|c| &c.messages).map(|line| line.content.as_str());
    for text in lines.chain(["héllo 世界\n  two\tthree", "", "two  spaces ", "<|end|>", "🦊's 12 + 3"]) {
        let ids = tokenizer.encode_literal(text, false).unwrap();
        assert_eq!(tokenizer.decode(&ids, false), text);
    }
}

#[test]
fn a_name_is_spelt_in_the_same_pieces_wherever_it_stands() {
    let tokenizer = Tokenizer::new(&assets(), &serde_json::Value::Null).unwrap();
    let name = tokenizer.encode("Zipoga", false).unwrap();
    for text in [
        "Zipoga lives here",
        "I know Zipoga.",
        "let Zipoga.dog = Rex;",
        "fn Zipoga(x)",
        "<|user|>Zipoga<|end|>",
    ] {
        let ids = tokenizer.encode(text, false).unwrap();
        assert!(ids.windows(name.len()).any(|window| window == name), "{text}");
    }
}

#[test]
fn the_template_spends_two_pieces_on_a_message() {
    let assets = assets();
    let tokenizer = Tokenizer::new(&assets, &serde_json::Value::Null).unwrap();
    let template = ChatTemplate::new(&assets, &tokenizer).unwrap();
    let messages = [Message::system("My dog is called Rex."), Message::user("Hello")];
    let prompt = template.render(&messages, &TemplateOptions::default()).unwrap();
    assert_eq!(prompt, "<|system|>My dog is called Rex.<|end|><|user|>Hello<|end|><|assistant|>");
    let pieces = tokenizer.encode(&prompt, false).unwrap();
    let words = tokenizer.encode("My dog is called Rex.", false).unwrap().len()
        + tokenizer.encode("Hello", false).unwrap().len();
    assert_eq!(pieces.len(), words + 5);
    assert_eq!(tokenizer.eos_ids(), [tokenizer.token_to_id("<|end|>").unwrap()]);
}

#[test]
fn passages_are_what_the_template_writes() {
    let assets = assets();
    let tokenizer = Tokenizer::new(&assets, &serde_json::Value::Null).unwrap();
    let template = ChatTemplate::new(&assets, &tokenizer).unwrap();
    let scribe = Scribe::new(&tokenizer).unwrap();
    for conversation in conversations(11, Split::Train, Shape::full(), 60) {
        let messages: Vec<_> = conversation
            .messages
            .iter()
            .map(|line| match line.role {
                Role::System => Message::system(line.content.as_str()),
                Role::User => Message::user(line.content.as_str()),
                Role::Assistant => Message::assistant(line.content.as_str()),
            })
            .collect();
        let options = TemplateOptions { add_generation_prompt: false, ..TemplateOptions::default() };
        let passage = scribe.write(&conversation).unwrap();
        assert_eq!(passage.tokens, template.encode(&tokenizer, &messages, &options).unwrap());
        let answers = taught(&conversation);
        assert_eq!(passage.answers.len(), answers.len());
        for (answer, (kind, _, text)) in passage.answers.iter().zip(answers) {
            assert_eq!(
                (answer.kind, tokenizer.decode(&passage.tokens[answer.tokens.clone()], true)),
                (kind, text.to_owned())
            );
        }
        let weights = passage.weights(0.25);
        let taught: usize = passage.answers.iter().map(|answer| answer.tokens.len()).sum();
        assert_eq!(weights.iter().filter(|weight| **weight == 1.0).count(), taught);
        assert!(weights[0] == 0.0 && weights[1..].iter().all(|weight| [0.25, 1.0].contains(weight)));
    }
}

#[test]
fn what_is_said_meanwhile_has_nothing_to_do_with_persistent_facts() {
    let mut generator = Generator::new(3, Split::HeldOut, Shape::full());
    for _ in 0..20 {
        let persistent = generator.persistent(230);
        assert_eq!(persistent.system.role, Role::System);
        assert_eq!(persistent.exchanges.len(), 230);
        assert!(!persistent.questions.is_empty());
        for [_, answer] in &persistent.questions {
            let told =
                persistent.exchanges.iter().flatten().any(|line| line.content.contains(&answer.content));
            assert!(!told, "{answer:?}");
        }
    }
}
