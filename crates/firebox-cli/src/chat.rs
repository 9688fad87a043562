//! `firebox chat`

use std::path::{Path, PathBuf};

use anyhow::Context as _;
use clap::Args;
use firebox_runtime::{Script, SessionFile, SessionSummary};
use firebox_text::Message;

use crate::chat_session::ChatSession;
use crate::console::{Console, human_bytes};
use crate::generating::{GeneratingArgs, speed};
use crate::interrupt::Interrupt;
use crate::lines::Lines;
use crate::outcome::{Outcome, is_closed_pipe};
use crate::pocket::pocket_model;
use crate::settings;
use crate::tracing::Trace;

const HELP: &str = "\
/help              this
/reset             forget the conversation
/system [TEXT]     tell the model what to be, or nothing
/fact TEXT         tell the model a fact, which stays when turns are forgotten
/regen             answer again
/head [NAME]       answer with another head from now on, or list them; auto lets the router choose
/set [NAME VALUE]  change a setting, or list them
/save FILE         write the conversation as JSON
/stats             how long and how fast it has been
/quit              leave, as Ctrl-D does

Ctrl-C stops an answer. A line that ends in \\ goes on in the next; \"\"\" begins and ends a text of several lines.";

/// Options of `firebox chat`.
#[derive(Debug, Args)]
pub struct ChatArgs {
    /// The model [default: the pocket model]
    #[arg(value_name = "MODEL")]
    place: Option<PathBuf>,
    /// The model, by its flag
    #[arg(short, long, value_name = "MODEL", conflicts_with = "place")]
    model: Option<PathBuf>,
    /// Go on with the conversation in this file, if there is one, and keep it there after every answer
    #[arg(long, value_name = "FILE")]
    session: Option<PathBuf>,
    /// Let answers go on that only repeat themselves; --ignore-eos does too
    #[arg(long)]
    no_loop_guard: bool,
    #[command(flatten)]
    generating: GeneratingArgs,
}

/// Talks until the user has had enough.
pub fn chat(args: &ChatArgs, console: &Console) -> anyhow::Result<Outcome> {
    let path = match args.place.as_ref().or(args.model.as_ref()) {
        Some(path) => path.clone(),
        None => pocket_model()?,
    };
    let interrupt = Interrupt::install()?;
    let (mut conversation, trace) = begin(args, &path, &interrupt, console)?;
    let mut lines = Lines::open()?;
    if matches!(lines, Lines::Editor { .. }) {
        console.note("/help lists the commands; Ctrl-D leaves");
    }
    let mut failure = None;
    while let Some(message) = lines.next_message()? {
        let done = match message.trim().strip_prefix('/') {
            Some(command) => command_given(command, &mut conversation, &interrupt, console),
            None if message.trim().is_empty() => Ok(true),
            None => conversation.say(&message, &interrupt, console).map(|()| true),
        };
        match done {
            Ok(true) => {}
            Ok(false) => break,
            Err(error) if is_closed_pipe(&error) => return Err(error),
            // On a terminal the user sees it and goes on; a script has to be told in the end.
            Err(error) if matches!(lines, Lines::Editor { .. }) => {
                console.error(&crate::outcome::in_one_line(&error))
            }
            Err(error) => {
                failure = Some(error);
                break;
            }
        }
    }
    if let Some(trace) = trace {
        trace.save(console)?;
    }
    failure.map_or(Ok(Outcome::Done), Err)
}

fn begin(
    args: &ChatArgs,
    path: &Path,
    interrupt: &Interrupt,
    console: &Console,
) -> anyhow::Result<(ChatSession, Option<Trace>)> {
    let model = args.generating.open(path, console)?;
    let trace = args.generating.tracing.begin(&model);
    let config = args.generating.config(&model, console)?;
    let config = config.with_loop_guard(!args.no_loop_guard && !args.generating.ignore_eos);
    let prompting = &args.generating.prompt;
    let mut script = Script::with_template(&model, prompting.template.template(&model)?)?;
    script.set_thinking(prompting.thinking());
    if script.is_plain() {
        console.note("note: the model has no chat template; it continues what you say, line after line");
    }
    let speculation = args.generating.speculation(&model, interrupt, console)?;
    let kept = args.generating.cache_type.into();
    let (session, messages) = match &args.session {
        Some(path) if path.exists() => {
            if !SessionSummary::is_session_file(path) {
                let reason = "is no saved conversation and stays as it is; name another file";
                return Err(anyhow::anyhow!("{} {reason}", path.display()));
            }
            let saved = SessionFile::open(path, &model, kept)?;
            let messages: Vec<Message> = serde_json::from_str(saved.note()).with_context(|| {
                format!(
                    "{} holds a session, but no conversation of `firebox chat`; name another file",
                    path.display()
                )
            })?;
            (args.generating.dressed(model.restored(&saved)?, interrupt)?, messages)
        }
        _ => (args.generating.session(&model, interrupt)?, Vec::new()),
    };
    let mut conversation = ChatSession::resume(model, script, config, session, speculation, &messages)?;
    conversation.printing = prompting.printing();
    conversation.let_choose(args.generating.router(conversation.session())?);
    if let Some(path) = &args.session {
        conversation.keep_in(path.clone());
    }
    if let Some(system) = &prompting.system {
        conversation.set_system(system);
    }
    Ok((conversation, trace))
}

/// Does what a command asks. False if that is to leave.
fn command_given(
    command: &str,
    conversation: &mut ChatSession,
    interrupt: &Interrupt,
    console: &Console,
) -> anyhow::Result<bool> {
    let (name, rest) = command.split_once(char::is_whitespace).unwrap_or((command, ""));
    let rest = rest.trim();
    match name {
        "help" | "?" => console.reply(HELP),
        "reset" | "clear" => {
            conversation.reset()?;
            console.reply("(forgotten)");
        }
        "system" => {
            conversation.set_system(rest);
            console.reply(if rest.is_empty() { "(no system text)" } else { "(system text set)" });
        }
        "fact" if rest.is_empty() => console.reply("/fact TEXT: say which"),
        "fact" => {
            conversation.add_fact(rest, interrupt, console)?;
            console.reply("(noted)");
        }
        "regen" => {
            if !conversation.answer_again(interrupt, console)? {
                console.reply("(nothing has been asked yet)");
            }
        }
        "head" => console.reply(conversation.use_head(rest)),
        "set" => set(rest, conversation, console),
        "save" if rest.is_empty() => console.reply("/save FILE: say where to"),
        "save" => match save(Path::new(rest), &conversation.messages()) {
            Ok(()) => console.reply(format!("(saved to {rest})")),
            Err(error) => console.error(&crate::outcome::in_one_line(&error)),
        },
        "stats" => console.reply(stats(conversation)),
        "quit" | "exit" | "bye" => return Ok(false),
        _ => console.reply(format!("there is no command /{name}; /help lists them")),
    }
    Ok(true)
}

fn set(rest: &str, conversation: &mut ChatSession, console: &Console) {
    let mut thinking = conversation.script.thinking();
    let Some((name, value)) = rest.split_once([' ', '=']) else {
        console.reply(settings::listed(&conversation.config, thinking));
        return;
    };
    let changed = settings::set(&mut conversation.config, &mut thinking, name.trim(), value.trim());
    conversation.script.set_thinking(thinking);
    match changed {
        Ok(()) => console.reply(format!("({} is {})", name.trim(), value.trim())),
        Err(error) => console.error(&error.to_string()),
    }
}

fn save(path: &Path, messages: &[Message]) -> anyhow::Result<()> {
    let text = serde_json::to_string_pretty(messages)?;
    std::fs::write(path, text + "\n").with_context(|| format!("cannot write {}", path.display()))
}

fn stats(conversation: &ChatSession) -> String {
    let (tokens, bytes) = conversation.size();
    let context = conversation.context();
    let said = conversation.messages().iter().filter(|message| message.role == "user").count();
    let held = format!(
        "{said} turns, {tokens} of {context} tokens in memory, keys and values take {}",
        human_bytes(bytes as u64)
    );
    match conversation.last() {
        Some(summary) => format!("{held}\nlast answer: {}", speed(summary)),
        None => held,
    }
}
