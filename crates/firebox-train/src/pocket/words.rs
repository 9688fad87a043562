//! The words that facts are made of: closed lists, and made-up names.

use super::draw::Draw;

pub(super) const KIN: &[&str] =
    &["dog", "cat", "horse", "parrot", "sister", "brother", "friend", "boss", "boat", "robot"];
pub(super) const COLOURS: &[&str] = &[
    "red", "green", "blue", "yellow", "white", "black", "brown", "purple", "orange", "pink", "grey", "gold",
];
pub(super) const JOBS: &[&str] = &[
    "baker", "doctor", "teacher", "pilot", "farmer", "singer", "painter", "nurse", "cook", "driver",
    "writer", "builder",
];
pub(super) const FOODS: &[&str] = &[
    "apples", "bread", "cheese", "soup", "plums", "coffee", "tea", "pizza", "rice", "honey", "cake", "music",
    "chess", "books", "snow", "rain",
];
pub(super) const INSTRUMENTS: &[&str] =
    &["piano", "guitar", "violin", "flute", "drums", "trumpet", "cello", "harp"];
pub(super) const TOWNS: &[&str] = &[
    "Paris", "London", "Berlin", "Rome", "Tokyo", "Oslo", "Lima", "Cairo", "Madrid", "Vienna", "Boston",
    "Delhi",
];
pub(super) const THINGS: &[&str] =
    &["key", "phone", "book", "lamp", "bag", "cup", "hat", "map", "bike", "letter", "ball", "coat"];
pub(super) const PLACES: &[&str] = &[
    "kitchen", "garden", "garage", "drawer", "box", "car", "hall", "cellar", "office", "attic", "cupboard",
    "shed",
];
pub(super) const EVENTS: &[&str] =
    &["meeting", "party", "concert", "exam", "trip", "dinner", "lesson", "wedding", "game", "race"];
pub(super) const DAYS: &[&str] =
    &["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"];
pub(super) const SECRETS: &[&str] = &["password", "code", "answer", "secret", "number"];
pub(super) const VARIABLES: &[&str] =
    &["total", "speed", "size", "count", "price", "score", "height", "width", "level", "step"];
/// Remarks that a summary leaves out.
pub(super) const NOISE: &[&str] = &[
    "Good morning.",
    "The weather is nice today.",
    "It was a long day.",
    "I had a lot to do.",
    "It rained all night.",
    "We talked for an hour.",
    "That was fun.",
    "There is not much news.",
    "I slept well.",
    "The bus was late.",
    "Time flies.",
    "Well, what else?",
];

const PEOPLE: &[&str] = &[
    "Anna", "Ben", "Clara", "David", "Emma", "Felix", "Greta", "Hugo", "Ida", "Jonas", "Kate", "Leo", "Mira",
    "Nora", "Oscar", "Paul", "Rosa", "Sam", "Tom", "Vera", "Alice", "Bob", "Max", "Lisa", "John", "Mary",
    "Peter", "Sarah", "Carl", "Lena", "Jack", "Maria",
];
const PETS: &[&str] = &[
    "Rex", "Luna", "Bello", "Milo", "Coco", "Rocky", "Bella", "Simba", "Lucky", "Daisy", "Charlie", "Buddy",
];

const ONSETS: &[&str] = &[
    "b", "d", "f", "g", "h", "j", "k", "l", "m", "n", "p", "r", "s", "t", "v", "z", "br", "dr", "st", "sh",
    "ch", "tr",
];
const VOWELS: &[&str] = &["a", "e", "i", "o", "u"];
const CODAS: &[&str] = &["n", "r", "l", "s", "m", "k", "th", "x"];
const LETTERS: &[u8] = b"abcdefghijklmnopqrstuvwxyz";

/// A person's name, from the list or made up.
pub(super) fn person(draw: &mut Draw) -> String {
    known_or_made_up(draw, PEOPLE, 40)
}

/// A name for whatever lives with a person.
pub(super) fn companion(draw: &mut Draw) -> String {
    if draw.percent(50) { known_or_made_up(draw, PETS, 40) } else { known_or_made_up(draw, PEOPLE, 40) }
}

/// A town.
pub(super) fn town(draw: &mut Draw) -> String {
    known_or_made_up(draw, TOWNS, 50)
}

/// Returns a made-up word that cannot be guessed.
pub(super) fn made_up(draw: &mut Draw) -> String {
    let letters = if draw.percent(75) { syllables(draw) } else { scrambled(draw) };
    if draw.percent(90) { capitalized(&letters) } else { letters }
}

fn known_or_made_up(draw: &mut Draw, known: &[&'static str], percent_known: usize) -> String {
    if draw.percent(percent_known) { draw.word(known).to_owned() } else { made_up(draw) }
}

fn syllables(draw: &mut Draw) -> String {
    let mut name = String::new();
    for _ in 0..draw.between(2, 3) {
        name += draw.word(ONSETS);
        name += draw.word(VOWELS);
    }
    if draw.percent(40) {
        name += draw.word(CODAS);
    }
    name
}

/// Letters in any order, so that names spelt in ways no syllable has are copied too.
fn scrambled(draw: &mut Draw) -> String {
    (0..draw.between(3, 6)).map(|_| char::from(*draw.one(LETTERS))).collect()
}

/// `text` with its first letter in upper case.
pub(super) fn capitalized(text: &str) -> String {
    let mut rest = text.chars();
    rest.next().map(|first| first.to_uppercase().chain(rest).collect()).unwrap_or_default()
}
