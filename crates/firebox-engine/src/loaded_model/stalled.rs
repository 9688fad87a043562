//! Requests of an open model whose events are not read.

use std::time::Duration;

use firebox_telemetry::Counter;

use super::LoadedModel;
use crate::batch::EventSink;
use crate::error::EngineError;
use crate::sequence::RequestId;

impl LoadedModel {
    /// Fails a request whose events are not read. Returns whether it has ended; one in a pass has not yet.
    pub fn fail_stalled(&mut self, id: RequestId, after: Duration, sink: EventSink<'_>) -> bool {
        let is_there = self.tickets.contains_key(&id) && !self.batch.is_in_pass(id);
        if is_there {
            self.model.meters().add(Counter::StalledRequests, 1);
            // The session waits for the reader with the failure, and its pages should not.
            let waiting = self.tickets.get(&id).and_then(|ticket| self.waiting.get_mut(ticket));
            if let Some((sequence, _)) = waiting
                && sequence.session.is_reproducible()
            {
                sequence.session.drop_cache();
                self.pool.shrink();
            }
            self.fail(id, EngineError::Stalled { after }, sink);
        }
        is_there
    }
}
