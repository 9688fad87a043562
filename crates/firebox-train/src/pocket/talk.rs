//! Small talk: greetings, and questions about the pocket model with its answers.

use super::draw::Draw;
use super::words;

const HELLO: &[&str] =
    &["Hello", "Hi", "Hey", "Good morning", "Hello there", "Hi there", "Good evening", "Hello Firebox"];
const GOODBYE: &[&str] = &["Bye", "Goodbye", "See you", "Good night", "Bye bye"];

const EXCHANGES: &[(&[&str], &str)] = &[
    (
        &[
            "Who are you?",
            "What are you?",
            "What is your name?",
            "Are you a robot?",
            "Tell me about yourself.",
            "Who is Firebox?",
            "What is Firebox?",
        ],
        "I am the pocket model of Firebox.",
    ),
    (
        &[
            "What can you do?",
            "Help",
            "Help me.",
            "Can you help me?",
            "How does this work?",
            "What do you do?",
        ],
        "Tell me facts and ask me about them. I also write small programs and sum things up.",
    ),
    (&["Thanks", "Thank you", "Thank you very much", "Thanks a lot", "Great, thanks"], "You are welcome!"),
    (&["How are you?", "How is it going?", "Are you well?"], "I am fine, thank you."),
    (
        &["Who made you?", "Who trained you?", "Where do you come from?", "How were you trained?"],
        "I was trained by Firebox, on text it wrote itself.",
    ),
    (&["Tell me a joke.", "Make me laugh.", "Say something funny."], "I am too small for jokes."),
    (&["Good", "Great", "Nice", "Ok", "Okay", "Well done", "Cool", "Right", "Yes"], "Good."),
    (
        &[
            "What is the capital of France?",
            "What time is it?",
            "Is it raining?",
            "Who is the king?",
            "What is the weather like?",
            "How far is the moon?",
            "What is love?",
            "Who won the game?",
            "Why is the sky blue?",
            "What day is it today?",
        ],
        UNKNOWN,
    ),
];

/// The answer of the chat head to what it was never told.
pub(super) const UNKNOWN: &str = "I do not know that yet.";

/// Something a person says, and the answer; by name, where the name is known.
pub(super) fn exchange(name: Option<&str>, draw: &mut Draw) -> (String, String) {
    let greeting = |word: &str| name.map_or(format!("{word}!"), |name| format!("{word}, {name}!"));
    match draw.below(7) {
        0 | 1 => (draw.word(HELLO).to_owned(), greeting("Hello")),
        2 => (draw.word(GOODBYE).to_owned(), greeting("Goodbye")),
        // A remark that is no fact is acknowledged and not repeated.
        3 => (draw.word(words::NOISE).to_owned(), "I see.".to_owned()),
        _ => {
            let (questions, answer) = draw.one(EXCHANGES);
            (draw.word(questions).to_owned(), (*answer).to_owned())
        }
    }
}
