//! Tests of `firebox chat`.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::process::Stdio;

use firebox_testing::thinking::{self, ANSWER, THOUGHTS};

use crate::args;
use crate::support::*;

#[test]
fn a_conversation_goes_through_a_pipe_line_by_line() {
    let folder = tempfile::tempdir().unwrap();
    let saved = folder.path().join("talk.json");
    let script = format!(
        "/system Be brief.\nHello\n/stats\n/regen\n/set temp 0.5\n/set\n\nTwo \\\nlines\n\"\"\"three\nmore\nlines\"\"\"\n\
         /set temp -1\n/frobnicate\n/help\n/save {}\n/quit\nnever said\n",
        saved.display()
    );
    let ran = firebox_fed(args!["chat", gguf("llama"), "-n", "6", "--temp", "0", "--seed", "1"], &script)
        .ends_with(0);
    for word in [
        "no chat template",
        "1 turns",
        "temp 0.5",
        "(temp is 0.5)",
        "should be 0 or more",
        "/frobnicate",
        "/regen",
    ] {
        assert!(ran.stderr.contains(word), "no {word:?} in {}", ran.stderr);
    }
    let messages: Vec<serde_json::Value> = serde_json::from_slice(&std::fs::read(&saved).unwrap()).unwrap();
    let roles: Vec<&str> = messages.iter().map(|message| message["role"].as_str().unwrap()).collect();
    assert_eq!(roles, ["system", "user", "assistant", "user", "assistant", "user", "assistant"]);
    assert_eq!(messages[3]["content"], "Two \nlines");
    assert_eq!(messages[5]["content"], "three\nmore\nlines");
    assert!(ran.stdout.contains(messages[6]["content"].as_str().unwrap()));
}

#[test]
fn an_answer_that_only_repeats_itself_ends() {
    let chat = |options: &[&str]| {
        let mut args = args!["chat", "--temp", "0", "--logit-bias", "9=1000", "-n", "300"].to_vec();
        args.extend(options.iter().map(Into::into));
        firebox_fed(&args, "Hello\n/stats\n").ends_with(0)
    };
    let ran = chat(&[]);
    assert!(
        ran.stderr.contains("only repeated itself") && ran.stderr.contains("256 tokens"),
        "{}",
        ran.stderr
    );
    for option in ["--no-loop-guard", "--ignore-eos"] {
        let ran = chat(&[option]);
        assert!(!ran.stderr.contains("repeated") && ran.stderr.contains("300 tokens"), "{}", ran.stderr);
    }
}

#[test]
fn thoughts_are_shown_when_they_are_asked_for() {
    let folder = tempfile::tempdir().unwrap();
    thinking::write(folder.path());
    let (model, saved) = (folder.path().as_os_str(), folder.path().join("talk.json"));
    let script = format!("Who are you?\n/save {}\n", saved.display());
    for (option, shown) in
        [(None, format!("{ANSWER}\n")), (Some("--show-thinking"), format!("{THOUGHTS}\n\n{ANSWER}\n"))]
    {
        let mut args = args!["chat", model, "--temp", "0"].to_vec();
        args.extend(option.map(Into::into));
        assert_eq!(firebox_fed(&args, &script).ends_with(0).stdout, shown);
        let messages: serde_json::Value = serde_json::from_slice(&std::fs::read(&saved).unwrap()).unwrap();
        assert_eq!(
            (&messages[1]["reasoning_content"], &messages[1]["content"]),
            (&THOUGHTS.into(), &ANSWER.into())
        );
        args[0] = "run".into();
        args.push("Who are you?".into());
        assert_eq!(firebox_with(&args).ends_with(0).stdout, shown);
    }
    let json = firebox_with(args!["run", model, "Who are you?", "--temp", "0", "--json"]).ends_with(0).json();
    assert_eq!((&json["reasoning_content"], &json["text"]), (&THOUGHTS.into(), &ANSWER.into()));
    // One that was cut says that there is nothing else.
    let ran = firebox_with(args!["run", model, "Who are you?", "--temp", "0", "-n", "3"]).ends_with(0);
    assert!(ran.stdout.is_empty() && ran.stderr.contains("--show-thinking"), "{}{}", ran.stdout, ran.stderr);
}

/// Two processes say what one would have said.
#[test]
fn a_conversation_outlives_its_process() {
    let folder = tempfile::tempdir().unwrap();
    let (session, saved) = (folder.path().join("session"), folder.path().join("talk.json"));
    let say = |family: &str, options: &[&std::ffi::OsStr], script: &str| {
        let mut args = args!["chat", gguf(family), "-n", "8", "--temp", "0", "--ignore-eos"].to_vec();
        args.extend(options.iter().map(|option| option.to_os_string()));
        firebox_fed(&args, script)
    };
    let last = || -> serde_json::Value {
        let messages: Vec<serde_json::Value> =
            serde_json::from_slice(&std::fs::read(&saved).unwrap()).unwrap();
        messages.last().unwrap()["content"].clone()
    };
    let save = format!("/save {}\n", saved.display());
    for family in ["llama", "qwen3_5_text"] {
        let _ = std::fs::remove_file(&session);
        say(family, &[], &format!("Hello\nAnd you\n{save}")).ends_with(0);
        let expected = last();
        let kept = ["--session".as_ref(), session.as_os_str()];
        say(family, &kept, "Hello\n").ends_with(0);
        say(family, &kept, &format!("And you\n{save}")).ends_with(0);
        assert_eq!(last(), expected, "{family}");
        // Where memory is promised, what is restored takes its pages from there.
        std::fs::remove_file(&session).unwrap();
        let kept = ["--session".as_ref(), session.as_os_str(), "--memory".as_ref(), "1G".as_ref()];
        say(family, &kept, "Hello\n").ends_with(0);
        say(family, &kept, &format!("And you\n{save}")).ends_with(0);
        assert_eq!(last(), expected, "{family}");
    }
    let ran = say("llama", &["--session".as_ref(), session.as_os_str()], "Hello\n");
    assert!(ran.stderr.contains("trunk"), "{}", ran.stderr);
}

/// The session's cache must not change the answers.
#[test]
fn remembering_changes_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let template = folder.path().join("template.jinja");
    let source = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}";
    std::fs::write(&template, source).unwrap();
    for family in ["llama", "qwen3_5_text", "gemma3_text"] {
        let answers = |script: String| {
            let saved = folder.path().join("talk.json");
            let script = format!("{script}/save {}\n", saved.display());
            firebox_fed(args!["chat", gguf(family), "-n", "8", "--temp", "0", "--ignore-eos"], &script)
                .ends_with(0);
            let messages: Vec<serde_json::Value> =
                serde_json::from_slice(&std::fs::read(&saved).unwrap()).unwrap();
            messages.last().unwrap()["content"].clone()
        };
        // The second asks again with nothing to go on but the text.
        let remembered = answers("Hello\nAnd you\n".into());
        let asked_again = answers("Hello\nAnd you\n/regen\n".into());
        assert_eq!(remembered, asked_again, "{family}");
    }
}

#[test]
fn old_turns_make_room_for_new() {
    let script = "Hello there\n".repeat(12);
    let ran = firebox_fed(args!["chat", gguf("llama"), "-n", "8", "-c", "64", "--ignore-eos"], &script)
        .ends_with(0);
    assert!(ran.stderr.contains("forgotten"), "{}", ran.stderr);
    let long = "word ".repeat(100);
    firebox_fed(args!["chat", gguf("llama"), "-c", "64"], &long).fails(OUT_OF_CONTEXT, &["context of 64"]);
}

#[test]
fn a_model_that_cannot_talk_says_why() {
    firebox_fed(args!["chat", fixture("reference/llama")], "Hello\n").fails(UNUSABLE, &["tokenizer.json"]);
    firebox_fed(args!["chat", fixture("reference/bert")], "Hello\n").fails(UNUSABLE, &["encoder"]);
}

#[test]
#[cfg(unix)]
fn ctrl_c_stops_the_answer_and_not_the_conversation() {
    let args = args!["chat", gguf("llama"), "-c", "1000000", "--ignore-eos"];
    let mut child = firebox().args(args).stdin(Stdio::piped()).spawn().unwrap();
    let mut input = child.stdin.take().unwrap();
    let mut remarks = BufReader::new(child.stderr.take().unwrap()).lines();
    let mut output = child.stdout.take().unwrap();
    input.write_all(b"Hello\n").unwrap();
    output.read_exact(&mut [0; 20]).unwrap();
    let drained = std::thread::spawn(move || std::io::copy(&mut output, &mut std::io::sink()));
    crate::run::signal(&child, "INT");
    assert!(remarks.by_ref().map_while(Result::ok).any(|line| line.contains("(stopped)")));
    input.write_all(b"/stats\n").unwrap();
    assert!(remarks.by_ref().map_while(Result::ok).any(|line| line.contains("1 turns")));
    // Nothing is being answered now, so this one ends the program.
    crate::run::signal(&child, "INT");
    assert_eq!(child.wait().unwrap().code(), Some(INTERRUPTED));
    drained.join().unwrap().unwrap();
}

/// Drafts follow a conversation over its turns and show in its numbers only.
#[test]
fn drafts_change_no_answer() {
    let folder = tempfile::tempdir().unwrap();
    let saved = folder.path().join("talk.json");
    let script = format!("Hello Hello Hello\nAnd you\n/regen\nAnd you\n/save {}\n", saved.display());
    for family in ["llama", "qwen3_5_text"] {
        let answers = |more: &[&str]| {
            let model = gguf(family);
            let base =
                ["chat", model.to_str().unwrap(), "-n", "24", "--temp", "0.3", "--seed", "2", "--ignore-eos"];
            firebox_fed(base.iter().chain(more), &script).ends_with(0);
            std::fs::read_to_string(&saved).unwrap()
        };
        let plain = answers(&[]);
        assert_eq!(answers(&["--lookup"]), plain, "{family}");
        let itself = gguf(family);
        assert_eq!(answers(&["--draft", itself.to_str().unwrap(), "--draft-tokens", "4"]), plain, "{family}");
    }
}
