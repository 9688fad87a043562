//! `firebox run`

use std::io::{IsTerminal as _, Read as _};
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use clap::Args;
use firebox_runtime::{Finish, Model, Summary, peak_resident_bytes};
use firebox_text::{AnswerReader, ChatTemplate, Message};
use serde::Serialize;

use crate::answer_printer::{AnswerPrinter, Printing};
use crate::console::Console;
use crate::fitting::say_events;
use crate::generating::{GeneratingArgs, answer, speed};
use crate::grammar::GrammarArgs;
use crate::hub;
use crate::interrupt::Interrupt;
use crate::outcome::{Outcome, usage};
use crate::pocket::pocket_model;
use crate::prompt::Prompter;
use crate::router::choose;
use crate::tokens::parse_ids;

/// Options of `firebox run`.
#[derive(Debug, Args)]
pub struct RunArgs {
    /// The model [default: the pocket model]
    #[arg(value_name = "MODEL")]
    first: Option<String>,
    /// What to answer; read from stdin where it is left out
    #[arg(value_name = "PROMPT")]
    second: Option<String>,
    /// The model, by its flag
    #[arg(short, long, value_name = "MODEL")]
    model: Option<PathBuf>,
    /// The prompt, by its flag
    #[arg(short, long, value_name = "PROMPT", conflicts_with = "ids", allow_hyphen_values = true)]
    prompt: Option<String>,
    /// The prompt as token ids, for models without a tokenizer
    #[arg(long, value_name = "1,2,3")]
    ids: Option<String>,
    /// Continue the prompt as it stands, without the chat template
    #[arg(long, conflicts_with_all = ["system", "chat_template", "think", "no_think"])]
    raw: bool,
    /// Print one JSON object at the end instead of the text
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    grammar: GrammarArgs,
    #[command(flatten)]
    generating: GeneratingArgs,
}

/// The object that `--json` prints.
#[derive(Debug, Serialize)]
struct Report<'a> {
    model: String,
    device: &'a str,
    #[serde(flatten)]
    summary: &'a Summary,
    /// The thoughts before the text.
    #[serde(skip_serializing_if = "str::is_empty")]
    reasoning_content: &'a str,
    peak_rss_mib: Option<f64>,
    seed: u64,
}

impl RunArgs {
    /// Model and prompt, wherever they stand.
    fn operands(&self) -> anyhow::Result<(PathBuf, Option<String>)> {
        let (model, rest) = match (&self.model, &self.first, &self.second) {
            (Some(model), first, None) => (model.clone(), first.clone()),
            // A name of a model has no spaces, and what is to be said usually has.
            (None, Some(prompt), None) if prompt.contains(' ') && !Path::new(prompt).exists() => {
                (pocket_model()?, Some(prompt.clone()))
            }
            (None, Some(word), None) if !word.contains('/') && hub::resolve(Path::new(word)).is_err() => {
                let said = format!("to say it to the pocket model, write `firebox run -p {word}`");
                return Err(anyhow::anyhow!("{word}: there is no such model; {said}"));
            }
            (None, Some(model), prompt) => (PathBuf::from(model), prompt.clone()),
            (Some(_), _, Some(_)) => return Err(usage("the model is given twice, by -m and by its place")),
            (None, None, _) => (pocket_model()?, None),
        };
        match (rest, &self.prompt) {
            (Some(_), Some(_)) => Err(usage("the prompt is given twice, by -p and by its place")),
            (Some(_), None) if self.ids.is_some() => Err(usage("give a prompt or --ids, not both")),
            (rest, flag) => Ok((model, rest.or_else(|| flag.clone()))),
        }
    }
}

/// Answers one prompt.
pub fn run(args: &RunArgs, console: &Console) -> anyhow::Result<Outcome> {
    let (path, text) = args.operands()?;
    let ids = args.ids.as_deref().map(parse_ids).transpose()?;
    if ids.as_ref().is_some_and(Vec::is_empty) {
        return Err(usage("--ids: give at least one token"));
    }
    let grammar = args.grammar.grammar()?;
    let interrupt = Interrupt::install()?;
    let model = args.generating.open(&path, console)?;
    let (prompt, template) = match ids {
        Some(ids) => (ids, None),
        None => encode(args, &model, &path, text, console)?,
    };
    let continues = template.is_none();
    let mut config = args.generating.config(&model, console)?.with_continues(continues);
    config.grammar = grammar;
    if prompt.is_empty() {
        return Err(usage("the prompt is empty; there is nothing to answer or to continue"));
    }
    let trace = args.generating.tracing.begin(&model);
    let tokenizer = model.tokenizer().ok().cloned();
    let reader = match (&template, &tokenizer) {
        (Some(template), Some(tokenizer)) => template.answer_reader(tokenizer, &prompt, None),
        _ => AnswerReader::default(),
    };
    // A grammar of the whole answer has no place for thoughts.
    let reader = if config.grammar.is_some() { reader.without_thoughts() } else { reader };
    let mut session = args.generating.session(&model, &interrupt)?;
    let mut speculation = args.generating.speculation(&model, &interrupt, console)?;
    let working = interrupt.work();
    // A router knows messages, and no texts that are to go on.
    if let Some(router) = args.generating.router(&session)?.filter(|_| !continues) {
        choose(&router, &mut session, &prompt, console)?;
    }
    let seed = config.sampler.seed;
    let printing = if args.json { Printing::Nothing } else { args.generating.prompt.printing() };
    let mut printer =
        tokenizer.clone().map(|tokenizer| AnswerPrinter::new(console, reader, tokenizer, printing));
    let took = |token: Option<u32>, text: &str| match (&mut printer, token) {
        (Some(printer), _) => printer.push(token, text),
        (None, Some(token)) if !args.json => console.print(&format!("{token} ")),
        _ => Ok(()),
    };
    let summary = answer(&mut session, tokenizer, &prompt, config, speculation.as_mut(), &working, took);
    drop(working);
    if let Some(trace) = trace {
        trace.save(console)?;
    }
    let mut summary = summary?;
    let mut thoughts = String::new();
    match printer {
        Some(printer) => (thoughts, summary.text) = printer.finish()?,
        None if args.json => {}
        None => console.line("")?,
    }
    if args.json {
        console.json(&Report {
            model: path.display().to_string(),
            device: &args.generating.device.device,
            summary: &summary,
            reasoning_content: &thoughts,
            peak_rss_mib: peak_resident_bytes().map(|bytes| bytes as f64 / f64::from(1 << 20)),
            seed,
        })?;
    }
    say_events(&model, console);
    console.detail(format!("{}, seed {seed}", speed(&summary)));
    Ok(if summary.finish == Finish::Cancelled { Outcome::Interrupted } else { Outcome::Done })
}

/// The prompt's tokens, and the template that wrote them; none if the answer continues the text.
fn encode(
    args: &RunArgs,
    model: &Model,
    path: &Path,
    text: Option<String>,
    console: &Console,
) -> anyhow::Result<(Vec<u32>, Option<ChatTemplate>)> {
    let tokenizer = model
        .tokenizer()
        .map_err(anyhow::Error::from)
        .with_context(|| format!("{}: a text cannot be read; give the prompt by --ids", path.display()))?;
    let text = match text {
        Some(text) => text,
        None => from_stdin()?,
    };
    if args.raw {
        return Ok((tokenizer.encode(&text, true)?, None));
    }
    let prompting = &args.generating.prompt;
    let Some(template) = prompting.template.template(model)? else {
        if prompting.system.is_some() {
            return Err(usage(
                "--system: the model has no chat template to put it in; give one by --chat-template",
            ));
        }
        console.note("note: the model has no chat template; it continues the prompt as it stands");
        return Ok((tokenizer.encode(&text, true)?, None));
    };
    let prompter = Prompter {
        tokenizer: tokenizer.clone(),
        template,
        thinking: prompting.thinking(),
        add_special: false,
    };
    let system = prompting.system.as_ref().map(|text| Message::system(text.as_str()));
    let messages: Vec<Message> = system.into_iter().chain([Message::user(text)]).collect();
    Ok((prompter.encode(&messages)?, Some(prompter.template)))
}

/// Returns the piped input, without the line break that ends a file.
fn from_stdin() -> anyhow::Result<String> {
    let mut stdin = std::io::stdin();
    if stdin.is_terminal() {
        return Err(usage("no prompt; give one, pipe one in, or talk with the model by `firebox chat`"));
    }
    let mut text = String::new();
    stdin.read_to_string(&mut text).context("cannot read the prompt from stdin")?;
    let text = text.strip_suffix('\n').unwrap_or(&text);
    Ok(text.strip_suffix('\r').unwrap_or(text).to_owned())
}
