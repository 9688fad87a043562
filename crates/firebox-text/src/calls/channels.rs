use serde_json::Value;

use super::reader::{AnswerPart, LONGEST_NAME};
use super::said::Said;
use super::syntax::{CALL, CHANNEL, CONSTRAIN, END, MESSAGE, RECIPIENT, RETURN, START};
use super::tools::Tools;
use crate::message::Message;

/// Around thoughts, as other families write them themselves.
const THOUGHT: &str = "<think>\n";
const THOUGHT_END: &str = "\n</think>";
/// Between messages that are handed on as one text.
const BETWEEN: &str = "\n\n";
/// What the header of a message may begin with. An answer that begins with something else has none.
const HEADERS: [&str; 5] = [START, CHANNEL, CONSTRAIN, MESSAGE, "to="];
/// What ends a message, be it that another one begins.
const ENDS: [&str; 5] = [END, CALL, RETURN, START, CHANNEL];
/// A header beyond it is none: a name, and marks around it.
const LONGEST_HEADER: usize = LONGEST_NAME + 256;

/// Reads answers of gpt-oss: messages, each with a header that says in what channel it is and to whom it is addressed. What
/// is in the channel `analysis` are thoughts, what is addressed to a tool is a call, and the rest is text.
#[derive(Debug, Clone)]
pub(super) struct ChannelReader {
    tools: Tools,
    held: String,
    /// What the present message is; nothing within a header.
    body: Option<Body>,
    /// Whether there was text before, with nothing but what follows to part them.
    spoke: bool,
    said: Said,
}

/// A message with the thoughts that its text begins with in the field for them, as the template of gpt-oss has it.
pub(crate) fn parted_thoughts(message: &Message) -> Message {
    let mut message = message.clone();
    let is_thought = |name: &&str| message.extra.get(*name).is_some_and(Value::is_string);
    let has_thoughts =
        message.reasoning_content.is_some() || ["reasoning", "thinking"].iter().any(is_thought);
    if message.role == "assistant" && !has_thoughts {
        let text = message.text();
        let parted = text.strip_prefix(THOUGHT).and_then(|text| text.split_once(THOUGHT_END));
        if let Some((thought, said)) = parted {
            message.reasoning_content = Some(thought.to_owned());
            message.content = Some(said.trim_start().into());
        }
    }
    message
}

#[derive(Debug, Clone)]
enum Body {
    Text {
        begun: bool,
    },
    Thought {
        begun: bool,
    },
    /// The arguments of a tool, and white space that is left out if they end with it.
    Arguments {
        space: String,
        begun: bool,
    },
    /// A call whose name is within.
    Call(String),
}

impl ChannelReader {
    pub fn new(tools: Tools) -> Self {
        Self { tools, held: String::new(), body: None, spoke: false, said: Said::default() }
    }

    pub fn push(&mut self, piece: &str) -> Vec<AnswerPart> {
        self.held.push_str(piece);
        while self.step() {}
        self.said.take()
    }

    pub fn finish(&mut self) -> Vec<AnswerPart> {
        let rest = std::mem::take(&mut self.held);
        if self.body.is_some() {
            self.take(&rest);
            self.end();
        } else if !HEADERS.iter().any(|mark| mark.starts_with('<') && rest.trim_start().starts_with(mark)) {
            self.speak(rest.trim_end());
        }
        self.said.take()
    }

    /// Whether there is more to do with what is held.
    fn step(&mut self) -> bool {
        if self.body.is_none() {
            return self.header();
        }
        let end = ENDS.iter().filter_map(|mark| Some((self.held.find(mark)?, *mark))).min();
        let Some((at, mark)) = end else {
            // What may become a mark waits.
            let open =
                self.held.rfind('<').filter(|at| ENDS.iter().any(|mark| mark.starts_with(&self.held[*at..])));
            let piece: String = self.held.drain(..open.unwrap_or(self.held.len())).collect();
            self.take(&piece);
            return false;
        };
        let piece: String = self.held.drain(..at).collect();
        self.take(&piece);
        self.end();
        // What begins another message is part of its header.
        if ![START, CHANNEL].contains(&mark) {
            self.held.drain(..mark.len());
        }
        true
    }

    fn header(&mut self) -> bool {
        let rest = self.held.trim_start();
        if HEADERS.iter().any(|mark| mark.starts_with(rest)) {
            return false;
        }
        let Some(begun) = HEADERS.iter().find(|mark| rest.starts_with(**mark)) else {
            self.body = Some(Body::Text { begun: false });
            return true;
        };
        let end =
            [MESSAGE, END, CALL, RETURN].iter().filter_map(|mark| Some((self.held.find(mark)?, *mark))).min();
        match end {
            Some((at, mark)) if at <= LONGEST_HEADER => {
                let header: String = self.held.drain(..at + mark.len()).collect();
                // A header that ends without a message has none.
                if mark == MESSAGE {
                    self.body = Some(self.body_of(&header));
                }
                true
            }
            // A mark that begins in time may still be on its way.
            None if self.held.len() <= LONGEST_HEADER + MESSAGE.len() => false,
            _ => {
                self.body = Some(Body::Text { begun: false });
                // Its first mark is text as well, and does not end it.
                let opening = self.held.len() - rest.len() + begun.len();
                let opening: String = self.held.drain(..opening).collect();
                self.take(&opening);
                true
            }
        }
    }

    fn body_of(&mut self, header: &str) -> Body {
        let word = |mark: &str| {
            let (_, behind) = header.rsplit_once(mark)?;
            behind.split(|c: char| c.is_whitespace() || c == '<').next().filter(|word| !word.is_empty())
        };
        let channel = word(CHANNEL).unwrap_or_default();
        match word("to=").filter(|_| self.tools.any()) {
            Some(RECIPIENT) => Body::Call(String::new()),
            Some(to) if !["user", "assistant", "all"].contains(&to) => {
                let tool = to.strip_prefix(RECIPIENT).and_then(|to| to.strip_prefix('.')).unwrap_or(to);
                self.spoke = false;
                self.said.begin(tool);
                Body::Arguments { space: String::new(), begun: false }
            }
            _ if channel == "analysis" => Body::Thought { begun: false },
            _ => Body::Text { begun: false },
        }
    }

    /// Takes a part of the present message.
    fn take(&mut self, piece: &str) {
        if piece.is_empty() {
            return;
        }
        match &mut self.body {
            None => {}
            Some(Body::Text { begun }) => {
                if !std::mem::replace(begun, true) && self.spoke {
                    self.said.text(BETWEEN);
                }
                self.spoke = true;
                self.said.text(piece);
            }
            Some(Body::Thought { begun }) => {
                if !std::mem::replace(begun, true) {
                    let between = if self.spoke { BETWEEN } else { "" };
                    self.said.text(&format!("{between}{THOUGHT}"));
                }
                self.said.text(piece);
            }
            Some(Body::Arguments { space, begun }) => {
                let piece = if *begun { piece } else { piece.trim_start() };
                let kept = piece.trim_end().len();
                if kept > 0 {
                    *begun = true;
                    let arguments = std::mem::take(space) + &piece[..kept];
                    self.said.arguments(&arguments);
                }
                space.push_str(&piece[kept..]);
            }
            Some(Body::Call(text)) => text.push_str(piece),
        }
    }

    /// Ends the present message.
    fn end(&mut self) {
        match self.body.take() {
            None | Some(Body::Text { .. }) => {}
            Some(Body::Thought { begun }) => {
                if begun {
                    self.said.text(THOUGHT_END);
                    self.spoke = true;
                }
            }
            Some(Body::Arguments { begun, .. }) => {
                if !begun {
                    self.said.arguments("{}");
                }
                self.said.end();
            }
            Some(Body::Call(text)) => {
                let value = serde_json::from_str(&text).ok();
                match value.and_then(|value| self.tools.calls(&value, false)) {
                    Some(calls) => {
                        self.spoke = false;
                        calls.iter().for_each(|call| self.said.call(call));
                    }
                    None => self.speak(&text),
                }
            }
        }
    }

    /// A text of its own.
    fn speak(&mut self, text: &str) {
        self.body = Some(Body::Text { begun: false });
        self.take(text);
        self.body = None;
    }
}
