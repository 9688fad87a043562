//! Trains a head on a few examples over a trunk that stays, installs it, and answers with it.
//!
//! `cargo run --release --example train_head`

#![allow(clippy::print_stdout, reason = "an example prints its output")]

use std::fs;
use std::path::Path;
use std::sync::Arc;

use firebox::heads::HeadPoolConfig;
use firebox::train::{
    ChatTemplate, Dtype, Examples, ExamplesConfig, Format, HeadForm, Heads, Packed, Run, Schedule, Seeded,
    Settings, Silent, Stored, Subject, Tower, TrainingData, boundary_states, export_head, train, trunk_hash,
};
use firebox::{Generation, GenerationConfig, Model, device};

/// As many as the pocket model's other heads have: all heads of a model begin at one layer.
const LAYERS: usize = 2;
const STEPS: u64 = 120;
const BATCH: usize = 256;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let folder = tempfile::tempdir()?;
    let bundle = folder.path().join("model");
    copy(Path::new("assets/pocket"), &bundle)?;
    let model = Model::open(&bundle, &device("cpu")?)?;
    let (decoder, tokenizer) = (model.decoder()?, model.tokenizer()?.clone());

    // What is to be learnt: a line of JSON for every conversation.
    let data = folder.path().join("examples.jsonl");
    let names =
        "Ada Bob Cleo Dan Eve Finn Gus Hal Ida Jon Kim Leo Mia Ned Oda Pia Rob Sue Tim Una Vic Wes Xen Zoe";
    let lines: Vec<String> = names
        .split(' ')
        .map(|name| {
            let said = format!(r#"{{"role": "user", "content": "My name is {name}."}}"#);
            format!(r#"{{"messages": [{said}, {{"role": "assistant", "content": "Ahoy {name}!"}}]}}"#)
        })
        .collect();
    fs::write(&data, lines.join("\n"))?;
    let template = Some(Arc::new(ChatTemplate::new(model.checkpoint().text(), &tokenizer)?));
    let format = Format { tokenizer: (*tokenizer).clone(), template, thinking: None };
    let mut examples = Examples::open(&data, format, ExamplesConfig::new(BATCH))?;

    // The trunk runs once; the head learns from what it left.
    let split = decoder.layers() - LAYERS;
    let trunk = trunk_hash(model.checkpoint(), split)?;
    let states =
        boundary_states(&mut examples, folder.path().join("states"), &decoder, &trunk, split, Stored::F16)?;
    let learning = device("cpu")?.autodiff();
    let network =
        Tower::head(model.checkpoint(), None, &HeadForm::Blocks, None, split, &learning, Seeded::new(1))?;
    let subject = Subject { samples: Packed::new(examples, BATCH, 1), states: Some(states) };
    let mut data = TrainingData::new(vec![subject], 1, &learning);
    let schedule = Schedule { peak: 2e-3, warm_up: 3, floor: 2e-4 };
    let mut run = Run::create(folder.path().join("run"), Settings::new(STEPS, schedule))?;
    let trained = train(network, &mut data, &mut run, &mut Silent, &Arc::default())?;
    println!("{:?} after {STEPS} steps", trained.ending);

    let files = folder.path().join("head");
    export_head(&trained.network, &HeadForm::Blocks, model.checkpoint(), Dtype::F16, &files)?;
    let installed = Heads::open(&bundle)?.install(&files, "pirate")?;
    println!("installed as generation {}", installed.generation);

    let model = Model::open(&bundle, &device("cpu")?)?.with_heads(HeadPoolConfig::patient())?;
    let prompt = tokenizer.encode("<|user|>My name is Ivy.<|end|><|assistant|>", false)?;
    for head in ["chat", "pirate"] {
        let mut session = model.session()?;
        session.use_head(head);
        let config = GenerationConfig::new().with_max_tokens(16).with_end_tokens(model.end_tokens());
        let generation = Generation::begin(&mut session, Some(tokenizer.clone()), &prompt, config)?;
        println!("{head}: {}", generation.complete()?.text);
    }
    Ok(())
}

fn copy(from: &Path, to: &Path) -> std::io::Result<()> {
    fs::create_dir_all(to)?;
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        let target = to.join(entry.file_name());
        if entry.file_type()?.is_dir() {
            copy(&entry.path(), &target)?;
        } else {
            fs::copy(entry.path(), target)?;
        }
    }
    Ok(())
}
