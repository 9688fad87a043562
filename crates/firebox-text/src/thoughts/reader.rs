//! The reader of thoughts, which come before the text of an answer.

use super::marks::ThoughtMarks;
use crate::stop::StopStrings;

/// Separates thoughts from what follows them, in a stream of text.
///
/// Thoughts are only read at the beginning of an answer; later marks are text. White space around thoughts is dropped. Results
/// do not depend on how the text is split, and an answer without thoughts is returned unchanged.
///
/// ```
/// use firebox_text::{ThoughtMarks, ThoughtReader};
///
/// let marks = ThoughtMarks::from_template("… </think> …").unwrap();
/// let mut reader = ThoughtReader::new(marks, false);
/// assert_eq!(reader.push("<think>\nWhy? </th"), ("Why?".into(), "".into()));
/// assert_eq!(reader.push("ink>\n\nBecause."), ("".into(), "Because.".into()));
/// assert_eq!(reader.finish(), ("".into(), "".into()));
/// ```
#[derive(Debug, Clone)]
pub struct ThoughtReader {
    marks: ThoughtMarks,
    state: State,
}

#[derive(Debug, Clone)]
enum State {
    /// At the beginning, with text that may belong to the first mark.
    Beginning(String),
    Thinking {
        end: StopStrings,
        begun: bool,
        /// White space that is dropped if the end follows.
        space: String,
    },
    /// Behind thoughts, where white space is dropped.
    Behind,
    Answer,
}

impl State {
    fn thinking(marks: ThoughtMarks) -> Self {
        Self::Thinking { end: StopStrings::new([marks.end()]), begun: false, space: String::new() }
    }
}

impl ThoughtReader {
    /// A reader for these marks. `is_open` if the prompt [ended within thoughts](ThoughtMarks::are_open).
    pub fn new(marks: ThoughtMarks, is_open: bool) -> Self {
        let state = if is_open { State::thinking(marks) } else { State::Beginning(String::new()) };
        Self { marks, state }
    }

    /// The marks that it looks for.
    pub fn marks(&self) -> ThoughtMarks {
        self.marks
    }

    /// Returns whether the text goes on with thoughts.
    pub fn is_thinking(&self) -> bool {
        matches!(self.state, State::Thinking { .. })
    }

    /// Adds a piece of text, and returns the thoughts and the text behind them that are certain now.
    pub fn push(&mut self, piece: &str) -> (String, String) {
        match &mut self.state {
            State::Beginning(held) => {
                held.push_str(piece);
                let begun = held.trim_start();
                if let Some(rest) = begun.strip_prefix(self.marks.start()) {
                    let rest = rest.to_owned();
                    self.state = State::thinking(self.marks);
                    return self.push(&rest);
                }
                if self.marks.start().starts_with(begun) {
                    return Default::default();
                }
                let text = std::mem::take(held);
                self.state = State::Answer;
                (String::new(), text)
            }
            State::Thinking { end, begun, space } => {
                let held = end.held().len();
                let shown = end.push(piece);
                let is_over = end.matched().is_some();
                // The match ends within this piece.
                let read = if is_over { shown.len() + self.marks.end().len() - held } else { piece.len() };
                let thought = without_outer_space(&shown, begun, space);
                if !is_over {
                    return (thought, String::new());
                }
                self.state = State::Behind;
                let (_, text) = self.push(&piece[read..]);
                (thought, text)
            }
            State::Behind => {
                let text = piece.trim_start();
                if !text.is_empty() {
                    self.state = State::Answer;
                }
                (String::new(), text.to_owned())
            }
            State::Answer => (String::new(), piece.to_owned()),
        }
    }

    /// Ends the text: returns what was held back.
    pub fn finish(&mut self) -> (String, String) {
        match &mut self.state {
            State::Beginning(held) => (String::new(), std::mem::take(held)),
            State::Thinking { end, begun, space } => {
                (without_outer_space(&end.finish(), begun, space), String::new())
            }
            State::Behind | State::Answer => Default::default(),
        }
    }
}

/// The next piece of a thought, without the white space before the thought and without what may be the white space behind it.
fn without_outer_space(piece: &str, begun: &mut bool, space: &mut String) -> String {
    let piece = if *begun { piece } else { piece.trim_start() };
    let kept = piece.trim_end().len();
    if kept == 0 {
        space.push_str(piece);
        return String::new();
    }
    *begun = true;
    let thought = std::mem::take(space) + &piece[..kept];
    space.push_str(&piece[kept..]);
    thought
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn read<'a>(
        marks: ThoughtMarks,
        is_open: bool,
        pieces: impl IntoIterator<Item = &'a str>,
    ) -> [String; 2] {
        let mut reader = ThoughtReader::new(marks, is_open);
        let mut all = [String::new(), String::new()];
        let mut add = |(thought, text): (String, String)| {
            assert!(thought.is_empty() || all[1].is_empty(), "a thought behind text");
            all[0] += &thought;
            all[1] += &text;
        };
        pieces.into_iter().for_each(|piece| add(reader.push(piece)));
        add(reader.finish());
        all
    }

    #[test]
    fn thoughts_are_separated_at_the_beginning_alone() {
        let marks = ThoughtMarks::ALL[0];
        for (is_open, text, thought, rest) in [
            (false, "<think>\na\n\nb\n</think>\n\nc\n", "a\n\nb", "c\n"),
            (false, "\n<think></think>c", "", "c"),
            (false, "<think>\n\n</think>\n\n c", "", "c"),
            (false, "a <think>b</think>c", "", "a <think>b</think>c"),
            (false, "<think>a</think>b<think>c</think>", "a", "b<think>c</think>"),
            (false, "<think>a </thin", "a </thin", ""),
            (false, "<thin", "", "<thin"),
            (false, " \n", "", " \n"),
            (false, " c", "", " c"),
            (true, "a < b\n</think>\nc", "a < b", "c"),
            (true, "a", "a", ""),
            // A model may write the mark that the prompt has.
            (true, "</think>", "", ""),
        ] {
            assert_eq!(read(marks, is_open, [text]), [thought, rest], "{text:?}");
        }
        assert_eq!(read(ThoughtMarks::ALL[5], false, ["<|channel>thought\na\n<channel|>b"]), ["a", "b"]);
        assert_eq!(read(ThoughtMarks::ALL[5], false, ["<|channel>final\na"]), ["", "<|channel>final\na"]);
    }

    proptest! {
        #[test]
        fn the_division_of_a_stream_changes_nothing(
            marks in 0..ThoughtMarks::ALL.len(),
            is_open: bool,
            words in prop::collection::vec(0..6_usize, 0..12),
            lengths in prop::collection::vec(1..6_usize, 1..8),
        ) {
            let marks = ThoughtMarks::ALL[marks];
            let words = words.iter().map(|word| [marks.start(), marks.end(), " ", "\n", "é", "<t"][*word]);
            let text: String = words.collect();
            let (mut pieces, mut rest) = (Vec::new(), text.as_str());
            for length in lengths.iter().cycle() {
                let Some((at, _)) = rest.char_indices().nth(*length) else { break };
                let (piece, behind) = rest.split_at(at);
                pieces.push(piece);
                rest = behind;
            }
            pieces.push(rest);
            let whole = read(marks, is_open, [text.as_str()]);
            prop_assert_eq!(&read(marks, is_open, pieces), &whole);
            if !is_open && !text.trim_start().starts_with(marks.start()) {
                prop_assert_eq!(&whole[1], &text);
            }
        }
    }
}
