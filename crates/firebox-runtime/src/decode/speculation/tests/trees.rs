//! Tests of drafts with several branches.

use super::*;
use crate::{AfterEviction, PagePool, WholeTurns};

/// Knows how a sequence goes on, and says several things of which some are that.
#[derive(Debug, Clone)]
struct Bushy {
    whole: Vec<u32>,
    /// One after the other; of each branch, how many tokens are true and how many follow that are not.
    shapes: Vec<Vec<(usize, usize)>>,
    proposed: usize,
}

impl Drafter for Bushy {
    fn propose(&mut self, tokens: &[u32], _: usize, _: &Sampler) -> Result<Draft, RuntimeError> {
        let shape = &self.shapes[self.proposed % self.shapes.len()];
        self.proposed += 1;
        let at = tokens.len().min(self.whole.len());
        let branch = |(index, &(right, wrong)): (usize, &(usize, usize))| {
            let right = self.whole[at..].iter().take(right).copied();
            // Some are no tokens, or are right by chance.
            let wrong =
                (0..wrong).map(|back| if index == 4 { u32::MAX } else { 5 + (index * 7 + back) as u32 });
            right.chain(wrong).collect()
        };
        Ok(shape.iter().enumerate().map(branch).collect::<Vec<Vec<u32>>>().into())
    }
}

type Shapes = Vec<Vec<(usize, usize)>>;

fn shapes() -> impl Strategy<Value = Shapes> {
    prop::collection::vec(prop::collection::vec((0usize..5, 0usize..3), 0..6), 1..8)
}

/// Drafts all that is said, and what is worth it.
fn bushy(whole: &[u32], shapes: &Shapes, branches: usize) -> [Speculation; 2] {
    let drafts = || {
        let drafter = Bushy { whole: whole.to_vec(), shapes: shapes.clone(), proposed: 0 };
        Speculation::new(drafter).with_draft_branches(branches).with_draft_tokens(5)
    };
    [drafts().steady(), drafts()]
}

fn prompt(length: usize) -> Vec<u32> {
    (0..length).map(|at| 5 + (at * at + 31 * at) as u32 % 150).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// At the end of a page, too, and ended by a token in the middle of a tree.
    #[test]
    fn trees_do_not_show(
        length in prop_oneof![1usize..40, 100usize..135],
        shapes in shapes(),
        branches in 1usize..6,
        sampler in samplers(),
        kept in prop_oneof![Just(KvType::F32), Just(KvType::F16), Just(KvType::Int8)],
        end in any::<Option<u32>>(),
    ) {
        let end_tokens = end.iter().map(|end| end % 150).collect();
        let config = GenerationConfig { max_tokens: Some(24), sampler, end_tokens, ..GenerationConfig::default() };
        for name in FIXTURES {
            let model = model(name);
            let session = || model.session().unwrap().with_kv_type(kept);
            compare(name, session, &prompt(length), &config, |whole| bushy(whole, &shapes, branches));
        }
    }

    /// Pages are few, turns are forgotten on the way, or rows are.
    #[test]
    fn trees_do_not_show_where_there_is_little_room(
        length in 90usize..140, shapes in shapes(), spare in 0usize..4, capacity in 60usize..90, chunk in 1usize..20,
    ) {
        for name in ["reference/llama", "reference/qwen3_5_text"] {
            let config = GenerationConfig { max_tokens: Some(20), ..GenerationConfig::default() };
            let model = model(name);
            let layout = model.decoder().unwrap().layout(KvType::F16);
            let pages = (length + 21).div_ceil(128) + spare;
            let few = || {
                let pool = PagePool::with_pages(layout.clone(), pages);
                Session::in_pool(model.decoder().unwrap(), &pool).with_chunk(chunk.max(2))
            };
            compare(name, few, &prompt(length), &config, |whole| bushy(whole, &shapes, 4));
            for after in [AfterEviction::KeepPositions, AfterEviction::CompactPositions, AfterEviction::Recompute] {
                let forgetful = || {
                    let mut session =
                        model.session().unwrap().with_turn_capacity(capacity, WholeTurns { after });
                    for said in [17, 12, 9] {
                        session.begin_turn(&[]).unwrap();
                        session.feed(&prompt(said)).unwrap();
                    }
                    session.begin_turn(&[]).unwrap();
                    session
                };
                compare(name, forgetful, &prompt(20), &config, |whole| bushy(whole, &shapes, 4));
            }
        }
    }

    /// Covers sequences whose positions depend on their length.
    #[test]
    fn trees_do_not_show_where_positions_depend_on_length(length in 1usize..70, shapes in shapes()) {
        let config = GenerationConfig { max_tokens: Some(40), ..GenerationConfig::default() };
        for name in ["variants/phi3-longrope-short-to-long", "variants/llama-rope-dynamic"] {
            let model = model(name);
            let session = || model.session().unwrap().with_kv_type(KvType::F32);
            compare(name, session, &prompt(length), &config, |whole| bushy(whole, &shapes, 4));
        }
    }
}

/// The one that comes true need not be the first.
#[test]
fn the_branch_that_comes_true_is_followed() {
    let config = GenerationConfig { max_tokens: Some(17), ..GenerationConfig::default() };
    for name in ["reference/llama", "reference/qwen3_5_text"] {
        let model = model(name);
        let mut plain = model.session().unwrap();
        generate(&mut plain, &[5, 9, 17], &config, None);
        // Of seven tokens one is right first, then three, then all.
        let shapes = vec![vec![(1, 6), (3, 4), (7, 0)]];
        let drafter = Bushy { whole: plain.tokens().to_vec(), shapes, proposed: 0 };
        let mut speculation = Speculation::new(drafter).with_draft_tokens(7).steady();
        let mut session = model.session().unwrap();
        let found = generate(&mut session, &[5, 9, 17], &config, Some(&mut speculation));
        assert_eq!((found.drafted_tokens, found.accepted_tokens), (42, 14), "{name}");
    }
}

/// What attention reads together, a branch reads together as well, wherever it left and whatever was forgotten.
#[test]
fn branches_round_as_the_sequence_does() {
    for (kept, forgets) in [(KvType::F32, false), (KvType::F16, true), (KvType::Int8, true)] {
        let mut session = model("reference/llama").session().unwrap().with_kv_type(kept);
        for said in [60, 30, 25] {
            session.begin_turn(&[]).unwrap();
            session.feed(&prompt(said)).unwrap();
        }
        if forgets {
            let turn = session.turns().nth(1).unwrap().id;
            session.forget(turn).unwrap();
        }
        for rewound in [0, 3, 0, 9] {
            let len = session.tokens().len() - rewound;
            session.rewind(len);
            let mut branch = session.clone();
            branch.cache = session.cache.branch().unwrap();
            for step in 0..12 {
                assert_eq!(session.feed(&[7 + step]).unwrap(), branch.feed(&[7 + step]).unwrap());
            }
        }
    }
}
