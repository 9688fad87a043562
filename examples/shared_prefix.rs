//! Sessions that begin alike compute their beginning once.
//!
//! `cargo run --release --example shared_prefix [MODEL] [TOKENS]`

#![allow(clippy::print_stdout, reason = "an example prints its output")]

use std::time::Instant;

use firebox::internals::runtime::likeliest;
use firebox::{KvType, Model, PagePool, PrefixLimits, PrefixTree, Session, device};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut args = std::env::args().skip(1);
    let model = args.next().unwrap_or_else(|| "tests/fixtures/reference/llama".into());
    let common: usize = args.next().map_or(Ok(512), |count| count.parse())?;
    let model = Model::open(model, &device("cpu")?)?;
    let decoder = model.decoder()?;
    let pool = PagePool::new(decoder.layout(KvType::default()));
    let tree = PrefixTree::new(&decoder, &pool, PrefixLimits::default());
    let vocabulary = decoder.config().vocab_size;
    let token = |at: usize| (at * 31 % (vocabulary - 3) + 3) as u32;
    let instructions: Vec<u32> = (0..common).map(token).collect();
    for question in 0..4 {
        // What every session is told, and what one of them asks.
        let prompt: Vec<u32> =
            instructions.iter().copied().chain((0..12).map(|at| token(at * 7 + question))).collect();
        let began = Instant::now();
        let mut alone = Session::in_pool(decoder.clone(), &pool);
        let expected = likeliest(&alone.feed(&prompt)?);
        let plain = began.elapsed();

        let began = Instant::now();
        let mut session = Session::in_pool(decoder.clone(), &pool);
        let begun = tree.begin(&mut session, "", &prompt);
        let mut fed = begun.tokens;
        if let Some(stop) = begun.stop {
            // Recurrent layers go on from where a state was kept.
            session.feed(&prompt[fed..stop])?;
            tree.insert(&session, "");
            fed = stop;
        }
        let next = likeliest(&session.feed(&prompt[fed..])?);
        let shared = began.elapsed();
        let began = Instant::now();
        tree.insert(&session, "");
        let kept = began.elapsed();
        println!(
            "{} of {} tokens shared: first token after {:.1} ms instead of {:.1}, {}; kept in {:.2} ms",
            begun.tokens,
            prompt.len(),
            shared.as_secs_f64() * 1e3,
            plain.as_secs_f64() * 1e3,
            if next == expected { "the same one" } else { "another one" },
            kept.as_secs_f64() * 1e3,
        );
    }
    println!("{:?}", tree.stats());
    Ok(())
}
