//! A conversation outlives its process: it goes on from a file, to the same tokens.
//!
//! `cargo run --release --example saved_session`

#![allow(clippy::print_stdout, reason = "an example prints its output")]

use firebox::{
    Generation, GenerationConfig, KvType, Model, PersistentPrefix, PrefixOptions, Session, device,
};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let folder = tempfile::tempdir()?;
    let file = folder.path().join("talk.session");
    let model = Model::open("assets/pocket", &device("cpu")?)?;
    let tokenizer = model.tokenizer()?.clone();

    let mut session = model.session()?;
    session.feed(
        &tokenizer.encode("<|user|>My dog is called Biscuit.<|end|><|assistant|>Noted.<|end|>", false)?,
    )?;
    session.save(&file, &model)?;
    println!("{} tokens in a file of {} bytes", session.tokens().len(), file.metadata()?.len());

    let question = tokenizer.encode("<|user|>What is my dog called?<|end|><|assistant|>", false)?;
    let here = answer(&model, &mut session, &question)?;
    let restored = answer(&model, &mut Session::restore(&file, &model, KvType::default())?, &question)?;
    println!("here: {here}\nrestored: {restored}");

    // What many sessions begin with is computed once, and mapped by all of them in all processes.
    let system = tokenizer.encode("<|system|>The user lives in Oslo.<|end|>", false)?;
    for _ in 0..2 {
        let prefix =
            PersistentPrefix::open_or_build(folder.path(), &model, &system, PrefixOptions::default())?;
        let mut session = model.session()?.with_prefix(&prefix)?;
        let question = tokenizer.encode("<|user|>Where do I live?<|end|><|assistant|>", false)?;
        println!("{:?}: {}", prefix.origin(), answer(&model, &mut session, &question)?);
    }
    Ok(())
}

fn answer(
    model: &Model,
    session: &mut Session,
    prompt: &[u32],
) -> Result<String, Box<dyn std::error::Error>> {
    let config = GenerationConfig::new().with_max_tokens(24);
    let generation = Generation::begin(session, Some(model.tokenizer()?.clone()), prompt, config)?;
    Ok(generation.complete()?.text)
}
