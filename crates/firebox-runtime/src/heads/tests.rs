//! Tests of the head pool.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::sleep;
use std::time::Duration;

use firebox_model::{Decoder, Head, HeadForm};
use firebox_store::{Checkpoint, StoreError, TensorInfo, Tensors, Weight};

use super::*;
use crate::{Budget, MemoryError, Model, RuntimeError, device};

/// Heads that are the model's own layers under other names.
#[derive(Debug)]
pub(crate) struct Wardrobe {
    pub model: Model,
    split: usize,
    heads: Mutex<BTreeMap<String, Made>>,
    /// Whether a load has begun.
    loading: AtomicBool,
    /// The answer to the next request for a generation, as if that had been sent earlier.
    stale: Mutex<Option<u64>>,
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct Made {
    pub generation: u64,
    pub bytes: u64,
    /// Whether loading waits until this is unset.
    pub held_back: bool,
    pub fails: bool,
    pub classifies: bool,
}

const PANICS: u64 = 99;

#[derive(Debug)]
struct Nothing;

impl Tensors for Nothing {
    fn path(&self) -> &Path {
        Path::new("nothing")
    }

    fn info(&self, _: &str) -> Option<&TensorInfo> {
        None
    }

    fn weight(&self, name: &str) -> Result<Weight, StoreError> {
        Err(StoreError::MissingTensor { model: "nothing".into(), tensor: name.into() })
    }

    fn names(&self) -> Box<dyn Iterator<Item = &str> + '_> {
        Box::new(std::iter::empty())
    }
}

/// The model's embeddings as the matrix of a classifier, which has a label for every token.
#[derive(Debug)]
struct Labels(Checkpoint);

impl Labels {
    const ROWS: &str = "model.embed_tokens.weight";

    fn form(decoder: &Decoder) -> HeadForm {
        HeadForm::Classifier { labels: (0..decoder.config().vocab_size).map(|id| id.to_string()).collect() }
    }
}

impl Tensors for Labels {
    fn path(&self) -> &Path {
        self.0.path()
    }

    fn info(&self, name: &str) -> Option<&TensorInfo> {
        self.0.info(Self::ROWS).filter(|_| name == "classifier.weight")
    }

    fn weight(&self, name: &str) -> Result<Weight, StoreError> {
        Ok(Weight { name: name.into(), ..self.0.weight(Self::ROWS)? })
    }

    fn names(&self) -> Box<dyn Iterator<Item = &str> + '_> {
        Box::new(std::iter::once("classifier.weight"))
    }
}

impl Wardrobe {
    pub fn new(heads: &[(&str, u64)]) -> Arc<Self> {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/reference/llama");
        let checkpoint = Checkpoint::open(path).unwrap();
        let model = Model::from_checkpoint(checkpoint, &device("cpu").unwrap()).unwrap();
        let split = model.decoder().unwrap().layers() - 1;
        model.decoder().unwrap().split_at(split).unwrap();
        let made = |bytes| Made { generation: 1, bytes, held_back: false, fails: false, classifies: false };
        let heads = heads.iter().map(|(name, bytes)| ((*name).to_owned(), made(*bytes))).collect();
        Arc::new(Self {
            model,
            split,
            heads: Mutex::new(heads),
            loading: AtomicBool::default(),
            stale: Mutex::default(),
        })
    }

    pub fn change(&self, name: &str, change: impl FnOnce(&mut Made)) {
        change(self.heads.lock().unwrap().get_mut(name).unwrap());
    }

    fn pool(self: &Arc<Self>, config: HeadPoolConfig) -> HeadPool {
        HeadPool::new(self.clone(), config).unwrap()
    }

    fn made(&self, name: &str) -> Made {
        self.heads.lock().unwrap()[name]
    }
}

impl HeadSource for Wardrobe {
    fn names(&self) -> Result<Vec<String>, RuntimeError> {
        Ok(self.heads.lock().unwrap().keys().cloned().collect())
    }

    fn generation(&self, name: &str) -> Result<Option<u64>, RuntimeError> {
        let made = self.heads.lock().unwrap().get(name).map(|made| made.generation);
        Ok(self.stale.lock().unwrap().take().or(made))
    }

    fn bytes(&self, name: &str) -> Result<u64, RuntimeError> {
        Ok(self.made(name).bytes)
    }

    fn load(&self, name: &str) -> Result<ReadyHead, RuntimeError> {
        let Made { generation, bytes, fails, classifies, .. } = self.made(name);
        self.loading.store(true, Ordering::Relaxed);
        // Gives up after a minute, so that no test waits forever.
        (0..6000).take_while(|_| self.made(name).held_back).for_each(|_| sleep(Duration::from_millis(10)));
        assert!(generation != PANICS, "as if a kernel had been given an impossible shape");
        if fails {
            return Err(RuntimeError::NoHead { name: "broken".into() });
        }
        let decoder = self.model.decoder()?;
        let (id, checkpoint) = (format!("{name} {generation}"), self.model.checkpoint());
        let (tensors, form): (Arc<dyn Tensors + Send + Sync>, _) = if classifies {
            (Arc::new(Labels(checkpoint.clone())), Labels::form(&decoder))
        } else {
            (Arc::new(Nothing), HeadForm::Blocks)
        };
        let head = Head::load(&id, tensors, &form, self.split, &decoder, checkpoint)?;
        Ok(ReadyHead { head: Arc::new(head), generation, bytes, requantized: None, detach: None })
    }
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
    let wardrobe = Wardrobe::new(&[("code", 10)]);
    let pool = wardrobe.pool(HeadPoolConfig::patient());
    assert_eq!(acquired(&pool, "code"), "code 1");
    assert_eq!(acquired(&pool, "code"), "code 1");
    wardrobe.change("code", |made| made.generation = 2);
    assert_eq!(acquired(&pool, "code"), "code 2");
    let events: Vec<_> = pool.events().iter().map(HeadEvent::to_string).collect();
    assert_eq!(events.len(), 3, "{events:?}");
    assert!(matches!(pool.acquire("none").fallback_reason.as_deref(), Some(RuntimeError::NoHead { .. })));
}

#[test]
fn an_older_wish_is_given_the_newer_head() {
    let wardrobe = Wardrobe::new(&[("code", 10)]);
    wardrobe.change("code", |made| made.generation = 2);
    let pool = wardrobe.pool(HeadPoolConfig::patient());
    assert_eq!(acquired(&pool, "code"), "code 2");
    *wardrobe.stale.lock().unwrap() = Some(1);
    assert_eq!(acquired(&pool, "code"), "code 2");
    assert_eq!(pool.events().len(), 1, "it is loaded once");
}

#[test]
fn a_head_that_is_taken_back_while_it_is_loaded_is_not_worn() {
    let wardrobe = Wardrobe::new(&[("code", 10)]);
    wardrobe.change("code", |made| (made.generation, made.held_back) = (2, true));
    let pool = wardrobe.pool(HeadPoolConfig::patient());
    pool.prefetch("code");
    wait_for(|| wardrobe.loading.load(Ordering::Relaxed));
    wardrobe.change("code", |made| (made.generation, made.held_back) = (1, false));
    assert_eq!(acquired(&pool, "code"), "code 1");
}

#[test]
fn another_fallback_takes_the_place_of_the_one_before() {
    let wardrobe = Wardrobe::new(&[("broken", 1), (FALLBACK, 1)]);
    wardrobe.change("broken", |made| made.fails = true);
    let pool = wardrobe.pool(HeadPoolConfig::patient());
    assert_eq!(acquired(&pool, "broken"), "universal 1");
    wardrobe.change(FALLBACK, |made| made.generation = 2);
    assert_eq!(acquired(&pool, "broken"), "universal 1", "acquiring does not wait for the new generation");
    pool.wait_until_idle();
    assert_eq!(acquired(&pool, "broken"), "universal 2");
    assert_eq!(pool.bytes(), 1);
}

#[test]
fn a_head_that_was_let_go_of_is_charged_for_as_long_as_it_is_worn() {
    let wardrobe = Wardrobe::new(&[("code", 4)]);
    let budget = Budget::new(10);
    let pool = wardrobe.pool(HeadPoolConfig { budget: Some(budget.clone()), ..HeadPoolConfig::patient() });
    let head = pool.acquire("code").head.unwrap();
    pool.wait_until_idle();
    pool.evict("code");
    assert!(pool.in_memory().is_empty());
    assert_eq!(budget.left(), 6);
    drop(head);
    assert_eq!(budget.left(), 10);
}

#[test]
fn what_cannot_be_used_is_stood_in_for_and_tried_later() {
    let wardrobe = Wardrobe::new(&[("code", 10), (FALLBACK, 1)]);
    let pool = wardrobe.pool(HeadPoolConfig::patient());
    wardrobe.change("code", |made| made.fails = true);
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
    wardrobe.change("code", |made| made.fails = false);
    assert_eq!(acquired(&pool, "code"), "universal 1", "no retry before the delay is over");
    wardrobe.change("code", |made| made.generation = 2);
    assert_eq!(acquired(&pool, "code"), "code 2", "a new generation is loaded at once");
}

#[test]
fn it_is_known_where_every_head_is() {
    let wardrobe = Wardrobe::new(&[("a", 4), ("b", 4), ("broken", 1), ("slow", 1)]);
    wardrobe.change("broken", |made| made.fails = true);
    wardrobe.change("slow", |made| made.held_back = true);
    let pool = wardrobe.pool(HeadPoolConfig::patient());
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
    wardrobe.change("slow", |made| made.held_back = false);
    pool.evict("b");
    pool.wait_until_idle();
    assert_eq!(states(&pool), ["a Warm", "b OnDisk", "broken Failed", "slow Warm"]);
    assert_eq!(pool.bytes_of("b").unwrap(), 4);
}

#[test]
fn what_panics_takes_nothing_with_it() {
    let wardrobe = Wardrobe::new(&[("broken", 1), ("code", 1)]);
    wardrobe.change("broken", |made| made.generation = PANICS);
    let pool = wardrobe.pool(HeadPoolConfig::patient());
    let reason = pool.acquire("broken").fallback_reason.unwrap().to_string();
    assert!(reason.contains("broken"), "{reason}");
    assert_eq!(acquired(&pool, "code"), "code 1");
    pool.wait_until_idle();
}

#[test]
fn a_guess_without_room_is_no_failure() {
    let wardrobe = Wardrobe::new(&[("a", 4), ("b", 4)]);
    let pool = wardrobe.pool(HeadPoolConfig { max_bytes: 5, ..HeadPoolConfig::patient() });
    let a = pool.acquire("a").head.unwrap();
    pool.prefetch("b");
    pool.wait_until_idle();
    assert_eq!(pool.in_memory(), ["a"]);
    drop(a);
    assert_eq!(acquired(&pool, "b"), "b 1");
}

#[test]
fn who_is_late_is_not_waited_for_and_comes_in_the_end() {
    let wardrobe = Wardrobe::new(&[("code", 10)]);
    wardrobe.change("code", |made| made.held_back = true);
    let pool =
        wardrobe.pool(HeadPoolConfig { max_wait: Duration::from_millis(30), ..HeadPoolConfig::default() });
    let found = pool.acquire("code");
    assert!(wardrobe.made("code").held_back && found.head.is_none());
    assert!(matches!(found.fallback_reason.as_deref(), Some(RuntimeError::HeadTimeout { .. })));
    wardrobe.change("code", |made| made.held_back = false);
    pool.wait_until_idle();
    assert_eq!(acquired(&pool, "code"), "code 1");
}

#[test]
fn heads_that_nobody_wears_make_room() {
    let wardrobe = Wardrobe::new(&[("a", 4), ("b", 4), ("c", 4), ("large", 20), (FALLBACK, 1)]);
    let budget = Budget::new(10);
    for config in [
        HeadPoolConfig { max_bytes: 10, ..HeadPoolConfig::patient() },
        HeadPoolConfig { budget: Some(budget.clone()), ..HeadPoolConfig::patient() },
    ] {
        let pool = wardrobe.pool(config);
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
        assert_eq!(pool.bytes(), 5, "what can go went");
        drop(a);
    }
    // The thread that loads may take a moment to notice that the pool is gone.
    wait_for(|| budget.left() == 10);
}

#[test]
fn what_usually_follows_is_made_ready() {
    let wardrobe = Wardrobe::new(&[("chat", 1), ("code", 1), ("summarize", 1), ("rare", 1)]);
    let mut history = HeadHistory::default();
    for after in ["code", "code", "code", "summarize", "summarize", "rare"] {
        history.note("chat", after);
    }
    let pool = wardrobe.pool(HeadPoolConfig { history, ..HeadPoolConfig::patient() });
    let mut session = wardrobe.model.session().unwrap().with_heads(pool.clone());
    assert!(session.use_head("chat").fallback_reason.is_none());
    pool.wait_until_idle();
    assert_eq!(pool.in_memory(), ["chat", "code", "summarize"]);
    session.use_head("code");
    assert_eq!(pool.history().likeliest("chat")[0], "code");
}
