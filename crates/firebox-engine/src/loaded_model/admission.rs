//! How requests come to a model: the queue admits them, and they are prepared.

use std::sync::Arc;
use std::time::Duration;

use firebox_runtime::Embedding;
use firebox_schedule::Ticket;
use firebox_telemetry::Counter;

use super::LoadedModel;
use crate::batch::EventSink;
use crate::error::EngineError;
use crate::event::Failure;
use crate::request::Request;
use crate::request_setup::{AdmittedRequest, RequestParts, RequestSetup, SetupTask};
use crate::sequence::RequestId;

impl LoadedModel {
    /// Queues the choices of a request, all or none, or a request for vectors. A refused request returns its session.
    pub fn submit(
        &mut self,
        ids: &[RequestId],
        mut request: Request,
        now: Duration,
    ) -> Result<(), Box<Failure>> {
        if let Some(embedding) = request.embedding.take() {
            return self.submit_embedding(ids, *embedding, &request, now);
        }
        let Request {
            prompt,
            config,
            session,
            head,
            task,
            or_not_at_all,
            scope,
            lookup,
            client,
            compiled,
            ..
        } = request;
        let session = match session {
            Some(session) => session,
            None => Box::new(self.session()?),
        };
        // The queue is asked first: a request that it refuses costs nothing more.
        let tickets = match self.queue.enter_all(now, task.priority, &client, ids.len()) {
            Ok(tickets) => tickets,
            Err(error) => {
                self.model.meters().add(Counter::RefusedRequests, ids.len() as u64);
                return Err(Box::new(Failure { error: error.into(), session: Some(session) }));
            }
        };
        let fail_at = task.first_by.filter(|_| or_not_at_all).map(|first_by| now.saturating_add(first_by));
        let choices: Vec<(RequestId, Ticket)> = ids.iter().copied().zip(tickets).collect();
        let request = AdmittedRequest { choices, task, scope, client, lookup, since: now, fail_at };
        let parts = RequestParts { session, prompt: prompt.into() };
        if let Err(error) = self.check_request(&parts, config.context) {
            self.leave(&request);
            return Err(parts.refused(error));
        }
        self.tickets.extend(request.choices.iter().copied());
        let setup =
            SetupTask::new(&parts.session, head, config, compiled, ids.len(), &self.model, &self.grammars);
        if setup.takes_long() {
            // Other requests run in its place until it is prepared.
            for (_, ticket) in &request.choices {
                self.queue.hold(now, *ticket, true);
            }
            self.setups.push(RequestSetup::new(request, parts, setup));
            self.start_setups();
        } else {
            match parts.with(setup.run()) {
                Ok(ready) => self.enqueue(request, ready, now),
                Err(failure) => {
                    self.leave(&request);
                    return Err(failure);
                }
            }
        }
        self.note_arrival(now);
        Ok(())
    }

    fn submit_embedding(
        &mut self,
        ids: &[RequestId],
        embedding: Embedding,
        request: &Request,
        now: Duration,
    ) -> Result<(), Box<Failure>> {
        if !Arc::ptr_eq(embedding.decoder(), &self.model.decoder().map_err(EngineError::from)?) {
            return Err(EngineError::ForeignSession { model: self.name.clone() }.into());
        }
        // Vectors have no choices: `Engine::generate` submits one.
        let Some(&id) = ids.first() else { return Ok(()) };
        self.embeddings.submit(id, embedding, request, self.model.meters(), now)?;
        self.note_arrival(now);
        Ok(())
    }

    fn note_arrival(&mut self, now: Duration) {
        self.changed = true;
        self.doubt_residency(now);
        self.last_active = now;
    }

    fn leave(&mut self, request: &AdmittedRequest) {
        for (id, ticket) in &request.choices {
            self.queue.leave(*ticket);
            self.tickets.remove(id);
        }
    }

    /// Refuses a request that no setup could make valid.
    fn check_request(
        &self,
        RequestParts { session, prompt, .. }: &RequestParts,
        context: Option<usize>,
    ) -> Result<(), EngineError> {
        if !Arc::ptr_eq(session.decoder(), &self.model.decoder()?) {
            return Err(EngineError::ForeignSession { model: self.name.clone() });
        }
        session.check_tokens(prompt)?;
        Ok(session.check_prompt_fits(prompt.len(), context)?)
    }

    fn start_setups(&mut self) {
        let grammars = &self.grammars;
        self.setups.iter_mut().for_each(|setup| setup.start(grammars));
    }

    /// Returns whether requests are being prepared.
    pub fn is_preparing(&self) -> bool {
        !self.setups.is_empty()
    }

    /// Queues the requests whose preparation is done. Returns those that ended instead.
    pub fn prepared(&mut self, now: Duration, sink: EventSink<'_>) -> Vec<RequestId> {
        let (mut ended, mut done, mut at) = (Vec::new(), Vec::new(), 0);
        while let Some(setup) = self.setups.get_mut(at) {
            match setup.outcome(&self.name, now) {
                Some(outcome) => done.push((self.setups.remove(at), outcome)),
                None => at += 1,
            }
        }
        for (setup, outcome) in done {
            self.changed = true;
            let RequestSetup { request, parts, cancelled, .. } = setup;
            match parts.with(outcome) {
                Err(failure) => {
                    let failures = failure.of_choices(request.choices.len());
                    for ((id, _), failure) in request.choices.into_iter().zip(failures) {
                        sink(id, failure);
                        ended.push(id);
                    }
                }
                Ok(ready) => {
                    self.enqueue(request, ready, now);
                    ended.extend(cancelled.into_iter().filter(|id| self.cancel(*id, now, sink)));
                }
            }
        }
        self.start_setups();
        ended
    }
}
