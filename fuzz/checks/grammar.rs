//! A grammar of llama.cpp: it is translated or refused with a reason, in a time and to a length that go with its own.

/// How many times longer a translation may be than what it is of, and what may be added to that.
const LONGER: (usize, usize) = (4096, 1 << 16);

/// Whether it was translated.
pub fn check(input: &[u8], to_lark: impl Fn(&str) -> Result<String, String>) -> bool {
    let text = String::from_utf8_lossy(input);
    match to_lark(&text) {
        Ok(lark) => {
            assert!(lark.starts_with("start: "), "{lark}");
            assert!(lark.len() <= text.len() * LONGER.0 + LONGER.1, "{} of {}", lark.len(), text.len());
            true
        }
        Err(reason) => {
            assert!(!reason.is_empty());
            false
        }
    }
}
