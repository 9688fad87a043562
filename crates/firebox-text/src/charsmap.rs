//! The normalization table of SentencePiece models, checked before use.

use crate::error::TextError;
use std::collections::HashSet;
use tokenizers::normalizers::Precompiled;

/// The largest table. Tables in use take a quarter of a megabyte; the check visits every entry with every byte, so this bounds
/// its time.
const MAX_TABLE_BYTES: usize = 4 << 20;

/// Reads a table: the length of a double-array trie, the trie, and the replacement texts it points at.
///
/// The reader in `tokenizers` follows the trie without bounds checks. All paths are therefore walked first: each must stay
/// inside the table and end at the start of a character in the replacements.
pub(crate) fn read(charsmap: &[u8]) -> Result<Precompiled, TextError> {
    let wrong = |reason| TextError::InvalidCharsmap { reason };
    if charsmap.len() > MAX_TABLE_BYTES {
        return Err(wrong("it is larger than 4 MiB"));
    }
    let (length, rest) = charsmap.split_first_chunk::<4>().ok_or(wrong("it is shorter than its header"))?;
    let length = u32::from_le_bytes(*length) as usize;
    if !length.is_multiple_of(4) {
        return Err(wrong("its trie does not consist of whole entries"));
    }
    let (trie, texts) = rest.split_at_checked(length).ok_or(wrong("its trie is longer than the table"))?;
    let texts = std::str::from_utf8(texts).map_err(|_| wrong("its replacements are not UTF-8"))?;
    let (words, _) = trie.as_chunks::<4>();
    let units: Vec<Unit> = words.iter().map(|word| Unit(u32::from_le_bytes(*word))).collect();
    let root = units.first().ok_or(wrong("its trie is empty"))?;

    let mut seen = HashSet::from([root.offset()]);
    let mut open = vec![root.offset()];
    while let Some(node) = open.pop() {
        for byte in 1..=255_u8 {
            let child = node ^ usize::from(byte);
            let unit = units.get(child).ok_or(wrong("its trie leads outside the table"))?;
            if !unit.is_child_by(byte) {
                continue;
            }
            let next = child ^ unit.offset();
            if unit.has_leaf() {
                let leaf = units.get(next).ok_or(wrong("its trie leads outside the table"))?;
                if !texts.is_char_boundary(leaf.value()) {
                    return Err(wrong("it points outside its replacements"));
                }
            }
            if seen.insert(next) {
                open.push(next);
            }
        }
    }
    Precompiled::from(charsmap).map_err(|_| wrong("it cannot be read"))
}

/// One entry of a double-array trie as the Darts library packs it.
#[derive(Clone, Copy)]
struct Unit(u32);

impl Unit {
    /// The xor offset from the entry's index to its children.
    fn offset(self) -> usize {
        let shift = (self.0 & (1 << 9)) >> 6;
        (self.0 as usize >> 10) << shift
    }

    fn has_leaf(self) -> bool {
        self.0 & (1 << 8) != 0
    }

    fn is_child_by(self, byte: u8) -> bool {
        self.0 & (1 << 31 | 0xff) == u32::from(byte)
    }

    fn value(self) -> usize {
        (self.0 & !(1 << 31)) as usize
    }
}

/// Reads a table in base 64, as in `tokenizer.json`.
pub(crate) fn read_base64(text: &str) -> Result<Precompiled, TextError> {
    let wrong = |reason| TextError::InvalidCharsmap { reason };
    if text.len() / 4 * 3 > MAX_TABLE_BYTES {
        return Err(wrong("it is larger than 4 MiB"));
    }
    let mut bytes = Vec::with_capacity(text.len() / 4 * 3);
    for group in text.as_bytes().chunks(4) {
        let digits = group.iter().position(|&byte| byte == b'=').unwrap_or(group.len());
        let mut bits = 0_u32;
        for &byte in group.iter().take(digits) {
            let digit = match byte {
                b'A'..=b'Z' => byte - b'A',
                b'a'..=b'z' => byte - b'a' + 26,
                b'0'..=b'9' => byte - b'0' + 52,
                b'+' => 62,
                b'/' => 63,
                _ => return Err(wrong("it is not written in base 64")),
            };
            bits = bits << 6 | u32::from(digit);
        }
        if digits < 2 {
            return Err(wrong("it is not written in base 64"));
        }
        let whole = (bits << (8 + 6 * (4 - digits))).to_be_bytes();
        bytes.extend_from_slice(&whole[..(digits * 3 / 4).min(3)]);
    }
    read(&bytes)
}

#[cfg(test)]
mod tests {
    use super::{read, read_base64};

    #[test]
    fn base64_is_the_same_table() -> Result<(), Box<dyn std::error::Error>> {
        // A trie of 256 entries without children, and replacements of every length modulo three.
        for texts in ["", "a", "ab", "abc\u{e9}"] {
            let mut bytes = 1024_u32.to_le_bytes().to_vec();
            bytes.resize(4 + 1024, 0);
            bytes.extend_from_slice(texts.as_bytes());
            let table = read(&bytes)?;
            let json = serde_json::to_value(&table)?;
            let text = json["precompiled_charsmap"].as_str().unwrap_or_default();
            assert_eq!(read_base64(text)?, table);
        }
        Ok(())
    }
}
