//! Tests of commands that run the pocket model, and of its router.

use crate::args;
use crate::support::*;

#[test]
fn whoever_names_no_model_talks_with_the_pocket_model() {
    let ran = firebox_with(args!["run", "Who are you?"]).ends_with(0);
    assert_eq!(ran.stdout, "I am the pocket model of Firebox.\n");
    let ran = firebox_with(args!["run", "-p", "Hello", "--head", "chat"]).ends_with(0);
    assert_eq!(ran.stdout, "Hello!\n");
    firebox_with(args!["run", "no-such-model"]).fails(UNUSABLE, &["no-such-model"]);
}

#[test]
fn the_router_chooses_the_head_for_every_message() {
    let said = "My dog is called Biscuit.\nWhat is my dog called?\n\
                Write a loop from 3 to 12.\n\
                Summarize: Anna lives in Oslo. It rained all night.\n/head code\nWhat is my dog called?\n";
    let ran = firebox_fed(args!["chat"], said).ends_with(0);
    let answers: Vec<_> = ran.stdout.lines().collect();
    assert_eq!(
        answers,
        [
            "Noted. Your dog is called Biscuit.",
            "Your dog is called Biscuit.",
            "for i = 3 to 12 { print i; }",
            "Anna: home Oslo.",
            "print me.dog; // Biscuit",
        ]
    );
    let heads: Vec<_> = ran.stderr.lines().filter(|line| !line.contains("changed")).collect();
    assert_eq!(heads, ["(chat)", "(chat)", "(code)", "(summarize)"]);
}

#[test]
fn a_model_without_a_router_has_none_to_choose() {
    firebox_with(args!["run", gguf("llama"), "Hello there", "--head", "auto", "-n", "1"])
        .fails(USAGE, &["--head auto", "router"]);
}
