//! Input of messages, from an editor on a terminal or line by line from a pipe.

use std::fs;
use std::io::{self, BufRead as _, IsTerminal as _};
use std::path::PathBuf;

use anyhow::Context as _;
use rustyline::DefaultEditor;
use rustyline::error::ReadlineError;

/// Opens and closes a message of several lines.
const FENCE: &str = "\"\"\"";

const PROMPT: &str = "> ";
const CONTINUED: &str = ". ";

/// Where messages come from.
pub enum Lines {
    /// A terminal, with editing and history.
    Editor {
        /// Boxed, since it is far larger than nothing at all.
        editor: Box<DefaultEditor>,
        /// Where the history is kept, if there is a place for it.
        history: Option<PathBuf>,
    },
    /// A pipe or a file.
    Pipe,
}

enum Line {
    Text(String),
    /// Ctrl-C at the prompt: what was typed so far is dropped.
    Dropped,
    End,
}

impl Lines {
    /// Reads from stdin, whatever it is.
    pub fn open() -> anyhow::Result<Self> {
        if !io::stdin().is_terminal() {
            return Ok(Self::Pipe);
        }
        let mut editor = Box::new(
            DefaultEditor::new()
                .context("cannot edit lines on this terminal; messages can be piped in instead")?,
        );
        let history = history_file();
        if let Some(history) = &history {
            // Missing at the first time, and no reason not to talk at any other.
            let _ = editor.load_history(history);
        }
        Ok(Self::Editor { editor, history })
    }

    /// The next message; nothing once there are no more. Lines that end in a backslash go on in the next, and so does
    /// everything between two `"""`.
    pub fn next_message(&mut self) -> anyhow::Result<Option<String>> {
        let mut message = Vec::new();
        let mut fenced = false;
        loop {
            let line = match self.read(if message.is_empty() && !fenced { PROMPT } else { CONTINUED })? {
                Line::Text(line) => line,
                Line::Dropped => {
                    (message, fenced) = (Vec::new(), false);
                    continue;
                }
                Line::End if message.is_empty() => return Ok(None),
                Line::End => break,
            };
            if fenced {
                match line.trim_end().strip_suffix(FENCE) {
                    Some(last) => {
                        message.extend((!last.is_empty()).then(|| last.to_owned()));
                        break;
                    }
                    None => message.push(line),
                }
            } else if let Some(first) = line.trim_start().strip_prefix(FENCE).filter(|_| message.is_empty()) {
                if let Some(only) = first.trim_end().strip_suffix(FENCE) {
                    message.push(only.to_owned());
                    break;
                }
                fenced = true;
                message.extend((!first.is_empty()).then(|| first.to_owned()));
            } else if let Some(continued) = line.strip_suffix('\\') {
                message.push(continued.to_owned());
            } else {
                message.push(line);
                break;
            }
        }
        let message = message.join("\n");
        self.remember(&message);
        Ok(Some(message))
    }

    fn read(&mut self, prompt: &str) -> anyhow::Result<Line> {
        match self {
            Self::Editor { editor, .. } => match editor.readline(prompt) {
                Ok(line) => Ok(Line::Text(line)),
                Err(ReadlineError::Interrupted) => Ok(Line::Dropped),
                Err(ReadlineError::Eof) => Ok(Line::End),
                Err(error) => Err(anyhow::Error::new(error).context("cannot read from the terminal")),
            },
            Self::Pipe => {
                let mut line = String::new();
                let read = io::stdin().lock().read_line(&mut line).context("cannot read stdin")?;
                if read == 0 {
                    return Ok(Line::End);
                }
                let line = line.strip_suffix('\n').unwrap_or(&line);
                Ok(Line::Text(line.strip_suffix('\r').unwrap_or(line).to_owned()))
            }
        }
    }

    fn remember(&mut self, message: &str) {
        let Self::Editor { editor, history } = self else { return };
        if message.trim().is_empty() {
            return;
        }
        // A history that cannot be kept is no reason to stop talking.
        let _ = editor.add_history_entry(message);
        if let Some(path) = history {
            let _ = path.parent().map(fs::create_dir_all);
            let _ = editor.save_history(path);
        }
    }
}

fn history_file() -> Option<PathBuf> {
    // Where the system knows no place for state, the one for local data comes closest.
    let folder = dirs::state_dir().or_else(dirs::data_local_dir)?;
    Some(folder.join("firebox").join("history"))
}
