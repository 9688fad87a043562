//! Tests of the conversation of `firebox chat`.

use std::path::Path;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use firebox_runtime::heads::HeadPoolConfig;
use firebox_runtime::residency::ResidencyOptions;
use firebox_runtime::{Account, Charge, device};

use super::*;

const SMALL: &str = "tests/fixtures/gguf/llama/model.gguf";

fn within(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(path)
}

fn model(path: &str) -> Model {
    Model::open(within(path), &device("cpu").unwrap()).unwrap()
}

/// A conversation in 64 tokens, with answers of two.
fn talk() -> ChatSession {
    talk_to(model(SMALL), 64)
}

fn talk_to(model: Model, context: usize) -> ChatSession {
    let script = Script::with_template(&model, None).unwrap();
    let config = GenerationConfig::new().with_context(context).with_max_tokens(2).with_ignore_end(true);
    let session = model.session().unwrap();
    ChatSession::resume(model, script, config, session, None, &[]).unwrap()
}

/// One for which a single page is left, and what takes the rest of the memory: nothing of the model is kept that could be let
/// go of for another page.
fn talk_in_one_page() -> (ChatSession, Charge) {
    let options = ResidencyOptions { context: Some(128), layers: Some(0), ..ResidencyOptions::new(8 << 30) };
    let model = Model::open_within(within(SMALL), &device("cpu").unwrap(), &options).unwrap();
    let budget = model.residency().unwrap().budget();
    let others = budget.charge(Account::Program, budget.left()).unwrap();
    (talk_to(model, 4096), others)
}

#[test]
fn where_pages_end_before_the_context_the_oldest_turns_are_forgotten() {
    let (interrupt, console) = (Interrupt::default(), Console::default());
    let (mut talk, _others) = talk_in_one_page();
    assert_eq!(talk.context(), 128);
    let mut forgot = Vec::new();
    for _ in 0..100 {
        let before = talk.messages().len();
        talk.say("Hello", &interrupt, &console).unwrap();
        forgot.push(talk.messages().len() <= before);
        assert!(talk.size().0 <= 128, "{:?}", talk.size());
        assert_eq!(talk.last().unwrap().tokens.len(), 2);
    }
    assert!(forgot.contains(&true));
    assert!(!forgot.windows(2).any(|pair| pair == [true, true]), "{forgot:?}");
}

#[test]
fn an_answer_ends_where_pages_do() {
    let (interrupt, console) = (Interrupt::default(), Console::default());
    let (mut talk, _others) = talk_in_one_page();
    talk.config.max_tokens = None;
    talk.say("Hello", &interrupt, &console).unwrap();
    assert_eq!(talk.last().unwrap().finish, Finish::Length);
    assert!((120..=128).contains(&talk.size().0), "{:?}", talk.size());
    talk.say("And you", &interrupt, &console).unwrap();
    assert!(talk.size().0 <= 128, "{:?}", talk.size());
}

#[test]
fn a_message_that_no_page_has_room_for_is_told_what_helps() {
    let (interrupt, console) = (Interrupt::default(), Console::default());
    let (mut talk, _others) = talk_in_one_page();
    let error = talk.say(&"word ".repeat(200), &interrupt, &console).unwrap_err();
    assert!(matches!(error.downcast_ref(), Some(RuntimeError::ContextFull { context: 128, .. })));
    assert!(error.to_string().contains("raise --memory"), "{error}");
    assert!(talk.messages().is_empty());
}

/// Kept layers are evicted to make room for pages.
#[test]
fn a_context_that_there_can_be_pages_for_is_had_as_a_whole() {
    let options = ResidencyOptions { context: Some(128), ..ResidencyOptions::new(8 << 30) };
    let model = Model::open_within(within(SMALL), &device("cpu").unwrap(), &options).unwrap();
    assert!(model.planned_tokens() < 4096);
    assert_eq!(talk_to(model, 4096).context(), 4096);
}

#[test]
fn a_message_that_is_too_long_takes_nothing_with_it() {
    let (interrupt, console) = (Interrupt::default(), Console::default());
    let mut talk = talk();
    talk.say("Hello", &interrupt, &console).unwrap();
    talk.say("And you", &interrupt, &console).unwrap();
    let said = talk.messages();
    let error = talk.say(&"word ".repeat(100), &interrupt, &console).unwrap_err();
    assert!(matches!(error.downcast_ref(), Some(RuntimeError::ContextFull { context: 64, .. })));
    assert_eq!((said.len(), talk.messages()), (4, said));
    talk.say("Hello", &interrupt, &console).unwrap();
    assert_eq!(talk.messages().len(), 6);
}

#[test]
fn what_is_forgotten_is_enough_for_more_than_one_message() {
    let (interrupt, console) = (Interrupt::default(), Console::default());
    let mut talk = talk();
    let mut forgot = Vec::new();
    for _ in 0..40 {
        let before = talk.messages().len();
        talk.say("Hello", &interrupt, &console).unwrap();
        forgot.push(talk.messages().len() <= before);
        assert!(!forgot[forgot.len() - 1] || talk.size().0 <= 48 + 2, "{:?}", talk.size());
        // As long as it was asked to be, however full the context is.
        assert_eq!(talk.last().unwrap().tokens.len(), 2);
    }
    assert!(forgot.contains(&true));
    assert!(!forgot.windows(2).any(|pair| pair == [true, true]), "{forgot:?}");
}

/// The router reads a message in pieces, and looks between them whether it is to stop.
#[test]
fn the_last_ctrl_c_does_not_stop_the_choice_of_a_head() {
    let (interrupt, console) = (Interrupt::default(), Console::default());
    let model = model("assets/pocket").with_heads(HeadPoolConfig::patient()).unwrap();
    let script = Script::new(&model).unwrap();
    let config = GenerationConfig::new().with_max_tokens(4).with_end_tokens(model.end_tokens());
    let session = model.session().unwrap().with_cancel(interrupt.flag()).with_chunk(2);
    let mut talk = ChatSession::resume(model, script, config, session, None, &[]).unwrap();
    let router = Router::for_session(talk.session());
    assert!(router.is_some());
    talk.let_choose(router);
    interrupt.flag().store(true, Ordering::SeqCst);
    talk.say("My dog is called Biscuit.", &interrupt, &console).unwrap();
    assert_ne!(talk.last().unwrap().finish, Finish::Cancelled);
}

/// A conversation with the pocket model.
fn talk_in_pocket(context: usize, session: Option<Session>, messages: &[Message]) -> ChatSession {
    let model = model("assets/pocket");
    let script = Script::new(&model).unwrap();
    let config =
        GenerationConfig::new().with_context(context).with_max_tokens(8).with_end_tokens(model.end_tokens());
    let session = session.unwrap_or_else(|| model.session().unwrap());
    ChatSession::resume(model, script, config, session, None, messages).unwrap()
}

#[test]
fn facts_that_outgrow_their_tokens_are_condensed_between_messages() {
    let (interrupt, console) = (Interrupt::default(), Console::default());
    let facts = ["My dog is called Rex.", "My brother is called Tom.", "My cat is called Tim."];
    let script = Script::new(&model("assets/pocket")).unwrap();
    let tokens = facts.map(|fact| script.parts().unwrap().system_message(fact).unwrap().len());
    // A quarter of the context is for facts.
    let mut talk = talk_in_pocket(4 * (tokens[0] + tokens[1].max(tokens[2])), None, &[]);
    talk.add_fact(facts[0], &interrupt, &console).unwrap();
    talk.add_fact(facts[1], &interrupt, &console).unwrap();
    assert!(talk.fact_update.is_none(), "they fit");
    talk.add_fact(facts[2], &interrupt, &console).unwrap();
    assert_eq!(talk.messages().len(), 3, "what is not read yet is part of it");
    let began = Instant::now();
    while talk.fact_update.is_some() {
        assert!(began.elapsed() < Duration::from_secs(60));
        talk.say("Hi", &interrupt, &console).unwrap();
    }
    let known = talk.transcript.read_facts();
    assert_eq!((known.len(), known[1].1.as_str()), (2, facts[2]));
    assert_eq!(talk.messages().last().unwrap().role, "assistant");
    // They are read again with everything else.
    talk.set_system("Be brief.");
    talk.say("Hi", &interrupt, &console).unwrap();
    let reread = talk.transcript.read_facts();
    assert_eq!(reread.len(), 2);
    assert_eq!(reread[0].1, known[0].1);
}

#[test]
fn a_session_continues_where_it_was_or_is_read_again() {
    let (interrupt, console) = (Interrupt::default(), Console::default());
    let mut talk = talk_in_pocket(512, None, &[]);
    talk.add_fact("My dog is called Rex.", &interrupt, &console).unwrap();
    talk.say("Hi", &interrupt, &console).unwrap();
    talk.say("Who are you?", &interrupt, &console).unwrap();
    let (session, messages) = (talk.session.clone(), talk.messages());
    let tokens = session.tokens().to_vec();
    let mut resumed = talk_in_pocket(512, Some(session), &messages);
    assert_eq!(resumed.session.tokens(), tokens);
    // Versions before turns saved the same tokens as a whole.
    let mut whole = model("assets/pocket").session().unwrap();
    whole.feed(&tokens).unwrap();
    let mut reread = talk_in_pocket(512, Some(whole), &messages);
    assert!(reread.session.tokens().is_empty());
    let says = [&mut talk, &mut resumed, &mut reread].map(|talk| {
        talk.say("What is my dog called?", &interrupt, &console).unwrap();
        talk.messages()
    });
    assert_eq!(says[0], says[1]);
    assert_eq!(says[0], says[2]);
    assert!(reread.transcript.exchanges.iter().all(|exchange| exchange.turn.is_some()));
}

#[test]
fn answering_again_keeps_facts_that_came_after() {
    let (interrupt, console) = (Interrupt::default(), Console::default());
    let mut talk = talk_in_pocket(512, None, &[]);
    talk.say("Hi", &interrupt, &console).unwrap();
    talk.add_fact("My dog is called Rex.", &interrupt, &console).unwrap();
    assert!(talk.answer_again(&interrupt, &console).unwrap());
    assert_eq!((talk.transcript.read_facts().len(), talk.messages().len()), (1, 3));
}
