//! The part of a file that the report writes, and nothing beside it.

use thiserror::Error;

pub const BEGIN: &str = "<!-- firebox-report: begin -->";
pub const END: &str = "<!-- firebox-report: end -->";

/// Why a file cannot take the report.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum MarkerError {
    /// A marker is not there, or more than once.
    #[error("{marker} stands there {times} times; put one line with it where the report is to begin and end")]
    Count {
        /// Which one.
        marker: &'static str,
        /// The number of its occurrences.
        times: usize,
    },
    /// They are in the wrong order.
    #[error("{END} stands before {BEGIN}; exchange them")]
    Order,
}

/// The text with what stands between the markers replaced.
pub fn replaced(text: &str, report: &str) -> Result<String, MarkerError> {
    let at = |marker: &'static str| match text.matches(marker).count() {
        1 => Ok(text.find(marker).unwrap_or_default()),
        times => Err(MarkerError::Count { marker, times }),
    };
    let (begin, end) = (at(BEGIN)? + BEGIN.len(), at(END)?);
    let (Some(before), Some(after)) = (text.get(..begin).filter(|_| begin <= end), text.get(end..)) else {
        return Err(MarkerError::Order);
    };
    Ok(format!("{before}\n{}\n{after}", report.trim_matches('\n')))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_text_between_the_markers_is_replaced() {
        let (before, after) = ("# Figures\n\nOld words.\n\n", "\n\n## More\n\nNot to be touched.\n");
        let text = format!("{before}{BEGIN}\nan old report\n\n{END}{after}");
        let expected = format!("{before}{BEGIN}\n| a | b |\n{END}{after}");
        assert_eq!(replaced(&text, "\n| a | b |\n").unwrap(), expected);
        // Once more, and nothing has grown.
        assert_eq!(replaced(&expected, "| a | b |").unwrap(), expected);
        // Markers beside each other have room for a first report.
        assert!(replaced(&format!("{BEGIN}{END}"), "new").unwrap().contains("\nnew\n"));
    }

    #[test]
    fn a_file_without_its_markers_is_left_as_it_is() {
        let count = |marker, times| Err(MarkerError::Count { marker, times });
        assert_eq!(replaced("nothing", "new"), count(BEGIN, 0));
        assert_eq!(replaced(BEGIN, "new"), count(END, 0));
        assert_eq!(replaced(&format!("{BEGIN}{END}{BEGIN}"), "new"), count(BEGIN, 2));
        assert_eq!(replaced(&format!("{END} {BEGIN}"), "new"), Err(MarkerError::Order));
    }
}
