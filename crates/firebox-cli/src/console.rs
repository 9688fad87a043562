//! Where results and remarks go.

use std::io::{self, IsTerminal as _, Write as _};
use std::time::Duration;

use clap::ValueEnum;
pub use firebox_runtime::human_bytes;
#[cfg(feature = "train")]
use firebox_train::{Lines, Progress, Silent};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde::Serialize;

use crate::outcome::ClosedPipe;

/// From one picture of a spinner to the next.
const TICK: Duration = Duration::from_millis(100);

/// When to use colours.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Color {
    /// On a terminal, unless NO_COLOR is set.
    Auto,
    /// Also into pipes and files.
    Always,
    /// Not at all.
    Never,
}

/// Options that every command has.
#[derive(Debug, Clone, clap::Args)]
pub struct OutputArgs {
    /// Says more on stderr, such as how fast it went
    #[arg(short, long, global = true, conflicts_with = "quiet")]
    pub verbose: bool,
    /// Says nothing on stderr but errors
    #[arg(short, long, global = true)]
    pub quiet: bool,
    /// When to use colours
    #[arg(long, global = true, value_name = "WHEN", env = "FIREBOX_COLOR", default_value = "auto")]
    pub color: Color,
}

/// A way to set text apart.
#[derive(Debug, Clone, Copy)]
pub enum Style {
    /// Failures.
    Alarm,
    /// For text that asks for attention.
    Strong,
    /// For secondary text.
    Dim,
}

impl Style {
    fn code(self) -> &'static str {
        match self {
            Self::Alarm => "1;31",
            Self::Strong => "1",
            Self::Dim => "2",
        }
    }
}

/// Results go to stdout, remarks to stderr.
#[derive(Debug, Clone, Default)]
pub struct Console {
    quiet: bool,
    verbose: bool,
    color_out: bool,
    color_err: bool,
}

impl Console {
    /// As the options ask.
    pub fn new(args: &OutputArgs) -> Self {
        let wanted = |terminal: bool| match args.color {
            Color::Always => true,
            Color::Never => false,
            Color::Auto => terminal && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty()),
        };
        Self {
            quiet: args.quiet,
            verbose: args.verbose,
            color_out: wanted(io::stdout().is_terminal()),
            color_err: wanted(io::stderr().is_terminal()),
        }
    }

    /// Writes to stdout, at once.
    pub fn print(&self, text: &str) -> anyhow::Result<()> {
        let mut stdout = io::stdout().lock();
        match stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()) {
            Ok(()) => Ok(()),
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Err(ClosedPipe.into()),
            Err(error) => Err(anyhow::Error::new(error).context("cannot write to stdout")),
        }
    }

    /// Writes a line to stdout.
    pub fn line(&self, text: impl AsRef<str>) -> anyhow::Result<()> {
        self.print(&format!("{}\n", text.as_ref()))
    }

    /// Writes a value to stdout, as one line of JSON.
    pub fn json(&self, value: &impl Serialize) -> anyhow::Result<()> {
        self.line(serde_json::to_string(value)?)
    }

    /// Text for stdout, set apart where that can be seen.
    pub fn styled(&self, style: Style, text: &str) -> String {
        paint(self.color_out, style, text)
    }

    /// A remark, on stderr.
    pub fn note(&self, text: impl AsRef<str>) {
        if !self.quiet {
            self.reply(text);
        }
    }

    /// A remark for those who asked for more.
    pub fn detail(&self, text: impl AsRef<str>) {
        if self.verbose {
            self.note(text);
        }
    }

    /// Writes the answer to a request of the user, such as `/help`, to stderr, even if the console is quiet.
    pub fn reply(&self, text: impl AsRef<str>) {
        self.remark(&paint(self.color_err, Style::Dim, text.as_ref()));
    }

    /// A failure, on stderr.
    pub fn error(&self, text: &str) {
        self.remark(&format!("{} {text}", paint(self.color_err, Style::Alarm, "error:")));
    }

    /// A bar on stderr for work of so many bytes; none where stderr is no terminal.
    pub fn bar(&self, bytes: u64) -> ProgressBar {
        let target = if self.quiet { ProgressDrawTarget::hidden() } else { ProgressDrawTarget::stderr() };
        let bar = ProgressBar::with_draw_target(Some(bytes), target);
        let style = ProgressStyle::with_template(
            "{wide_msg} {bar:24} {bytes:>10} of {total_bytes:>10} {binary_bytes_per_sec:>12} {eta:>4}",
        );
        // A template that does not parse would only cost the looks of the bar.
        if let Ok(style) = style {
            bar.set_style(style);
        }
        bar
    }

    /// Shows a spinner on a terminal for work of unknown length, until it is cleared.
    pub fn waiting(&self, text: impl Into<String>) -> ProgressBar {
        let target = if self.quiet { ProgressDrawTarget::hidden() } else { ProgressDrawTarget::stderr() };
        let bar = ProgressBar::with_draw_target(None, target);
        // As with bars.
        if let Ok(style) = ProgressStyle::with_template("{spinner} {msg} {elapsed:.dim}") {
            bar.set_style(style);
        }
        bar.set_message(text.into());
        bar.enable_steady_tick(TICK);
        bar
    }

    /// Returns what reports a training: a line on stderr every `every` steps, or nothing where the console is quiet.
    #[cfg(feature = "train")]
    pub fn training(&self, every: u64) -> Box<dyn Progress> {
        if self.quiet { Box::new(Silent) } else { Box::new(Lines::new(io::stderr(), every)) }
    }

    fn remark(&self, text: &str) {
        // An error on stderr cannot be reported anywhere.
        let _ = writeln!(io::stderr().lock(), "{text}");
    }
}

fn paint(colored: bool, style: Style, text: &str) -> String {
    if colored { format!("\x1b[{}m{text}\x1b[0m", style.code()) } else { text.to_owned() }
}

/// A number with its digits in groups of three.
pub fn grouped(number: u64) -> String {
    indicatif::HumanCount(number).to_string()
}
