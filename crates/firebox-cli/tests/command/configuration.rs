//! Tests of how commands find and apply `firebox.toml`.

use std::path::Path;
use std::process::Command;

use crate::args;
use crate::support::*;

fn firebox_in(folder: &Path) -> Command {
    let mut command = firebox();
    command.current_dir(folder);
    command
}

#[test]
fn a_file_is_found_here_or_among_the_users_own_or_where_it_is_said_to_be() {
    let folder = tempfile::tempdir().unwrap();
    let (here, own, said) =
        (folder.path().join("here"), folder.path().join("own"), folder.path().join("said.toml"));
    std::fs::create_dir_all(&here).unwrap();
    std::fs::create_dir_all(own.join("firebox")).unwrap();
    let seed = |name: &Path, seed: u32| std::fs::write(name, format!("[defaults]\nseed = {seed}\n")).unwrap();
    let run = |more: &[&str]| {
        let mut command = firebox_in(&here);
        command.env("XDG_CONFIG_HOME", &own).args(["run", "Hello there", "--json"]).args(more);
        Ran::from(command.output().unwrap()).ends_with(0).json()["seed"].as_u64().unwrap()
    };
    seed(&own.join("firebox/firebox.toml"), 1);
    assert_eq!(run(&[]), 1);
    seed(&here.join("firebox.toml"), 2);
    assert_eq!(run(&[]), 2);
    seed(&said, 3);
    assert_eq!(run(&["--config", said.to_str().unwrap()]), 3);
    assert_eq!(run(&["--seed", "4"]), 4);
}

#[test]
fn a_broken_file_is_an_error_with_its_line_and_no_reason_to_hide_the_help() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("firebox.toml"), "[defaults]\n# warmer\ntempp = 1\n").unwrap();
    let ran = Ran::from(firebox_in(folder.path()).args(["devices"]).output().unwrap());
    ran.fails(USAGE, &["firebox.toml, line 3", "tempp", "temp?"]);
    let ran = Ran::from(firebox_in(folder.path()).args(["run", "--help"]).output().unwrap()).ends_with(0);
    assert!(ran.stdout.contains("FIREBOX_TEMP"), "{}", ran.stdout);
    let nowhere = folder.path().join("nowhere.toml");
    firebox_with(args!["devices", "--config", nowhere]).fails(UNUSABLE, &["nowhere.toml"]);
}

#[test]
fn models_go_by_their_names() {
    let folder = tempfile::tempdir().unwrap();
    let text = format!("[[model]]\nname = \"small\"\npath = {:?}\n", gguf("llama"));
    std::fs::write(folder.path().join("firebox.toml"), text).unwrap();
    let run = |model: &str| {
        Ran::from(
            firebox_in(folder.path())
                .args(["run", model, "Hello", "-n", "4", "--temp", "0"])
                .output()
                .unwrap(),
        )
    };
    let named = run("small").ends_with(0).stdout;
    assert_eq!(named, run(gguf("llama").to_str().unwrap()).ends_with(0).stdout);
    run("smaller").fails(UNUSABLE, &["smaller"]);
    // A model's own setting outranks the defaults, and a flag outranks both.
    let text = format!(
        "[defaults]\nmemory = \"2G\"\n[[model]]\nname = \"small\"\npath = {:?}\nmemory = \"1M\"\n",
        gguf("llama")
    );
    std::fs::write(folder.path().join("firebox.toml"), text).unwrap();
    run("small").fails(UNUSABLE, &["too little"]);
    run(gguf("llama").to_str().unwrap()).ends_with(0);
    let args = ["run", "small", "Hello", "-n", "4", "--temp", "0", "--memory", "1G"];
    Ran::from(firebox_in(folder.path()).args(args).output().unwrap()).ends_with(0);
}

#[test]
fn memory_that_the_file_gives_one_model_is_memory_to_say_more_of() {
    let folder = tempfile::tempdir().unwrap();
    let text = format!("[[model]]\nname = \"small\"\npath = {:?}\nmemory = \"1G\"\n", gguf("llama"));
    std::fs::write(folder.path().join("firebox.toml"), text).unwrap();
    let run = |model: &str| {
        let args = ["run", model, "Hello", "-n", "1", "--keep-layers", "1", "--verbose"];
        Ran::from(firebox_in(folder.path()).args(args).output().unwrap())
    };
    let ran = run("small").ends_with(0);
    assert!(ran.stderr.contains("keeps 1 layers"), "{}", ran.stderr);
    run(gguf("llama").to_str().unwrap()).fails(USAGE, &["--keep-layers", "--memory"]);
}

#[test]
fn memory_that_the_file_gives_is_explained_where_it_stands_in_the_way() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("firebox.toml"), "[defaults]\nmemory = \"1G\"\n").unwrap();
    let args = args!["run", gguf("llama"), "Hello", "--draft", gguf("llama")];
    Ran::from(firebox_in(folder.path()).args(args).output().unwrap())
        .fails(USAGE, &["--draft", "firebox.toml"]);
    firebox_with(args!["run", gguf("llama"), "Hello", "--mode", "context"])
        .fails(USAGE, &["--mode", "--memory"]);
}

#[test]
fn serving_nothing_says_how_to_serve_something() {
    let folder = tempfile::tempdir().unwrap();
    let ran = Ran::from(firebox_in(folder.path()).args(["serve"]).output().unwrap());
    ran.fails(USAGE, &["firebox serve MODEL", "[[model]]"]);
    let pocket = fixture("../../assets/pocket");
    let text = format!("[[model]]\nname = \"pocket\"\npath = {pocket:?}\nheads = [\"chatt\"]\n");
    std::fs::write(folder.path().join("firebox.toml"), text).unwrap();
    let ran = Ran::from(firebox_in(folder.path()).args(["serve", "--port", "0"]).output().unwrap());
    ran.fails(USAGE, &["chatt", "summarize"]);
}
