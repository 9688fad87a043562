//! `firebox top`

mod figures;
mod history;
mod metrics;
mod source;
mod view;

use std::io::IsTerminal as _;
use std::sync::mpsc::{Receiver, sync_channel};
use std::thread;
use std::time::Duration;

use anyhow::Context as _;
use clap::Args;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEventKind, KeyModifiers};

use crate::console::Console;
use crate::outcome::Outcome;
use figures::Figures;
use source::Metrics;
use view::View;

/// The longest wait for a pressed key before the screen is drawn again.
const LOOK: Duration = Duration::from_millis(50);

/// Options of `firebox top`.
#[derive(Debug, Args)]
pub struct TopArgs {
    /// Where the server is
    #[arg(long, value_name = "URL", default_value = "http://127.0.0.1:8080")]
    url: String,
    /// The key that it wants
    #[arg(long, value_name = "KEY", env = "FIREBOX_API_KEY", hide_env_values = true)]
    api_key: Option<String>,
    /// Seconds from one reading to the next
    #[arg(long, value_name = "SECONDS", default_value_t = 0.5, value_parser = seconds)]
    interval: f64,
    /// Print everything once and leave, as where there is no terminal
    #[arg(long)]
    once: bool,
}

fn seconds(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(seconds) if (0.05..=3600.0).contains(&seconds) => Ok(seconds),
        _ => Err("should be between 0.05 and 3600 seconds".into()),
    }
}

/// Shows what a server does, until the user has seen enough.
pub fn top(args: &TopArgs, console: &Console) -> anyhow::Result<Outcome> {
    let source = Metrics::at(&args.url, args.api_key.as_deref());
    let mut view = View::new(source.name().to_owned());
    // A server that cannot be reached at first is probably a mistake on the command line.
    view.history.add(source.read()?);
    let interval = Duration::from_secs_f64(args.interval);
    if args.once || !std::io::stdout().is_terminal() {
        thread::sleep(interval);
        view.history.add(source.read()?);
        console.line(view.plain())?;
        return Ok(Outcome::Done);
    }
    let readings = readings(source, interval);
    let mut terminal =
        ratatui::try_init().context("cannot draw on this terminal; --once prints plain text")?;
    let watched = loop {
        if let Err(error) = terminal.draw(|frame| view.draw(frame)) {
            break Err(error).context("cannot draw on this terminal");
        }
        take(&mut view, &readings);
        match obey(&mut view) {
            Ok(true) => {}
            Ok(false) => break Ok(Outcome::Done),
            Err(error) => break Err(error),
        }
    };
    ratatui::restore();
    watched
}

/// Reads on a thread of its own, so that keys do not wait for a server that does not answer.
fn readings(source: Metrics, interval: Duration) -> Receiver<anyhow::Result<Figures>> {
    let (sender, receiver) = sync_channel(1);
    thread::spawn(move || {
        loop {
            thread::sleep(interval);
            if sender.send(source.read()).is_err() {
                return;
            }
        }
    });
    receiver
}

/// Takes in what was read, but for what came while the picture stands still.
fn take(view: &mut View, readings: &Receiver<anyhow::Result<Figures>>) {
    while let Ok(reading) = readings.try_recv() {
        match reading {
            _ if view.is_paused => {}
            Ok(figures) => {
                view.history.add(figures);
                view.trouble = None;
            }
            Err(error) => view.trouble = Some(crate::outcome::in_one_line(&error)),
        }
    }
}

/// Does what keys ask. False once the user leaves.
fn obey(view: &mut View) -> anyhow::Result<bool> {
    if !event::poll(LOOK).context("cannot read the keyboard")? {
        return Ok(true);
    }
    let Event::Key(key) = event::read().context("cannot read the keyboard")? else { return Ok(true) };
    if key.kind != KeyEventKind::Press {
        return Ok(true);
    }
    match key.code {
        KeyCode::Char('q') | KeyCode::Esc => return Ok(false),
        KeyCode::Char('c') if key.modifiers.contains(KeyModifiers::CONTROL) => return Ok(false),
        KeyCode::Char('p') | KeyCode::Char(' ') => view.is_paused = !view.is_paused,
        KeyCode::Up | KeyCode::Char('k') => view.step(false),
        KeyCode::Down | KeyCode::Char('j') => view.step(true),
        _ => {}
    }
    Ok(true)
}

#[cfg(test)]
mod tests;
