//! Tests of `firebox doctor`.

use crate::args;
use crate::support::*;

#[test]
fn a_machine_is_measured_and_told_what_it_can_run() {
    let json = firebox_with(["doctor", "--json"]).ends_with(0).json();
    assert!(json["processor"]["threads"].as_u64().unwrap() > 0);
    assert!(json["memory"]["read_bytes_per_second"].as_f64().unwrap() > 1e8, "{json}");
    assert!(json["disk"]["read_bytes_per_second"].as_f64().unwrap() > 1e6, "{json}");
    let outlook = json["outlook"].as_array().unwrap();
    assert!(outlook.len() > 4);
    assert!(json["warnings"].is_array() && json["model"].is_null());
}

#[test]
fn a_model_is_told_of_too() {
    let ran = firebox_with(args!["doctor", fixture("reference/llama")]).ends_with(0);
    for word in ["processor", "GB/s", "devices", "0.6B", "layers kept", "tokens a second"] {
        assert!(ran.stdout.contains(word), "no {word:?} in {}", ran.stdout);
    }
    firebox_with(args!["doctor", "no/such-model"]).fails(UNUSABLE, &["no/such-model"]);
}
