//! The command `firebox session rewind`, which removes the last turns of a saved conversation.

use std::path::PathBuf;

use clap::Args;
use firebox_runtime::heads::HeadPoolConfig;
use firebox_runtime::{Role, Session, SessionFile, TurnKind};
use firebox_text::Message;

use super::saved_conversation::SavedConversation;
use crate::compute::DeviceArgs;
use crate::console::Console;
use crate::opening::open;
use crate::outcome::usage;
use crate::pocket::pocket_model;
use crate::prompt::TemplateArgs;

/// Options of `firebox session rewind`.
#[derive(Debug, Args)]
pub struct RewindArgs {
    /// The file
    #[arg(value_name = "FILE")]
    file: PathBuf,
    /// How many questions to take back, with their answers
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..))]
    turns: u16,
    /// The model that it is a conversation with [default: the pocket model]
    #[arg(short, long, value_name = "MODEL")]
    model: Option<PathBuf>,
    #[command(flatten)]
    template: TemplateArgs,
    #[command(flatten)]
    device: DeviceArgs,
}

/// Takes back the last turns of a conversation, in its file.
pub fn rewind(args: &RewindArgs, console: &Console) -> anyhow::Result<()> {
    let saved = SavedConversation::open(&args.file)?;
    let path = match &args.model {
        Some(path) => path.clone(),
        None => pocket_model()?,
    };
    let model = open(&path, &args.device, console)?.with_heads(HeadPoolConfig::patient())?;
    let mut session = model.restored(&SessionFile::open(&args.file, &model, saved.summary.kv_type)?)?;
    let turns = usize::from(args.turns);
    let note = match saved.messages {
        Some(mut messages) => {
            shorten(&mut messages, turns)?;
            let questions = messages.iter().filter(|message| message.role == "user").count();
            let length = match before_questions(&session, turns, questions + turns) {
                Some(length) => length,
                // It was saved without turns, by an earlier version.
                None => {
                    let ids = args.template.prompter(&model, None)?.encode(&messages)?;
                    // The template says as well that an answer comes next; as far as that is so, it need not be taken back.
                    session.tokens().iter().zip(&ids).take_while(|(known, wanted)| known == wanted).count()
                }
            };
            session.rewind(length);
            serde_json::to_string(&messages)?
        }
        None => {
            let length = before_turns(&session, turns)?;
            session.rewind(length);
            saved.summary.note
        }
    };
    session.save_with_note(&args.file, &model, &note)?;
    console.line(format!("{} of {} tokens left", session.tokens().len(), saved.summary.tokens.len()))
}

/// Drops the last questions, and all that followed.
fn shorten(messages: &mut Vec<Message>, turns: usize) -> anyhow::Result<()> {
    let questions: Vec<usize> =
        messages.iter().enumerate().filter(|(_, message)| message.role == "user").map(|(at, _)| at).collect();
    let Some(first) = questions.len().checked_sub(turns) else {
        return Err(usage(format!("--turns {turns}: there are only {}", questions.len())));
    };
    messages.truncate(questions[first]);
    Ok(())
}

/// Returns the number of tokens before the last of all questions, if the session has a turn for each.
fn before_questions(session: &Session, last: usize, all: usize) -> Option<usize> {
    // With no question left, whatever came before the first is read again.
    if last == all {
        return Some(0);
    }
    let mut before = 0;
    let starts = session.all_turns().map(|turn| {
        before += turn.tokens;
        (turn.roles.contains(&Role::User), before - turn.tokens)
    });
    let starts: Vec<usize> = starts.filter_map(|(asks, start)| asks.then_some(start)).collect();
    (starts.len() == all).then(|| starts[all - last])
}

/// Returns the number of tokens before the last turns.
fn before_turns(session: &Session, turns: usize) -> anyhow::Result<usize> {
    let mut starts = Vec::new();
    let mut before = 0;
    for turn in session.turns() {
        starts.extend((turn.kind == TurnKind::Turn).then_some(before));
        before += turn.tokens;
    }
    let first = starts.len().checked_sub(turns);
    let first = first.ok_or_else(|| usage(format!("--turns {turns}: there are only {}", starts.len())))?;
    Ok(starts[first])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn questions_go_with_all_that_followed() {
        let said = || {
            vec![
                Message::system("be"),
                Message::user("a"),
                Message::assistant("b"),
                Message::user("c"),
                Message::assistant("d"),
            ]
        };
        for (turns, left) in [(1, 3), (2, 1)] {
            let mut messages = said();
            shorten(&mut messages, turns).unwrap();
            assert_eq!(messages.len(), left);
        }
        assert!(shorten(&mut said(), 3).is_err());
    }
}
