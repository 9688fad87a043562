//! Prints an answer as it arrives.

use std::sync::Arc;

use firebox_text::{AnswerPart, AnswerReader, Tokenizer};
use indicatif::ProgressBar;

use crate::console::{Console, Style};

/// What happens to the parts of an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Printing {
    /// Nothing is printed.
    Nothing,
    /// The text is printed. A terminal shows that the model is thinking.
    Text,
    /// Thoughts are printed too, and set apart.
    Thoughts,
}

/// Prints the text of an answer as it arrives, and its thoughts if they are wanted.
pub struct AnswerPrinter<'c> {
    console: &'c Console,
    reader: AnswerReader,
    tokenizer: Arc<Tokenizer>,
    printing: Printing,
    thoughts: String,
    text: String,
    spinner: Option<ProgressBar>,
}

impl<'c> AnswerPrinter<'c> {
    /// A printer of what a reader finds.
    pub fn new(
        console: &'c Console,
        reader: AnswerReader,
        tokenizer: Arc<Tokenizer>,
        printing: Printing,
    ) -> Self {
        let (thoughts, text) = (String::new(), String::new());
        Self { console, reader, tokenizer, printing, thoughts, text, spinner: None }
    }

    /// Adds the text of a token.
    pub fn push(&mut self, token: Option<u32>, text: &str) -> anyhow::Result<()> {
        let parts = self.reader.push_token(text, token, &self.tokenizer);
        self.print(parts)?;
        self.show_thinking();
        Ok(())
    }

    /// Ends the answer: prints what was held back, and ends the last line. Returns its thoughts and its text.
    pub fn finish(mut self) -> anyhow::Result<(String, String)> {
        let parts = self.reader.finish();
        self.print(parts)?;
        self.clear_spinner();
        if self.printing != Printing::Nothing {
            let is_cut = self.text.is_empty() && !self.thoughts.is_empty();
            if is_cut && self.printing == Printing::Text {
                self.console.note("(it has only thought so far; --show-thinking shows what)");
            } else if !self.text.ends_with('\n') {
                self.console.line("")?;
            }
        }
        Ok((std::mem::take(&mut self.thoughts), std::mem::take(&mut self.text)))
    }

    fn print(&mut self, parts: Vec<AnswerPart>) -> anyhow::Result<()> {
        for part in parts {
            match part {
                AnswerPart::Thought(thought) => {
                    if self.printing == Printing::Thoughts {
                        self.console.print(&self.console.styled(Style::Dim, &thought))?;
                    }
                    self.thoughts += &thought;
                }
                AnswerPart::Text(text) => {
                    self.clear_spinner();
                    if self.printing == Printing::Thoughts
                        && self.text.is_empty()
                        && !self.thoughts.is_empty()
                    {
                        self.console.print("\n\n")?;
                    }
                    if self.printing != Printing::Nothing {
                        self.console.print(&text)?;
                    }
                    self.text += &text;
                }
                // There are no tools.
                AnswerPart::CallStart(_) | AnswerPart::Arguments(_) | AnswerPart::Call(_) => {}
            }
        }
        Ok(())
    }

    fn clear_spinner(&mut self) {
        if let Some(spinner) = self.spinner.take() {
            spinner.finish_and_clear();
        }
    }

    /// Shows on a terminal that the model is thinking, where its thoughts are not printed.
    fn show_thinking(&mut self) {
        if !self.reader.is_thinking() {
            self.clear_spinner();
        } else if self.printing == Printing::Text && self.spinner.is_none() {
            self.spinner = Some(self.console.waiting("thinking"));
        }
    }
}

impl Drop for AnswerPrinter<'_> {
    fn drop(&mut self) {
        self.clear_spinner();
    }
}
