//! The terminal view of `firebox top`, and its plain-text form.

use firebox_runtime::telemetry::{Counter, Gauge, Histogram};
use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Modifier, Style};
use ratatui::text::Line;
use ratatui::widgets::{Block, Borders, Cell, Paragraph, Row, Sparkline, Table};

use super::figures::{Figures, ModelFigures};
use super::history::History;
use crate::columns::{printable, table};
use crate::console::{grouped, human_bytes};

const HEADER: [&str; 10] =
    ["model", "running", "waiting", "tok/s", "prompt/s", "first p50", "first p99", "token p50", "KV", "kept"];

/// The counters that are shown in the list of counts.
const COUNTED: [(&str, Counter); 12] = [
    ("finished", Counter::FinishedRequests),
    ("cancelled", Counter::CancelledRequests),
    ("refused", Counter::RefusedRequests),
    ("failed", Counter::FailedRequests),
    ("deadline slips", Counter::DeadlineSlips),
    ("evicted turns", Counter::EvictedTurns),
    ("warm head swaps", Counter::WarmHeadSwaps),
    ("cold head swaps", Counter::ColdHeadSwaps),
    ("preemptions", Counter::Preemptions),
    ("cached tokens", Counter::CachedTokens),
    ("shed parts", Counter::ShedParts),
    ("major faults", Counter::MajorPageFaults),
];

/// The state of the screen: a server's figures, and the selected model.
pub struct View {
    pub server: String,
    pub history: History,
    /// Of the models in their order.
    pub chosen: usize,
    pub is_paused: bool,
    /// Why there is nothing new.
    pub trouble: Option<String>,
}

impl View {
    pub fn new(server: String) -> Self {
        Self { server, history: History::default(), chosen: 0, is_paused: false, trouble: None }
    }

    /// Looks at another model.
    pub fn step(&mut self, down: bool) {
        let models = self.history.newest().map_or(0, |figures| figures.models.len());
        self.chosen = match down {
            true => (self.chosen + 1).min(models.saturating_sub(1)),
            false => self.chosen.saturating_sub(1),
        };
    }

    /// Draws all of it.
    pub fn draw(&self, frame: &mut Frame<'_>) {
        let models = self.history.newest().map_or(0, |figures| figures.models.len()) as u16;
        let [top, rows, middle, bottom, keys] = Layout::vertical([
            Constraint::Length(1),
            Constraint::Length(models + 3),
            Constraint::Min(4),
            Constraint::Length(6),
            Constraint::Length(1),
        ])
        .areas(frame.area());
        frame.render_widget(Paragraph::new(self.headline()), top);
        if let Some(figures) = self.history.newest() {
            self.draw_models(frame, rows, figures);
            if let Some((name, model)) = figures.models.iter().nth(self.chosen) {
                self.draw_rates(frame, middle, name);
                draw_counts(frame, bottom, name, model);
            }
        }
        let pause = if self.is_paused { "p goes on" } else { "p pauses" };
        let keys_text = Line::from(format!("q leaves   {pause}   up and down choose a model"));
        frame.render_widget(Paragraph::new(keys_text).style(Style::new().add_modifier(Modifier::DIM)), keys);
    }

    fn headline(&self) -> Line<'_> {
        let memory = self.history.newest().map_or(String::new(), memory);
        let state = match (&self.trouble, self.is_paused) {
            (Some(trouble), _) => format!("   {}", printable(trouble)),
            (None, true) => "   paused".into(),
            (None, false) => String::new(),
        };
        Line::from(format!("{}{memory}{state}", self.server)).style(Style::new().add_modifier(Modifier::BOLD))
    }

    fn draw_models(&self, frame: &mut Frame<'_>, area: Rect, figures: &Figures) {
        let rows = self.rows(figures).into_iter().enumerate().map(|(index, row)| {
            let style = if index == self.chosen {
                Style::new().add_modifier(Modifier::REVERSED)
            } else {
                Style::new()
            };
            Row::new(row.into_iter().map(Cell::from)).style(style)
        });
        let widths = [
            Constraint::Min(8),
            Constraint::Length(7),
            Constraint::Length(7),
            Constraint::Length(8),
            Constraint::Length(8),
            Constraint::Length(9),
            Constraint::Length(9),
            Constraint::Length(9),
            Constraint::Length(11),
            Constraint::Length(9),
        ];
        let header = Row::new(HEADER).style(Style::new().add_modifier(Modifier::DIM));
        let block = Block::new().borders(Borders::TOP | Borders::BOTTOM);
        frame.render_widget(Table::new(rows, widths).header(header).block(block), area);
    }

    fn draw_rates(&self, frame: &mut Frame<'_>, area: Rect, model: &str) {
        let halves = Layout::vertical([Constraint::Fill(1), Constraint::Fill(1)]).areas::<2>(area);
        let series = [
            ("tokens a second", Counter::GeneratedTokens),
            ("prompt tokens a second", Counter::PromptTokens),
        ];
        for (area, (title, counter)) in halves.into_iter().zip(series) {
            let rates = self.history.rates(model, counter);
            let most = rates.iter().copied().fold(0.0, f64::max);
            let block = Block::new().title(format!("{title} of {}, at most {most:.0}", printable(model)));
            // The newest is at the right, as time goes.
            let seen = rates.iter().rev().take(area.width.into()).rev().map(|rate| rate.round() as u64);
            frame.render_widget(Sparkline::default().block(block).data(seen.collect::<Vec<_>>()), area);
        }
    }

    /// Everything once, for scripts and for eyes.
    pub fn plain(&self) -> String {
        let Some(figures) = self.history.newest() else { return String::new() };
        let models = table(Some(HEADER), &[1, 2, 3, 4, 5, 6, 7, 8, 9], self.rows(figures));
        let names: Vec<&str> = figures.models.keys().map(String::as_str).collect();
        let counts = COUNTED.iter().map(|(what, counter)| {
            let each = figures.models.values().map(|model| grouped(model.counter(*counter) as u64));
            [(*what).to_owned(), each.collect::<Vec<_>>().join("  ")]
        });
        let counts = table(Some(["since the start", &names.join("  ")]), &[1], counts);
        format!("{}{}\n\n{models}\n\n{counts}", self.server, memory(figures))
    }

    fn rows(&self, figures: &Figures) -> Vec<[String; 10]> {
        let row = |(name, model): (&String, &ModelFigures)| {
            let quantile =
                |histogram, share| self.history.quantile(name, histogram, share).map_or("-".into(), time);
            let rate = |counter| format!("{:.1}", self.history.rate(name, counter));
            [
                printable(name),
                grouped(model.gauge(Gauge::RunningRequests) as u64),
                grouped(model.gauge(Gauge::WaitingRequests) as u64),
                rate(Counter::GeneratedTokens),
                rate(Counter::PromptTokens),
                quantile(Histogram::TimeToFirstToken, 0.5),
                quantile(Histogram::TimeToFirstToken, 0.99),
                quantile(Histogram::InterToken, 0.5),
                human_bytes(model.gauge(Gauge::KeysAndValues) as u64),
                kept(model),
            ]
        };
        figures.models.iter().map(row).collect()
    }
}

fn draw_counts(frame: &mut Frame<'_>, area: Rect, name: &str, model: &ModelFigures) {
    let block = Block::new().borders(Borders::TOP).title(format!("{} since the start", printable(name)));
    let cells = COUNTED.map(|(what, counter)| {
        Cell::from(format!("{:<16}{:>9}", what, grouped(model.counter(counter) as u64)))
    });
    let rows = cells.chunks(3).map(|cells| Row::new(cells.to_vec()));
    frame.render_widget(Table::new(rows, [Constraint::Length(28); 3]).block(block), area);
}

/// Describes a server's memory and its uses.
fn memory(figures: &Figures) -> String {
    let mut text = String::new();
    if let Some(resident) = figures.resident_bytes {
        text += &format!("   {} resident", human_bytes(resident as u64));
    }
    for (name, budget) in &figures.budgets {
        let Some(total) = budget.total else { continue };
        let (held, total) = (human_bytes(budget.held() as u64), human_bytes(total as u64));
        text += &format!("   {}: {held} of {total}", printable(name));
    }
    text
}

/// Which part of the weights stays in memory by plan.
fn kept(model: &ModelFigures) -> String {
    match (model.gauge(Gauge::KeptParts), model.gauge(Gauge::Parts)) {
        // A model that is mapped as a whole has no parts.
        (_, 0.0) => "mapped".into(),
        (kept, parts) => format!("{kept}/{parts}"),
    }
}

fn time(seconds: f64) -> String {
    if seconds < 1.0 { format!("{:.1} ms", seconds * 1e3) } else { format!("{seconds:.2} s") }
}
