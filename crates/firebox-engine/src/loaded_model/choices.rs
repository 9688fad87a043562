//! The choices of a request in an open model: the first computes the prompt, and the others continue after it.

use std::time::Duration;

use firebox_runtime::Session;

use super::LoadedModel;
use crate::batch::EventSink;
use crate::error::EngineError;
use crate::request_setup::{AdmittedRequest, Ready};
use crate::sequence::{ComputedPrompt, RequestId, Sequence};

impl LoadedModel {
    /// Adds a prepared request to the queue, as one that came when it was submitted. The first of several choices computes
    /// the prompt, and the others continue after it.
    pub(super) fn enqueue(&mut self, request: AdmittedRequest, ready: Ready, now: Duration) {
        let AdmittedRequest { choices, task, scope, client, lookup, since, fail_at } = request;
        let Ready { session, prompt, outputs } = ready;
        let mut sessions: Vec<Session> = choices.iter().skip(1).map(|_| (*session).clone()).collect();
        sessions.insert(0, *session);
        for ((&(id, ticket), output), session) in choices.iter().zip(outputs).zip(sessions) {
            let scope = scope.clone();
            let mut sequence =
                Sequence::new(id, session, prompt.clone(), output, scope, task.priority, since);
            sequence.client = client.clone();
            sequence.fail_at = fail_at;
            sequence.speculation = self.speculation(lookup);
            self.waiting.insert(ticket, (sequence, task));
        }
        self.share_prompt(choices.into_iter().map(|(id, _)| id).collect(), now);
    }

    /// Lets the first of these choices compute the prompt, and the others wait for it.
    pub(super) fn share_prompt(&mut self, choices: Vec<RequestId>, now: Duration) {
        for (nth, id) in choices.iter().enumerate() {
            let Some(&ticket) = self.tickets.get(id) else { continue };
            let Some((sequence, _)) = self.waiting.get_mut(&ticket) else { continue };
            sequence.awaits_prompt = nth > 0;
            sequence.shares_prompt = nth == 0 && choices.len() > 1;
            self.queue.hold(now, ticket, sequence.held || sequence.awaits_prompt);
        }
        if let [first, others @ ..] = &choices[..]
            && !others.is_empty()
        {
            self.followers.insert(*first, others.to_vec());
        }
    }

    /// Lets the choices go on that waited for a prompt.
    pub fn prompt_computed(&mut self, prompt: &ComputedPrompt, now: Duration) {
        for id in self.followers.remove(&prompt.id).unwrap_or_default() {
            let Some(&ticket) = self.tickets.get(&id) else { continue };
            let Some((sequence, _)) = self.waiting.get_mut(&ticket) else { continue };
            sequence.continue_after(prompt);
            self.queue.hold(now, ticket, sequence.held);
        }
        self.changed = true;
    }

    /// Drops the caches of waiting requests that share their pages, as choices of a request do. No page is only one's own, but
    /// together they may free some. Returns whether there were any.
    pub(super) fn drop_shared_prompts(&mut self) -> bool {
        let sessions = self.waiting.values_mut().map(|(sequence, _)| &mut sequence.session);
        let mut sharing =
            sessions.filter(|session| session.is_reproducible() && !session.cache().is_empty()).peekable();
        let are_there = sharing.peek().is_some();
        sharing.for_each(Session::drop_cache);
        self.pool.shrink();
        are_there
    }

    /// Records rows that a pass has computed for a request.
    pub fn served(&mut self, id: RequestId, rows: usize) {
        if let Some(&ticket) = self.tickets.get(&id) {
            self.changed |= self.queue.served(ticket, rows);
        }
        self.changed |= self.embeddings.served(id, rows);
    }
}

/// Chooses the first token after a prompt that another choice has computed. Returns whether the answer has ended with it.
pub(super) fn first_token(
    sequence: &mut Sequence,
    now: Duration,
    sink: EventSink<'_>,
) -> Result<bool, EngineError> {
    let Some(scores) = sequence.take_first_scores() else { return Ok(false) };
    let id = sequence.id;
    sequence.advance(scores, now, &mut |event| sink(id, event))
}
