//! The command as scripts and people use it: arguments in, stdout, stderr and exit code out.

#![allow(clippy::unwrap_used, reason = "a test that fails here should say so")]

mod chat;
mod completions;
mod configuration;
mod doctor;
mod embed;
mod export;
mod fitting;
mod grammar;
mod head;
mod hub;
mod import;
mod inspect;
#[cfg(target_os = "linux")]
mod isolation;
mod perplexity;
mod plan;
mod pocket;
mod pull;
mod run;
mod serve;
mod session;
mod simulate;
#[cfg(target_os = "linux")]
mod storm;
mod support;
mod tokenize;
mod top;
mod trace;
mod train;
mod verify;
