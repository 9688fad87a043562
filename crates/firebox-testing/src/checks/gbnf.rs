//! Checks that a GBNF grammar is translated or refused with a reason, and that the length of a translation is bounded.

/// The bound of a translation: a multiple of the length of the grammar, and a constant.
const MAX_LENGTH: (usize, usize) = (4096, 1 << 16);

/// Checks an input. Returns whether it was translated.
pub fn check(input: &[u8], to_lark: impl Fn(&str) -> Result<String, String>) -> bool {
    let text = String::from_utf8_lossy(input);
    match to_lark(&text) {
        Ok(lark) => {
            assert!(lark.starts_with("start: "), "{lark}");
            assert!(
                lark.len() <= text.len() * MAX_LENGTH.0 + MAX_LENGTH.1,
                "{} of {}",
                lark.len(),
                text.len()
            );
            true
        }
        Err(reason) => {
            assert!(!reason.is_empty());
            false
        }
    }
}
