//! The reader of gpt-oss's answers, which consist of messages in channels.

use super::answer_part::AnswerPart;
use super::declared_tools::Tools;
use super::marks::{CALL, CHANNEL, CONSTRAIN, END, MESSAGE, RECIPIENT, RETURN, START};
use super::part_queue::PartQueue;
use super::tool_name::MAX_TOOL_NAME;

/// The separator between messages that are returned as one text.
const MESSAGE_SEPARATOR: &str = "\n\n";
/// The possible beginnings of a message's header. An answer that begins differently has no header.
const HEADER_STARTS: [&str; 5] = [START, CHANNEL, CONSTRAIN, MESSAGE, "to="];
/// The ends of a message; the last two begin another one.
const MESSAGE_ENDS: [&str; 5] = [END, CALL, RETURN, START, CHANNEL];
/// The longest header: a name, and marks around it.
const MAX_HEADER: usize = MAX_TOOL_NAME + 256;

/// Reads answers of gpt-oss: messages whose headers name a channel and a recipient. Messages in the channel `analysis` are
/// thoughts, messages to a tool are calls, and the rest is text.
#[derive(Debug, Clone)]
pub(super) struct ChannelReader {
    tools: Tools,
    held: String,
    /// The kind of the current message; `None` within a header.
    body: Option<Body>,
    /// Whether there was text, or thoughts, before that has to be separated from the next one.
    has_text: bool,
    has_thoughts: bool,
    parts: PartQueue,
}

#[derive(Debug, Clone)]
enum Body {
    Text {
        begun: bool,
    },
    Thoughts {
        begun: bool,
    },
    /// The arguments of a call, and trailing white space, which is dropped if the arguments end with it.
    Arguments {
        space: String,
        begun: bool,
    },
    /// A call whose content includes the name of the tool.
    Call(String),
}

impl ChannelReader {
    pub fn new(tools: Tools) -> Self {
        Self {
            tools,
            held: String::new(),
            body: None,
            has_text: false,
            has_thoughts: false,
            parts: PartQueue::default(),
        }
    }

    /// Returns whether the current message is of thoughts.
    pub fn is_thinking(&self) -> bool {
        matches!(self.body, Some(Body::Thoughts { .. }))
    }

    pub fn push(&mut self, piece: &str) -> Vec<AnswerPart> {
        self.held.push_str(piece);
        while self.step() {}
        self.parts.take()
    }

    pub fn finish(&mut self) -> Vec<AnswerPart> {
        let rest = std::mem::take(&mut self.held);
        if self.body.is_some() {
            self.append(&rest);
            self.end();
        } else if !HEADER_STARTS
            .iter()
            .any(|mark| mark.starts_with('<') && rest.trim_start().starts_with(mark))
        {
            self.add_text_message(rest.trim_end());
        }
        self.parts.take()
    }

    /// Processes a part of the held text. Returns whether there may be more to process.
    fn step(&mut self) -> bool {
        if self.body.is_none() {
            return self.header();
        }
        let end = MESSAGE_ENDS.iter().filter_map(|mark| Some((self.held.find(mark)?, *mark))).min();
        let Some((at, mark)) = end else {
            // A possible beginning of a mark is held back.
            let open = self
                .held
                .rfind('<')
                .filter(|at| MESSAGE_ENDS.iter().any(|mark| mark.starts_with(&self.held[*at..])));
            let piece: String = self.held.drain(..open.unwrap_or(self.held.len())).collect();
            self.append(&piece);
            return false;
        };
        let piece: String = self.held.drain(..at).collect();
        self.append(&piece);
        self.end();
        // A mark that begins another message is part of its header.
        if ![START, CHANNEL].contains(&mark) {
            self.held.drain(..mark.len());
        }
        true
    }

    fn header(&mut self) -> bool {
        let rest = self.held.trim_start();
        if HEADER_STARTS.iter().any(|mark| mark.starts_with(rest)) {
            return false;
        }
        let Some(begun) = HEADER_STARTS.iter().find(|mark| rest.starts_with(**mark)) else {
            self.body = Some(Body::Text { begun: false });
            return true;
        };
        let end =
            [MESSAGE, END, CALL, RETURN].iter().filter_map(|mark| Some((self.held.find(mark)?, *mark))).min();
        match end {
            Some((at, mark)) if at <= MAX_HEADER => {
                let header: String = self.held.drain(..at + mark.len()).collect();
                // A header that ends without a message is dropped.
                if mark == MESSAGE {
                    self.body = Some(self.parse_header(&header));
                }
                true
            }
            // The end mark may still arrive in time.
            None if self.held.len() <= MAX_HEADER + MESSAGE.len() => false,
            _ => {
                self.body = Some(Body::Text { begun: false });
                // Its first mark becomes text too, and must not end it.
                let opening = self.held.len() - rest.len() + begun.len();
                let opening: String = self.held.drain(..opening).collect();
                self.append(&opening);
                true
            }
        }
    }

    fn parse_header(&mut self, header: &str) -> Body {
        let word = |mark: &str| {
            let (_, behind) = header.rsplit_once(mark)?;
            behind.split(|c: char| c.is_whitespace() || c == '<').next().filter(|word| !word.is_empty())
        };
        let channel = word(CHANNEL).unwrap_or_default();
        match word("to=").filter(|_| self.tools.any()) {
            Some(RECIPIENT) => Body::Call(String::new()),
            Some(to) if !["user", "assistant", "all"].contains(&to) => {
                let tool = to.strip_prefix(RECIPIENT).and_then(|to| to.strip_prefix('.')).unwrap_or(to);
                self.has_text = false;
                self.parts.begin(tool);
                Body::Arguments { space: String::new(), begun: false }
            }
            _ if channel == "analysis" => Body::Thoughts { begun: false },
            _ => Body::Text { begun: false },
        }
    }

    /// Adds a piece to the current message.
    fn append(&mut self, piece: &str) {
        if piece.is_empty() {
            return;
        }
        match &mut self.body {
            None => {}
            Some(Body::Text { begun }) => {
                if !std::mem::replace(begun, true) && self.has_text {
                    self.parts.text(MESSAGE_SEPARATOR);
                }
                self.has_text = true;
                self.parts.text(piece);
            }
            Some(Body::Thoughts { begun }) => {
                if !std::mem::replace(begun, true) && self.has_thoughts {
                    self.parts.thought(MESSAGE_SEPARATOR);
                }
                self.has_thoughts = true;
                self.parts.thought(piece);
            }
            Some(Body::Arguments { space, begun }) => {
                let piece = if *begun { piece } else { piece.trim_start() };
                let kept = piece.trim_end().len();
                if kept > 0 {
                    *begun = true;
                    let arguments = std::mem::take(space) + &piece[..kept];
                    self.parts.arguments(&arguments);
                }
                space.push_str(&piece[kept..]);
            }
            Some(Body::Call(text)) => text.push_str(piece),
        }
    }

    /// Ends the current message.
    fn end(&mut self) {
        match self.body.take() {
            None | Some(Body::Text { .. } | Body::Thoughts { .. }) => {}
            Some(Body::Arguments { begun, .. }) => {
                if !begun {
                    self.parts.arguments("{}");
                }
                self.parts.end();
            }
            Some(Body::Call(text)) => {
                let value = serde_json::from_str(&text).ok();
                match value.and_then(|value| self.tools.calls(&value, false)) {
                    Some(calls) => {
                        self.has_text = false;
                        calls.iter().for_each(|call| self.parts.call(call));
                    }
                    None => self.add_text_message(&text),
                }
            }
        }
    }

    /// Adds a message of text.
    fn add_text_message(&mut self, text: &str) {
        self.body = Some(Body::Text { begun: false });
        self.append(text);
        self.body = None;
    }
}
