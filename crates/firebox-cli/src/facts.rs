//! Facts of `firebox chat`: system messages that stay when turns are forgotten, and are condensed when they outgrow their
//! tokens.

use std::sync::Arc;

use firebox_runtime::{ExtractiveCondenser, TextCondensation};
use firebox_text::{Message, Tokenizer};

/// The name of messages that are facts.
const FACT: &str = "fact";

/// Returns whether a message is a fact.
pub fn is_fact(message: &Message) -> bool {
    message.role == "system" && message.name.as_deref() == Some(FACT)
}

/// Adds a fact after the system message and the other facts.
pub fn add(messages: &mut Vec<Message>, text: &str) {
    let at = messages.iter().take_while(|message| message.role == "system").count();
    messages.insert(at, Message { name: Some(FACT.into()), ..Message::system(text) });
}

/// Returns the messages with the facts as part of the system message.
pub fn with_system(messages: &[Message]) -> Vec<Message> {
    let leading = messages.iter().take_while(|message| message.role == "system").count();
    let (system, rest) = messages.split_at(leading);
    if !system.iter().any(is_fact) {
        return messages.to_vec();
    }
    let text = system.iter().map(Message::text).collect::<Vec<_>>().join("\n");
    std::iter::once(Message::system(text)).chain(rest.iter().cloned()).collect()
}

/// Facts that are being condensed.
#[derive(Debug, Default)]
pub struct Facts {
    condensing: Option<(Vec<String>, TextCondensation)>,
}

impl Facts {
    /// Begins to condense the facts in the background if they have more tokens than `capacity`.
    pub fn condense(
        &mut self,
        messages: &[Message],
        tokenizer: &Arc<Tokenizer>,
        capacity: usize,
    ) -> anyhow::Result<()> {
        let facts = texts(messages);
        let tokenizer = tokenizer.clone();
        let fits = move |text: &str| {
            tokenizer.encode_literal(text, false).is_ok_and(|tokens| tokens.len() <= capacity)
        };
        let text = facts.join("\n");
        if !fits(&text) {
            let condensing = TextCondensation::begin(text, Arc::new(ExtractiveCondenser), fits)?;
            self.condensing = Some((facts, condensing));
        }
        Ok(())
    }

    /// Replaces facts by their condensed text, if that is ready. Facts that were added since stay. Returns whether any were
    /// replaced.
    pub fn apply(&mut self, messages: &mut Vec<Message>) -> anyhow::Result<bool> {
        let Some((facts, condensing)) = self.condensing.take_if(|(_, condensing)| condensing.is_finished())
        else {
            return Ok(false);
        };
        let Some(condensed) = condensing.finish()? else { return Ok(false) };
        let mut current = texts(messages);
        if !current.starts_with(&facts) {
            return Ok(false);
        }
        current.splice(..facts.len(), [condensed]);
        messages.retain(|message| !is_fact(message));
        current.iter().for_each(|fact| add(messages, fact));
        Ok(true)
    }
}

fn texts(messages: &[Message]) -> Vec<String> {
    messages.iter().filter(|message| is_fact(message)).map(Message::text).collect()
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::time::{Duration, Instant};

    use firebox_runtime::{Model, device};

    use super::*;

    #[test]
    fn facts_are_part_of_the_system_message() {
        let mut messages = vec![Message::system("Be brief."), Message::user("Hi")];
        assert_eq!(with_system(&messages), messages);
        add(&mut messages, "I am Ada.");
        add(&mut messages, "I like tea.");
        let expected = [Message::system("Be brief.\nI am Ada.\nI like tea."), Message::user("Hi")];
        assert_eq!(with_system(&messages), expected);
    }

    #[test]
    fn facts_that_outgrow_their_tokens_are_condensed_between_messages() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../assets/pocket");
        let model = Model::open(path, &device("cpu").unwrap()).unwrap();
        let tokenizer = model.tokenizer().unwrap();
        let mut messages = vec![Message::user("Hi")];
        let mut facts = Facts::default();
        for fact in ["My dog is called Rex.", "My brother is called Tom."] {
            add(&mut messages, fact);
        }
        let tokens = |text: &str| tokenizer.encode_literal(text, false).unwrap().len();
        let capacity = tokens("My brother is called Tom.");
        facts.condense(&messages, tokenizer, 100).unwrap();
        assert!(facts.condensing.is_none(), "they fit");
        facts.condense(&messages, tokenizer, capacity).unwrap();
        add(&mut messages, "My cat is called Tim.");
        let began = Instant::now();
        while !facts.apply(&mut messages).unwrap() {
            assert!(began.elapsed() < Duration::from_secs(60));
        }
        let texts = texts(&messages);
        assert_eq!((texts.len(), texts[1].as_str()), (2, "My cat is called Tim."));
        assert!(tokens(&texts[0]) <= capacity, "{texts:?}");
        assert_eq!(messages.last().unwrap().role, "user");
    }
}
