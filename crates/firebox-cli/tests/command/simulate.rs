//! Tests of `firebox simulate`.

use crate::args;
use crate::support::*;

#[test]
fn an_hour_on_a_device_that_is_not_there_is_a_table_or_json_and_the_same_every_time() {
    let args = args!["simulate", "mac-studio", "--hours", "1", "--seed", "7", "--load", "4"];
    let text = firebox_with(&args).ends_with(0).stdout;
    for word in ["Mac Studio", "violations", "pinned", "background", "router", "deadlines"] {
        assert!(text.contains(word), "no {word:?} in\n{text}");
    }
    assert_eq!(firebox_with(&args).ends_with(0).stdout, text);
    let json = firebox_with(args.iter().cloned().chain(["--json".into()])).ends_with(0).json();
    assert_eq!((&json["violations"], &json["seed"]), (&0.into(), &7.into()));
    assert_eq!(json["classes"].as_array().unwrap().len(), 4);
}

#[test]
fn what_cannot_be_simulated_says_why() {
    firebox_with(args!["simulate", "nowhere.toml"]).fails(UNUSABLE, &["nowhere.toml"]);
    firebox_with(args!["simulate", "ipad-m3", "--hours", "-1"]).ends_with(USAGE);
    firebox_with(args!["simulate", "ipad-m3", "--load", "0"]).fails(USAGE, &["load"]);
}
