//! Conversations that are written message by message, each behind what a sequence has remembered.

use crate::control::ControlTokens;
use crate::error::TextError;
use crate::message::Message;
use crate::template::{ChatTemplate, TemplateOptions};
use crate::tokenizer::Tokenizer;

/// What stands for messages whose text does not matter. Templates trim, so there is no space around it.
const ASKED: &str = "firebox-asked";
const ANSWERED: &str = "firebox-answered";
const TOLD: &str = "firebox-told";

/// The parts that a template writes conversations from, for those who do not write them anew with every message because
/// what came before is remembered, or forgotten, or is followed by something else than it was.
///
/// Where a template writes a conversation from left to right, the parts of it are what it writes as a whole.
#[derive(Debug, Clone, Copy)]
pub struct Continued<'a> {
    template: &'a ChatTemplate,
    tokenizer: &'a Tokenizer,
    options: &'a TemplateOptions,
}

impl<'a> Continued<'a> {
    /// By a template, in a model's tokens.
    pub fn new(template: &'a ChatTemplate, tokenizer: &'a Tokenizer, options: &'a TemplateOptions) -> Self {
        Self { template, tokenizer, options }
    }

    /// What comes before the first question. Nothing where a template does not tell what it is from the question.
    pub fn opening(&self, system: Option<&str>) -> Result<Option<Vec<u32>>, TextError> {
        let mut messages: Vec<Message> = system.map(Message::system).into_iter().collect();
        messages.push(Message::user(ASKED));
        let (whole, question) =
            (self.written(&messages, true)?, self.behind_answer(&messages[messages.len() - 1])?);
        let shows =
            |text: &str| system.is_none_or(|system| text.contains(self.control().marked(system).trim()));
        match whole.strip_suffix(&question) {
            Some(opening) if shows(opening) => {
                Ok(Some(self.control().encode(self.tokenizer, opening, false)?))
            }
            _ => Ok(None),
        }
    }

    /// A question behind an answer that was closed, up to where the next answer begins.
    pub fn question(&self, text: &str) -> Result<Vec<u32>, TextError> {
        self.encode(&self.behind_answer(&Message::user(text))?)
    }

    /// What comes behind an answer, whatever follows.
    pub fn closing(&self) -> Result<Vec<u32>, TextError> {
        self.encode(&self.closed()?)
    }

    /// Something that nobody has asked and the model is to know, behind an answer that was closed. A template that has no
    /// place for it there gets a line of text.
    pub fn told(&self, text: &str) -> Result<Vec<u32>, TextError> {
        let next = Message::user(ASKED);
        let messages =
            [Message::user(ASKED), Message::assistant(ANSWERED), Message::system(TOLD), next.clone()];
        let marked = self.control().marked(text);
        // Not at the end of a conversation, where some templates write what ends a text.
        let written = match self.written(&messages, true) {
            Ok(written) => {
                // Some templates put it before everything else, or leave it out.
                let rest = behind(&written, ANSWERED).and_then(|rest| {
                    let (closed, next) = (self.closed().ok()?, self.behind_answer(&next).ok()?);
                    rest.strip_prefix(&*closed)?.strip_suffix(&*next)
                });
                rest.filter(|rest| rest.contains(TOLD)).map(|rest| rest.replace(TOLD, marked.trim()))
            }
            Err(_) => None,
        };
        self.encode(&written.unwrap_or_else(|| marked.trim().to_owned() + "\n"))
    }

    fn closed(&self) -> Result<String, TextError> {
        let spoken = [Message::user(ASKED), Message::assistant(ANSWERED)];
        let alone = self.written(&spoken, false)?;
        let [asked, answered] = spoken;
        let next = Message::user(TOLD);
        let first = self.written(std::slice::from_ref(&next), true)?;
        let followed = self.written(&[asked, answered, next], true)?;
        let (alone, followed) = (behind(&alone, ANSWERED), behind(&followed, ANSWERED));
        let (Some(alone), Some(followed)) = (alone, followed) else { return Ok(String::new()) };
        let common = alone.chars().zip(followed.chars()).take_while(|(one, other)| one == other);
        let common: usize = common.map(|(letter, _)| letter.len_utf8()).sum();
        let shared = self.uncut(alone, common).min(self.uncut(followed, common));
        // Some templates close an answer only where something follows. What does is written as at the beginning then.
        let whole = followed.strip_suffix(&*first).map(str::len);
        let tokens = self.control().places(followed).map(|token| token.start);
        let mut ends = std::iter::once(shared).chain(whole).chain(tokens);
        let end = ends.find(|end| {
            let question = &followed[*end..];
            question.contains(TOLD) && first.ends_with(question)
        });
        Ok(followed[..end.unwrap_or(shared)].to_owned())
    }

    /// A place in a text, or where the token begins that it would cut: tokens that differ may begin alike.
    fn uncut(&self, text: &str, place: usize) -> usize {
        let mut tokens = self.control().places(text);
        tokens.find(|token| token.end > place).map_or(place, |token| token.start.min(place))
    }

    /// A message behind an answer, without what closes that, up to where the next answer begins.
    fn behind_answer(&self, message: &Message) -> Result<String, TextError> {
        let messages = [Message::user(ASKED), Message::assistant(ANSWERED), message.clone()];
        let written = self.written(&messages, true)?;
        let rest = behind(&written, ANSWERED).ok_or_else(|| TextError::RenderChatTemplate {
            reason: "an answer is not to be seen in the conversation that it is part of".into(),
        })?;
        Ok(rest.strip_prefix(&*self.closed()?).unwrap_or(rest).to_owned())
    }

    fn written(&self, messages: &[Message], prompts: bool) -> Result<String, TextError> {
        let options = TemplateOptions { add_generation_prompt: prompts, ..self.options.clone() };
        self.template.render_marked(self.tokenizer, messages, &options)
    }

    fn control(&self) -> &ControlTokens {
        self.tokenizer.control_tokens()
    }

    fn encode(&self, text: &str) -> Result<Vec<u32>, TextError> {
        self.control().encode(self.tokenizer, text, true)
    }
}

/// What comes behind the first of what may be many: what is written later may have the same letters.
fn behind<'t>(text: &'t str, mark: &str) -> Option<&'t str> {
    text.find(mark).map(|at| &text[at + mark.len()..])
}

#[cfg(test)]
mod tests {

    use firebox_store::{TextAssets, TokenizerSource};
    use serde_json::{Map, Value};

    use super::*;

    /// Byte-level, with control tokens of several families.
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
    /// Thinks before the last answer only, as Qwen's do.
    const THINKING: &str = "{% for m in messages %}<|im_start|>{{ m.role }}\n\
        {% if m.role == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}{{ m.content }}<|im_end|>\n\
        {% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";
    /// Knows no system message but the first, which is part of the first question.
    const MERGED: &str = "<s>{% for m in messages %}{% if m.role == 'system' %}{% if not loop.first %}\
        {{ raise_exception('no') }}{% endif %}{% elif m.role == 'user' %}[INST] \
        {% if messages[0].role == 'system' and loop.index0 == 1 %}{{ messages[0].content }}\n\n{% endif %}\
        {{ m.content | trim }}[/INST]{% else %}{{ m.content }}</s>{% endif %}{% endfor %}";
    /// Ends a text that nothing follows, as Phi's do.
    const ENDED: &str = "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}\
        {% if add_generation_prompt %}<|assistant|>\n{% else %}<|endoftext|>{% endif %}";
    /// Closes an answer only where something follows, as OLMo's do.
    const PARTED: &str = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}\
        {% if m.role != 'assistant' or not loop.last %}<|im_end|>\n{% else %}<|endoftext|>{% endif %}\
        {% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";
    /// Says what a model is to be where nobody else does.
    const INTRODUCED: &str =
        "{% if messages[0].role != 'system' %}<|im_start|>system\nHelp.<|im_end|>\n{% endif %}";

    fn template(source: &str) -> ChatTemplate {
        ChatTemplate::from_source(source, Map::new()).unwrap()
    }

    #[test]
    fn parts_are_what_the_whole_is() {
        let (tokenizer, options) = (tokenizer(), TemplateOptions::default());
        let introduced = [INTRODUCED, PARTED].concat();
        for source in [CHATML, THINKING, MERGED, ENDED, PARTED, introduced.as_str()] {
            let template = template(source);
            let parts = Continued::new(&template, &tokenizer, &options);
            for system in [None, Some("Be brief.")] {
                if source == MERGED && system.is_some() {
                    assert_eq!(parts.opening(system).unwrap(), None);
                    continue;
                }
                let mut messages: Vec<Message> = system.map(Message::system).into_iter().collect();
                let mut tokens = parts.opening(system).unwrap().unwrap();
                for round in 0..3 {
                    // What poses as a control token is none.
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
    fn what_is_told_stands_behind_an_answer() {
        let (tokenizer, options) = (tokenizer(), TemplateOptions::default());
        let told = |source: &str| {
            let template = template(source);
            let tokens = Continued::new(&template, &tokenizer, &options).told("It rains<|im_end|>").unwrap();
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
