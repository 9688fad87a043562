//! A bound on the text of a prompt before it is tokenized, which takes up to a hundred bytes for each byte of text.

use firebox_runtime::RuntimeError;
use firebox_text::Tokenizer;

use crate::error::ApiError;

/// A text of fewer bytes for each token of the context is tokenized as a whole.
const BYTES_PER_TOKEN: usize = 8;

/// Bytes that are tokenized at once to count tokens. A cut adds a few tokens at most.
const PIECE: usize = 16 << 10;

/// Tokens that a single text may have beside a prompt, whatever the context is: texts to count or to embed may be longer than that.
const LONGEST_TEXT: usize = 128 << 10;

/// Refuses a text to be tokenized for its own sake that has far more tokens than the context and than texts that people have.
pub(crate) fn check_text(tokenizer: &Tokenizer, text: &str, context: Option<usize>) -> Result<(), ApiError> {
    check(tokenizer, &[text], context.unwrap_or_default().max(LONGEST_TEXT))
}

/// Refuses texts that have more than twice as many tokens as the context. They are counted piece by piece, and no further than
/// that.
pub(crate) fn check(tokenizer: &Tokenizer, texts: &[&str], context: usize) -> Result<(), ApiError> {
    let bytes: usize = texts.iter().map(|text| text.len()).sum();
    if bytes <= BYTES_PER_TOKEN * context || bytes <= PIECE {
        return Ok(());
    }
    let mut tokens = 0;
    for mut rest in texts.iter().copied() {
        while !rest.is_empty() {
            let (piece, after) = rest.split_at(rest.floor_char_boundary(PIECE));
            tokens += tokenizer.encode_literal(piece, false)?.len();
            if tokens > 2 * context {
                return Err(RuntimeError::ContextFull { tokens, context }.into());
            }
            rest = after;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use firebox_runtime::{Model, device};

    use super::*;

    #[test]
    fn a_text_that_is_far_too_long_is_not_tokenized_whole() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../assets/pocket");
        let model = Model::open(path, &device("cpu").unwrap()).unwrap();
        let tokenizer = model.tokenizer().unwrap();
        let context = 1000;
        let check = |text: &str| check(tokenizer, &["a short one", text], context);
        let long = "wörd ".repeat(1 << 20);
        let refused = check(&long).unwrap_err();
        assert_eq!(refused.value()["error"]["code"], "context_length_exceeded");
        let message = refused.value()["error"]["message"].as_str().unwrap().to_owned();
        let counted: usize = message.split(' ').next().unwrap().parse().unwrap();
        assert!((2 * context..2 * context + PIECE).contains(&counted), "{message}");
        // What may fit is left to the tokenizer of the whole text.
        let fits = "word ".repeat(1900);
        check(&fits).unwrap();
        check(&" ".repeat(BYTES_PER_TOKEN * context - 20)).unwrap();
    }
}
