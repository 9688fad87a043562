//! Tests of the shell completion scripts and the manual pages.

use std::io::Write as _;
use std::process::{Command, Stdio};

use crate::args;
use crate::support::*;

#[test]
fn every_shell_has_a_script_that_knows_the_commands() {
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let script = firebox_with(["completions", shell]).ends_with(0).stdout;
        for word in ["doctor", "session", "cache-type"] {
            assert!(script.contains(word), "no {word} for {shell}");
        }
    }
    let ran = firebox_with(["completions", "tcsh"]).ends_with(USAGE);
    assert!(ran.stderr.contains("zsh"), "{}", ran.stderr);
}

/// Bash completes a command from its first letters.
#[test]
#[ignore = "tool: bash"]
fn bash_completes_by_it() {
    let script = firebox_with(["completions", "bash"]).ends_with(0).stdout;
    let ask =
        "COMP_WORDS=(firebox doc) COMP_CWORD=1; _firebox firebox doc firebox; echo \"${COMPREPLY[@]}\"\n";
    let mut bash = Command::new("bash")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    bash.stdin.take().unwrap().write_all(format!("{script}\n{ask}").as_bytes()).unwrap();
    let answer = bash.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&answer.stdout);
    assert_eq!(said.trim(), "doctor", "{}", String::from_utf8_lossy(&answer.stderr));
}

#[test]
fn every_command_has_a_page() {
    let folder = tempfile::tempdir().unwrap();
    let pages = folder.path().join("man/man1");
    firebox_with(args!["man", pages]).ends_with(0);
    let page = |name: &str| std::fs::read_to_string(pages.join(name)).unwrap();
    assert!(page("firebox.1").starts_with(".ie") && page("firebox.1").contains(".TH firebox 1"));
    assert!(page("firebox-run.1").contains("json\\-schema"));
    assert!(page("firebox-head-train.1").contains("lora"));
    let file = folder.path().join("file");
    std::fs::write(&file, "").unwrap();
    firebox_with(args!["man", file]).fails(UNUSABLE, &["cannot write manual pages"]);
}
