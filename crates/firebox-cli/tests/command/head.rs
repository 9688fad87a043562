//! Tests of `firebox head`: cutting, training, installing and using heads.

use std::path::{Path, PathBuf};

use crate::args;
use crate::support::*;

/// A bundle with a tokenizer.
fn bundle(folder: &Path, quantize: &[&str]) -> PathBuf {
    let path = folder.join("model");
    let mut all = args!["import", gguf("llama"), path.clone().into_os_string()].to_vec();
    all.extend(quantize.iter().map(|arg| (*arg).into()));
    firebox_with(&all).ends_with(0);
    path
}

fn answer(model: &Path, head: Option<&str>) -> String {
    let mut all = args!["run", model.as_os_str(), "Hello", "--raw", "-n", "12", "--temp", "0"].to_vec();
    if let Some(head) = head {
        all.extend(["--head".into(), head.into()]);
    }
    firebox_with(&all).ends_with(0).stdout
}

#[test]
fn a_head_that_is_cut_off_is_the_model_that_it_was_cut_from() {
    let folder = tempfile::tempdir().unwrap();
    let model = bundle(folder.path(), &["--quantize", "q4"]);
    let cut = folder.path().join("own");
    firebox_with(args!["head", "cut", model.as_os_str(), cut.as_os_str(), "--layers", "99"])
        .fails(USAGE, &["--layers"]);
    firebox_with(args!["head", "cut", model.as_os_str(), cut.as_os_str(), "--layers", "1"]).ends_with(0);
    firebox_with(args!["head", "add", model.as_os_str(), cut.as_os_str(), "--name", "../x"])
        .fails(UNUSABLE, &["../x"]);
    firebox_with(args!["head", "add", model.as_os_str(), cut.as_os_str(), "--name", "code"]).ends_with(0);
    let listed = firebox_with(args!["head", "list", model.as_os_str(), "--json"]).ends_with(0).json();
    assert_eq!(listed["heads"][0]["name"], "code");
    assert_eq!(listed["heads"][0]["spec"]["kind"], "blocks");
    assert_eq!(answer(&model, Some("code")), answer(&model, None));
    firebox_with(args!["run", model.as_os_str(), "Hello", "--raw", "--head", "chat"])
        .fails(UNUSABLE, &["\"chat\"", "firebox head list"]);
    firebox_with(args!["run", model.as_os_str(), "Hello", "--raw", "--head", "code", "--head-wait", "0"])
        .fails(UNUSABLE, &["\"code\"", "0 ms"]);

    let swap = firebox_with(args!["head", "swap", model.as_os_str(), "code", "--repeat", "15", "--json"]);
    let swap = swap.ends_with(0).json();
    let seconds = |what: &str| swap["seconds"][what].as_f64().unwrap();
    assert!(seconds("warm") < seconds("cold") && seconds("cold") < seconds("reload"), "{swap}");

    let habits = tempfile::tempdir().unwrap();
    let talk = "/head\n/head code\nHello\n/head none\n/head own\n/quit\n";
    let mut chat = firebox();
    chat.args(args!["chat", model.as_os_str(), "-n", "4", "--temp", "0"]).env("XDG_DATA_HOME", habits.path());
    let mut chat = chat.stdin(std::process::Stdio::piped()).spawn().unwrap();
    std::io::Write::write_all(&mut chat.stdin.take().unwrap(), talk.as_bytes()).unwrap();
    let ran = Ran::from(chat.wait_with_output().unwrap()).ends_with(0);
    let habits = std::fs::read_to_string(habits.path().join("firebox/heads.json")).unwrap();
    assert!(habits.contains("\"code\":1"), "{habits}");
    for said in ["(heads: code)", "(changed in", "no head \"none\" is installed"] {
        assert!(ran.stderr.contains(said), "no {said:?} in {}", ran.stderr);
    }
    firebox_with(args!["head", "rollback", model.as_os_str(), "code"]).fails(UNUSABLE, &["code"]);
    firebox_with(args!["head", "remove", model.as_os_str(), "code"]).ends_with(0);
    let listed = firebox_with(args!["head", "list", model.as_os_str(), "--json"]).ends_with(0).json();
    assert_eq!(listed["heads"], serde_json::json!([]));
}

/// The losses of a run.
fn losses(run: &Path) -> Vec<f64> {
    let metrics = std::fs::read_to_string(run.join("run/metrics.jsonl")).unwrap();
    let lines = metrics.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap());
    lines.map(|line| line["loss"].as_f64().unwrap()).collect()
}

#[test]
fn a_head_learns_is_installed_and_answers() {
    let folder = tempfile::tempdir().unwrap();
    let model = bundle(folder.path(), &[]);
    let data = folder.path().join("data.jsonl");
    let line = "{\"prompt\": \"Hello\", \"completion\": \" world, hello world\"}\n";
    std::fs::write(&data, format!("{}not json\n", line.repeat(40))).unwrap();
    let plot = folder.path().join("profile.svg");
    let profile = firebox_with(args![
        "head",
        "profile",
        model.as_os_str(),
        "--data",
        data.as_os_str(),
        "--plot",
        plot.as_os_str(),
        "--json",
        "--samples",
        "3",
    ]);
    let profile = profile.ends_with(0).json();
    assert_eq!(profile["without"].as_array().unwrap().len(), 2, "{profile}");
    assert!(std::fs::read_to_string(&plot).unwrap().contains("<svg"));
    let own = answer(&model, None);
    for (name, lora) in [("blocks", None), ("lora", Some("4"))] {
        let run = folder.path().join(name);
        let mut all = args!["head", "train", model.as_os_str(), "--data", data.as_os_str()].to_vec();
        all.extend(args!["-o", run.as_os_str(), "--steps", "30", "--rate", "0.01", "--batch-tokens", "128"]);
        all.extend(args!["--layers", "1", "--install", name]);
        all.extend(lora.into_iter().flat_map(|rank| args!["--lora", rank]));
        let ran = firebox_with(&all).ends_with(0);
        assert!(ran.stderr.contains("line 41"), "bad lines are told: {}", ran.stderr);
        let losses = losses(&run);
        assert!(losses.len() == 30 && losses[29] < losses[0] * 0.9, "{name}: {losses:?}");
        assert!(run.join("run/loss.svg").exists());
        assert_ne!(answer(&model, Some(name)), own, "{name} says something of its own");
        // Finished steps are not repeated.
        let again = firebox_with(&all).ends_with(0);
        assert!(again.stderr.contains("going on after step 30"), "{}", again.stderr);
    }
    // There and back through the form of another package.
    let (peft, again) = (folder.path().join("peft"), folder.path().join("again"));
    firebox_with(args!["head", "export", model.as_os_str(), "lora", peft.as_os_str()]).ends_with(0);
    firebox_with(args!["head", "export", model.as_os_str(), "blocks", again.as_os_str()])
        .fails(USAGE, &["no adapter"]);
    firebox_with(args!["head", "add", model.as_os_str(), peft.as_os_str()]).ends_with(0);
    assert_eq!(answer(&model, Some("peft")), answer(&model, Some("lora")));
    assert_eq!(answer(&model, None), own);
    let listed = firebox_with(args!["head", "list", model.as_os_str(), "--json"]).ends_with(0).json();
    assert_eq!(listed["heads"].as_array().unwrap().len(), 3);
}

/// A short training.
fn train(model: &Path, data: &Path, run: &Path, more: &[&[&str]]) -> Ran {
    let mut all = args!["head", "train", model, "--data", data, "-o", run].to_vec();
    all.extend(args!["--layers", "1"]);
    all.extend(more.concat().iter().map(Into::into));
    firebox_with(all)
}

fn data(folder: &Path, completion: &str) -> PathBuf {
    let path = folder.join("data.jsonl");
    let line = format!("{{\"prompt\": \"Hello\", \"completion\": \"{completion}\"}}\n");
    std::fs::write(&path, line.repeat(20)).unwrap();
    path
}

/// Checkpoints of one head are not gone on with as those of another.
#[test]
fn a_run_goes_on_with_what_it_was_begun_with() {
    let folder = tempfile::tempdir().unwrap();
    let model = bundle(folder.path(), &[]);
    let run = folder.path().join("run");
    let learnt = data(folder.path(), " world");
    let (steps, batch, lora) = (["--steps", "2"], ["--batch-tokens", "64"], ["--lora", "4"]);
    train(&model, &learnt, &run, &[&steps, &batch, &lora]).ends_with(0);
    for (other, words) in [
        (
            &[&steps[..], &batch, &lora, &["--lora-alpha", "4"]][..],
            &["about.form.scale = 2.0", "is 1.0", "--output", "delete"][..],
        ),
        (&[&steps, &batch, &lora, &["--hold-out", "2"]], &["about.hold_out = 1"]),
        (&[&steps, &batch, &lora, &["--targets", "q_proj"]], &["about.targets"]),
        (&[&steps, &batch, &lora, &["--exact-states"]], &["about.states = \"f16\""]),
        (&[&steps, &batch, &lora, &["--bf16"]], &["precision"]),
        (&[&steps, &batch], &["about.form.kind"]),
        (&[&steps, &batch, &["--lora", "2", "--lora-alpha", "4"]], &["about.rank = 4"]),
        (&[&steps, &lora, &["--batch-tokens", "32"]], &["about.batch_tokens = 64"]),
        (&[&batch, &lora, &["--steps", "3"]], &["steps = 2"]),
    ] {
        train(&model, &learnt, &run, other).fails(UNUSABLE, words);
    }
    data(folder.path(), " world, hello");
    train(&model, &learnt, &run, &[&steps, &batch, &lora]).fails(UNUSABLE, &["about.data"]);
    data(folder.path(), " world");
    let again = train(&model, &learnt, &run, &[&steps, &batch, &lora]).ends_with(0);
    assert!(again.stderr.contains("going on after step 2"), "{}", again.stderr);
}

#[test]
fn products_that_are_not_there_leave_no_run() {
    let folder = tempfile::tempdir().unwrap();
    let model = bundle(folder.path(), &[]);
    let (run, learnt) = (folder.path().join("run"), data(folder.path(), " world"));
    for targets in ["q_porj", "q_proj,q_porj"] {
        let more = ["--steps", "1", "--lora", "2", "--targets", targets];
        train(&model, &learnt, &run, &[&more]).fails(USAGE, &["--targets", "q_porj"]);
    }
    train(&model, &learnt, &run, &[&["--steps", "0"]]).fails(USAGE, &["steps is 0"]);
    assert!(!run.exists());
}

#[test]
fn a_training_says_nothing_where_it_shall_not() {
    let folder = tempfile::tempdir().unwrap();
    let model = bundle(folder.path(), &[]);
    let (run, learnt) = (folder.path().join("run"), data(folder.path(), " world"));
    let ran = train(&model, &learnt, &run, &[&["--quiet", "--steps", "1"]]).ends_with(0);
    assert_eq!(ran.stderr, "");
    assert!(ran.stdout.contains("head"), "{}", ran.stdout);
}

#[test]
fn a_head_is_stored_in_the_numbers_it_was_trained_for() {
    let folder = tempfile::tempdir().unwrap();
    let model = bundle(folder.path(), &[]);
    let learnt = data(folder.path(), " world");
    for (name, option, dtype) in
        [("bf16", &["--bf16"][..], safetensors::Dtype::BF16), ("f32", &[], safetensors::Dtype::F16)]
    {
        let run = folder.path().join(name);
        train(&model, &learnt, &run, &[&["--steps", "1", "--install", name], option]).ends_with(0);
        let tensors = read_tensors(&run.join("head/layer-0001.safetensors"));
        let matrix = tensors.iter().find(|tensor| tensor.shape.len() == 2).unwrap();
        assert_eq!(matrix.dtype, dtype, "{}", matrix.name);
        answer(&model, Some(name));
    }
}
