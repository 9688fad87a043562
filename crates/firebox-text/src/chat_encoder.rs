//! Conversations encoded turn by turn, each behind the tokens that a sequence holds already.

use crate::control_tokens::ControlTokens;
use crate::error::TextError;
use crate::message::Message;
use crate::template::{ChatTemplate, TemplateOptions};
use crate::tokenizer::Tokenizer;

/// Placeholders for messages whose text does not matter. Templates trim, so they have no surrounding spaces.
const QUESTION: &str = "firebox-asked";
const ANSWER: &str = "firebox-answered";
const NOTE: &str = "firebox-told";

/// Encodes the parts of a conversation one by one, for callers that do not render it anew with every message because earlier
/// turns are cached, evicted, or followed by other text than the template writes.
///
/// For templates that write a conversation from left to right, the parts concatenate to the whole prompt.
#[derive(Debug, Clone, Copy)]
pub struct ChatEncoder<'a> {
    template: &'a ChatTemplate,
    tokenizer: &'a Tokenizer,
    options: &'a TemplateOptions,
}

impl<'a> ChatEncoder<'a> {
    /// An encoder for a template and a tokenizer.
    pub fn new(template: &'a ChatTemplate, tokenizer: &'a Tokenizer, options: &'a TemplateOptions) -> Self {
        Self { template, tokenizer, options }
    }

    /// The tokens before the first question; `None` if the template does not separate them from the question.
    pub fn opening(&self, system: Option<&str>) -> Result<Option<Vec<u32>>, TextError> {
        let mut messages: Vec<Message> = system.map(Message::system).into_iter().collect();
        messages.push(Message::user(QUESTION));
        let (whole, question) =
            (self.render(&messages, true)?, self.after_answer(&messages[messages.len() - 1])?);
        let shows =
            |text: &str| system.is_none_or(|system| text.contains(self.control().marked(system).trim()));
        match whole.strip_suffix(&question) {
            Some(opening) if shows(opening) => Ok(Some(self.tokenizer.encode_marked(opening, false)?)),
            _ => Ok(None),
        }
    }

    /// A question behind a closed answer, up to the beginning of the next answer.
    pub fn question(&self, text: &str) -> Result<Vec<u32>, TextError> {
        self.encode(&self.after_answer(&Message::user(text))?)
    }

    /// The tokens that close an answer, independent of what follows.
    pub fn closing(&self) -> Result<Vec<u32>, TextError> {
        self.encode(&self.answer_end()?)
    }

    /// A system message behind a closed answer. Templates that allow none there get a line of text.
    pub fn system_message(&self, text: &str) -> Result<Vec<u32>, TextError> {
        let next = Message::user(QUESTION);
        let messages =
            [Message::user(QUESTION), Message::assistant(ANSWER), Message::system(NOTE), next.clone()];
        let marked = self.control().marked(text);
        // Not rendered as the last message, because some templates then add an end-of-text token.
        let written = match self.render(&messages, true) {
            Ok(written) => {
                // Some templates move it to the front, or omit it.
                let rest = text_after(&written, ANSWER).and_then(|rest| {
                    let (closed, next) = (self.answer_end().ok()?, self.after_answer(&next).ok()?);
                    rest.strip_prefix(&*closed)?.strip_suffix(&*next)
                });
                rest.filter(|rest| rest.contains(NOTE)).map(|rest| rest.replace(NOTE, marked.trim()))
            }
            Err(_) => None,
        };
        self.encode(&written.unwrap_or_else(|| marked.trim().to_owned() + "\n"))
    }

    fn answer_end(&self) -> Result<String, TextError> {
        let spoken = [Message::user(QUESTION), Message::assistant(ANSWER)];
        let alone = self.render(&spoken, false)?;
        let [asked, answered] = spoken;
        let next = Message::user(NOTE);
        let first = self.render(std::slice::from_ref(&next), true)?;
        let followed = self.render(&[asked, answered, next], true)?;
        let (alone, followed) = (text_after(&alone, ANSWER), text_after(&followed, ANSWER));
        let (Some(alone), Some(followed)) = (alone, followed) else { return Ok(String::new()) };
        let common = alone.chars().zip(followed.chars()).take_while(|(one, other)| one == other);
        let common: usize = common.map(|(letter, _)| letter.len_utf8()).sum();
        let shared = self.uncut(alone, common).min(self.uncut(followed, common));
        // Some templates close an answer only if something follows, and write that as at the beginning.
        let whole = followed.strip_suffix(&*first).map(str::len);
        let tokens = self.control().places(followed).map(|token| token.start);
        let mut ends = std::iter::once(shared).chain(whole).chain(tokens);
        let end = ends.find(|end| {
            let question = &followed[*end..];
            question.contains(NOTE) && first.ends_with(question)
        });
        Ok(followed[..end.unwrap_or(shared)].to_owned())
    }

    /// `place`, or the start of the token that it would split: different tokens may have a common prefix.
    fn uncut(&self, text: &str, place: usize) -> usize {
        let mut tokens = self.control().places(text);
        tokens.find(|token| token.end > place).map_or(place, |token| token.start.min(place))
    }

    /// The text of a message behind an answer, without the answer's end, up to the beginning of the next answer.
    fn after_answer(&self, message: &Message) -> Result<String, TextError> {
        let messages = [Message::user(QUESTION), Message::assistant(ANSWER), message.clone()];
        let written = self.render(&messages, true)?;
        let rest = text_after(&written, ANSWER).ok_or_else(|| TextError::RenderChatTemplate {
            reason: "an answer is not to be seen in the conversation that it is part of".into(),
        })?;
        Ok(rest.strip_prefix(&*self.answer_end()?).unwrap_or(rest).to_owned())
    }

    fn render(&self, messages: &[Message], prompts: bool) -> Result<String, TextError> {
        let options = TemplateOptions { add_generation_prompt: prompts, ..self.options.clone() };
        self.template.render_marked(self.tokenizer, messages, &options)
    }

    fn control(&self) -> &ControlTokens {
        self.tokenizer.control_tokens()
    }

    fn encode(&self, text: &str) -> Result<Vec<u32>, TextError> {
        self.tokenizer.encode_marked(text, true)
    }
}

/// The text behind the first occurrence of a mark; later text may contain it too.
fn text_after<'t>(text: &'t str, mark: &str) -> Option<&'t str> {
    text.find(mark).map(|at| &text[at + mark.len()..])
}

#[cfg(test)]
mod tests {

    use firebox_store::{TextAssets, TokenizerSource};
    use serde_json::{Map, Value};

    use super::*;

    /// A byte-level tokenizer with control tokens of several families.
    fn tokenizer() -> Tokenizer {
        let letters = (0u32..256).map(|byte| match byte {
            33..=126 | 161..=172 | 174..=255 => char::from_u32(byte),
            0..=32 => char::from_u32(256 + byte),
            127..=160 => char::from_u32(256 + 33 + byte - 127),
            _ => char::from_u32(256 + 67),
        });
        let mut tokens: Vec<String> = letters.flatten().map(String::from).collect();
        let control = [
            "<|im_start|>",
            "<|im_end|>",
            "<s>",
            "[INST]",
            "[/INST]",
            "</s>",
            "<|system|>",
            "<|user|>",
            "<|assistant|>",
            "<|end|>",
            "<|endoftext|>",
        ];
        let mut token_types = vec![1; tokens.len()];
        token_types.extend(control.map(|_| 3));
        tokens.extend(control.map(String::from));
        let vocabulary =
            firebox_store::GgufVocabulary { model: "gpt2".into(), tokens, token_types, ..Default::default() };
        let source = Some(TokenizerSource::Gguf(vocabulary));
        Tokenizer::new(&TextAssets { tokenizer: source, ..TextAssets::default() }, &Value::Null).unwrap()
    }

    const CHATML: &str = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}\
        {% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";
    /// Adds reasoning to the last answer only, like Qwen's templates.
    const THINKING: &str = "{% for m in messages %}<|im_start|>{{ m.role }}\n\
        {% if m.role == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}{{ m.content }}<|im_end|>\n\
        {% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";
    /// Accepts a system message only at the beginning, and merges it into the first question.
    const MERGED: &str = "<s>{% for m in messages %}{% if m.role == 'system' %}{% if not loop.first %}\
        {{ raise_exception('no') }}{% endif %}{% elif m.role == 'user' %}[INST] \
        {% if messages[0].role == 'system' and loop.index0 == 1 %}{{ messages[0].content }}\n\n{% endif %}\
        {{ m.content | trim }}[/INST]{% else %}{{ m.content }}</s>{% endif %}{% endfor %}";
    /// Adds an end-of-text token to a conversation that ends with an answer, like Phi's templates.
    const ENDED: &str = "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}\
        {% if add_generation_prompt %}<|assistant|>\n{% else %}<|endoftext|>{% endif %}";
    /// Closes an answer only if something follows, like OLMo's templates.
    const PARTED: &str = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}\
        {% if m.role != 'assistant' or not loop.last %}<|im_end|>\n{% else %}<|endoftext|>{% endif %}\
        {% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";
    /// Adds a default system message.
    const INTRODUCED: &str =
        "{% if messages[0].role != 'system' %}<|im_start|>system\nHelp.<|im_end|>\n{% endif %}";

    fn template(source: &str) -> ChatTemplate {
        ChatTemplate::from_source(source, Map::new()).unwrap()
    }

    #[test]
    fn parts_concatenate_to_the_whole_prompt() {
        let (tokenizer, options) = (tokenizer(), TemplateOptions::default());
        let introduced = [INTRODUCED, PARTED].concat();
        for source in [CHATML, THINKING, MERGED, ENDED, PARTED, introduced.as_str()] {
            let template = template(source);
            let parts = ChatEncoder::new(&template, &tokenizer, &options);
            for system in [None, Some("Be brief.")] {
                if source == MERGED && system.is_some() {
                    assert_eq!(parts.opening(system).unwrap(), None);
                    continue;
                }
                let mut messages: Vec<Message> = system.map(Message::system).into_iter().collect();
                let mut tokens = parts.opening(system).unwrap().unwrap();
                for round in 0..3 {
                    // The spelling of a control token in a question is plain text.
                    let question = format!("Nr. {round}<|im_end|>?");
                    messages.push(Message::user(question.as_str()));
                    tokens.extend(parts.question(&question).unwrap());
                    let whole = template.encode(&tokenizer, &messages, &options).unwrap();
                    assert_eq!(tokens, whole, "{source}: {system:?}");
                    messages.push(Message::assistant("Yes."));
                    tokens.extend(tokenizer.encode("Yes.", false).unwrap());
                    tokens.extend(parts.closing().unwrap());
                }
            }
        }
    }

    #[test]
    fn a_system_message_follows_a_closed_answer() {
        let (tokenizer, options) = (tokenizer(), TemplateOptions::default());
        let told = |source: &str| {
            let template = template(source);
            let tokens = ChatEncoder::new(&template, &tokenizer, &options)
                .system_message("It rains<|im_end|>")
                .unwrap();
            (tokenizer.decode(&tokens, false), tokens)
        };
        for source in [CHATML, PARTED] {
            let (text, tokens) = told(source);
            assert_eq!(text, "<|im_start|>system\nIt rains<|im_end|><|im_end|>\n");
            let end = tokenizer.token_to_id("<|im_end|>").unwrap();
            let ends = tokens.iter().filter(|token| **token == end).count();
            assert_eq!(ends, 1, "only the template ends anything");
        }
        assert_eq!(told(ENDED).0, "<|system|>\nIt rains<|im_end|><|end|>\n");
        assert_eq!(told(MERGED).0, "It rains<|im_end|>\n");
    }
}
