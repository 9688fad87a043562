//! What a decode step takes: sequences, and the tokens drafted for them.

use std::time::{Duration, Instant};

use firebox_runtime::decode::{BatchDraft, draft_together};
use firebox_schedule::Client;

use super::Batch;
use crate::decode_share::{Beside, Decoding, decode_share};
use crate::in_flight::InFlightPass;
use crate::recent_rows::Standing;
use crate::sequence::{Need, RequestId, Sequence};
use crate::shield::shielded;

impl Batch {
    /// Chooses the sequences of the next decode step.
    pub(super) fn decoding(&mut self, now: Duration) -> Vec<RequestId> {
        let beside = match self.prefilling.is_some() || self.has_waiting(Need::Prefill) {
            true if self.owes_prompt(now) => Beside::OwedPrompt,
            true => Beside::Prompts,
            false => Beside::Nothing,
        };
        let in_pass: Vec<RequestId> = self.in_pass().collect();
        let needs_step =
            |one: &&mut Sequence| !one.held && one.need() == Need::Decode && !in_pass.contains(&one.id);
        let mut sequences: Vec<&mut Sequence> = self.sequences.iter_mut().filter(needs_step).collect();
        let all: Vec<Decoding<'_>> = sequences
            .iter()
            .map(|one| Decoding { client: &one.client, priority: one.priority, last_step: one.last_step })
            .collect();
        let takes = decode_share(&all, beside, |rows| self.costs.seconds(rows));
        self.decode_steps += 1;
        let taken = sequences.iter_mut().zip(takes).filter(|(_, takes)| *takes);
        let taken = taken.map(|(one, _)| {
            one.last_step = self.decode_steps;
            one.id
        });
        taken.collect()
    }

    /// Returns where a client stands beside those that decode.
    pub(super) fn standing(&self, client: &Client, now: Duration) -> Standing {
        let decoding = self.sequences.iter().filter(|one| !one.held && one.need() == Need::Decode);
        self.recent.standing(client, decoding.map(|one| &one.client), now)
    }

    /// Returns whether a client with a prompt is owed rows.
    fn owes_prompt(&self, now: Duration) -> bool {
        let prompts = self.sequences.iter().filter(|one| !one.held && one.need() == Need::Prefill);
        let texts = self.embeddings.ready().map(|one| &one.client);
        let mut clients = prompts.map(|one| &one.client).chain(texts);
        clients.any(|client| self.standing(client, now).owed > 0)
    }

    /// Counts the rows of a pass that has ended.
    pub(super) fn count_rows(&mut self, in_flight: &InFlightPass, now: Duration) {
        for (id, rows) in in_flight.rows_by_request() {
            let text = || self.embeddings.iter().find(|one| one.id == id).map(|one| &one.client);
            let sequence = self.sequences.iter().find(|one| one.id == id).map(|one| &one.client);
            if let Some(client) = sequence.or_else(text) {
                self.recent.add(client, rows, now);
            }
        }
    }

    /// Drafts tokens for the sequences of the next decode pass.
    pub(super) fn draft(&mut self, decoding: &[RequestId]) {
        let drafting = |one: &&mut Sequence| one.may_draft() && decoding.contains(&one.id);
        let mut sequences: Vec<&mut Sequence> = self.sequences.iter_mut().filter(drafting).collect();
        let Some(room) = sequences.iter().map(|one| one.session.chunk()).min() else { return };
        let began = Instant::now();
        let drafted = shielded(self.decoder.device(), || {
            let mut batch: Vec<BatchDraft<'_>> = sequences
                .iter_mut()
                .map(|one| {
                    let Sequence { state, session, speculation, .. } = &mut **one;
                    BatchDraft { state, session, speculation }
                })
                .collect();
            draft_together(&self.costs, room, &mut batch);
            Ok(())
        });
        if drafted.is_err() {
            // Decoding goes on without drafts; if the device is lost, the next pass reports it.
            sequences.iter_mut().for_each(|one| one.speculation = None);
        }
        self.drafting = began.elapsed();
    }
}
