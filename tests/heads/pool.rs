//! Tests of the head pool.

use std::sync::Arc;
use std::thread::sleep;
use std::time::Duration;

use firebox::RuntimeError;
use firebox::heads::{FALLBACK, HeadEvent, HeadHistory, HeadPool, HeadPoolConfig, HeadState};
use firebox::internals::runtime::{Budget, MemoryError};
use firebox_testing::test_heads::TestHeads;

fn pool(heads: &Arc<TestHeads>, config: HeadPoolConfig) -> HeadPool {
    HeadPool::new(heads.clone(), config).unwrap()
}

#[track_caller]
fn wait_for(what: impl Fn() -> bool) {
    assert!((0..6000).any(|_| {
        sleep(Duration::from_millis(10));
        what()
    }));
}

fn acquired(pool: &HeadPool, name: &str) -> String {
    pool.acquire(name).head.map_or("own".into(), |head| head.id().to_string())
}

#[test]
fn a_head_is_loaded_once_and_again_when_it_is_replaced() {
    let heads = TestHeads::new(&[("code", 10)]);
    let pool = pool(&heads, HeadPoolConfig::patient());
    assert_eq!(acquired(&pool, "code"), "code 1");
    assert_eq!(acquired(&pool, "code"), "code 1");
    heads.change("code", |head| head.generation = 2);
    assert_eq!(acquired(&pool, "code"), "code 2");
    let events: Vec<_> = pool.events().iter().map(HeadEvent::to_string).collect();
    assert_eq!(events.len(), 3, "{events:?}");
    assert!(matches!(pool.acquire("none").fallback_reason.as_deref(), Some(RuntimeError::NoHead { .. })));
}

#[test]
fn a_stale_generation_gets_the_newer_head() {
    let heads = TestHeads::new(&[("code", 10)]);
    heads.change("code", |head| head.generation = 2);
    let pool = pool(&heads, HeadPoolConfig::patient());
    assert_eq!(acquired(&pool, "code"), "code 2");
    heads.answer_stale_generation(1);
    assert_eq!(acquired(&pool, "code"), "code 2");
    assert_eq!(pool.events().len(), 1, "it is loaded once");
}

#[test]
fn a_head_that_is_replaced_while_it_loads_is_not_used() {
    let heads = TestHeads::new(&[("code", 10)]);
    heads.change("code", |head| (head.generation, head.is_held_back) = (2, true));
    let pool = pool(&heads, HeadPoolConfig::patient());
    pool.prefetch("code");
    wait_for(|| heads.is_loading());
    heads.change("code", |head| (head.generation, head.is_held_back) = (1, false));
    assert_eq!(acquired(&pool, "code"), "code 1");
}

#[test]
fn a_new_fallback_replaces_the_one_before() {
    let heads = TestHeads::new(&[("broken", 1), (FALLBACK, 1)]);
    heads.change("broken", |head| head.fails = true);
    let pool = pool(&heads, HeadPoolConfig::patient());
    assert_eq!(acquired(&pool, "broken"), "universal 1");
    heads.change(FALLBACK, |head| head.generation = 2);
    assert_eq!(acquired(&pool, "broken"), "universal 1", "acquiring does not wait for the new generation");
    pool.wait_until_idle();
    assert_eq!(acquired(&pool, "broken"), "universal 2");
    assert_eq!(pool.bytes(), 1);
}

#[test]
fn an_evicted_head_is_charged_while_it_is_in_use() {
    let heads = TestHeads::new(&[("code", 4)]);
    let budget = Budget::new(10);
    let pool = pool(&heads, HeadPoolConfig { budget: Some(budget.clone()), ..HeadPoolConfig::patient() });
    let head = pool.acquire("code").head.unwrap();
    pool.wait_until_idle();
    pool.evict("code");
    assert!(pool.in_memory().is_empty());
    assert_eq!(budget.left(), 6);
    drop(head);
    assert_eq!(budget.left(), 10);
}

#[test]
fn an_unusable_head_is_replaced_by_the_fallback_and_retried() {
    let heads = TestHeads::new(&[("code", 10), (FALLBACK, 1)]);
    let pool = pool(&heads, HeadPoolConfig::patient());
    heads.change("code", |head| head.fails = true);
    for _ in 0..3 {
        let found = pool.acquire("code");
        assert!(found.fallback_reason.is_some());
        assert_eq!(found.head.unwrap().id().as_ref(), "universal 1");
    }
    let failures = || {
        let events = pool.events().into_iter();
        events.filter(|event| matches!(event, HeadEvent::Failed { .. })).count()
    };
    assert_eq!(failures(), 1, "it is not tried again at once");
    heads.change("code", |head| head.fails = false);
    assert_eq!(acquired(&pool, "code"), "universal 1", "no retry before the delay is over");
    heads.change("code", |head| head.generation = 2);
    assert_eq!(acquired(&pool, "code"), "code 2", "a new generation is loaded at once");
}

#[test]
fn every_head_has_a_state() {
    let heads = TestHeads::new(&[("a", 4), ("b", 4), ("broken", 1), ("slow", 1)]);
    heads.change("broken", |head| head.fails = true);
    heads.change("slow", |head| head.is_held_back = true);
    let pool = pool(&heads, HeadPoolConfig::patient());
    let a = pool.acquire("a").head.unwrap();
    pool.prefetch("b");
    pool.wait_until_idle();
    assert!(pool.acquire("broken").fallback_reason.is_some());
    pool.prefetch("slow");
    let states = |pool: &HeadPool| {
        let of = |(name, state): (String, HeadState)| {
            let state = format!("{state:?}");
            format!("{name} {}", state.split(' ').next().unwrap())
        };
        pool.states().into_iter().map(of).collect::<Vec<_>>()
    };
    assert_eq!(states(&pool), ["a Active", "b Warm", "broken Failed", "slow Loading"]);
    drop(a);
    heads.change("slow", |head| head.is_held_back = false);
    pool.evict("b");
    pool.wait_until_idle();
    assert_eq!(states(&pool), ["a Warm", "b OnDisk", "broken Failed", "slow Warm"]);
    assert_eq!(pool.bytes_of("b").unwrap(), 4);
}

#[test]
fn a_panic_while_a_head_loads_affects_no_other_head() {
    let heads = TestHeads::new(&[("broken", 1), ("code", 1)]);
    heads.change("broken", |head| head.panics = true);
    let pool = pool(&heads, HeadPoolConfig::patient());
    let reason = pool.acquire("broken").fallback_reason.unwrap().to_string();
    assert!(reason.contains("broken"), "{reason}");
    assert_eq!(acquired(&pool, "code"), "code 1");
    pool.wait_until_idle();
}

#[test]
fn a_prefetch_without_room_is_no_failure() {
    let heads = TestHeads::new(&[("a", 4), ("b", 4)]);
    let pool = pool(&heads, HeadPoolConfig { max_bytes: 5, ..HeadPoolConfig::patient() });
    let a = pool.acquire("a").head.unwrap();
    pool.prefetch("b");
    pool.wait_until_idle();
    assert_eq!(pool.in_memory(), ["a"]);
    drop(a);
    assert_eq!(acquired(&pool, "b"), "b 1");
}

#[test]
fn a_late_head_is_not_waited_for_and_is_used_once_loaded() {
    let heads = TestHeads::new(&[("code", 10)]);
    heads.change("code", |head| head.is_held_back = true);
    let pool =
        pool(&heads, HeadPoolConfig { max_wait: Duration::from_millis(30), ..HeadPoolConfig::default() });
    let found = pool.acquire("code");
    assert!(heads.head("code").is_held_back && found.head.is_none());
    assert!(matches!(found.fallback_reason.as_deref(), Some(RuntimeError::HeadTimeout { .. })));
    heads.change("code", |head| head.is_held_back = false);
    pool.wait_until_idle();
    assert_eq!(acquired(&pool, "code"), "code 1");
}

#[test]
fn unused_heads_are_evicted_for_others() {
    let heads = TestHeads::new(&[("a", 4), ("b", 4), ("c", 4), ("large", 20), (FALLBACK, 1)]);
    let budget = Budget::new(10);
    for config in [
        HeadPoolConfig { max_bytes: 10, ..HeadPoolConfig::patient() },
        HeadPoolConfig { budget: Some(budget.clone()), ..HeadPoolConfig::patient() },
    ] {
        let pool = pool(&heads, config);
        let a = pool.acquire("a").head.unwrap();
        acquired(&pool, "b");
        assert_eq!(pool.in_memory(), ["a", "b", FALLBACK]);
        assert_eq!(acquired(&pool, "c"), "c 1");
        assert_eq!(pool.in_memory(), ["a", "c", FALLBACK], "a is in use, the fallback stays");
        let refused = pool.acquire("large");
        assert!(matches!(
            refused.fallback_reason.as_deref(),
            Some(RuntimeError::Memory(MemoryError::OverBudget { .. }))
        ));
        assert_eq!(pool.bytes(), 5, "unused heads were evicted");
        drop(a);
    }
    // The thread that loads may take a moment to notice that the pool is gone.
    wait_for(|| budget.left() == 10);
}

#[test]
fn likely_successors_are_prefetched() {
    let heads = TestHeads::new(&[("chat", 1), ("code", 1), ("summarize", 1), ("rare", 1)]);
    let mut history = HeadHistory::default();
    for after in ["code", "code", "code", "summarize", "summarize", "rare"] {
        history.note("chat", after);
    }
    let pool = pool(&heads, HeadPoolConfig { history, ..HeadPoolConfig::patient() });
    let mut session = heads.model.session().unwrap().with_heads(pool.clone());
    assert!(session.use_head("chat").fallback_reason.is_none());
    pool.wait_until_idle();
    assert_eq!(pool.in_memory(), ["chat", "code", "summarize"]);
    session.use_head("code");
    assert_eq!(pool.history().likeliest("chat")[0], "code");
}
