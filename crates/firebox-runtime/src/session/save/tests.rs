//! Tests of session files.

use std::fs;

use firebox_cache::{AfterEviction, HiddenReason, Role, SlidingWindow, TurnKind, WholeTurns};
use proptest::prelude::*;

use super::*;
use crate::residency::ResidencyOptions;
use crate::session::operations::check_session_operations;
use crate::{Account, device};

const FIXTURES: [&str; 9] = [
    "reference/llama",
    "variants/mistral-window7-headdim12",
    "reference/qwen3_5_text",
    "reference/qwen3_next",
    "reference/lfm2",
    "reference/granitemoehybrid",
    "variants/mamba2-groups2-kernel3-biases",
    "reference/gemma4_text",
    "reference/deepseek_v3",
];

pub(crate) fn model(fixture: &str) -> Model {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures").join(fixture);
    Model::open(root, &device("cpu").unwrap()).unwrap()
}

pub(crate) fn bits(logits: &[f32]) -> Vec<u32> {
    logits.iter().map(|logit| logit.to_bits()).collect()
}

/// Every fixture with every way to keep keys and values.
pub(crate) fn kinds() -> impl Iterator<Item = (&'static str, KvType)> {
    FIXTURES
        .into_iter()
        .flat_map(|fixture| [KvType::F32, KvType::F16, KvType::Int8].map(|kv_type| (fixture, kv_type)))
}

#[derive(Debug, Clone)]
pub(crate) enum Step {
    Feed(u32, usize),
    Append(u32),
    Begin,
    Fact(u32, usize),
    Supersede(usize, u32, usize),
    Mask(usize, bool),
    Pin(usize, bool),
    Forget(usize),
    CloseUp,
    Rewind(usize),
}

pub(crate) fn some_tokens(seed: u32, count: usize) -> Vec<u32> {
    (0..count as u32).map(|i| 3 + (seed + i * 31) % 150).collect()
}

/// Runs a step. Returns its logits, if it feeds, or its error as text.
pub(crate) fn take(session: &mut Session, step: &Step) -> Result<Vec<u32>, String> {
    let nth = |session: &Session, n: usize, fact: bool| {
        let ids: Vec<_> = session
            .turns()
            .filter(|turn| !fact || turn.kind == TurnKind::Fact && turn.hidden.is_none())
            .map(|turn| turn.id)
            .collect();
        ids.get(n % ids.len().max(1)).copied()
    };
    let done = match *step {
        Step::Feed(seed, count) => {
            return session.feed(&some_tokens(seed, count)).map(|logits| bits(&logits)).map_err(show);
        }
        Step::Append(token) => {
            session.append(3 + token % 150);
            Ok(())
        }
        Step::Begin => session.begin_turn(&[Role::User, Role::Assistant]).map(drop),
        Step::Fact(seed, count) => session.add_fact(&some_tokens(seed, count)).map(drop),
        Step::Supersede(n, seed, count) => match nth(session, n, true) {
            // Between a step back and the next feed, the clone that a supersession makes shows in where tokens lie.
            Some(fact) => {
                session.feed(&[7]).and_then(|_| session.supersede(fact, &some_tokens(seed, count))).map(drop)
            }
            None => Ok(()),
        },
        Step::Mask(n, masked) => match nth(session, n, false) {
            Some(turn) => session.mask(turn, masked),
            None => Ok(()),
        },
        Step::Pin(n, pinned) => match nth(session, n, false) {
            Some(turn) => session.pin(turn, pinned),
            None => Ok(()),
        },
        Step::Forget(n) => match nth(session, n, false) {
            Some(turn) => session.forget(turn),
            None => Ok(()),
        },
        Step::CloseUp => session.compact_positions(),
        Step::Rewind(count) => {
            session.rewind(session.tokens().len().saturating_sub(count));
            Ok(())
        }
    };
    done.map(|()| Vec::new()).map_err(show)
}

fn show(error: RuntimeError) -> String {
    error.to_string()
}

pub(crate) fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => (0u32..190, 1usize..70).prop_map(|(seed, count)| Step::Feed(seed, count)),
        1 => (0u32..190).prop_map(Step::Append),
        3 => Just(Step::Begin),
        1 => (0u32..190, 1usize..40).prop_map(|(seed, count)| Step::Fact(seed, count)),
        1 => (0usize..4, 0u32..190, 1usize..20).prop_map(|(n, seed, count)| Step::Supersede(n, seed, count)),
        1 => (0usize..8, any::<bool>()).prop_map(|(n, masked)| Step::Mask(n, masked)),
        1 => (0usize..8, any::<bool>()).prop_map(|(n, pinned)| Step::Pin(n, pinned)),
        2 => (0usize..8).prop_map(Step::Forget),
        1 => Just(Step::CloseUp),
        1 => (1usize..50).prop_map(Step::Rewind),
    ]
}

pub(crate) fn with_policy(session: Session, policy: u8) -> Session {
    let session = session.with_chunk(48).with_fact_capacity(60);
    match policy {
        0 => session,
        1 => session.with_turn_capacity(150, WholeTurns { after: AfterEviction::CompactPositions }),
        2 => session.with_turn_capacity(150, WholeTurns { after: AfterEviction::KeepPositions }),
        _ => session.with_turn_capacity(150, SlidingWindow),
    }
}

/// Checks that a session that is restored at some point ends like one that is not.
fn check(model: &Model, kv_type: KvType, policy: u8, steps: &[Step], at: usize) -> Result<(), TestCaseError> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("session");
    let mut session = with_policy(model.session().unwrap().with_kv_type(kv_type), policy);
    for step in &steps[..at] {
        let _ = take(&mut session, step);
    }
    session.save_with_note(&path, model, "said \u{1}").unwrap();
    let saved = SessionFile::open(&path, model, kv_type).unwrap();
    prop_assert_eq!(saved.note(), "said \u{1}");
    let mut restored = with_policy(saved.session().unwrap(), policy);
    prop_assert_eq!(restored.tokens(), session.tokens());
    prop_assert!(restored.turns().eq(session.turns()));
    prop_assert!(restored.cache().positions().eq(session.cache().positions()));
    prop_assert!(restored.cache().visible().eq(session.cache().visible()));
    prop_assert_eq!(restored.cache_bytes(), 0, "it lies in the file");
    // What lies in a file is saved like what lies in pages.
    let again = folder.path().join("again");
    restored.save_with_note(&again, model, "said \u{1}").unwrap();
    prop_assert!(fs::read(&path).unwrap() == fs::read(&again).unwrap());

    for step in &steps[at..] {
        // To go back, recurrent layers need states that no file has, and compute again instead.
        if matches!(step, Step::Rewind(_)) && session.cache().pool().layout().is_recurrent() {
            continue;
        }
        let expected = take(&mut session, step);
        // With a policy, what does not fit is refused.
        prop_assert!(policy > 0 || expected.is_ok() || matches!(step, Step::Fact(..) | Step::Supersede(..)));
        prop_assert_eq!(expected, take(&mut restored, step), "{:?}", step);
        prop_assert_eq!(restored.tokens(), session.tokens());
    }
    let (mut expected, mut found) = (session.feed(&[5]), restored.feed(&[5]));
    for _ in 0..4 {
        prop_assert_eq!(expected.is_ok(), found.is_ok());
        let (one, other) = (expected.unwrap_or_default(), found.unwrap_or_default());
        prop_assert_eq!(bits(&one), bits(&other));
        let likeliest = if one.is_empty() { 5 } else { crate::likeliest(&one) };
        (expected, found) = (session.feed(&[likeliest]), restored.feed(&[likeliest]));
    }
    let of = |session: &Session| {
        session.turns().map(|turn| (turn.id, turn.tokens, turn.pinned, turn.hidden)).collect::<Vec<_>>()
    };
    prop_assert_eq!(of(&session), of(&restored));
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    #[test]
    fn restoring_does_not_show(
        steps in prop::collection::vec(step(), 1..16),
        at in any::<prop::sample::Index>(),
        policy in 0u8..4,
        kind in 0usize..9,
    ) {
        let (fixture, kv_type) = kinds().nth(kind).unwrap();
        check(&model(fixture), kv_type, policy, &steps, at.index(steps.len() + 1))?;
    }
}

#[test]
fn every_way_to_keep_is_restored() {
    let steps = [
        Step::Fact(1, 20),
        Step::Feed(2, 90),
        Step::Begin,
        Step::Feed(3, 40),
        Step::Begin,
        Step::Feed(4, 30),
        Step::Mask(1, true),
        Step::Forget(2),
        Step::Append(9),
        Step::Feed(5, 3),
        Step::CloseUp,
        Step::Feed(6, 150),
    ];
    for (fixture, kv_type) in kinds() {
        let model = model(fixture);
        for at in 0..=steps.len() {
            check(&model, kv_type, 0, &steps, at).unwrap();
        }
    }
}

/// A page with a hole in it that is full to its end: what comes next begins another, and so it has to where the page was in
/// a file when a second hole was closed.
#[test]
fn holes_are_closed_in_a_file_as_in_pages() {
    let feed = |seed, count| [Step::Begin, Step::Feed(seed, count)];
    let turns = [feed(1, 25), feed(2, 12), feed(3, 14), feed(4, 77)].into_iter().flatten();
    let holes = [Step::Forget(1), Step::CloseUp, Step::Forget(1), Step::CloseUp];
    let steps: Vec<Step> = turns.chain(holes).chain(feed(5, 20)).collect();
    for (fixture, kv_type) in kinds() {
        let model = model(fixture);
        for at in 0..=steps.len() {
            check(&model, kv_type, 0, &steps, at).unwrap();
        }
    }
}

#[test]
fn evicted_tokens_are_not_in_the_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("session");
    let model = model("reference/llama");
    let mut session = model.session().unwrap().with_kv_type(KvType::F32);
    for seed in [1, 2, 3] {
        session.begin_turn(&[Role::User]).unwrap();
        session.feed(&some_tokens(seed, 10)).unwrap();
    }
    let second = session.turns().nth(1).unwrap().id;
    session.forget(second).unwrap();
    session.save(&path, &model).unwrap();
    let file = TensorFile::open(&path).unwrap();
    let keys = file.tensor("layers.0.keys", Dtype::F32).unwrap();
    let row = keys.shape[2] * 4;
    let empty = |slot: usize| keys.data[slot * row..(slot + 1) * row].iter().all(|byte| *byte == 0);
    assert_eq!(keys.shape[1], 30);
    assert!((0..30).all(|slot| empty(slot) == (10..20).contains(&slot)));
}

#[test]
fn damage_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let (path, broken) = (folder.path().join("whole"), folder.path().join("broken"));
    for (fixture, kv_type) in [("reference/llama", KvType::Int8), ("reference/qwen3_5_text", KvType::F16)] {
        let model = model(fixture);
        let mut session = model.session().unwrap().with_kv_type(kv_type);
        session.feed(&some_tokens(3, 20)).unwrap();
        session.save(&path, &model).unwrap();
        let whole = fs::read(&path).unwrap();
        let refused = |bytes: &[u8], what: &str| {
            fs::write(&broken, bytes).unwrap();
            let error = Session::restore(&broken, &model, kv_type).expect_err(what);
            assert!(matches!(error, RuntimeError::Store(_)), "{error}");
            assert!(error.to_string().contains("broken"), "{error}");
        };
        let stride = whole.len() / 300 + 1;
        for at in (0..whole.len()).step_by(stride).chain(whole.len() - 40..whole.len()) {
            refused(&whole[..at], "cut short");
            let mut flipped = whole.clone();
            flipped[at] ^= 1 << (at % 8);
            refused(&flipped, "a bit flipped");
        }
    }
}

/// Files whose hash is right and whose content is not, as from a faulty or malicious program.
#[test]
fn nonsense_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let (path, broken) = (folder.path().join("whole"), folder.path().join("broken"));
    let model = model("reference/llama");
    let mut session = model.session().unwrap().with_kv_type(KvType::F32);
    session.feed(&some_tokens(3, 20)).unwrap();
    session.save(&path, &model).unwrap();
    let whole = fs::read(&path).unwrap();
    let rehashed = |mut bytes: Vec<u8>| {
        let at = bytes.len() - blake3::OUT_LEN;
        let hash = *blake3::hash(&bytes[..at]).as_bytes();
        bytes[at..].copy_from_slice(&hash);
        bytes
    };
    fs::write(&broken, rehashed(whole.clone())).unwrap();
    Session::restore(&broken, &model, KvType::F32).unwrap();
    let text = String::from_utf8_lossy(&whole).into_owned();
    for (from, to) in [
        ("[[0,20,0]]", "[[0,21,0]]"),
        ("[[0,20,0]]", "[[5,20,0]]"),
        ("[[0,20,0]]", "[[9,2,0] ]"),
        ("[[0,20,0]]", "[[0,20,9]]"),
        ("[[0,20,0]]", "[        ]"),
        ("\\\"position\\\":20", "\\\"position\\\":19"),
        ("\\\"next_turn\\\":1", "\\\"next_turn\\\":0"),
        ("\\\"tokens\\\":20", "\\\"tokens\\\":21"),
        ("\\\"kind\\\":\\\"turn\\\"", "\\\"kind\\\":\\\"tuna\\\""),
        ("\"version\":\"1\"", "\"version\":\"2\""),
        ("firebox-session", "firebox-seasons"),
        ("\"tokens\":{", "\"takens\":{"),
        ("layers.1.values", "layers.7.values"),
    ] {
        assert_eq!(from.len(), to.len());
        let at = text.find(from).unwrap_or_else(|| panic!("{from} in {}", &text[..2000]));
        let mut changed = whole.clone();
        changed[at..at + to.len()].copy_from_slice(to.as_bytes());
        fs::write(&broken, rehashed(changed)).unwrap();
        let error = Session::restore(&broken, &model, KvType::F32).expect_err(to);
        assert!(error.to_string().contains("broken"), "{to}: {error}");
    }
    // Tokens that the model does not know.
    let start = whole.windows(4).position(|bytes| bytes == 6u32.to_le_bytes()).unwrap();
    let mut changed = whole;
    changed[start + 3] = 0x7f;
    fs::write(&broken, rehashed(changed)).unwrap();
    assert!(Session::restore(&broken, &model, KvType::F32).is_err());
}

#[test]
fn files_of_another_model_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("session");
    let one = model("reference/llama");
    let mut session = one.session().unwrap().with_kv_type(KvType::F32);
    session.feed(&[3, 4]).unwrap();
    session.save(&path, &one).unwrap();
    let field = |error: RuntimeError| match error {
        RuntimeError::Foreign { field, .. } => field,
        error => panic!("{error}"),
    };
    let refused =
        |model: &Model, kv_type| field(Session::restore(&path, model, kv_type).expect_err("another's"));
    assert_eq!(refused(&model("reference/qwen3"), KvType::F32), "trunk");
    assert_eq!(refused(&one, KvType::F16), "kv format");
    assert_eq!(refused(&one, KvType::Int8), "kv format");
    assert!(session.save(&path, &model("reference/llama")).is_err(), "not the one it was begun with");

    // The same shapes with other numbers, and a copy with the same.
    let copy = folder.path().join("copy");
    fs::create_dir(&copy).unwrap();
    for file in fs::read_dir(one.checkpoint().path()).unwrap() {
        let file = file.unwrap();
        if file.file_name() != "expected.safetensors" {
            fs::copy(file.path(), copy.join(file.file_name())).unwrap();
        }
    }
    let open = || Model::open(&copy, &device("cpu").unwrap()).unwrap();
    Session::restore(&path, &open(), KvType::F32).unwrap();
    let weights = copy.join("model.safetensors");
    let mut bytes = fs::read(&weights).unwrap();
    let header = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    bytes[header..].iter_mut().step_by(4).for_each(|byte| *byte ^= 1);
    fs::write(&weights, bytes).unwrap();
    assert_eq!(refused(&open(), KvType::F32), "trunk");
}

/// The pages of a restored session are charged to its model's budget, and it is fed in chunks of its model's size.
#[test]
fn a_restored_session_is_charged_to_the_budget_of_its_model() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("session");
    let checkpoint = model("reference/llama").checkpoint().path().to_owned();
    let config = ResidencyOptions::new(64 << 30);
    let model = Model::open_within(checkpoint, &device("cpu").unwrap(), &config).unwrap();
    let residency = model.residency().unwrap();
    for kv_type in [config.kv_dtype, KvType::F32] {
        let mut session = model.session().unwrap().with_kv_type(kv_type);
        session.feed(&some_tokens(3, 40)).unwrap();
        session.save(&path, &model).unwrap();
        drop(session);
        let before = residency.budget().held(Account::Streams);
        let mut restored = Session::restore(&path, &model, kv_type).unwrap();
        assert_eq!(restored.chunk, residency.plan().chunk);
        assert_eq!(restored.cache().pool().is(residency.pool()), kv_type == config.kv_dtype);
        restored.feed(&some_tokens(4, 200)).unwrap();
        // The pool of the model has made its pages before.
        assert_eq!(residency.budget().held(Account::Streams) > before, kv_type != config.kv_dtype);
    }
}

#[test]
fn sessions_from_one_file_share_it() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("session");
    let model = model("reference/llama");
    let mut session = model.session().unwrap().with_kv_type(KvType::F32);
    session.feed(&some_tokens(3, 256)).unwrap();
    session.save(&path, &model).unwrap();
    let saved = SessionFile::open(&path, &model, KvType::F32).unwrap();
    let pool = PagePool::new(model.decoder().unwrap().layout(KvType::F32));
    let mut sessions = [saved.session_in(&pool).unwrap(), saved.session_in(&pool).unwrap()];
    assert_eq!(pool.pages(), 0);
    // The file may go: it is mapped.
    fs::remove_file(&path).unwrap();
    let expected = bits(&session.feed(&[5]).unwrap());
    for session in &mut sessions {
        assert_eq!(bits(&session.feed(&[5]).unwrap()), expected);
    }
    assert_eq!(pool.pages(), 2, "a page each for what is new");
    assert!(sessions[0].cache().turns().all(|turn| turn.hidden != Some(HiddenReason::Superseded)));
}

#[test]
fn the_fuzzing_corpus() {
    let folder = tempfile::tempdir().unwrap();
    let models = ["reference/llama", "reference/qwen3_5_text"].map(model);
    let stories = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus/session_operations");
    let mut went_well = 0;
    for story in fs::read_dir(stories).unwrap() {
        let story = fs::read(story.unwrap().path()).unwrap();
        let [model, story @ ..] = &story[..] else { continue };
        let file = folder.path().join("session");
        went_well += check_session_operations(&models[usize::from(model % 2)], &file, story);
    }
    assert!(went_well > 0);
}

/// Forks, rewinds, evictions, masks, facts and saved files in any order, for every dense family.
#[test]
fn sessions_of_dense_families_survive_operations() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("session");
    let mut state = 7u32;
    for family in "cohere2 ernie4_5 exaone4 glm4 gpt2 gpt_oss granite hunyuan_v1_dense ministral3 olmo2 olmo3 seed_oss starcoder2"
        .split(' ')
    {
        let (model, mut succeeded) = (model(&format!("reference/{family}")), 0);
        for story in 0..12u8 {
            let mut bytes = vec![story, story / 3];
            bytes.extend((0..60).map(|_| {
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                (state >> 24) as u8
            }));
            succeeded += check_session_operations(&model, &file, &bytes);
        }
        assert!(succeeded > 60, "{family}: {succeeded}");
    }
}
