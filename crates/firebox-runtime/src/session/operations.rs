//! A check of operations on a session in any order: each succeeds or says why not, a file of the session continues to the same
//! bits, and a session that was only fed and rewound is as if it had been fed at once.

use std::path::Path;

use firebox_cache::{AfterEviction, KvType, Role, SlidingWindow, TurnId, TurnKind, WholeTurns};

use crate::{Model, Session};

/// The most tokens that the operations feed, so that no check takes long.
const MAX_TOKENS: usize = 400;
const CAPACITY: usize = 120;

/// Runs a session through the operations that bytes encode, and panics where a rule is violated. The first two bytes choose the
/// number format of keys and values and the eviction policy; every three of the others are an operation. The session is saved
/// to `file`. Returns how many operations succeeded.
pub fn check_session_operations(model: &Model, file: &Path, bytes: &[u8]) -> usize {
    let [kept, policy, operations @ ..] = bytes else { return 0 };
    let kept = [KvType::F32, KvType::F16, KvType::Int8][usize::from(kept % 3)];
    let with_policy = |session: Session| {
        let session = session.with_chunk(48).with_fact_capacity(60);
        match policy % 4 {
            0 => session,
            1 => session.with_turn_capacity(CAPACITY, WholeTurns { after: AfterEviction::CompactPositions }),
            2 => session.with_turn_capacity(CAPACITY, WholeTurns { after: AfterEviction::KeepPositions }),
            _ => session.with_turn_capacity(CAPACITY, SlidingWindow),
        }
    };
    let begun = || with_policy(model.session().expect("a decoder").with_kv_type(kept));
    let (mut session, mut branch) = (begun(), None);
    // Whether nothing was done that a single feed does not do.
    let (mut plain, mut succeeded, mut fed) = (policy % 4 == 0, 0, 0);
    for &[what, a, b] in operations.as_chunks().0 {
        let some = tokens(a, usize::from(b % 70) + 1);
        fed += some.len();
        if fed > MAX_TOKENS {
            break;
        }
        let turn = nth_turn(&session, a, false);
        plain &= matches!(what % 14, 0..=3 | 8 | 12);
        let done = match what % 14 {
            0..=2 => session.feed(&some).map(|logits| assert!(logits.iter().all(|logit| logit.is_finite()))),
            3 => session.feed(&some[..1]).map(drop),
            4 | 5 => session.begin_turn(&[Role::User, Role::Assistant]).map(drop),
            6 => session.add_fact(&some).map(drop),
            7 => match nth_turn(&session, a, true) {
                Some(fact) => session.supersede(fact, &some).map(drop),
                None => Ok(()),
            },
            8 => {
                let left = session.tokens().len().saturating_sub(some.len());
                session.rewind(left);
                Ok(())
            }
            9 => turn.map_or(Ok(()), |turn| session.mask(turn, b % 2 == 0)),
            10 => turn.map_or(Ok(()), |turn| session.forget(turn)),
            11 => session.compact_positions(),
            12 => {
                branch = Some(std::mem::replace(&mut session, branch.take().unwrap_or_else(begun)));
                Ok(())
            }
            _ => turn.map_or(Ok(()), |turn| session.pin(turn, b % 2 == 0)),
        };
        succeeded += usize::from(done.is_ok());
        expect_sound(&session);
    }
    for mut session in [Some(session), branch].into_iter().flatten() {
        if plain && !session.tokens().is_empty() {
            let mut at_once = begun();
            let whole = [session.tokens(), &[7]].concat();
            // Both may be too long by now.
            if let (Ok(one), Ok(other)) = (session.clone().feed(&[7]), at_once.feed(&whole)) {
                assert_eq!(bits(&one), bits(&other), "{} tokens", whole.len());
            }
        }
        session.save(file, model).expect("a session that is sound");
        let restored = Session::restore(file, model, kept).expect("it was just saved");
        let mut restored = with_policy(restored);
        assert_eq!(restored.tokens(), session.tokens());
        let (one, other) = (session.feed(&[9, 8]), restored.feed(&[9, 8]));
        match (one, other) {
            (Ok(one), Ok(other)) => assert_eq!(bits(&one), bits(&other)),
            (Err(one), Err(other)) => assert_eq!(one.to_string(), other.to_string()),
            (one, other) => panic!("{one:?}, and restored {other:?}"),
        }
        expect_sound(&session);
    }
    succeeded
}

fn tokens(seed: u8, count: usize) -> Vec<u32> {
    (0..count as u32).map(|at| 3 + (u32::from(seed) + at * 31) % 150).collect()
}

fn nth_turn(session: &Session, which: u8, is_fact: bool) -> Option<TurnId> {
    let turns =
        session.turns().filter(|turn| !is_fact || turn.kind == TurnKind::Fact && turn.hidden.is_none());
    let ids: Vec<TurnId> = turns.map(|turn| turn.id).collect();
    ids.get(usize::from(which) % ids.len().max(1)).copied()
}

/// Asserts that the parts of a session agree with each other.
fn expect_sound(session: &Session) {
    let cache = session.cache();
    assert!(cache.len() <= session.tokens().len());
    let in_turns: usize = cache.turns().map(|turn| turn.tokens).sum();
    assert!(in_turns <= cache.len(), "{in_turns} tokens of turns and {} in all", cache.len());
    assert_eq!(cache.visible().count(), cache.len());
    let mut end = 0;
    for run in cache.positions() {
        assert!(end <= run.start && run.start <= run.end, "{run:?} behind {end}");
        end = run.end;
    }
    assert_eq!(cache.positions().map(|run| run.len()).sum::<usize>(), cache.len());
    assert!(end <= cache.position());
    assert!(cache.pool().free_pages() <= cache.pool().pages());
}

fn bits(logits: &[f32]) -> Vec<u32> {
    logits.iter().map(|logit| logit.to_bits()).collect()
}
