//! What a decode step takes: sequences, and the tokens drafted for them.

use std::time::Instant;

use firebox_runtime::decode::{BatchDraft, draft_together};

use super::Batch;
use crate::decode_share::{Decoding, decode_share};
use crate::sequence::{Need, RequestId, Sequence};
use crate::shield::shielded;

impl Batch {
    /// Chooses the sequences of the next decode step.
    pub(super) fn decoding(&mut self) -> Vec<RequestId> {
        let prefills = self.prefilling.is_some() || self.has_waiting(Need::Prefill);
        let in_pass: Vec<RequestId> = self.in_pass().collect();
        let needs_step =
            |one: &&mut Sequence| !one.held && one.need() == Need::Decode && !in_pass.contains(&one.id);
        let mut sequences: Vec<&mut Sequence> = self.sequences.iter_mut().filter(needs_step).collect();
        let all: Vec<Decoding<'_>> = sequences
            .iter()
            .map(|one| Decoding { client: &one.client, priority: one.priority, last_step: one.last_step })
            .collect();
        let takes = decode_share(&all, prefills, |rows| self.costs.seconds(rows));
        self.decode_steps += 1;
        let taken = sequences.iter_mut().zip(takes).filter(|(_, takes)| *takes);
        let taken = taken.map(|(one, _)| {
            one.last_step = self.decode_steps;
            one.id
        });
        taken.collect()
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
