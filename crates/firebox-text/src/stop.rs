//! Stop strings, which end a generation.

/// Searches streamed text for stop strings.
///
/// Text is returned as soon as it cannot be part of a stop string; the rest is held back. The match that *ends* first wins,
/// because a stream encounters it first; of two that end together, the longer one. Text after a match is dropped.
///
/// ```
/// use firebox_text::StopStrings;
///
/// let mut stops = StopStrings::new(["\nUser:"]);
/// assert_eq!(stops.push("Hello\nUs"), "Hello");
/// assert_eq!(stops.push("er: hi"), "");
/// assert_eq!(stops.matched(), Some("\nUser:"));
/// ```
#[derive(Debug, Clone)]
pub struct StopStrings {
    stops: Vec<String>,
    held: String,
    matched: Option<usize>,
}

impl StopStrings {
    /// Searches for any of `stops`. Empty strings are ignored, because they would match before the first character.
    pub fn new<S: Into<String>>(stops: impl IntoIterator<Item = S>) -> Self {
        let stops = stops.into_iter().map(Into::into).filter(|stop: &String| !stop.is_empty()).collect();
        Self { stops, held: String::new(), matched: None }
    }

    /// Adds a piece of text and returns the text that may be shown.
    pub fn push(&mut self, piece: &str) -> String {
        if self.matched.is_some() || piece.is_empty() {
            return String::new();
        }
        if self.stops.is_empty() {
            return piece.to_owned();
        }
        let already_searched = self.held.len();
        self.held.push_str(piece);
        if let Some((stop, start)) = self.first_match(already_searched) {
            self.matched = Some(stop);
            let mut text = std::mem::take(&mut self.held);
            text.truncate(start);
            return text;
        }
        let keep = self.possible_match_start();
        let tail = self.held.split_off(keep);
        std::mem::replace(&mut self.held, tail)
    }

    /// Resumes from the state of another search for the same strings: the text it [held](Self::held) back and the match it found.
    pub fn resume(mut self, held: String, matched: Option<&str>) -> Self {
        self.held = held;
        self.matched = matched.and_then(|met| self.stops.iter().position(|stop| stop == met));
        self
    }

    /// Held-back text that may be the beginning of a stop string.
    pub fn held(&self) -> &str {
        &self.held
    }

    /// The stop string that was found, if any.
    pub fn matched(&self) -> Option<&str> {
        self.matched.map(|stop| self.stops[stop].as_str())
    }

    /// Ends the stream: returns the text held back for a match that did not come.
    pub fn finish(&mut self) -> String {
        if self.matched.is_some() {
            self.held.clear();
        }
        std::mem::take(&mut self.held)
    }

    /// The match that ends first beyond `already_searched`, as (stop, start).
    fn first_match(&self, already_searched: usize) -> Option<(usize, usize)> {
        let mut best: Option<(usize, usize, usize)> = None;
        for (index, stop) in self.stops.iter().enumerate() {
            let mut from = (already_searched + 1).saturating_sub(stop.len());
            while !self.held.is_char_boundary(from) {
                from -= 1;
            }
            let Some(offset) = self.held[from..].find(stop.as_str()) else { continue };
            let start = from + offset;
            let end = start + stop.len();
            if best.is_none_or(|(_, best_start, best_end)| (end, start) < (best_end, best_start)) {
                best = Some((index, start, end));
            }
        }
        best.map(|(index, start, _)| (index, start))
    }

    /// Start of the longest suffix that is the beginning of a stop string.
    fn possible_match_start(&self) -> usize {
        let longest = self.stops.iter().map(String::len).max().unwrap_or(0);
        let mut start = (self.held.len() + 1).saturating_sub(longest);
        while !self.held.is_char_boundary(start) {
            start += 1;
        }
        self.held[start..]
            .char_indices()
            .map(|(offset, _)| start + offset)
            .find(|&at| self.stops.iter().any(|stop| stop.starts_with(&self.held[at..])))
            .unwrap_or(self.held.len())
    }
}

#[cfg(test)]
mod tests {
    use super::StopStrings;
    use proptest::prelude::*;

    fn naive(text: &str, stops: &[String]) -> (String, Option<String>) {
        for end in (0..=text.len()).filter(|&end| text.is_char_boundary(end)) {
            let ending = stops.iter().filter(|stop| !stop.is_empty() && text[..end].ends_with(stop.as_str()));
            if let Some(stop) = ending.max_by_key(|stop| stop.len()) {
                return (text[..end - stop.len()].to_owned(), Some(stop.clone()));
            }
        }
        (text.to_owned(), None)
    }

    proptest! {
        #[test]
        fn equals_a_search_of_the_whole_text(
            pieces in proptest::collection::vec("[ab√©\n]{0,4}", 0..12),
            stops in proptest::collection::vec("[ab√©\n]{0,4}", 0..4),
        ) {
            let mut stream = StopStrings::new(stops.clone());
            let mut shown = String::new();
            for piece in &pieces {
                shown += &stream.push(piece);
                let (expected, _) = naive(&pieces.concat(), &stops);
                prop_assert!(expected.starts_with(&shown));
            }
            shown += &stream.finish();
            let (expected, stop) = naive(&pieces.concat(), &stops);
            prop_assert_eq!(shown, expected);
            prop_assert_eq!(stream.matched().map(str::to_owned), stop);
        }
    }

    #[test]
    fn holds_back_no_more_than_needed() {
        let mut stops = StopStrings::new(["</s>", "STOP"]);
        assert_eq!(stops.push("a < b"), "a < b");
        assert_eq!(stops.push(" <"), " ");
        assert_eq!(stops.push("b"), "<b");
        assert_eq!(stops.push("ST"), "");
        assert_eq!(stops.finish(), "ST");
        assert_eq!(stops.matched(), None);
    }
}
