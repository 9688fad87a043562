//! Tests that clients share a model, by counts of tokens on a simulated clock.

use std::collections::HashMap;

use firebox_schedule::{AdmissionConfig, Client};

use super::{SimulatedClock, answer_of, one_model};
use crate::clock::Clock;
use crate::engine_core::{EngineCore, StepOutcome};
use crate::event::Event;
use crate::sequence::RequestId;

/// The tokens of every client, and the requests that have ended.
#[derive(Debug, Default)]
struct Observed {
    clients: HashMap<RequestId, &'static str>,
    tokens: HashMap<&'static str, usize>,
    ended: Vec<RequestId>,
}

impl Observed {
    fn submit(
        &mut self,
        core: &mut EngineCore,
        clock: &SimulatedClock,
        client: Client,
        name: &'static str,
        count: usize,
        tokens: usize,
    ) -> bool {
        let request = answer_of(tokens).for_client(client).in_scope(name);
        let Ok(ids) = core.submit_choices(request, count, clock.now()) else { return false };
        self.clients.extend(ids.into_iter().map(|id| (id, name)));
        true
    }

    fn work(&mut self, core: &mut EngineCore, clock: &SimulatedClock) -> StepOutcome {
        let mut sink = |id: RequestId, event: Event| match event {
            Event::Piece(piece) if piece.token.is_some() => {
                *self.tokens.entry(self.clients[&id]).or_default() += 1;
            }
            Event::Failed(failure) => panic!("{}", failure.error),
            event if event.is_last() => self.ended.push(id),
            _ => {}
        };
        core.work(clock, &mut sink)
    }

    fn tokens(&self, name: &str) -> usize {
        self.tokens.get(name).copied().unwrap_or(0)
    }
}

/// While one client has as many choices as its queue takes, another's answer gets a place of the batch with the next pass and
/// keeps it: the first gets no more tokens meanwhile than the other places of as many passes.
#[test]
fn an_answer_waits_for_no_other_clients_choices() {
    const PLACES: usize = 8;
    const TOKENS: usize = 6;
    let (mut core, clock) = one_model(PLACES);
    let mut seen = Observed::default();
    let admitted =
        (0..8).filter(|_| seen.submit(&mut core, &clock, Client::new("many"), "many", 64, 200)).count();
    assert_eq!(admitted, 4, "the queue takes no more of one client");
    for _ in 0..200 {
        seen.work(&mut core, &clock);
    }
    for _ in 0..20 {
        let before = seen.tokens("many");
        let ended = seen.ended.len();
        assert!(seen.submit(&mut core, &clock, Client::new("single"), "single", 1, TOKENS));
        let answered = seen.tokens("single") + TOKENS;
        while seen.tokens("single") < answered {
            seen.work(&mut core, &clock);
        }
        let others = seen.tokens("many") - before;
        // One pass is under way, one computes the prompt, and first tokens after shared prompts take no pass.
        let most = (PLACES - 1) * (TOKENS + 2) + PLACES + (seen.ended.len() - ended);
        assert!(others <= most, "{others} tokens of others during {TOKENS}");
    }
}

#[test]
fn clients_get_tokens_by_their_weights() {
    for (weight, least, most) in [(1, 0.95, 1.05), (3, 2.8, 3.2)] {
        let (mut core, clock) = one_model(8);
        let mut seen = Observed::default();
        let heavy = Client::new("heavy").with_weight(weight);
        assert!(seen.submit(&mut core, &clock, Client::new("light"), "light", 64, 200));
        assert!(seen.submit(&mut core, &clock, heavy, "heavy", 64, 200));
        while seen.tokens("light") < 1000 {
            seen.work(&mut core, &clock);
        }
        let ratio = seen.tokens("heavy") as f64 / seen.tokens("light") as f64;
        assert!((least..most).contains(&ratio), "weight {weight}: {ratio}");
    }
}

/// Five clients have two places, which change hands.
#[test]
fn more_clients_than_places_take_turns() {
    const NAMES: [&str; 5] = ["a", "b", "c", "d", "e"];
    let (mut core, clock) = one_model(2);
    let mut seen = Observed::default();
    for name in NAMES {
        for _ in 0..20 {
            assert!(seen.submit(&mut core, &clock, Client::new(name), name, 1, 200));
        }
    }
    while NAMES.iter().map(|name| seen.tokens(name)).sum::<usize>() < 5000 {
        seen.work(&mut core, &clock);
        let tokens = NAMES.map(|name| seen.tokens(name));
        let apart = tokens.iter().max().unwrap() - tokens.iter().min().unwrap();
        let turn = AdmissionConfig::default().turn_rows as usize;
        // A client runs for a turn beyond the one that waits, and its rows are looked at after a turn of all.
        assert!(apart <= 3 * turn, "{tokens:?}");
    }
}
