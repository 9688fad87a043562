//! Tests that drafts change no token.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use proptest::prelude::*;

use super::*;
use crate::{Finish, Generation, GenerationConfig, KvType, Model, SamplerConfig, Session, Summary, device};

mod trees;

const FIXTURES: [&str; 6] = [
    "reference/llama",
    "reference/qwen3",
    "reference/gemma3_text",
    "variants/mistral-window7-headdim12",
    "reference/qwen3_5_text",
    "reference/lfm2",
];

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures").join(name)
}

fn model(name: &str) -> Model {
    static OPEN: Mutex<Option<HashMap<String, Model>>> = Mutex::new(None);
    let mut open = OPEN.lock().unwrap();
    let models = open.get_or_insert_default();
    let opened = || Model::open(fixture(name), &device("cpu").unwrap()).unwrap();
    models.entry(name.into()).or_insert_with(opened).clone()
}

/// Knows how a sequence goes on, and spoils what it says: every `wrong`th token, if that is not 0.
#[derive(Debug, Clone)]
struct Oracle {
    whole: Vec<u32>,
    wrong: usize,
}

impl Drafter for Oracle {
    fn propose(&mut self, tokens: &[u32], most: usize, _: &Sampler) -> Result<Draft, RuntimeError> {
        let spoiled = |at: usize| self.wrong > 0 && at.is_multiple_of(self.wrong);
        let said = |at: usize| self.whole[at] ^ u32::from(spoiled(at));
        Ok((tokens.len()..self.whole.len()).take(most).map(said).collect::<Vec<_>>().into())
    }
}

/// Says the same whatever it is asked, and more of it than was asked for.
#[derive(Debug)]
struct Stubborn(Draft);

impl Drafter for Stubborn {
    fn propose(&mut self, _: &[u32], _: usize, _: &Sampler) -> Result<Draft, RuntimeError> {
        Ok(self.0.clone())
    }
}

fn generate(
    session: &mut Session,
    prompt: &[u32],
    config: &GenerationConfig,
    speculation: Option<&mut Speculation>,
) -> Summary {
    let mut generation = Generation::begin(session, None, prompt, config.clone()).unwrap();
    if let Some(speculation) = speculation {
        generation = generation.with_speculation(speculation);
    }
    while generation.next_piece().unwrap().is_some() {}
    generation.finish().unwrap()
}

/// Drafts must not show: tokens, the session they leave and what the session says next are those of plain decoding.
/// `speculations` are made from the tokens of that.
fn compare<S: IntoIterator<Item = Speculation>>(
    name: &str,
    session: impl Fn() -> Session,
    prompt: &[u32],
    config: &GenerationConfig,
    speculations: impl FnOnce(&[u32]) -> S,
) {
    let mut plain = session();
    let expected = generate(&mut plain, prompt, config, None);
    let whole = plain.tokens().to_vec();
    let after = plain.feed(&[7]).unwrap();
    let held = |session: &Session| {
        let pool = session.cache().pool();
        pool.pages() - pool.free_pages()
    };
    for mut speculation in speculations(&whole) {
        let mut session = session();
        let found = generate(&mut session, prompt, config, Some(&mut speculation));
        assert_eq!(found.tokens, expected.tokens, "{name}, {speculation:?}");
        assert_eq!(found.finish, expected.finish);
        assert_eq!(session.tokens(), whole, "{name}, {speculation:?}");
        assert!(found.accepted_tokens <= found.drafted_tokens.min(found.tokens.len()));
        assert!(session.feed(&[7]).unwrap() == after, "{name}, {speculation:?}");
        assert_eq!(held(&session), held(&plain), "{name}: drafts leave no page behind");
    }
}

fn check(name: &str, kept: KvType, prompt: &[u32], config: &GenerationConfig, most: usize) {
    let model = model(name);
    let session = || model.session().unwrap().with_kv_type(kept);
    compare(name, session, prompt, config, |whole| steadily(&model, prompt, whole, most));
}

/// Drafts by all kinds of drafters.
fn steadily(model: &Model, prompt: &[u32], whole: &[u32], most: usize) -> Vec<Speculation> {
    let oracle = |wrong| Speculation::new(Oracle { whole: whole.to_vec(), wrong });
    let speculations = [
        oracle(0),
        oracle(1),
        oracle(3),
        oracle(0).with_draft_tokens(most),
        Speculation::new(LookupDrafter::new()),
        Speculation::new(Stubborn(prompt.repeat(3).into())),
        Speculation::new(Stubborn(vec![prompt[0], u32::MAX].into())),
        Speculation::new(ModelDrafter::new(model, model).unwrap()),
    ];
    speculations.into_iter().map(Speculation::steady).collect()
}

fn samplers() -> impl Strategy<Value = SamplerConfig> {
    let warm = |seed| SamplerConfig { temperature: 0.7, seed, ..SamplerConfig::default() };
    prop_oneof![
        Just(SamplerConfig::greedy()),
        any::<u64>().prop_map(warm),
        any::<u64>().prop_map(move |seed| SamplerConfig { top_k: 9, top_p: 0.9, min_p: 0.02, ..warm(seed) }),
        any::<u64>().prop_map(move |seed| SamplerConfig {
            repetition_penalty: 1.3,
            frequency_penalty: 0.2,
            presence_penalty: 0.1,
            penalty_window: 12,
            top_k: 6,
            ..warm(seed)
        }),
        Just(SamplerConfig { repetition_penalty: 1.5, frequency_penalty: 0.4, ..SamplerConfig::greedy() }),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]

    #[test]
    fn drafts_do_not_show(
        prompt in prop::collection::vec(5u32..150, 1..30),
        sampler in samplers(),
        most in 1usize..12,
        tokens in 1usize..28,
        f16: bool,
    ) {
        let kept = if f16 { KvType::F16 } else { KvType::F32 };
        let config = GenerationConfig { max_tokens: Some(tokens), sampler, ..GenerationConfig::default() };
        for name in FIXTURES {
            check(name, kept, &prompt, &config, most);
        }
    }

    /// Covers sequences whose positions depend on their length, which a draft must not extend.
    #[test]
    fn drafts_do_not_show_where_positions_depend_on_length(
        prompt in prop::collection::vec(5u32..150, 1..70), most in 1usize..12,
    ) {
        let config = GenerationConfig { max_tokens: Some(40), ..GenerationConfig::default() };
        for name in ["variants/phi3-longrope-short-to-long", "variants/llama-rope-dynamic"] {
            check(name, KvType::F32, &prompt, &config, most);
        }
    }
}

/// A generation and the drafts that know it.
fn known(name: &str, config: &GenerationConfig) -> (Model, [u32; 6], Summary, Speculation) {
    let model = model(name);
    let prompt = [5, 9, 17, 33, 4, 21];
    let mut session = model.session().unwrap();
    let plain = generate(&mut session, &prompt, config, None);
    let oracle = Oracle { whole: session.tokens().to_vec(), wrong: 0 };
    (model, prompt, plain, Speculation::new(oracle).with_draft_tokens(7).steady())
}

#[test]
fn drafted_tokens_are_counted() {
    let config = GenerationConfig { max_tokens: Some(17), ..GenerationConfig::default() };
    let (model, prompt, plain, mut speculation) = known("reference/llama", &config);
    assert_eq!((plain.drafted_tokens, plain.accepted_tokens), (0, 0));
    let mut session = model.session().unwrap();
    let found = generate(&mut session, &prompt, &config, Some(&mut speculation));
    // One from the prompt's pass, eight from each of the next two.
    assert_eq!((found.drafted_tokens, found.accepted_tokens), (14, 14));
}

#[test]
fn a_generation_ends_in_the_middle_of_a_draft() {
    for name in FIXTURES {
        let config = GenerationConfig { max_tokens: Some(24), ..GenerationConfig::default() };
        let (model, prompt, plain, mut speculation) = known(name, &config);
        for at in 1..plain.tokens.len() {
            let end = plain.tokens[at];
            let kept = plain.tokens.iter().position(|&token| token == end).unwrap();
            let config = GenerationConfig { end_tokens: vec![end], ..config.clone() };
            let mut session = model.session().unwrap();
            let found = generate(&mut session, &prompt, &config, Some(&mut speculation));
            assert_eq!((found.finish, &found.tokens[..]), (Finish::Stop, &plain.tokens[..kept]));
            let expected = [&prompt[..], &plain.tokens[..kept]].concat();
            assert_eq!(session.tokens(), expected);
            let fresh = model.session().unwrap().feed(&[&expected[..], &[7]].concat()).unwrap();
            assert_eq!(session.feed(&[7]).unwrap(), fresh, "{name}, ended at {kept}");
        }
    }
}

#[test]
fn who_leaves_in_the_middle_of_a_draft_leaves_no_draft_behind() {
    let config = GenerationConfig { max_tokens: Some(24), ..GenerationConfig::default() };
    let (model, prompt, plain, mut speculation) = known("reference/qwen3_5_text", &config);
    for (taken, cancel) in [(1, true), (4, true), (4, false), (9, true), (9, false)] {
        let mut session = model.session().unwrap();
        let mut generation = Generation::begin(&mut session, None, &prompt, config.clone())
            .unwrap()
            .with_speculation(&mut speculation);
        for _ in 0..taken {
            generation.next_piece().unwrap();
        }
        if cancel {
            generation.cancel();
            let summary = generation.finish().unwrap();
            assert_eq!((summary.finish, &summary.tokens[..]), (Finish::Cancelled, &plain.tokens[..taken]));
        } else {
            drop(generation);
        }
        let whole = [&prompt[..], &plain.tokens[..taken]].concat();
        assert!(whole.starts_with(session.tokens()));
        assert!(session.tokens().len() >= whole.len() - usize::from(!cancel));
    }
}

#[test]
fn a_stop_string_ends_it_in_the_middle_of_a_draft() {
    let model = Model::open(fixture("gguf/llama/model.gguf"), &device("cpu").unwrap()).unwrap();
    let tokenizer = model.tokenizer().unwrap();
    let prompt = tokenizer.encode("Hello", true).unwrap();
    let base = GenerationConfig { max_tokens: Some(40), ignore_end: true, ..GenerationConfig::default() };
    let run = |config: &GenerationConfig, speculation: Option<&mut Speculation>| {
        let mut session = model.session().unwrap();
        let generation =
            Generation::begin(&mut session, Some(tokenizer.clone()), &prompt, config.clone()).unwrap();
        let mut generation = match speculation {
            Some(speculation) => generation.with_speculation(speculation),
            None => generation,
        };
        let mut text = String::new();
        while let Some(piece) = generation.next_piece().unwrap() {
            text.push_str(&piece.text);
        }
        let summary = generation.finish().unwrap();
        assert_eq!(text, summary.text);
        (summary, session.tokens().to_vec())
    };
    let (plain, whole) = run(&base, None);
    let characters: Vec<char> = plain.text.chars().collect();
    for at in 2..characters.len() - 2 {
        let config = GenerationConfig { stop: vec![characters[at..at + 2].iter().collect()], ..base.clone() };
        let oracle = Oracle { whole: whole.clone(), wrong: 0 };
        let (found, tokens) = run(&config, Some(&mut Speculation::new(oracle).steady()));
        let (expected, expected_tokens) = run(&config, None);
        assert_eq!(
            (found.text, found.tokens, found.finish),
            (expected.text, expected.tokens, expected.finish)
        );
        assert_eq!(tokens, expected_tokens);
    }
}

#[test]
fn a_context_is_not_overrun() {
    for context in 8..20 {
        let config = GenerationConfig { context: Some(context), ..GenerationConfig::default() };
        let (model, prompt, plain, mut speculation) = known("reference/llama", &config);
        let mut session = model.session().unwrap();
        let found = generate(&mut session, &prompt, &config, Some(&mut speculation));
        assert_eq!((found.tokens, found.finish), (plain.tokens, Finish::Length));
        assert_eq!(session.tokens().len(), context);
    }
}

/// Equal tokens with equal seeds imply equal distributions; this test would notice if both were drawn wrongly.
#[test]
fn tokens_are_drawn_as_the_probabilities_say() {
    let model = model("reference/llama");
    let prompt = [5, 9, 17, 33];
    let warm = SamplerConfig { temperature: 1.5, top_k: 4, min_p: 0.02, ..SamplerConfig::default() };
    let penalised = SamplerConfig { repetition_penalty: 1.4, presence_penalty: 0.5, ..warm };
    let sampler = Sampler::new(penalised.clone()).unwrap();
    // Every two tokens that may follow, and how likely they are.
    let mut expected: HashMap<(u32, u32), f64> = HashMap::new();
    let mut session = model.session().unwrap();
    let first = session.feed(&prompt).unwrap();
    for (one, p) in sampler.probabilities(&first, &prompt) {
        let second = session.feed(&[one]).unwrap();
        for (two, q) in sampler.probabilities(&second, session.tokens()) {
            *expected.entry((one, two)).or_default() += f64::from(p) * f64::from(q);
        }
        session.rewind(prompt.len());
    }
    assert!(expected.len() >= 12, "{expected:?}");
    // Drafts the same unlikely pair again and again, so that a bias towards drafts would show.
    let unlikely = expected.iter().filter(|(_, p)| **p > 0.02).min_by(|a, b| a.1.total_cmp(b.1)).unwrap().0;
    let (pair, reversed) = (vec![unlikely.0, unlikely.1], vec![unlikely.1, unlikely.0]);
    let fork = vec![unlikely.0, unlikely.0];
    let drafts = [pair.clone().into(), reversed.clone().into(), vec![reversed, fork, pair].into()];
    for draft in drafts {
        let mut speculation = Speculation::new(Stubborn(draft)).steady();
        let mut seen: HashMap<(u32, u32), f64> = HashMap::new();
        const DRAWS: u64 = 4000;
        session.rewind(prompt.len() - 1);
        for seed in 0..DRAWS {
            let config = GenerationConfig {
                max_tokens: Some(3),
                sampler: SamplerConfig { seed, ..penalised.clone() },
                ..GenerationConfig::default()
            };
            let found = generate(&mut session, &prompt[prompt.len() - 1..], &config, Some(&mut speculation));
            *seen.entry((found.tokens[0], found.tokens[1])).or_default() += 1.0;
            session.rewind(prompt.len() - 1);
        }
        assert!(seen.keys().all(|pair| expected.contains_key(pair)));
        let (mut chi_square, mut freedom) = (0.0, -1.0);
        let mut rest = (0.0, 0.0);
        for (pair, probability) in &expected {
            let (expected, seen) = (probability * DRAWS as f64, seen.get(pair).copied().unwrap_or(0.0));
            if expected < 8.0 {
                rest = (rest.0 + expected, rest.1 + seen);
                continue;
            }
            chi_square += (seen - expected) * (seen - expected) / expected;
            freedom += 1.0;
        }
        if rest.0 >= 8.0 {
            chi_square += (rest.1 - rest.0) * (rest.1 - rest.0) / rest.0;
            freedom += 1.0;
        }
        // Wilson and Hilferty's approximation of the 99.9 % point.
        let ninth: f64 = 2.0 / (9.0 * freedom);
        let bound = freedom * (1.0 - ninth + 3.09 * ninth.sqrt()).powi(3);
        assert!(chi_square < bound, "{chi_square} of {bound} with {freedom} degrees of freedom");
    }
}

/// A draft model that agrees with the large model drafts the tokens that the large model draws, at any temperature.
#[test]
fn the_same_model_drafts_the_same_tokens() {
    for name in ["reference/qwen3", "reference/qwen3_5_text"] {
        let model = model(name);
        let sampler = SamplerConfig { temperature: 1.5, seed: 3, ..SamplerConfig::default() };
        let config = GenerationConfig { max_tokens: Some(40), sampler, ..GenerationConfig::default() };
        let drafter = ModelDrafter::new(&model, &model).unwrap();
        let mut speculation = Speculation::new(drafter).with_draft_branches(1).steady();
        let found = generate(&mut model.session().unwrap(), &[5, 9, 17], &config, Some(&mut speculation));
        assert!(found.drafted_tokens > 30);
        assert_eq!(found.accepted_tokens, found.drafted_tokens, "{name}");
    }
}

#[test]
fn a_drafter_follows_from_one_answer_to_another() {
    let model = model("reference/qwen3_5_text");
    let drafter = ModelDrafter::new(&model, &model).unwrap();
    let mut speculation = Speculation::new(drafter).with_draft_branches(1).steady();
    let config = GenerationConfig { max_tokens: Some(12), ..GenerationConfig::default() };
    let mut session = model.session().unwrap();
    let mut plain = model.session().unwrap();
    for turn in 0..4u32 {
        let prompt = [30 + turn, 60, 90 + 3 * turn];
        let found = generate(&mut session, &prompt, &config, Some(&mut speculation));
        assert_eq!(found.tokens, generate(&mut plain, &prompt, &config, None).tokens);
        assert_eq!(found.accepted_tokens, found.drafted_tokens);
        let back = session.tokens().len() - 5;
        session.rewind(back);
        plain.rewind(back);
    }
}

#[test]
fn a_model_of_other_tokens_cannot_draft() {
    let small = model("variants/qwen3_5_text-v3k-kernel3");
    let model = model("reference/llama");
    let error = ModelDrafter::new(&small, &model).unwrap_err();
    assert!(matches!(error, RuntimeError::DraftVocabulary { .. }));
    assert!(error.to_string().contains("160 tokens and not 320"), "{error}");
}

#[test]
fn a_failing_drafter_is_an_error_and_loses_nothing() {
    #[derive(Debug)]
    struct Failing;
    impl Drafter for Failing {
        fn propose(&mut self, _: &[u32], _: usize, _: &Sampler) -> Result<Draft, RuntimeError> {
            Err(RuntimeError::Readback { reason: "gone".into() })
        }
    }
    let model = model("reference/llama");
    let mut session = model.session().unwrap();
    let mut speculation = Speculation::new(Failing).steady();
    let mut generation = Generation::begin(&mut session, None, &[5, 9], GenerationConfig::default())
        .unwrap()
        .with_speculation(&mut speculation);
    let first = generation.next_piece().unwrap().unwrap().token.unwrap();
    assert!(generation.next_piece().is_err());
    let summary = generation.finish().unwrap();
    assert_eq!(summary.tokens, [first]);
    assert_eq!(session.tokens(), [5, 9, first]);
}

/// Why drafts are drawn with the model's own random numbers and then compared, and not accepted by chance: what is
/// accepted comes close to all that two distributions share, and the tokens stay those of plain decoding.
#[test]
fn equal_random_numbers_accept_most_drafts() {
    let noise = |at: usize| ((at * 7919 + 13) % 1009) as f32 / 504.5 - 1.0;
    let (mut shared, mut likeliest, mut alike, mut draws) = (0.0f32, 0.0f32, 0.0f32, 0.0f32);
    for trial in 0..400 {
        let model: Vec<f32> = (0..160).map(|at| 4.0 * noise(trial * 161 + at)).collect();
        let draft: Vec<f32> = model
            .iter()
            .enumerate()
            .map(|(at, logit)| logit + 0.5 * noise(trial * 97 + at * 3 + 1))
            .collect();
        let config = SamplerConfig { temperature: 1.0, seed: trial as u64, ..SamplerConfig::default() };
        let mut sampler = Sampler::new(config).unwrap();
        let probabilities: HashMap<u32, f32> = sampler.probabilities(&model, &[]).into_iter().collect();
        let guessed = sampler.probabilities(&draft, &[]);
        shared += guessed.iter().map(|(token, q)| q.min(probabilities[token])).sum::<f32>();
        likeliest += probabilities[&guessed[0].0];
        let drafted = sampler.clone().sample(&draft, &[]);
        alike += f32::from(u8::from(drafted == sampler.sample(&model, &[])));
        draws += 1.0;
    }
    let [shared, likeliest, alike] = [shared, likeliest, alike].map(|sum| sum / draws);
    // Two distributions that share s can agree by s at most, and races do by s / (2 - s) at least.
    assert!(alike > shared / (2.0 - shared) - 0.04, "{alike} of {shared}");
    assert!(alike > 5.0 * likeliest, "{alike}, {likeliest}");
}
