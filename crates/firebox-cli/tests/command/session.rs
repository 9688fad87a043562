//! Tests of `firebox session`.

use std::path::Path;

use crate::args;
use crate::support::*;

/// Keeps a conversation of two questions.
fn talked(session: &Path) {
    let script = "My dog is called Biscuit.\nMy house is red.\n";
    firebox_fed(args!["chat", "--temp", "0", "--session", session], script).ends_with(0);
}

#[test]
fn conversations_are_listed_shown_and_exported() {
    let folder = tempfile::tempdir().unwrap();
    let session = folder.path().join("talk");
    talked(&session);
    std::fs::write(folder.path().join("other.txt"), "no session").unwrap();
    let list = firebox_with(args!["session", "list", folder.path(), "--json"]).ends_with(0).json();
    assert_eq!(list.as_array().unwrap().len(), 1);
    assert_eq!((&list[0]["questions"], &list[0]["messages"][0]["role"]), (&2.into(), &"user".into()));
    let text = firebox_with(args!["session", "list", folder.path()]).ends_with(0).stdout;
    assert!(text.contains("talk") && text.contains("iB"), "{text}");
    let shown = firebox_with(args!["session", "show", session]).ends_with(0).stdout;
    for word in ["user: My dog is called Biscuit.", "assistant: Noted", "f16", "tokens"] {
        assert!(shown.contains(word), "no {word:?} in {shown}");
    }
    let exported = firebox_with(args!["session", "export", session]).ends_with(0).json();
    assert_eq!(exported.as_array().unwrap().len(), 4);
    let file = folder.path().join("talk.md");
    firebox_with(args!["session", "export", session, "--format", "markdown", "-o", file]).ends_with(0);
    assert!(
        std::fs::read_to_string(file)
            .unwrap()
            .starts_with("**user:** My dog is called Biscuit.\n\n**assistant:**")
    );
}

/// After a rewind, the conversation goes on as if the removed turns had never been said.
#[test]
fn what_is_taken_back_was_never_said() {
    let folder = tempfile::tempdir().unwrap();
    let [long, short] = ["long", "short"].map(|name| folder.path().join(name));
    talked(&long);
    firebox_fed(args!["chat", "--temp", "0", "--session", short], "My dog is called Biscuit.\n").ends_with(0);
    let fork = folder.path().join("fork");
    firebox_with(args!["session", "fork", long, fork]).ends_with(0);
    firebox_with(args!["session", "fork", long, fork]).fails(USAGE, &["there already"]);
    firebox_with(args!["session", "rewind", fork]).ends_with(0);
    let messages = |path: &Path| firebox_with(args!["session", "export", path]).ends_with(0).stdout;
    assert_eq!(messages(&fork), messages(&short));
    assert_ne!(messages(&fork), messages(&long));
    let ask = |path: &Path| {
        firebox_fed(args!["chat", "--temp", "0", "--session", path], "What is my dog called?\n")
            .ends_with(0)
            .stdout
    };
    assert_eq!(ask(&fork), ask(&short));
    firebox_with(args!["session", "rewind", fork, "--turns", "9"]).fails(USAGE, &["only 2"]);
}

#[test]
fn what_another_template_has_written_is_found_again_by_it() {
    let folder = tempfile::tempdir().unwrap();
    let [template, session] = ["own.jinja", "talk"].map(|name| folder.path().join(name));
    let source = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}<assistant>";
    std::fs::write(&template, source).unwrap();
    let model = gguf("llama");
    let chat = args!["chat", model, "-n", "4", "--chat-template", template, "--session", session];
    firebox_fed(chat, "Hello\nAnd you\n").ends_with(0);
    let rewind = args!["session", "rewind", session, "--model", model, "--chat-template", template];
    let ran = firebox_with(rewind).ends_with(0);
    assert!(!ran.stdout.starts_with("0 of "), "{}", ran.stdout);
}

#[test]
fn only_conversations_are_removed() {
    let folder = tempfile::tempdir().unwrap();
    let session = folder.path().join("talk");
    talked(&session);
    let other = folder.path().join("other.txt");
    std::fs::write(&other, "mine").unwrap();
    firebox_with(args!["session", "remove", other]).fails(USAGE, &["no saved conversation"]);
    assert!(other.exists());
    firebox_with(args!["session", "remove", session]).ends_with(0);
    assert!(!session.exists());
    firebox_with(args!["session", "remove", session]).fails(USAGE, &["is not there"]);
    firebox_with(args!["session", "show", other]).fails(UNUSABLE, &["other.txt"]);
    let none = firebox_with(args!["session", "list", folder.path()]).ends_with(0);
    assert!(none.stderr.contains("--session"), "{}", none.stderr);
}

/// Templates require a first message; a conversation whose only question was taken back has none.
#[test]
fn the_only_question_can_be_taken_back() {
    let folder = tempfile::tempdir().unwrap();
    let (model, session) = (folder.path().join("model"), folder.path().join("talk"));
    firebox_with(args!["import", gguf("llama"), model]).ends_with(0);
    let template = "{% if messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}\
                    {% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}<assistant>";
    std::fs::write(model.join("chat_template.jinja"), template).unwrap();
    let chat = args!["chat", model, "-n", "4", "--temp", "0", "--session", session];
    firebox_fed(&chat, "Hello\n").ends_with(0);
    let ran = firebox_with(args!["session", "rewind", session, "--model", model]).ends_with(0);
    assert!(ran.stdout.starts_with("0 of "), "{}", ran.stdout);
    let left = firebox_with(args!["session", "export", session]).ends_with(0).json();
    assert_eq!(left, serde_json::json!([]));
    firebox_fed(&chat, "Hello\n").ends_with(0);
}

#[test]
fn a_file_that_is_named_has_to_be_a_conversation() {
    let folder = tempfile::tempdir().unwrap();
    let session = folder.path().join("talk");
    talked(&session);
    let [missing, other] = ["missing", "other.txt"].map(|name| folder.path().join(name));
    std::fs::write(&other, "no session").unwrap();
    for wrong in [&missing, &other] {
        let ran = firebox_with(args!["session", "list", *wrong, session, "--json"]).ends_with(UNUSABLE);
        assert_eq!(ran.json().as_array().unwrap().len(), 1, "the others are listed");
        ran.fails(UNUSABLE, &[wrong.file_name().unwrap().to_str().unwrap()]);
    }
    let both = firebox_with(args!["session", "list", missing, other]).ends_with(UNUSABLE);
    assert_eq!(both.stderr.lines().filter(|line| line.starts_with("error: ")).count(), 2, "{}", both.stderr);
    // One that only lies in a folder is none of the user's words.
    let broken = std::fs::read(&session).unwrap();
    std::fs::write(folder.path().join("broken"), &broken[..broken.len() / 2]).unwrap();
    firebox_with(args!["session", "list", folder.path()]).ends_with(0);
}
