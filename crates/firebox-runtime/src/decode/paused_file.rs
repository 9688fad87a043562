//! Files of paused generations: the generation and its output, as the note of a session file.

use std::path::Path;

use firebox_cache::{CacheError, PagePool};

use crate::decode::{PartialOutput, PausedGeneration};
use crate::{Model, RuntimeError, Session, SessionFile};

impl PausedGeneration {
    /// Writes it to a file with its session and the output so far, in place of one that may be there. `model` is the one
    /// that the session was begun with.
    pub fn write(
        &self,
        output: &PartialOutput,
        session: &Session,
        path: impl AsRef<Path>,
        model: &Model,
    ) -> Result<(), RuntimeError> {
        let note = serde_json::to_string(&(self, output));
        let note = note.map_err(|error| CacheError::Mismatch { reason: error.to_string() })?;
        session.save_with_note(path, model, &note)
    }

    /// Reads a file that was [written](Self::write). The session takes pages from `pool` for new tokens; keys and values of
    /// earlier ones stay in the file. Settings of the session, its head for example, have to be made again.
    pub fn read(
        path: impl AsRef<Path>,
        model: &Model,
        pool: &PagePool,
    ) -> Result<(Self, PartialOutput, Session), RuntimeError> {
        let saved = SessionFile::open(path, model, pool.layout().kv_dtype)?;
        let (paused, output): (Self, PartialOutput) =
            serde_json::from_str(saved.note()).map_err(|error| {
                let reason = format!("the session was not written with an answer that was paused: {error}");
                CacheError::Mismatch { reason }
            })?;
        let session = model.restored_in(&saved, pool)?;
        paused.check(&session)?;
        Ok((paused, output, session))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, OnceLock};

    use firebox_text::{GgufVocabulary, TextAssets, Tokenizer, TokenizerSource};
    use proptest::prelude::*;

    use super::*;
    use crate::decode::{Finish, GenerationConfig, LogProbabilities, OutputState, SamplerConfig};
    use crate::session::save::tests::{bits, model, some_tokens};
    use crate::{Generation, LookupDrafter, Speculation, Summary};

    /// Every token is a byte, or two: most are parts of characters.
    fn tokenizer() -> Arc<Tokenizer> {
        // The letters that byte-level vocabularies write bytes as.
        let plain = |byte: &u32| matches!(byte, 33..=126 | 161..=172 | 174..=255);
        let others = (0..256).filter(|byte| !plain(byte)).zip(256..);
        let mut letters: Vec<(u32, u32)> =
            (0..256).filter(plain).map(|byte| (byte, byte)).chain(others).collect();
        letters.sort_unstable();
        let letter = |byte: u32| char::from_u32(letters[byte as usize].1).unwrap();
        let token = |id: u32| match id {
            0..256 => letter(id).to_string(),
            _ => [letter(id % 64 + 128), letter(id % 32 + 194)].iter().collect(),
        };
        let vocabulary = GgufVocabulary {
            model: "gpt2".into(),
            tokens: (0..300).map(token).collect(),
            ..GgufVocabulary::default()
        };
        let source = Some(TokenizerSource::Gguf(vocabulary));
        let assets = TextAssets { tokenizer: source, ..TextAssets::default() };
        Arc::new(Tokenizer::new(&assets, &serde_json::Value::Null).unwrap())
    }

    fn models() -> &'static [Model] {
        static MODELS: OnceLock<Vec<Model>> = OnceLock::new();
        MODELS.get_or_init(|| ["reference/llama", "reference/qwen3_5_text"].map(model).into())
    }

    /// How an answer is interrupted at a token.
    #[derive(Debug, Clone, Copy)]
    enum Interruption {
        Paused,
        WithoutWhatWasSaid,
        Written,
    }

    fn through_json(paused: &PausedGeneration) -> PausedGeneration {
        let text = serde_json::to_string(paused).unwrap();
        assert!(text.len() <= 8 << 10, "{} bytes", text.len());
        let read: PausedGeneration = serde_json::from_str(&text).unwrap();
        assert_eq!(&read, paused);
        read
    }

    type Pieces = Vec<(Option<u32>, String, Option<LogProbabilities>)>;

    /// An answer and its pieces, interrupted before some of its tokens.
    fn answer(
        model: &Model,
        config: &GenerationConfig,
        interrupted: &[(usize, Interruption)],
        drafts: bool,
    ) -> (Summary, Pieces, Vec<u32>) {
        let folder = tempfile::tempdir().unwrap();
        let tokenizer = tokenizer();
        let mut session = model.session().unwrap();
        let pool = session.cache().pool().clone();
        let mut speculation = Speculation::new(LookupDrafter::new()).steady();
        let mut pieces = Vec::new();
        let mut before = PartialOutput::default();
        let mut paused: Option<(PausedGeneration, PartialOutput)> = None;
        for (at, how) in interrupted.iter().copied().chain([(usize::MAX, Interruption::Paused)]) {
            let mut generation = match paused.take() {
                None => {
                    let (tokenizer, prompt) = (Some(tokenizer.clone()), some_tokens(3, 20));
                    Generation::begin(&mut session, tokenizer, &prompt, config.clone()).unwrap()
                }
                Some((paused, said)) => {
                    Generation::resume(&mut session, Some(tokenizer.clone()), &paused, said).unwrap()
                }
            };
            if drafts {
                generation = generation.with_speculation(&mut speculation);
            }
            while pieces.len() < at {
                let Some(piece) = generation.next_piece().unwrap() else { break };
                pieces.push((piece.token, piece.text, piece.logprobs));
            }
            if at == usize::MAX {
                let mut summary = generation.finish().unwrap();
                summary.text.insert_str(0, &before.text);
                summary.tokens.splice(0..0, before.tokens);
                let next = bits(&session.feed(&[7]).unwrap());
                return (summary, pieces, next);
            }
            let (stopped, said) = generation.pause().unwrap();
            let stopped = through_json(&stopped);
            paused = Some(match how {
                Interruption::Paused => (stopped, said),
                Interruption::WithoutWhatWasSaid => {
                    before.text += &said.text;
                    before.tokens.extend(said.tokens);
                    (stopped, PartialOutput::default())
                }
                Interruption::Written => {
                    let path = folder.path().join("paused");
                    stopped.write(&said, &session, &path, model).unwrap();
                    session.clear();
                    assert_eq!(pool.pages(), pool.free_pages(), "its pages are there for others");
                    let (read, said, restored) = PausedGeneration::read(&path, model, &pool).unwrap();
                    assert_eq!(read, stopped);
                    session = restored;
                    (read, said)
                }
            });
        }
        unreachable!("the last part is not interrupted")
    }

    fn interruptions() -> impl Strategy<Value = Vec<(usize, Interruption)>> {
        let how = prop::sample::select(vec![
            Interruption::Paused,
            Interruption::WithoutWhatWasSaid,
            Interruption::Written,
        ]);
        prop::collection::btree_map(0usize..40, how, 0..5).prop_map(|map| map.into_iter().collect())
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(48) })]

        /// Half a character, half a stop string, in the middle of a draft: an answer goes on as if nothing had been.
        #[test]
        fn interruptions_do_not_show(
            interrupted in interruptions(),
            which in 0usize..2,
            temperature in prop_oneof![Just(0f32), Just(0.9), Just(2.5)],
            penalty in prop_oneof![Just(1f32), Just(1.4)],
            seed: u64,
            max_tokens in 0usize..40,
            context in prop_oneof![Just(None), (21usize..70).prop_map(Some)],
            stops in prop::collection::vec(0usize..200, 0..3),
            logprobs in prop::option::of(0usize..4),
            drafts: bool,
        ) {
            let model = &models()[which];
            let sampler = SamplerConfig {
                temperature, seed, repetition_penalty: penalty, top_p: 0.95,
                logit_bias: [(9, f32::NEG_INFINITY), (40, 0.1 + 0.2)].into(),
                ..SamplerConfig::default()
            };
            let mut config = GenerationConfig {
                max_tokens: Some(max_tokens), context, continues: seed % 2 == 0, end_tokens: vec![17],
                logprobs, sampler, ..GenerationConfig::default()
            };
            // Stop strings out of what is said, so that they are met.
            let (whole, ..) = answer(model, &config, &[], false);
            let letters: Vec<char> = whole.text.chars().collect();
            if !letters.is_empty() {
                let stop = |at: usize| {
                    let at = at % letters.len();
                    letters[at..letters.len().min(at + 3)].iter().collect()
                };
                config.stop = stops.into_iter().map(stop).collect();
            }
            let (expected, expected_pieces, expected_next) = answer(model, &config, &[], false);
            let (found, pieces, next) = answer(model, &config, &interrupted, drafts);
            prop_assert_eq!(found.text, expected.text);
            prop_assert_eq!(found.tokens, expected.tokens);
            prop_assert_eq!((found.finish, found.prompt_tokens), (expected.finish, expected.prompt_tokens));
            prop_assert_eq!(pieces, expected_pieces);
            prop_assert_eq!(next, expected_next);
        }
    }

    /// A token that is always the likeliest ends an answer at the same place, interrupted or not and drafted or not.
    #[test]
    fn an_answer_that_repeats_itself_ends() {
        use Interruption::{Paused, WithoutWhatWasSaid, Written};
        let sampler = SamplerConfig { logit_bias: [(9, 1000.0)].into(), ..SamplerConfig::default() };
        let config = |most| GenerationConfig {
            max_tokens: Some(most),
            loop_guard: true,
            sampler: sampler.clone(),
            ..GenerationConfig::default()
        };
        let interrupted = [(31, Written), (100, WithoutWhatWasSaid), (255, Paused)];
        for (interrupted, drafts) in
            [(&[][..], false), (&[][..], true), (&interrupted, false), (&interrupted, true)]
        {
            let (summary, pieces, _) = answer(&models()[0], &config(400), interrupted, drafts);
            assert_eq!((summary.finish, summary.tokens), (Finish::Repetition, vec![9; 256]));
            assert_eq!(pieces.iter().map(|(_, text, _)| text.as_str()).collect::<String>(), summary.text);
        }
        let unguarded = GenerationConfig { loop_guard: false, ..config(400) };
        assert_eq!(answer(&models()[0], &unguarded, &[], false).0.tokens.len(), 400);
        let (summary, ..) = answer(&models()[0], &config(255), &[], false);
        assert_eq!(summary.finish, Finish::Length);
    }

    /// As much as a request of a server may ask for.
    #[test]
    fn a_large_request_is_small_when_paused() {
        let biases = (0..300).map(|token| (150_000 + token, -99.5));
        let config = GenerationConfig {
            stop: vec!["a stop string of some length".into(); 4],
            end_tokens: (0..8).collect(),
            sampler: SamplerConfig { logit_bias: biases.collect(), ..SamplerConfig::default() },
            ..GenerationConfig::default()
        };
        let mut output = OutputState::new(config, Some(tokenizer())).unwrap();
        (0..5000).for_each(|token| drop(output.add(token % 300)));
        let (paused, said) = output.pause(10_000, Some(200_000), 5_000);
        let paused = through_json(&paused);
        println!("{} bytes", serde_json::to_string(&paused).unwrap().len());
        assert_eq!(OutputState::resume(&paused, said, Some(tokenizer())).unwrap().count(), 5000);
    }

    #[test]
    fn another_session_is_refused() {
        let model = &models()[0];
        let mut session = model.session().unwrap();
        let config = GenerationConfig { max_tokens: Some(5), ..GenerationConfig::default() };
        let mut generation = Generation::begin(&mut session, None, &[5, 6, 7], config).unwrap();
        generation.next_piece().unwrap();
        let (paused, said) = generation.pause().unwrap();
        let mut other = model.session().unwrap();
        other.feed(&[5]).unwrap();
        let refused = Generation::resume(&mut other, None, &paused, said.clone()).unwrap_err();
        assert!(matches!(refused, RuntimeError::Cache(CacheError::Mismatch { .. })), "{refused}");
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("session");
        other.save(&path, model).unwrap();
        let refused = PausedGeneration::read(&path, model, other.cache().pool()).unwrap_err();
        assert!(refused.to_string().contains("was not written with an answer"), "{refused}");
    }
}
