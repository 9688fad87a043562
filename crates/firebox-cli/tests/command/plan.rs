//! Tests of `firebox plan`.

use crate::args;
use crate::support::*;

/// Streams as slowly as it computes.
const PROFILE: &str = r#"{"name": "a test", "read_bytes_per_second": 1e7, "weight_bytes_per_second": 2e7}"#;

/// The least memory that a model says it can be streamed in.
fn least_memory(model: &std::path::Path) -> u64 {
    let ran = firebox_with(args!["plan", model, "--memory", "1M"]).ends_with(UNUSABLE);
    let bytes = ran.stderr.split('(').nth(1).and_then(|rest| rest.split(' ').next()).unwrap();
    bytes.parse().unwrap()
}

#[test]
fn a_table_goes_from_no_layer_to_all() {
    let model = fixture("reference/llama");
    let json = firebox_with(args!["plan", model, "--memory", "2G", "--json"]).ends_with(0).json();
    let layers = json["layers"].as_u64().unwrap() as usize;
    assert_eq!(json["table"].as_array().unwrap().len(), layers + 1);
    assert_eq!(json["kept_layers"].as_array().unwrap().len(), layers);
    assert_eq!(json["buffers"], 0);
    assert_eq!(json["prediction"]["waiting"], 0.0);
    assert_eq!(json["mode"], "balanced");
    assert!(json["rates"].as_str().unwrap().contains("measured on this machine"));

    let text = firebox_with(args!["plan", model, "--memory", "2G"]).ends_with(0).stdout;
    for word in ["measured on this machine", "all layers and the unembedding", "waiting", "tok/s"] {
        assert!(text.contains(word), "no {word:?} in\n{text}");
    }
    let chosen: Vec<&str> = text.lines().filter(|line| line.starts_with('>')).collect();
    assert_eq!(chosen.len(), 1, "{text}");
    assert_eq!(chosen[0].split_whitespace().nth(1).unwrap(), layers.to_string());
}

#[test]
fn little_memory_streams_and_less_is_refused_with_what_it_takes() {
    let folder = tempfile::tempdir().unwrap();
    let profile = folder.path().join("profile.json");
    std::fs::write(&profile, PROFILE).unwrap();
    let model = fixture("reference/llama");
    let least = least_memory(&model);
    let planned = |memory: u64| {
        firebox_with(args![
            "plan",
            model,
            "--memory",
            memory.to_string(),
            "--device-profile",
            profile,
            "--json"
        ])
    };
    let json = planned(least).ends_with(0).json();
    assert_eq!(json["kept_layers"].as_array().unwrap().len(), 0);
    assert_eq!((&json["buffers"], &json["prediction"]["peak_bytes"]), (&2.into(), &least.into()));
    assert!(json["prediction"]["waiting"].as_f64().unwrap() > 0.0);
    assert!(json["rates"].as_str().unwrap().contains("a test"));
    planned(least - 1).fails(UNUSABLE, &["too little", &least.to_string()]);
}

#[test]
fn a_longer_context_takes_more_memory() {
    let model = fixture("reference/llama");
    let peak = |mode: &str, context: &str| {
        let args = args!["plan", model, "--memory", "2G", "--mode", mode, "--ctx-size", context, "--json"];
        let json = firebox_with(args).ends_with(0).json();
        (json["kv_tokens"].as_u64().unwrap(), json["prediction"]["peak_bytes"].as_u64().unwrap())
    };
    let found = [peak("throughput", "4096"), peak("balanced", "4096"), peak("context", "4096")];
    assert_eq!(found.map(|(tokens, _)| tokens), [512, 1024, 4096]);
    assert!(found[0].1 < found[1].1 && found[1].1 < found[2].1);
}

#[test]
fn a_plot_is_an_image_that_suits_any_background() {
    let folder = tempfile::tempdir().unwrap();
    let image = folder.path().join("plan.svg");
    firebox_with(args!["plan", fixture("reference/llama"), "--memory", "2G", "--plot", image]).ends_with(0);
    let svg = std::fs::read_to_string(&image).unwrap();
    assert!(svg.starts_with("<svg") && svg.trim_end().ends_with("</svg>"));
    assert!(svg.contains("Tokens per second") && svg.contains("kept layers"));
    assert!(!svg.contains("#FFFFFF") && !svg.contains("#000000"), "{svg}");
    let nowhere = folder.path().join("missing/plan.svg");
    firebox_with(args!["plan", fixture("reference/llama"), "--memory", "2G", "--plot", nowhere])
        .fails(UNUSABLE, &["missing/plan.svg"]);
}

#[test]
fn what_cannot_be_planned_says_why() {
    let model = fixture("reference/llama");
    firebox_with(args!["plan", fixture("reference/bert"), "--memory", "1G"]).fails(UNUSABLE, &["encoder"]);
    firebox_with(args!["plan", model, "--memory", "1G", "--device-profile", "nowhere.json"])
        .fails(UNUSABLE, &["nowhere.json"]);
    let ran = firebox_with(args!["plan", model, "--memory", "much"]).ends_with(USAGE);
    assert!(ran.stderr.contains("1.5G"), "{}", ran.stderr);
}
