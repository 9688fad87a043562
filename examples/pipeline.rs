//! A pipeline: a router says which stage answers, and a fallback answers where that one does not in time.
//!
//! `cargo run --release --example pipeline`

#![allow(clippy::print_stdout, reason = "an example prints its output")]

use std::time::Duration;

use firebox::engine::{Engine, EngineConfig, Event, Pipeline, PipelineEvent, Stage};
use firebox::heads::HeadPoolConfig;
use firebox::{GenerationConfig, Model, RuntimeError, device};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let model = Model::open("assets/pocket", &device("cpu")?)?.with_heads(HeadPoolConfig::patient())?;
    let tokenizer = model.tokenizer()?.clone();
    let engine = Engine::start(EngineConfig::default())?;
    engine.add("pocket", model.clone())?;

    let ask = move |text: &str| -> Result<Vec<u32>, RuntimeError> {
        Ok(tokenizer.encode(&format!("<|user|>{text}<|end|><|assistant|>"), false)?)
    };
    let config = GenerationConfig::new().with_max_tokens(32).with_end_tokens(model.end_tokens());
    let stage = |head: &str| {
        let stage = Stage::new("pocket", ask.clone()).with_head(head).with_config(config.clone());
        stage.with_first_by(Duration::from_secs(10)).with_least_confidence(0.5)
    };
    // The router is a head as well: a classifier whose labels are names of stages.
    let pool = model.heads().ok_or("the pocket model has heads")?;
    let router = pool.acquire("router").head.ok_or("the pocket model has a router")?;
    let (routed, prompt) = (model.session()?, ask.clone());
    let router = move |text: &str| -> Result<Vec<(String, f32)>, RuntimeError> {
        let likely = routed.classify(&router, &prompt(text)?)?;
        Ok(likely.into_iter().map(|one| (one.label, one.probability)).collect())
    };
    let fallback = Stage::new("pocket", ask.clone()).with_head("universal").with_config(config.clone());
    let pipeline = ["chat", "code", "summarize"]
        .into_iter()
        .fold(Pipeline::new(&engine, fallback), |pipeline, head| pipeline.with_stage(stage(head)))
        .with_router(router);

    for said in
        ["Who are you?", "Write a loop from 3 to 12.", "Summarize: Anna lives in Oslo. It rained all night."]
    {
        println!("{said}");
        for event in pipeline.ask(said) {
            match event {
                PipelineEvent::Routed { stage, confidence } => {
                    print!("  [{stage}, {:.0} %] ", 100.0 * confidence)
                }
                PipelineEvent::Replaced { by, why, .. } => print!("  [{why}; {by} answers] "),
                PipelineEvent::Answer(Event::Piece(piece)) => print!("{}", piece.text),
                _ => {}
            }
        }
        println!();
    }
    Ok(())
}
