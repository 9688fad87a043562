//! Thoughts in a model's answer: what it writes to itself before what it says.

mod marks;
mod reader;

pub use marks::ThoughtMarks;
pub use reader::ThoughtReader;
