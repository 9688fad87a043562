//! Calls from other languages give the same answers as calls from Rust. `FIREBOX_UNIFFI_BINDGEN` names the
//! program `uniffi-bindgen` of the library's UniFFI version (`pip install 'uniffi-bindgen==0.31.*'`).

#![allow(clippy::unwrap_used, clippy::print_stdout)]

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::LazyLock;

use firebox_ffi::objects::Model;
use firebox_ffi::{Ended, FireboxError};
use firebox_testing::tool::tool;

const WHO: &str = "Who are you?";
const DOG: &str = "What is my dog called?";

/// The answers in Rust: the model's name, the dog's first name, and its later name.
static RUST: LazyLock<[String; 3]> = LazyLock::new(|| {
    let model = Model::open(None, None).unwrap();
    let session = model.session(None).unwrap();
    let say = |text: &str| session.say(text.into(), None, None).unwrap().text;
    let who = say(WHO);
    let dog = session.add_fact("The user's dog is called Biscuit.".into()).unwrap();
    let told = say(DOG);
    session.supersede_fact(dog, "The user's dog is called Pepper.".into()).unwrap();
    [who, told, say(DOG)]
});

fn here(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

fn pocket() -> PathBuf {
    here("../../assets/pocket")
}

/// The folder of the library, which is built along with its tests.
fn libraries() -> PathBuf {
    std::env::current_exe().unwrap().parent().unwrap().into()
}

fn library() -> PathBuf {
    let name = format!("{}firebox_ffi{}", std::env::consts::DLL_PREFIX, std::env::consts::DLL_SUFFIX);
    libraries().join(name)
}

/// Runs a program and reads its output: lines of a label and a value.
fn lines(command: &mut Command) -> BTreeMap<String, String> {
    let out = written(command);
    let lines = out.lines().filter_map(|line| line.split_once(": "));
    lines.map(|(label, text)| (label.to_owned(), text.to_owned())).collect()
}

/// Compiles a C program with the library, by the compiler that Rust links with.
#[cfg(unix)]
fn compiled(source: &str, folder: &Path, options: &[&str]) -> PathBuf {
    let program = folder.join("program");
    let compiled = Command::new("cc")
        .args(options)
        .args(["-std=c11", "-Wall", "-Wextra", "-Werror", "-I"])
        .args([here("include"), here("tests/c").join(source)])
        .arg("-L")
        .arg(libraries())
        .args(["-lfirebox_ffi", "-o"])
        .arg(&program)
        .arg(format!("-Wl,-rpath,{}", libraries().display()))
        .status()
        .unwrap();
    assert!(compiled.success());
    program
}

fn written(command: &mut Command) -> String {
    let ran = command.output().unwrap();
    let (out, error) = (String::from_utf8_lossy(&ran.stdout), String::from_utf8_lossy(&ran.stderr));
    assert!(ran.status.success(), "{command:?}: {}\n{out}\n{error}", ran.status);
    out.into_owned()
}

#[track_caller]
fn check(lines: &BTreeMap<String, String>, expected: &[(&str, &str)]) {
    for (label, text) in expected {
        assert_eq!(lines.get(*label).map(String::as_str), Some(*text), "{label} in {lines:#?}");
    }
}

#[test]
fn the_pocket_model_answers() {
    let [who, told, superseded] = &*RUST;
    assert_eq!(who, "I am the pocket model of Firebox.");
    assert!(told.contains("Biscuit"), "{told}");
    assert!(superseded.contains("Pepper"), "{superseded}");
}

#[test]
fn a_failed_call_leaves_the_session_unchanged() {
    let model = Model::open(None, None).unwrap();
    let session = model.session(Some("You are helpful.".into())).unwrap();
    let long = "word ".repeat(4000);
    let refused = session.say(long.clone(), None, None);
    assert!(matches!(refused, Err(FireboxError::Full { .. })), "{refused:?}");
    assert!(matches!(session.add_fact(long.clone()), Err(FireboxError::Full { .. })));
    assert!(matches!(model.session(Some(long)), Err(FireboxError::Full { .. })));
    assert!(matches!(session.use_head(Some("nobody".into())), Err(FireboxError::NoHead { .. })));
    let other = model.session(Some("You are helpful.".into())).unwrap();
    let say = |session: &firebox_ffi::objects::Session| session.say(WHO.into(), None, None).unwrap();
    let answer = say(&session);
    assert_eq!((answer.ended, &answer), (Ended::Stop, &say(&other)));
}

#[test]
fn a_memory_limit_does_not_change_answers() {
    let model = Model::open(None, Some(8 << 30)).unwrap();
    let session = model.session(None).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("talk.session").display().to_string();
    session.save(file.clone()).unwrap();
    let restored = model.restore(file).unwrap();
    for session in [session, restored] {
        assert_eq!(session.say(WHO.into(), None, None).unwrap().text, RUST[0]);
    }
}

#[test]
fn foreign_files_are_rejected() {
    let folder = tempfile::tempdir().unwrap();
    let model = Model::open(None, None).unwrap();
    let file = |name: &str| folder.path().join(name).display().to_string();
    let refused = |name: &str| model.restore(file(name)).unwrap_err();
    assert!(matches!(refused("missing"), FireboxError::File { .. }));
    fs::write(file("noise"), "no session").unwrap();
    assert!(matches!(refused("noise"), FireboxError::File { .. }));
    let own = firebox_runtime::Model::open(pocket(), &firebox_runtime::device("cpu").unwrap()).unwrap();
    own.session().unwrap().save_with_note(file("other"), &own, "[]").unwrap();
    assert!(matches!(refused("other"), FireboxError::ForeignFile { .. }), "{}", refused("other"));
}

#[test]
#[cfg(unix)]
fn c_gets_the_same_answers_as_rust() {
    let folder = tempfile::tempdir().unwrap();
    let program = compiled("say.c", folder.path(), &[]);
    let lines = lines(Command::new(program).arg(pocket()).arg(folder.path().join("talk.session")));
    let [who, told, superseded] = &*RUST;
    check(
        &lines,
        &[
            ("no error yet", "1"),
            ("answer", who),
            ("heard the same in several pieces", "1"),
            ("in its own callback", "6"),
            ("told", told),
            ("superseded", superseded),
            ("restored", superseded),
            ("stopped after a piece", "1"),
            ("by a head", who),
            ("too hot", "1 temperature should be 0 or more"),
            ("NULL", "1 session is NULL"),
            ("no text", "1 text is NULL"),
            ("nowhere", "1 model is NULL"),
            ("no model", "2 1"),
        ],
    );
    assert!(lines["superseded twice"].starts_with("3 fact "), "{lines:#?}");
    assert!(lines["unknown head"].starts_with("3 head \"nobody\" cannot be used: "), "{lines:#?}");
    assert!(lines["not UTF-8"].starts_with("1 text is not UTF-8"), "{lines:#?}");
}

#[test]
#[cfg(unix)]
fn the_c_example_answers_from_the_fact() {
    let folder = tempfile::tempdir().unwrap();
    let out = written(&mut Command::new(compiled("hello.c", folder.path(), &[])));
    assert!(out.contains("Biscuit"), "{out}");
}

/// The sanitizer watches what the library allocates and frees, too: it finds memory that C is given and nothing frees, and what is
/// freed twice.
#[test]
#[ignore = "tool: AddressSanitizer of the C compiler"]
fn c_programs_leak_and_corrupt_nothing() {
    for (source, arguments) in [("say.c", vec![pocket()]), ("hello.c", vec![])] {
        let folder = tempfile::tempdir().unwrap();
        let program =
            compiled(source, folder.path(), &["-g", "-fsanitize=address", "-fno-omit-frame-pointer"]);
        let mut command = Command::new(program);
        command.args(arguments).env("ASAN_OPTIONS", "detect_leaks=1");
        if source == "say.c" {
            command.arg(folder.path().join("talk.session"));
        }
        assert!(!written(&mut command).is_empty());
    }
}

#[test]
#[ignore = "tool: python3"]
fn ctypes_gets_the_same_answers_as_rust() {
    let folder = tempfile::tempdir().unwrap();
    let mut python = Command::new("python3");
    python.arg(here("tests/python/by_ctypes.py")).arg(library()).arg(pocket());
    let lines = lines(python.arg(folder.path().join("talk.session")));
    let [who, _, _] = &*RUST;
    check(&lines, &[("answer", who)]);
    assert!(lines["superseded"].contains("Pepper"), "{lines:#?}");
    assert_eq!(lines["superseded"], lines["restored"]);
    assert!(lines["unknown head"].contains("3: head \"nobody\""), "{lines:#?}");
}

#[test]
#[ignore = "tool: uniffi-bindgen"]
fn uniffi_gets_the_same_answers_as_rust() {
    let folder = tempfile::tempdir().unwrap();
    let made = Command::new(tool("FIREBOX_UNIFFI_BINDGEN"))
        .arg("generate")
        .arg(library())
        .args(["--language", "python", "--no-format", "--out-dir"])
        .arg(folder.path())
        .status()
        .unwrap();
    assert!(made.success());
    // The module looks for the library in its own folder.
    let beside = folder.path().join(library().file_name().unwrap());
    fs::hard_link(library(), &beside).or_else(|_| fs::copy(library(), &beside).map(drop)).unwrap();
    let mut python = Command::new("python3");
    python.env("PYTHONPATH", folder.path()).arg(here("tests/python/by_uniffi.py")).arg(pocket());
    let lines = lines(python.arg(folder.path().join("talk.session")));
    let [who, told, superseded] = &*RUST;
    check(
        &lines,
        &[
            ("heads", "True"),
            ("answer", who),
            ("heard the same in several pieces", "True"),
            ("ended by the model", "True"),
            ("in its own callback", "busy"),
            ("told", told),
            ("deaf", "True"),
            ("superseded", superseded),
            ("restored", superseded),
            ("stopped after a piece", "True"),
            ("few", "True"),
            ("by a head", who),
            ("too hot", "temperature should be 0 or more"),
            ("no model", "True"),
        ],
    );
    let out =
        written(Command::new("python3").env("PYTHONPATH", folder.path()).arg(here("tests/python/hello.py")));
    assert!(out.contains("Pepper"), "{out}");
    assert!(lines["superseded twice"].starts_with("fact "), "{lines:#?}");
    assert!(lines["unknown head"].starts_with("head \"nobody\""), "{lines:#?}");
}
