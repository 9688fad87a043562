//! Drafts of sequences that share a pass.

use crate::decode::DecodeState;
use crate::decode::speculation::costs::PassCosts;
use crate::decode::speculation::pace::{Candidate, draft_lengths};
use crate::{Session, Speculation};

/// A sequence of a batch that takes its last token through the layers next.
#[derive(Debug)]
pub struct BatchDraft<'a> {
    /// The state of its answer.
    pub state: &'a mut DecodeState,
    /// Its session.
    pub session: &'a mut Session,
    /// Drops out where its drafter fails: the sequence continues without drafts.
    pub speculation: &'a mut Option<Speculation>,
}

/// Appends drafts to the sequences that share the next pass: the tokens that a grammar forces, and for other sequences as
/// many as are worth their rows by `costs`. The pass has `room` rows.
///
/// Forced tokens cost nothing, as every one of them needs a row in some pass anyway.
pub fn draft_together(costs: &PassCosts, room: usize, batch: &mut [BatchDraft<'_>]) {
    let sequences = batch.len();
    let mut left = room.saturating_sub(batch.iter().map(|one| one.session.uncached_tokens()).sum());
    let mut rows = sequences;
    let (mut limits, mut grades) = (vec![0; sequences], vec![None; sequences]);
    for (at, BatchDraft { state, session, speculation }) in batch.iter_mut().enumerate() {
        let most = state.draft_limit(session).min(left);
        let forced = state.forced_draft(session, most);
        if !forced.is_empty() {
            (rows, left) = (rows + forced.len(), left - forced.len());
            state.begin_draft(session, &forced, true);
        } else if let Some(speculation) = speculation {
            limits[at] = most.min(speculation.most);
            grades[at] = speculation.grade(session.tokens(), limits[at]);
        }
    }
    let mut wanted = vec![0; sequences];
    let (mut paced, mut candidates) = (Vec::new(), Vec::new());
    for (at, one) in batch.iter_mut().enumerate() {
        let (Some(speculation), Some(grade)) = (one.speculation.as_mut(), grades[at]) else { continue };
        if speculation.steady {
            wanted[at] = limits[at].min(left);
            (rows, left) = (rows + wanted[at], left - wanted[at]);
        } else {
            paced.push(at);
            let acceptance = &mut speculation.acceptance;
            candidates.push(Candidate { acceptance, grade, most: limits[at] });
        }
    }
    for (at, length) in paced.into_iter().zip(draft_lengths(costs, sequences, rows, left, &mut candidates)) {
        wanted[at] = length;
    }
    for (at, BatchDraft { state, session, speculation }) in batch.iter_mut().enumerate() {
        let (Some(drafter), Some(grade)) = (speculation.as_mut(), grades[at]) else { continue };
        if wanted[at] == 0 {
            continue;
        }
        match drafter.propose(session, wanted[at], grade, state.output_mut()) {
            Ok(()) => {
                if let Some(draft) = drafter.proposed().first() {
                    state.begin_draft(session, draft, false);
                }
            }
            Err(_) => **speculation = None,
        }
    }
}
