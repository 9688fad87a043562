//! A test of `firebox top` against a running server.

use std::io::{BufRead as _, BufReader};

use crate::args;
use crate::support::*;

#[test]
fn a_server_that_runs_is_seen() {
    let args = args!["serve", fixture("../../assets/pocket"), "--port", "0", "--api-key", "secret"];
    let mut server = firebox().args(args).spawn().unwrap();
    let mut remarks = BufReader::new(server.stderr.take().unwrap()).lines();
    let url = remarks.find_map(|line| Some(line.unwrap().split(" at ").nth(1)?.to_owned())).unwrap();
    let top = |more: &[&str]| {
        firebox_with(
            ["top", "--url", &url, "--interval", "0.1"].iter().chain(more).copied().collect::<Vec<_>>(),
        )
    };
    let seen = top(&["--once", "--api-key", "secret"]);
    let piped = top(&["--api-key", "secret"]);
    let refused = top(&["--once"]);
    server.kill().unwrap();
    server.wait().unwrap();
    for ran in [seen.ends_with(0), piped.ends_with(0)] {
        for word in ["pocket", "running", "first p99", "deadline slips", "resident"] {
            assert!(ran.stdout.contains(word), "no {word:?} in {}", ran.stdout);
        }
        assert!(!ran.stdout.contains('\x1b'), "{}", ran.stdout);
    }
    refused.fails(UNUSABLE, &["--api-key"]);
    firebox_with(["top", "--url", &url, "--once"]).fails(UNUSABLE, &["firebox serve"]);
}
