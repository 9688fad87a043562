//! From what a line of data says to tokens, and which of them are learned.

use std::sync::Arc;

use firebox_text::{ChatTemplate, Message, TemplateOptions, Tokenizer};
use serde::Deserialize;

use crate::error::TrainError;

/// Tokens of one sequence.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Sample {
    /// The tokens.
    pub tokens: Vec<u32>,
    /// For each of them, whether it is a target: to be predicted from those before it. The first never is.
    pub learn: Vec<bool>,
}

impl Sample {
    /// Returns the number of target tokens.
    pub fn targets(&self) -> usize {
        self.learn.iter().filter(|&&learn| learn).count()
    }
}

/// The format of a model's conversations: its tokenizer and its chat template.
#[derive(Debug, Clone)]
pub struct Format {
    /// The model's own tokenizer.
    pub tokenizer: Tokenizer,
    /// The chat template, which lines of `messages` need.
    pub template: Option<Arc<ChatTemplate>>,
    /// The template's thinking option.
    pub thinking: Option<bool>,
}

/// A line of data. Fields beside these are left alone.
#[derive(Debug, Deserialize)]
struct Line {
    messages: Option<Vec<Message>>,
    prompt: Option<String>,
    completion: Option<String>,
}

impl Format {
    /// The samples of one line of JSON; the reason if there are none.
    ///
    /// Of `messages`, every turn of the assistant is learned, its end token included. Most lines are one sample. Where the
    /// template writes a turn otherwise once others follow (templates that drop earlier thoughts do), that turn
    /// becomes a sample of its own, which ends with it, as it does when the model has just said it.
    ///
    /// Of `prompt` and `completion` the completion is learned, and the token that ends it.
    pub fn samples(&self, line: &str) -> Result<Vec<Sample>, String> {
        let line: Line = serde_json::from_str(line).map_err(|error| error.to_string())?;
        let samples = match line {
            Line { messages: Some(messages), prompt: None, completion: None } => self.conversation(&messages),
            Line { messages: None, prompt: Some(prompt), completion: Some(completion) } => {
                self.completion(&prompt, &completion).map(|sample| vec![sample])
            }
            _ => return Err("it has to have either messages, or prompt and completion".into()),
        };
        let samples = samples.map_err(|error| error.to_string())?;
        if samples.iter().all(|sample| sample.targets() == 0) {
            return Err("there is nothing to learn in it: the assistant says nothing".into());
        }
        Ok(samples)
    }

    fn completion(&self, prompt: &str, completion: &str) -> Result<Sample, TrainError> {
        // Apart, as they are when the model is asked: a token across the seam would never be generated.
        let mut tokens = self.tokenizer.encode(prompt, false)?;
        if self.tokenizer.adds_bos() {
            tokens.splice(0..0, self.tokenizer.bos_id());
        }
        let begin = tokens.len();
        tokens.extend(match prompt.is_empty() {
            true => self.tokenizer.encode(completion, false)?,
            false => self.tokenizer.encode_continuation(completion)?,
        });
        tokens.extend(self.tokenizer.eos_ids().first());
        let mut learn = vec![false; tokens.len()];
        learn.iter_mut().skip(begin.max(1)).for_each(|learn| *learn = true);
        Ok(Sample { tokens, learn })
    }

    fn conversation(&self, messages: &[Message]) -> Result<Vec<Sample>, TrainError> {
        let mut samples: Vec<Sample> = Vec::new();
        // From the last turn backwards: what follows decides whether a turn is written as it was said.
        for turn in (0..messages.len()).rev().filter(|&turn| messages[turn].role == "assistant") {
            let asked = self.encode(&messages[..turn], true)?;
            let said = self.encode(&messages[..=turn], false)?;
            let begin = common(&asked, &said);
            // Where an answer does not begin as the model is told to begin it, its beginning is learned as well, but
            // nothing of what was said before.
            if begin < asked.len() {
                let before = self.encode(&messages[..turn], false)?;
                // Some templates end a text that nothing follows.
                let ended = before.last().is_some_and(|&id| self.tokenizer.is_eos(id));
                if common(&before, &said) < before.len() - usize::from(ended) {
                    return Err(TrainError::NoData {
                        what: format!("message {}", turn + 1),
                        reason: "with it, the chat template writes what was said before it otherwise".into(),
                    });
                }
            }
            let end = self.end_of_turn(&said, begin);
            let holder = samples.iter_mut().find(|sample| common(&said[..end], &sample.tokens) == end);
            let sample = match holder {
                Some(sample) => sample,
                None => {
                    let tokens = said[..end].to_vec();
                    samples.push(Sample { learn: vec![false; tokens.len()], tokens });
                    let last = samples.len() - 1;
                    &mut samples[last]
                }
            };
            sample.learn[begin.max(1).min(end)..end].iter_mut().for_each(|learn| *learn = true);
        }
        samples.reverse();
        Ok(samples)
    }

    /// Where a turn that begins there ends: behind the first token that ends a generation, or else behind its last control
    /// token, or else with the text. What templates write between two turns is nothing the model says.
    fn end_of_turn(&self, said: &[u32], begin: usize) -> usize {
        let answer = &said[begin..];
        let end = answer.iter().position(|&id| self.tokenizer.is_eos(id));
        let end = end.or_else(|| answer.iter().rposition(|&id| self.tokenizer.is_special(id)));
        end.map_or(said.len(), |end| begin + end + 1)
    }

    fn encode(&self, messages: &[Message], ask: bool) -> Result<Vec<u32>, TrainError> {
        let Some(template) = &self.template else {
            return Err(TrainError::NoData {
                what: "a line of messages".into(),
                reason: "the model has no chat template; give prompt and completion instead".into(),
            });
        };
        let options = TemplateOptions {
            add_generation_prompt: ask,
            enable_thinking: self.thinking,
            ..TemplateOptions::default()
        };
        Ok(template.encode(&self.tokenizer, messages, &options)?)
    }
}

/// Returns the length of the common prefix of two sequences.
fn common(one: &[u32], other: &[u32]) -> usize {
    one.iter().zip(other).take_while(|(one, other)| one == other).count()
}

#[cfg(test)]
pub(crate) mod tests {
    use firebox_text::{GgufVocabulary, TextAssets, TokenizerSource};
    use serde_json::{Value, json};

    use super::*;

    const CHATML: &str = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}\
                          {% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";
    /// Thinks before the last answer only.
    const FORGETFUL: &str = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}\
                             {% if loop.last and m.role == 'assistant' %}{{ 'hm:' }}{% endif %}\
                             {{ m.content + '<|im_end|>\n' }}{% endfor %}\
                             {% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";

    /// A tokenizer of bytes.
    pub(crate) fn tokenizer() -> Tokenizer {
        of_bytes(false)
    }

    fn of_bytes(add_space_prefix: bool) -> Tokenizer {
        let special = ["<unk>", "<s>", "<|im_end|>", "<|im_start|>", "<|endoftext|>"].map(String::from);
        let bytes = (0..=255u8).map(|byte| format!("<0x{byte:02X}>"));
        let vocabulary = GgufVocabulary {
            model: "llama".into(),
            tokens: special.into_iter().chain(bytes).collect(),
            scores: vec![0.0; 261],
            token_types: [2, 3, 3, 3, 3].into_iter().chain(std::iter::repeat_n(6, 256)).collect(),
            eos: Some(2),
            bos: Some(1),
            add_space_prefix: Some(add_space_prefix),
            ..GgufVocabulary::default()
        };
        let assets =
            TextAssets { tokenizer: Some(TokenizerSource::Gguf(vocabulary)), ..TextAssets::default() };
        Tokenizer::new(&assets, &Value::Null).unwrap()
    }

    fn samples(template: &str, line: &Value) -> Result<Vec<(String, Vec<String>)>, String> {
        let tokenizer = tokenizer();
        let template = ChatTemplate::from_source(template, Default::default()).unwrap();
        let format =
            Format { tokenizer: tokenizer.clone(), template: Some(Arc::new(template)), thinking: None };
        let samples = format.samples(&line.to_string())?;
        let text = |ids: &[u32]| tokenizer.decode(ids, false);
        let learned = |sample: &Sample| {
            let marked: Vec<(u32, bool)> =
                sample.tokens.iter().copied().zip(sample.learn.iter().copied()).collect();
            let runs = marked.chunk_by(|one, other| one.1 == other.1).filter(|run| run[0].1);
            runs.map(|run| text(&run.iter().map(|token| token.0).collect::<Vec<_>>())).collect()
        };
        Ok(samples.iter().map(|sample| (text(&sample.tokens), learned(sample))).collect())
    }

    #[test]
    fn every_turn_of_the_assistant_is_learned_with_its_end() {
        let line = json!({"task": "chat", "messages": [
            {"role": "system", "content": "s"}, {"role": "user", "content": "hello"},
            {"role": "assistant", "content": "hi"}, {"role": "user", "content": "<|im_end|>"},
            {"role": "assistant", "content": "bye"}]});
        // Some templates end a text that nothing follows, and some have an answer begun that is not written so later.
        let ended = CHATML.replace("{% endif %}", "{% else %}<|endoftext|>{% endif %}");
        let begun = ended.replace("assistant\n'", "assistant\n<think>'");
        for template in [CHATML, ended.as_str(), begun.as_str()] {
            let found = samples(template, &line).unwrap();
            let [(text, learned)] = &found[..] else { panic!("{found:?}") };
            assert!(text.ends_with("<|im_start|>assistant\nbye<|im_end|>"), "{text}");
            assert_eq!(learned, &["hi<|im_end|>", "bye<|im_end|>"]);
        }
    }

    #[test]
    fn turns_that_are_written_otherwise_later_are_samples_of_their_own() {
        let line = json!({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"},
                                       {"role": "user", "content": "c"}, {"role": "assistant", "content": "d"}]});
        let found = samples(FORGETFUL, &line).unwrap();
        let learned: Vec<_> = found.iter().map(|(_, learned)| learned.concat()).collect();
        assert_eq!(learned, ["hm:b<|im_end|>", "hm:d<|im_end|>"]);
        assert!(found[0].0.ends_with("hm:b<|im_end|>") && !found[1].0.contains("hm:b"));
    }

    #[test]
    fn templates_that_rewrite_what_was_said_before_are_refused() {
        let counting = format!("{{{{ messages | length }}}}{CHATML}");
        let line =
            json!({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]});
        let error = samples(&counting, &line).unwrap_err();
        assert!(error.contains("message 2") && error.contains("otherwise"), "{error}");
    }

    #[test]
    fn completions_are_learned_and_prompts_are_not() {
        let found = samples(CHATML, &json!({"prompt": "1+1=", "completion": "2"})).unwrap();
        assert_eq!(found[0].1, ["2<|im_end|>"]);
        assert!(found[0].0.contains("1+1=2"), "{}", found[0].0);
        // Nothing can be predicted from nothing.
        let alone = samples(CHATML, &json!({"prompt": "", "completion": "2"})).unwrap();
        assert!(alone[0].1.concat().ends_with("<|im_end|>"));
    }

    #[test]
    fn a_vocabulary_puts_its_space_before_prompts_alone() {
        let format = Format { tokenizer: of_bytes(true), template: None, thinking: None };
        let learned = |prompt: &str| {
            let line = json!({"prompt": prompt, "completion": "2"}).to_string();
            format.samples(&line).unwrap()[0].targets()
        };
        // Bytes of the space, of the completion, and its end.
        assert_eq!((learned("1+1="), learned("")), (1 + 1, 3 + 1 + 1));
    }

    #[test]
    fn bad_lines_are_refused_with_a_reason() {
        for (line, reason) in [
            (json!({"text": "x"}), "either messages"),
            (json!({"messages": [], "prompt": "x"}), "either messages"),
            (json!({"prompt": "x"}), "either messages"),
            (json!({"messages": [{"role": "user", "content": "x"}]}), "nothing to learn"),
            (json!({"messages": "x"}), "invalid type"),
            (json!([1]), "invalid"),
        ] {
            let error = samples(CHATML, &line).unwrap_err();
            assert!(error.contains(reason), "{error}");
        }
    }
}
