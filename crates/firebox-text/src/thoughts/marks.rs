//! The marks that families of models write around their thoughts.

use crate::detokenizer::Detokenizer;
use crate::tokenizer::Tokenizer;

/// The most tokens that a mark and the white space behind it take at the end of a prompt.
const MAX_MARK_TOKENS: usize = 24;

/// The marks around a family's thoughts, as its chat template has them.
///
/// ```
/// use firebox_text::ThoughtMarks;
///
/// let template = "{% if '</think>' in message.content %}…";
/// assert_eq!(ThoughtMarks::from_template(template).unwrap().start(), "<think>");
/// assert_eq!(ThoughtMarks::from_template("{{ message.content }}"), None);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ThoughtMarks {
    start: &'static str,
    end: &'static str,
    /// Those of the marks that are control tokens in some vocabularies.
    control: [&'static str; 2],
}

impl ThoughtMarks {
    /// All marks. Those of gpt-oss are channels, which [`CallReader`](crate::CallReader) reads.
    pub const ALL: [Self; 6] = [
        // Qwen, DeepSeek, GLM, MiniMax, Nemotron, SmolLM3 and most others.
        Self::new("<think>", "</think>"),
        // Seed-OSS.
        Self::new("<seed:think>", "</seed:think>"),
        // Magistral and Ministral 3.
        Self::new("[THINK]", "[/THINK]"),
        // Command A Reasoning.
        Self::new("<|START_THINKING|>", "<|END_THINKING|>"),
        // Kimi-VL.
        Self::new("◁think▷", "◁/think▷"),
        // Gemma 4.
        Self { start: "<|channel>thought\n", end: "<channel|>", control: ["<|channel>", "<channel|>"] },
    ];

    const fn new(start: &'static str, end: &'static str) -> Self {
        Self { start, end, control: [start, end] }
    }

    /// Determines the marks from a model's chat template, which either writes them or takes them out of earlier answers.
    pub fn from_template(template: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|marks| template.contains(marks.end))
    }

    /// The mark before thoughts.
    pub fn start(self) -> &'static str {
        self.start
    }

    /// The mark behind thoughts.
    pub fn end(self) -> &'static str {
        self.end
    }

    /// Control tokens that mark thoughts. A detokenizer that omits special tokens drops them, so they have to be restored before
    /// the text is read.
    pub fn control_tokens(self) -> [&'static str; 2] {
        self.control
    }

    /// Returns whether a prompt ends within thoughts: some templates write the first mark themselves.
    pub fn are_open(self, tokenizer: &Tokenizer, prompt: &[u32]) -> bool {
        let mut detokenizer = Detokenizer::continuing(tokenizer, false);
        let tail = &prompt[prompt.len().saturating_sub(MAX_MARK_TOKENS)..];
        let text: String = tail.iter().map(|token| detokenizer.push(*token)).collect();
        text.trim_end().ends_with(self.start.trim_end())
    }
}
