//! Custom components: a drafter that knows what is often said, a policy that decides what is forgotten, and a
//! feed-forward with tensors that the model did not come with.
//!
//! `cargo run --release --example own_component`

#![allow(clippy::print_stdout, reason = "an example prints its output")]

use burn::tensor::{Device, Tensor};
use firebox::components::{ComponentError, FeedForward, OwnFeedForward};
use firebox::{
    AfterEviction, CacheError, Draft, Drafter, Eviction, EvictionPolicy, Generation, GenerationConfig, Model,
    Role, RuntimeError, Sampler, Speculation, Turn, TurnKind, device,
};

/// Drafts the rest of an answer that is often given.
#[derive(Debug)]
struct Phrases(Vec<Vec<u32>>);

impl Drafter for Phrases {
    fn propose(&mut self, tokens: &[u32], most: usize, _: &Sampler) -> Result<Draft, RuntimeError> {
        let rest = self.0.iter().find_map(|phrase| {
            let said = (1..phrase.len()).rev().find(|&said| tokens.ends_with(&phrase[..said]))?;
            Some(&phrase[said..])
        });
        Ok(match rest {
            Some(rest) => Draft::from(rest[..rest.len().min(most)].to_vec()),
            None => Draft::default(),
        })
    }
}

/// Forgets the longest turn first, whenever it was.
#[derive(Debug)]
struct LongestFirst;

impl EvictionPolicy for LongestFirst {
    fn make_room(&self, turns: &[Turn], capacity: usize, needed: usize) -> Result<Eviction, CacheError> {
        let mut starts = Vec::new();
        let mut held = 0;
        let mut before = 0;
        for (index, turn) in turns.iter().enumerate() {
            if turn.kind == TurnKind::Turn {
                held += turn.tokens;
                if !turn.pinned && index + 1 < turns.len() {
                    starts.push(before..before + turn.tokens);
                }
            }
            before += turn.tokens;
        }
        starts.sort_by_key(|tokens| std::cmp::Reverse(tokens.len()));
        let mut tokens = Vec::new();
        for turn in starts {
            if held + needed <= capacity {
                break;
            }
            held -= turn.len();
            tokens.push(turn);
        }
        tokens.sort_by_key(|turn| turn.start);
        Ok(Eviction { tokens, after: AfterEviction::KeepPositions })
    }
}

/// Lets through what was there before, every channel by a gate of its own.
#[derive(Debug)]
struct Gates {
    there: FeedForward,
    /// One for each channel.
    open: Tensor<1>,
    /// What sequences remember depends on the gates too.
    id: String,
}

impl Gates {
    fn new(there: FeedForward, width: usize, open: f32) -> Self {
        let id = format!("gates, {open} open");
        Self { there, open: Tensor::full([width], open, &Device::flex()), id }
    }
}

impl OwnFeedForward for Gates {
    fn id(&self) -> &str {
        &self.id
    }

    fn forward(&self, x: Tensor<2>) -> Result<Tensor<2>, ComponentError> {
        Ok(self.there.forward(x)?.mul(self.open.clone().unsqueeze()))
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let model = Model::open("assets/pocket", &device("cpu")?)?;
    let tokenizer = model.tokenizer()?.clone();
    let prompt = tokenizer.encode("<|user|>Who are you?<|end|><|assistant|>", false)?;
    let config = GenerationConfig::new().with_max_tokens(24).with_end_tokens(model.end_tokens());
    let phrase = tokenizer.encode("<|assistant|>I am the pocket model of Firebox.<|end|>", false)?;
    for mut speculation in [None, Some(Speculation::new(Phrases(vec![phrase])))] {
        let mut session = model.session()?;
        let mut generation =
            Generation::begin(&mut session, Some(tokenizer.clone()), &prompt, config.clone())?;
        if let Some(speculation) = &mut speculation {
            generation = generation.with_speculation(speculation);
        }
        while generation.next_piece()?.is_some() {}
        let summary = generation.finish()?;
        // Drafts change how fast tokens come and never which.
        println!("{} ({} of {} drafted)", summary.text, summary.accepted_tokens, summary.drafted_tokens);
    }

    let mut session = model.session()?.with_turn_capacity(40, LongestFirst);
    for length in [6, 20, 8, 12] {
        session.begin_turn(&[Role::User])?;
        session.feed(&vec![9; length])?;
    }
    let left: Vec<usize> = session.turns().map(|turn| turn.tokens).collect();
    println!("turns of 6, 20, 8 and 12 tokens in 40: {left:?} are left");

    let width = model.decoder()?.config().hidden_size;
    for open in [1.0, 0.0] {
        // The weights are those of the model, and the variant goes wherever a model goes.
        let variant = model.clone().with_feed_forward(2, |there| Gates::new(there, width, open))?;
        let mut session = variant.session()?;
        let generation = Generation::begin(&mut session, Some(tokenizer.clone()), &prompt, config.clone())?;
        println!("gates {open} open: {}", generation.complete()?.text);
    }
    Ok(())
}
