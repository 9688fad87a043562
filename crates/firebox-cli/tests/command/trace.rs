//! Tests of the trace files that commands write.

use std::collections::HashMap;
use std::path::Path;

use crate::args;
use crate::support::*;

/// Counts the events of each name in a trace.
fn counted(path: &Path) -> HashMap<String, usize> {
    let trace: serde_json::Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    let mut counts = HashMap::new();
    for event in trace["traceEvents"].as_array().unwrap() {
        *counts.entry(event["name"].as_str().unwrap().to_owned()).or_default() += 1;
    }
    counts
}

#[test]
fn what_happened_is_in_the_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("out.json");
    let run = args![
        "run",
        fixture("reference/llama"),
        "--ids",
        "5,6,7",
        "-n",
        "5",
        "--ignore-eos",
        "--trace",
        &path
    ];
    firebox_with(run).ends_with(0);
    let counts = counted(&path);
    assert_eq!((counts["prefill"], counts["decode"]), (1, 4), "{counts:?}");
    assert_eq!(counts["layer"] % 5, 0, "{counts:?}");
    assert!(!counts.contains_key("read"), "{counts:?}");

    let memory = args!["--memory", "400M", "--keep-layers", "0"];
    let run = args![
        "run",
        fixture("reference/llama"),
        "--ids",
        "5,6,7",
        "-n",
        "5",
        "--ignore-eos",
        "--trace",
        &path
    ];
    firebox_with(run.into_iter().chain(memory)).ends_with(0);
    assert!(counted(&path)["read"] > 0);

    let chat = args!["chat", gguf("llama"), "-n", "3", "--temp", "0", "--trace", &path];
    firebox_fed(chat, "Hello\nAgain\n").ends_with(0);
    // Two questions, and what the template writes after each answer.
    assert_eq!(counted(&path)["prefill"], 4);

    let bench =
        args!["bench", gguf("llama"), "--prompt", "8", "--tokens", "3", "--depth", "4", "--repeat", "1"];
    firebox_with(bench.into_iter().chain(args!["--trace", &path])).ends_with(0);
    assert!(counted(&path)["decode"] > 3);
}

#[test]
fn a_file_that_cannot_be_written_is_told() {
    let nowhere = Path::new("/nowhere/out.json");
    let run = args!["run", fixture("reference/llama"), "--ids", "5,6,7", "-n", "2", "--trace", nowhere];
    firebox_with(run).fails(UNUSABLE, &["/nowhere/out.json"]);
}
