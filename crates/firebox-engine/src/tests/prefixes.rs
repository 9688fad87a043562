//! Tests that a panic while a prefix is looked up or cached fails no request.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use firebox_cache::PageLedger;
use firebox_runtime::{KvType, PagePool};

use super::{SimulatedClock, answer_of, models};
use crate::clock::Clock;
use crate::engine_core::{EngineConfig, EngineCore, StepOutcome};
use crate::event::Event;
use crate::sequence::RequestId;

/// Grants every page, but panics at the next one once it is set to.
#[derive(Debug, Default)]
struct PanickingLedger(AtomicBool);

impl PageLedger for PanickingLedger {
    fn may_allocate(&self, _: usize) -> bool {
        true
    }

    fn has_headroom(&self, _: usize) -> bool {
        assert!(!self.0.swap(false, Ordering::Relaxed), "as if there were no device any more");
        true
    }

    fn freed(&self, _: usize) {}
}

#[test]
fn a_panic_in_the_prefix_cache_fails_no_request() {
    let (model, ledger, clock) =
        (models().remove(0), Arc::new(PanickingLedger::default()), SimulatedClock::default());
    let layout = model.decoder().unwrap().layout(KvType::default());
    let mut core = EngineCore::new(EngineConfig::default()).unwrap();
    core.add_in_pool("model", model, PagePool::with_ledger(layout, ledger.clone())).unwrap();
    // After how many tokens a page panics: the first page is for a copy of the known prefix, the last one for a copy to
    // cache.
    let mut answer = |panics_after: Option<usize>| {
        let (mut outcome, mut pieces) = (None, 0);
        let mut sink = |_: RequestId, event: Event| match event {
            Event::Piece(_) => {
                pieces += 1;
                if panics_after == Some(pieces) {
                    ledger.0.store(true, Ordering::Relaxed);
                }
            }
            Event::Finished(finished) => outcome = Some(finished),
            Event::Failed(failure) => panic!("{}", failure.error),
            Event::Waiting { .. } | Event::Vectors(_) | Event::Embedded(_) => {}
        };
        core.submit(answer_of(4), clock.now()).unwrap();
        ledger.0.store(panics_after == Some(0), Ordering::Relaxed);
        while core.work(&clock, &mut sink) != StepOutcome::Idle {}
        assert!(!ledger.0.load(Ordering::Relaxed), "the ledger has panicked");
        let outcome = outcome.unwrap();
        (outcome.summary.tokens, outcome.cached_tokens)
    };
    let (expected, _) = answer(Some(4));
    for (panics_after, cached) in [(None, 0), (None, 2), (Some(0), 0), (None, 2)] {
        assert_eq!(answer(panics_after), (expected.clone(), cached), "{panics_after:?}");
    }
}
