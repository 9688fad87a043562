//! The outcomes of commands: exit codes, and the errors that lead to them.

use std::fmt;
use std::process::ExitCode;

use firebox_engine::EngineError;
use firebox_eval::EvalError;
use firebox_model::ModelError;
use firebox_runtime::{GrammarError, RuntimeError};
use firebox_server::ServerError;
use firebox_store::StoreError;
#[cfg(feature = "train")]
use firebox_train::TrainError;

use crate::columns::printable;

const CHECK_FAILED: u8 = 1;
const USAGE: u8 = 2;
const UNUSABLE: u8 = 3;
const OUT_OF_CONTEXT: u8 = 4;
/// The exit code for an internal error, `EX_SOFTWARE` of sysexits.h: a supervisor may start the program again.
const INTERNAL: u8 = 70;
/// The exit code that a shell reports for a program that SIGINT ended.
pub const INTERRUPTED: u8 = 130;

/// The outcome of a command that did not fail.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// As it should.
    Done,
    /// A check did not pass.
    CheckFailed,
    /// By Ctrl-C.
    Interrupted,
}

impl Outcome {
    /// The exit code.
    pub fn code(self) -> ExitCode {
        ExitCode::from(match self {
            Self::Done => 0,
            Self::CheckFailed => CHECK_FAILED,
            Self::Interrupted => INTERRUPTED,
        })
    }
}

/// The command line makes no sense in a way that its parser cannot see.
#[derive(Debug)]
pub struct Usage(pub String);

impl fmt::Display for Usage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Usage {}

/// A usage error of this text.
pub fn usage(text: impl Into<String>) -> anyhow::Error {
    Usage(text.into()).into()
}

/// The error that the reading end of stdout was closed.
#[derive(Debug)]
pub struct ClosedPipe;

impl fmt::Display for ClosedPipe {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("stdout was closed")
    }
}

impl std::error::Error for ClosedPipe {}

/// Returns whether an error only says that the reader of stdout has left, as `head` does. Such errors are not reported.
pub fn is_closed_pipe(error: &anyhow::Error) -> bool {
    error.is::<ClosedPipe>()
}

/// The exit code of a failure.
pub fn code_of(error: &anyhow::Error) -> u8 {
    error.chain().find_map(specific_code).unwrap_or(UNUSABLE)
}

fn specific_code(cause: &(dyn std::error::Error + 'static)) -> Option<u8> {
    if cause.is::<Usage>() {
        return Some(USAGE);
    }
    if let Some(error) = cause.downcast_ref() {
        return of_server(error);
    }
    #[cfg(feature = "train")]
    if let Some(error) = cause.downcast_ref() {
        return of_training(error);
    }
    if let Some(error) = cause.downcast_ref() {
        return of_runtime(error);
    }
    if let Some(EvalError::Runtime(error)) = cause.downcast_ref() {
        return of_runtime(error);
    }
    if let Some(error) = cause.downcast_ref() {
        return of_model(error);
    }
    cause.downcast_ref().and_then(of_store)
}

// An error that stands for another one, word for word, is no link of the chain before it: who knows it asks for both.

fn of_server(error: &ServerError) -> Option<u8> {
    match error {
        ServerError::Key | ServerError::Exposed { .. } => Some(USAGE),
        ServerError::EngineEnded { .. } => Some(INTERNAL),
        ServerError::Engine(EngineError::Runtime(error)) => of_runtime(error),
        _ => None,
    }
}

#[cfg(feature = "train")]
fn of_training(error: &TrainError) -> Option<u8> {
    match error {
        TrainError::Setting { .. } => Some(USAGE),
        TrainError::Store(error) => of_store(error),
        _ => None,
    }
}

fn of_runtime(error: &RuntimeError) -> Option<u8> {
    match error {
        RuntimeError::ContextFull { .. } => Some(OUT_OF_CONTEXT),
        RuntimeError::Constraint(GrammarError::Stuck { .. } | GrammarError::Refused { .. }) => None,
        RuntimeError::Constraint(_)
        | RuntimeError::Setting { .. }
        | RuntimeError::Device { .. }
        | RuntimeError::DeviceMissing { .. }
        | RuntimeError::DraftVocabulary { .. } => Some(USAGE),
        RuntimeError::Cancelled => Some(INTERRUPTED),
        RuntimeError::Model(error) => of_model(error),
        RuntimeError::Store(error) => of_store(error),
        _ => None,
    }
}

fn of_model(error: &ModelError) -> Option<u8> {
    match error {
        ModelError::TooLong { .. } => Some(OUT_OF_CONTEXT),
        ModelError::Store(error) => of_store(error),
        _ => None,
    }
}

fn of_store(error: &StoreError) -> Option<u8> {
    matches!(error, StoreError::HashMismatch { .. }).then_some(CHECK_FAILED)
}

/// An error and its causes, leaving out those that the text before them repeats already.
pub fn in_one_line(error: &anyhow::Error) -> String {
    let mut line = String::new();
    for cause in error.chain() {
        let text = cause.to_string();
        if line.is_empty() {
            line = text;
        } else if !line.contains(&text) {
            line = format!("{line}: {text}");
        }
    }
    printable(&line.split_whitespace().collect::<Vec<_>>().join(" "))
}

#[cfg(test)]
mod tests {
    use super::*;
    use anyhow::Context as _;

    #[test]
    fn an_error_is_one_line_that_says_nothing_twice() {
        let io = std::io::Error::new(std::io::ErrorKind::NotFound, "no such\nfile");
        let store = StoreError::Io { path: "a/b".into(), action: "open".into(), source: io };
        let error = Err::<(), _>(store).context("importing").unwrap_err();
        assert_eq!(
            in_one_line(&error),
            "importing: a/b: cannot open: no such file; look whether the name is right, and where the file went"
        );
        assert_eq!(code_of(&error), UNUSABLE);
    }

    #[test]
    fn codes_are_found_below_context() {
        let full = RuntimeError::ContextFull { tokens: 9, context: 8 };
        assert_eq!(code_of(&anyhow::Error::new(full).context("chatting")), OUT_OF_CONTEXT);
        assert_eq!(code_of(&usage("no")), USAGE);
        let long = RuntimeError::Model(ModelError::TooLong { tokens: 9, longest: 8 });
        assert_eq!(code_of(&long.into()), OUT_OF_CONTEXT);
        let wrong = || RuntimeError::Setting {
            setting: "temperature",
            value: "-1".into(),
            reason: "it has to be zero or above",
        };
        assert_eq!(code_of(&ServerError::Engine(wrong().into()).into()), USAGE);
        assert_eq!(code_of(&EvalError::Runtime(wrong()).into()), USAGE);
        assert_eq!(code_of(&ServerError::Key.into()), USAGE);
        assert_eq!(code_of(&ServerError::EngineEnded { reason: "it panicked".into() }.into()), INTERNAL);
        #[cfg(feature = "train")]
        {
            let setting = TrainError::Setting { setting: "steps", value: "0".into(), reason: "too few" };
            assert_eq!(code_of(&anyhow::Error::new(setting).context("training")), USAGE);
            assert_eq!(code_of(&TrainError::NothingToTrain.into()), UNUSABLE);
        }
        assert_eq!(code_of(&anyhow::anyhow!("broken")), UNUSABLE);
    }
}
