//! The transcript of `firebox chat`: what was said, and the turns of the session that hold it.

use firebox_runtime::{CondensedFacts, Role, RuntimeError, Script, Session, TurnId, TurnKind};
use firebox_text::Message;

/// The name of messages that are facts.
const FACT: &str = "fact";

/// What was said in a conversation.
#[derive(Debug, Default)]
pub struct Transcript {
    pub system: Option<String>,
    pub facts: Vec<Fact>,
    pub exchanges: Vec<Exchange>,
}

/// A fact, which stays when exchanges are forgotten.
#[derive(Debug)]
pub struct Fact {
    pub text: String,
    /// The turn that holds it; `None` if the session has yet to read it.
    pub turn: Option<TurnId>,
}

/// A question and its answer.
#[derive(Debug)]
pub struct Exchange {
    pub question: String,
    pub answer: String,
    /// The thoughts before the answer. They are not read again.
    pub thoughts: String,
    /// The turn that holds it; `None` if the session has yet to read it.
    pub turn: Option<TurnId>,
}

impl Transcript {
    /// Reads the messages of a saved conversation.
    pub fn from_messages(messages: &[Message]) -> Self {
        let mut transcript = Self::default();
        for message in messages {
            let text = message.text();
            match message.role.as_str() {
                "system" if message.name.as_deref() == Some(FACT) => {
                    transcript.facts.push(Fact { text, turn: None });
                }
                "system" => transcript.system = Some(text),
                "user" => {
                    let (answer, thoughts) = (String::new(), String::new());
                    transcript.exchanges.push(Exchange { question: text, answer, thoughts, turn: None });
                }
                _ => {
                    if let Some(exchange) = transcript.exchanges.last_mut() {
                        exchange.answer += &text;
                        exchange.thoughts += message.reasoning_content.as_deref().unwrap_or_default();
                    }
                }
            }
        }
        transcript
    }

    /// Returns it as messages, with a fact that the session does not hold yet.
    pub fn messages(&self, pending_fact: Option<&str>) -> Vec<Message> {
        let facts = self.facts.iter().map(|fact| fact.text.as_str()).chain(pending_fact);
        let fact = |text: &str| Message { name: Some(FACT.into()), ..Message::system(text) };
        let exchanges = self.exchanges.iter().flat_map(|exchange| {
            let mut answer = Message::assistant(exchange.answer.as_str());
            answer.reasoning_content =
                Some(exchange.thoughts.clone()).filter(|thoughts| !thoughts.is_empty());
            [Message::user(exchange.question.as_str()), answer]
        });
        let system = self.system.as_deref().map(Message::system);
        system.into_iter().chain(facts.map(fact)).chain(exchanges).collect()
    }

    /// Finds the turns of a session that hold it. Returns `false` if the session holds anything else.
    pub fn find_turns(&mut self, session: &Session, script: &Script) -> Result<bool, RuntimeError> {
        let parts = script.parts()?;
        let (mut facts, mut exchanges) = (self.facts.iter_mut(), self.exchanges.iter_mut());
        let mut rest = session.tokens();
        for (index, turn) in session.all_turns().enumerate() {
            // A session that was rewound may list turns whose tokens are gone.
            if turn.tokens == 0 || rest.is_empty() {
                continue;
            }
            let Some((tokens, others)) = rest.split_at_checked(turn.tokens) else { return Ok(false) };
            rest = others;
            let is_opening = index == 0 && turn.pinned;
            let place = match turn.kind {
                _ if is_opening && tokens == script.opening(self.system.as_deref())? => continue,
                TurnKind::Fact => match facts.next() {
                    Some(fact) if tokens == parts.system_message(&fact.text)? => &mut fact.turn,
                    _ => return Ok(false),
                },
                // Earlier versions saved conversations without turns, so that one without roles held everything.
                TurnKind::Turn => match exchanges.next() {
                    Some(exchange)
                        if turn.roles == [Role::User, Role::Assistant]
                            && tokens.starts_with(&parts.question(&exchange.question)?) =>
                    {
                        &mut exchange.turn
                    }
                    _ => return Ok(false),
                },
            };
            *place = Some(turn.id);
        }
        Ok(rest.is_empty())
    }

    /// Marks everything as unread.
    pub fn set_unread(&mut self) {
        self.facts.iter_mut().for_each(|fact| fact.turn = None);
        self.exchanges.iter_mut().for_each(|exchange| exchange.turn = None);
    }

    /// Removes exchanges that the session has evicted. Returns how many there were.
    pub fn remove_evicted(&mut self, session: &Session) -> usize {
        let before = self.exchanges.len();
        let holds = |turn: TurnId| session.all_turns().any(|held| held.id == turn);
        self.exchanges.retain(|exchange| exchange.turn.is_none_or(holds));
        before - self.exchanges.len()
    }

    /// Returns the facts that the session holds.
    pub fn read_facts(&self) -> Vec<(TurnId, String)> {
        self.facts.iter().filter_map(|fact| Some((fact.turn?, fact.text.clone()))).collect()
    }

    /// Records that facts were condensed and another was added. Returns whether any were condensed.
    pub fn condense_facts(&mut self, facts: CondensedFacts) -> bool {
        let CondensedFacts { condensed, added: (turn, _), text } = facts;
        let is_condensed = condensed.is_some();
        if let Some(condensed) = condensed {
            let is_replaced = |fact: &Fact| fact.turn.is_some_and(|turn| condensed.facts.contains(&turn));
            let at = self.facts.iter().position(is_replaced).unwrap_or(0);
            self.facts.retain(|fact| !is_replaced(fact));
            self.facts.insert(at, Fact { text: condensed.text.clone(), turn: Some(condensed.turn) });
        }
        self.facts.push(Fact { text, turn: Some(turn) });
        is_condensed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_read_back() {
        let fact = |text: &str| Message { name: Some(FACT.into()), ..Message::system(text) };
        let messages = [
            Message::system("Be brief."),
            fact("I am Ada."),
            fact("I like tea."),
            Message::user("Hi"),
            Message { reasoning_content: Some("A greeting.".into()), ..Message::assistant("Hello") },
        ];
        let transcript = Transcript::from_messages(&messages);
        assert_eq!((transcript.facts.len(), transcript.exchanges.len()), (2, 1));
        assert_eq!(transcript.messages(None), messages);
        assert_eq!(transcript.messages(Some("I am tall."))[3], fact("I am tall."));
    }
}
