//! Texts as the encoder reads them.

/// Rows of the encoder's table.
const ROWS: u32 = 512;
/// Shorter words say little.
const SHORTEST: usize = 3;
/// And so do these.
const SMALL: [&str; 10] = ["the", "and", "for", "are", "was", "does", "what", "which", "there", "were"];
/// How many letters a part of a word has.
const PARTS: [usize; 2] = [3, 4];

/// The rows that words and parts of words fall to.
pub fn pieces(text: &str) -> Vec<i32> {
    let text = text.to_lowercase();
    let words = text.split(|letter: char| !letter.is_alphanumeric());
    let telling = words.filter(|word| word.chars().count() >= SHORTEST && !SMALL.contains(word));
    telling.flat_map(of_word).collect()
}

fn of_word(word: &str) -> Vec<i32> {
    let letters: Vec<char> = format!("<{word}>").chars().collect();
    let parts = PARTS.into_iter().flat_map(|length| letters.windows(length));
    parts.chain([&letters[..]]).map(row).collect()
}

/// FNV, in 32 bits.
fn row(letters: &[char]) -> i32 {
    let bytes = letters.iter().collect::<String>().into_bytes();
    let hash = bytes
        .into_iter()
        .fold(0x811c_9dc5, |hash: u32, byte| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193));
    (hash % ROWS) as i32
}
