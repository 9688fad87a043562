//! Tests of the prefix tree.

use std::collections::HashMap;

use firebox_cache::{KvType, PAGE_TOKENS, TurnKind};
use proptest::prelude::*;

use super::*;
use crate::residency::{Residency, ShareOptions, SharedBudget};
use crate::session::save::tests::{Step, bits, model, some_tokens, step, take, with_policy};
use crate::{Model, RuntimeError, device, likeliest};

const FIXTURES: [&str; 7] = [
    "reference/llama",
    "reference/qwen3",
    "variants/mistral-window7-headdim12",
    "reference/qwen3_5_text",
    "reference/lfm2",
    "variants/phi3-longrope-short-to-long",
    "variants/mamba2-groups2-kernel3-biases",
];

fn models() -> &'static [Model] {
    static MODELS: std::sync::OnceLock<Vec<Model>> = std::sync::OnceLock::new();
    MODELS.get_or_init(|| FIXTURES.iter().map(|fixture| model(fixture)).collect())
}

fn pool(model: &Model, kept: KvType) -> PagePool {
    PagePool::new(model.decoder().unwrap().layout(kept))
}

fn tree(model: &Model, pool: &PagePool, limits: PrefixLimits) -> PrefixTree {
    PrefixTree::new(&model.decoder().unwrap(), pool, limits)
}

fn session(model: &Model, pool: &PagePool) -> Session {
    Session::in_pool(model.decoder().unwrap(), pool).with_chunk(48)
}

/// Feeds what a tree does not know, with the stops that it asks for.
fn feed(
    tree: &PrefixTree,
    session: &mut Session,
    tokens: &[u32],
) -> Result<(Vec<f32>, PrefixHit), RuntimeError> {
    let begun = tree.begin(session, "scope", tokens);
    let mut at = begun.tokens;
    if let Some(stop) = begun.stop {
        session.feed(&tokens[at..stop])?;
        tree.insert(session, "scope");
        at = stop;
    }
    let logits = session.feed(&tokens[at..])?;
    tree.insert(session, "scope");
    Ok((logits, begun))
}

/// One of a family: how it goes on from another one, and what is done to it afterwards.
#[derive(Debug, Clone)]
struct Member {
    /// Which one it begins like, and how far.
    parent: prop::sample::Index,
    common: prop::sample::Index,
    added: Vec<u32>,
    answer: usize,
    /// Turns that the prompt comes in.
    turns: usize,
    afterwards: Vec<Step>,
    lives: bool,
}

fn member() -> impl Strategy<Value = Member> {
    let added = (0u32..190, 1usize..170).prop_map(|(seed, count)| some_tokens(seed, count));
    let parts = (any::<prop::sample::Index>(), any::<prop::sample::Index>(), added, 0usize..6, 1usize..4);
    (parts, prop::collection::vec(step(), 0..6), any::<bool>()).prop_map(
        |((parent, common, added, answer, turns), afterwards, lives)| Member {
            parent,
            common,
            added,
            answer,
            turns,
            afterwards,
            lives,
        },
    )
}

fn state(session: &Session) -> Vec<(crate::TurnId, TurnKind, usize, bool, Option<crate::HiddenReason>)> {
    let turns = session.turns().filter(|turn| turn.tokens > 0);
    turns.map(|turn| (turn.id, turn.kind, turn.tokens, turn.pinned, turn.hidden)).collect()
}

/// Every member says what it says alone, to the last bit, whatever is done to it afterwards.
fn check(model: &Model, kept: KvType, policy: u8, limits: PrefixLimits, family: &[Member]) -> PrefixStats {
    let pool = pool(model, kept);
    let tree = tree(model, &pool, limits);
    let mut said: Vec<Vec<u32>> = vec![Vec::new()];
    let mut living = Vec::new();
    for member in family {
        let parent = &said[member.parent.index(said.len())];
        let prompt = [&parent[..member.common.index(parent.len() + 1)], &member.added].concat();
        let mut alone = with_policy(session(model, &PagePool::new(pool.layout().clone())), policy);
        let mut shared = with_policy(session(model, &pool), policy);
        let mut logits = Vec::new();
        for part in prompt.chunks(prompt.len().div_ceil(member.turns)) {
            for session in [&mut alone, &mut shared] {
                session.begin_turn(&[crate::Role::User]).unwrap();
            }
            let expected = alone.feed(part);
            let found = feed(&tree, &mut shared, part);
            let Ok(expected) = expected else {
                assert_eq!(expected.unwrap_err().to_string(), found.unwrap_err().to_string());
                continue;
            };
            logits = found.unwrap().0;
            assert_eq!(bits(&expected), bits(&logits));
        }
        for _ in 0..member.answer {
            let token = if logits.is_empty() { 5 } else { likeliest(&logits) };
            let expected = alone.feed(&[token]).map_err(|error| error.to_string());
            let found = shared.feed(&[token]).map_err(|error| error.to_string());
            assert_eq!(expected.as_deref().map(bits), found.as_deref().map(bits));
            logits = found.unwrap_or_default();
        }
        tree.insert(&shared, "scope");
        said.push(shared.tokens().to_vec());
        for step in &member.afterwards {
            assert_eq!(take(&mut alone, step), take(&mut shared, step), "{step:?}");
            assert_eq!(state(&alone), state(&shared), "{step:?}");
            assert_eq!(alone.tokens(), shared.tokens());
            assert!(alone.cache().positions().flatten().eq(shared.cache().positions().flatten()));
        }
        tree.insert(&shared, "scope");
        said.push(shared.tokens().to_vec());
        if member.lives {
            living.push((alone, shared));
        }
    }
    for (alone, shared) in &mut living {
        let fed = [alone, shared].map(|session| session.feed(&[7, 8]).map_err(|error| error.to_string()));
        assert_eq!(fed[0].as_deref().map(bits), fed[1].as_deref().map(bits));
    }
    let stats = tree.stats();
    drop(living);
    assert!(pool.pages() - pool.free_pages() <= stats.pages, "pages outside the tree are free again");
    tree.clear();
    assert_eq!(pool.free_pages(), pool.pages());
    stats
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(40) })]

    #[test]
    fn families_say_what_their_members_say_alone(
        family in prop::collection::vec(member(), 1..8),
        which in 0usize..FIXTURES.len(),
        kept in prop::sample::select(vec![KvType::F32, KvType::F16, KvType::Int8]),
        policy in 0u8..4,
        pages in prop_oneof![Just(usize::MAX), 0usize..6],
        state_bytes in prop_oneof![Just(u64::MAX), 0u64..40_000],
    ) {
        let limits = PrefixLimits { pages, state_bytes, budget: None };
        let stats = check(&models()[which], kept, policy, limits, &family);
        prop_assert!(stats.pages <= pages && stats.state_bytes <= state_bytes);
        prop_assert!(stats.hit_tokens <= stats.lookup_tokens);
    }

    /// A lookup finds all that is known, no more and no less.
    #[test]
    fn as_much_is_found_as_was_kept(
        family in prop::collection::vec((any::<prop::sample::Index>(), any::<prop::sample::Index>(), 0u32..4, 1usize..200), 1..9),
        which in 0usize..FIXTURES.len(),
    ) {
        let model = &models()[which];
        let pool = pool(model, KvType::F16);
        let is_recurrent = pool.layout().is_recurrent();
        let limits = PrefixLimits { state_bytes: u64::MAX, ..PrefixLimits::default() };
        let tree = tree(model, &pool, limits);
        // By what positions mean.
        let mut kept: HashMap<usize, Vec<Vec<u32>>> = HashMap::new();
        let mut said: Vec<Vec<u32>> = vec![Vec::new()];
        for (parent, common, seed, count) in family {
            let parent = &said[parent.index(said.len())];
            let tokens = [&parent[..common.index(parent.len() + 1)], &some_tokens(seed, count)].concat();
            let mut session = session(model, &pool);
            let known = kept.entry(model.decoder().unwrap().config().position_epoch(tokens.len())).or_default();
            let fed = &tokens[..tokens.len() - 1];
            let in_common =
                |one: &Vec<u32>| one.iter().zip(fed).take_while(|(one, other)| one == other).count();
            let most = known.iter().map(in_common).max().unwrap_or(0);
            let resting = known.iter().map(Vec::len).filter(|&len| {
                known.iter().any(|one| one.len() == len && in_common(one) == len)
            });
            let expected = if is_recurrent { resting.max().unwrap_or(0) } else { most };
            let (_, begun) = feed(&tree, &mut session, &tokens).unwrap();
            prop_assert_eq!(begun.tokens, expected);
            prop_assert_eq!(begun.stop, (is_recurrent && most >= expected + MIN_STOP_TOKENS).then_some(most));
            known.extend(begun.stop.map(|stop| tokens[..stop].to_vec()));
            known.push(tokens.clone());
            said.push(tokens);
        }
    }

    /// With a tree, a pool that is too small refuses no request that it accepts without one.
    #[test]
    fn cached_prefixes_give_way_to_sequences(
        doings in prop::collection::vec((0usize..3, 0u8..5, 0u32..3, 1usize..260), 1..24),
        which in 0usize..4,
        pages in 3usize..9,
    ) {
        let model = &models()[which];
        let layout = model.decoder().unwrap().layout(KvType::F16);
        let pools = [PagePool::with_pages(layout.clone(), pages), PagePool::with_pages(layout, pages)];
        let tree = tree(model, &pools[1], PrefixLimits::default());
        let mut sessions = [0, 1, 2].map(|_| [session(model, &pools[0]), session(model, &pools[1])]);
        for (which, kind, seed, count) in doings {
            let [alone, shared] = &mut sessions[which];
            match kind {
                0 => [alone, shared].into_iter().for_each(Session::clear),
                1 => {
                    let len = alone.tokens().len().saturating_sub(count / 2);
                    [alone, shared].into_iter().for_each(|session| session.rewind(len));
                }
                _ => {
                    let tokens = some_tokens(seed, count);
                    let expected = alone.feed(&tokens);
                    let found = feed(&tree, shared, &tokens);
                    match (expected, found) {
                        (Ok(expected), found) => prop_assert_eq!(bits(&expected), bits(&found.unwrap().0)),
                        // Sharing leaves more room; from here on they would be different sequences.
                        (Err(_), _) => [alone, shared].into_iter().for_each(Session::clear),
                    }
                }
            }
        }
    }
}

/// Different models and different scopes share nothing.
#[test]
fn nothing_is_shared_across_keys() {
    let [one, other] = ["reference/llama", "reference/llama"].map(model);
    let pool = pool(&one, KvType::F16);
    let tree = tree(&one, &pool, PrefixLimits::default());
    let tokens = some_tokens(3, 300);
    let mut first = session(&one, &pool);
    feed(&tree, &mut first, &tokens).unwrap();
    let begun = |mut session: Session, scope| tree.begin(&mut session, scope, &tokens).tokens;
    assert_eq!(begun(session(&one, &pool), "scope"), 299);
    assert_eq!(begun(session(&one, &pool), "another"), 0, "another scope");
    assert_eq!(begun(session(&other, &pool), "scope"), 0, "another model");
    assert_eq!(begun(session(&one, &PagePool::new(pool.layout().clone())), "scope"), 0, "another pool");
    assert_eq!(begun(session(&one, &pool).with_kv_type(KvType::F32), "scope"), 0, "other numbers");
    assert_eq!(begun(first, "scope"), 0, "a sequence that has gone on otherwise");
}

/// States that were computed in the presence of tokens that are hidden or gone now are not shared.
#[test]
fn altered_prefixes_are_not_shared() {
    let alter: [fn(&mut Session, [crate::TurnId; 2]); 6] = [
        |session, turns| {
            session.forget(turns[0]).unwrap();
            session.compact_positions().unwrap();
        },
        |session, turns| {
            session.forget(turns[1]).unwrap();
            session.compact_positions().unwrap();
        },
        |session, turns| turns.iter().for_each(|turn| session.forget(*turn).unwrap()),
        |session, turns| {
            turns.iter().for_each(|turn| session.forget(*turn).unwrap());
            session.compact_positions().unwrap();
        },
        |session, turns| {
            session.mask(turns[0], true).unwrap();
            session.feed(&some_tokens(9, 30)).unwrap();
            session.mask(turns[0], false).unwrap();
        },
        |session, _| {
            let fact = session.add_fact(&some_tokens(5, 20)).unwrap();
            session.supersede(fact, &some_tokens(6, 20)).unwrap();
        },
    ];
    for (model, fixture) in models().iter().zip(FIXTURES) {
        for (way, alter) in alter.iter().enumerate() {
            let pool = pool(model, KvType::F32);
            let tree = tree(model, &pool, PrefixLimits::default());
            let mut altered = session(model, &pool);
            let turns = [(1, 70), (2, 75)].map(|(seed, count)| {
                let turn = altered.begin_turn(&[crate::Role::User]).unwrap();
                altered.feed(&some_tokens(seed, count)).unwrap();
                turn
            });
            alter(&mut altered, turns);
            for (seed, count) in [(3, 40), (4, 120)] {
                altered.begin_turn(&[crate::Role::User]).unwrap();
                altered.feed(&some_tokens(seed, count)).unwrap();
                tree.insert(&altered, "scope");
            }
            let tokens = [altered.tokens(), &[7, 8]].concat();
            let expected = session(model, &PagePool::new(pool.layout().clone())).feed(&tokens).unwrap();
            let (found, _) = feed(&tree, &mut session(model, &pool), &tokens).unwrap();
            assert_eq!(bits(&found), bits(&expected), "{fixture}, {way}");
        }
    }
}

/// The second of two equal prompts takes the pages of the first.
#[test]
fn pages_are_shared_and_counted() {
    let model = model("reference/llama");
    let pool = pool(&model, KvType::F16);
    let tree = tree(&model, &pool, PrefixLimits::default());
    let tokens = some_tokens(3, 3 * PAGE_TOKENS + 10);
    let mut sessions: Vec<Session> = Vec::new();
    for _ in 0..4 {
        let mut session = session(&model, &pool);
        feed(&tree, &mut session, &tokens).unwrap();
        sessions.push(session);
    }
    // Three that all share, one of each, and a copy of the first one's.
    assert_eq!(pool.pages() - pool.free_pages(), 3 + 4 + 1);
    let stats = tree.stats();
    assert_eq!((stats.pages, stats.lookups, stats.hits), (4, 4, 3));
    let all = tokens.len() as u64;
    assert_eq!((stats.lookup_tokens, stats.hit_tokens), (4 * all, 3 * (all - 1)));
}

/// States that the budget refuses are not cached, and evicted states are no longer charged.
#[test]
fn states_are_charged() {
    let model = model("reference/qwen3_5_text");
    let pool = pool(&model, KvType::F16);
    let mut probe = session(&model, &pool);
    probe.feed(&[5]).unwrap();
    let each = states_bytes(&probe.cache().states().to_vec());
    let budget = Budget::new(2 * each + each / 2);
    let limits = PrefixLimits { budget: Some(budget.clone()), ..PrefixLimits::default() };
    let tree = tree(&model, &pool, limits);
    for seed in 0..4 {
        feed(&tree, &mut session(&model, &pool), &some_tokens(40 * seed, 30)).unwrap();
    }
    assert_eq!((budget.held(Account::Streams), tree.stats().state_bytes), (2 * each, 2 * each));
    tree.clear();
    assert_eq!(budget.left(), budget.total());
}

#[test]
fn an_idle_model_frees_prefixes_before_any_model_frees_weights() {
    let shared = SharedBudget::beside(&Budget::new(256 << 20)).unwrap();
    let path = models()[0].checkpoint().path().to_owned();
    let open = || shared.open(&path, &device("cpu").unwrap(), &ShareOptions::default()).unwrap();
    let (idle, asked) = (open(), open());
    let kept = || [&idle, &asked].map(|model| model.residency().map(Residency::resident_bytes));
    let prompts = [[5u32; 20], [7; 20]];
    let trees = [&idle, &asked].map(|model| {
        let pool = model.session().unwrap().cache().pool().clone();
        let tree = tree(model, &pool, PrefixLimits::default());
        for prompt in &prompts {
            let mut session = model.session().unwrap();
            session.feed(prompt).unwrap();
            tree.insert(&session, "scope");
        }
        tree
    });
    let pages = || trees.each_ref().map(|tree| tree.stats().pages);
    let (before, budget) = (kept(), shared.budget());
    let _taken = budget.charge(Account::Scratch, budget.left()).unwrap();
    let mut session = asked.session().unwrap();
    session.feed(&[3, 5, 8]).unwrap();
    assert_eq!((pages(), kept()), ([1, 2], before), "the other's, and no more than is needed");
    let mut other = asked.session().unwrap();
    other.feed(&[3, 5, 8]).unwrap();
    assert_eq!((pages(), kept()), ([0, 2], before));
    let mut last = asked.session().unwrap();
    last.feed(&[3, 5, 8]).unwrap();
    assert_eq!((pages(), kept()), ([0, 1], before), "its own come next");
}
