//! The report as Markdown.

use std::fmt::Write as _;

use crate::claim::{Claim, Claims, Verdict};
use crate::figure::{Figure, Spread};
use crate::measures::residency_sweep;

/// The contents of the report.
#[derive(Debug)]
pub struct Report {
    /// The machine, the day, and how long it took.
    pub conditions: Vec<String>,
    pub claims: Claims,
    pub figures: Vec<Figure>,
    /// Figures that were not measured, with the reasons.
    pub left_out: Vec<String>,
    /// Images, as a reader of the Markdown finds them, and what they show.
    pub images: Vec<(String, &'static str)>,
}

impl Report {
    /// All of it, to stand below a heading.
    pub fn markdown(&self) -> String {
        let mut text = String::new();
        for line in &self.conditions {
            let _ = writeln!(text, "{line}\n");
        }
        self.write_claims(&self.claims.measured, &mut text);
        self.write_misses(&mut text);
        self.write_predictions(&mut text);
        self.write_sweep(&mut text);
        self.write_others(&mut text);
        for (path, what) in &self.images {
            let _ = writeln!(text, "![{what}]({path})\n");
        }
        if !self.left_out.is_empty() {
            text.push_str("Left out:\n\n");
            self.left_out.iter().for_each(|why| {
                let _ = writeln!(text, "- {why}");
            });
        }
        text
    }

    /// Returns the number of claims that hold and the number of claims that were measured.
    pub fn score(&self) -> (usize, usize) {
        let verdicts = self.claims.measured.iter().map(|claim| claim.verdict(&self.figures));
        verdicts.fold((0, 0), |(held, measured), verdict| match verdict {
            Verdict::Held(_) => (held + 1, measured + 1),
            Verdict::Missed(_) => (held, measured + 1),
            Verdict::NotMeasured => (held, measured),
        })
    }

    fn write_claims(&self, claims: &[Claim], text: &mut String) {
        text.push_str("| | published | bar | here: median, lowest and highest | in the same run | |\n|---|---|---|---|---|---|\n");
        let mut unmeasured = Vec::new();
        for claim in claims {
            let (spread, verdict) = match claim.verdict(&self.figures) {
                Verdict::Held(spread) => (spread, "held"),
                Verdict::Missed(spread) => (spread, "**missed**"),
                Verdict::NotMeasured => {
                    unmeasured.push(claim.says.as_str());
                    continue;
                }
            };
            let published = claim.published.as_deref().unwrap_or("–");
            let figure = claim.figure(&self.figures);
            let unit = figure.map_or("", |figure| &figure.unit);
            let pair = figure.map_or_else(String::new, in_the_same_run);
            let (says, bar, here) = (&claim.says, &claim.bar, shown(spread, unit));
            let _ = writeln!(text, "| {says} | {published} | {bar} {unit} | {here} | {pair} | {verdict} |");
        }
        text.push('\n');
        if !unmeasured.is_empty() {
            let _ = writeln!(text, "Not measured: {}.\n", unmeasured.join("; "));
        }
    }

    fn write_misses(&self, text: &mut String) {
        let is_missed = |claim: &&Claim| matches!(claim.verdict(&self.figures), Verdict::Missed(_));
        let missed: Vec<&Claim> = self.claims.all().filter(is_missed).collect();
        if missed.is_empty() {
            return;
        }
        text.push_str("Missed:\n\n");
        for claim in missed {
            let reason = claim.reason.as_deref().unwrap_or("it was not looked into why");
            let _ = writeln!(text, "- {}: {reason}.", claim.says);
        }
        text.push('\n');
    }

    /// Writes what was computed from published tables, apart from what was measured.
    fn write_predictions(&self, text: &mut String) {
        if self.claims.predicted.iter().any(|claim| claim.figure(&self.figures).is_some()) {
            text.push_str("Computed from published tables; nothing was measured for these:\n\n");
            self.write_claims(&self.claims.predicted, text);
        }
    }

    /// By how many layers are kept, if that was measured.
    fn write_sweep(&self, text: &mut String) {
        let named = |name: &str| self.figures.iter().find(|figure| figure.name == name);
        let steps = residency_sweep::STEPS
            .iter()
            .enumerate()
            .filter_map(|(quarter, (speed, memory))| Some((25 * quarter, named(speed)?, named(memory)?)));
        let steps: Vec<_> = steps.collect();
        if steps.is_empty() {
            return;
        }
        text.push_str("| layers kept | tok/s, predicted | tok/s | off by | MB, predicted | MB |\n|---|---|---|---|---|---|\n");
        for (kept, speed, memory) in steps {
            let (Some(of_speed), Some(of_memory)) = (speed.pair(), memory.pair()) else { continue };
            let [(speed_found, speed_told), (memory_found, memory_told)] =
                [of_speed, of_memory].map(|(found, told)| (number(found), number(told)));
            let off = shown(speed.spread(), "%");
            let _ = writeln!(
                text,
                "| {kept} % | {speed_told} | {speed_found} | {off} | {memory_told} | {memory_found} |"
            );
        }
        text.push('\n');
    }

    /// Writes the figures that no claim refers to.
    fn write_others(&self, text: &mut String) {
        let is_told = |figure: &Figure| {
            self.claims.all().any(|claim| claim.figure == figure.name)
                || residency_sweep::STEPS
                    .iter()
                    .any(|(speed, memory)| figure.name == *speed || figure.name == *memory)
        };
        let others: Vec<&Figure> = self.figures.iter().filter(|figure| !is_told(figure)).collect();
        if others.is_empty() {
            return;
        }
        text.push_str(
            "Measured beside that:\n\n| | median, lowest and highest | in the same run |\n|---|---|---|\n",
        );
        for figure in others {
            let here = shown(figure.spread(), &figure.unit);
            let _ = writeln!(text, "| `{}` | {here} | {} |", figure.name, in_the_same_run(figure));
        }
        text.push('\n');
    }
}

/// A median with what it lies between, where there was more than one round.
fn shown(Spread { lowest, median, highest }: Spread, unit: &str) -> String {
    let space = if unit.is_empty() { "" } else { " " };
    if lowest == highest {
        return format!("**{}**{space}{unit}", number(median));
    }
    format!("**{}**{space}{unit} ({} to {})", number(median), number(lowest), number(highest))
}

/// Describes the two quantities that a figure compares.
fn in_the_same_run(figure: &Figure) -> String {
    let (Some((ours, baseline)), Figure { of, beside, .. }) = (figure.pair(), figure) else {
        return String::new();
    };
    format!("{} {of}; {beside}: {} {of}", number(ours), number(baseline))
}

/// Three digits, or all those before the point.
pub fn number(value: f64) -> String {
    let size = value.abs();
    let decimals = match size {
        _ if size >= 100.0 || size == 0.0 => 0,
        _ if size >= 10.0 => 1,
        _ if size >= 1.0 => 2,
        // As many zeros more as it begins with.
        _ => (2.0 - size.log10().floor()).min(9.0) as usize,
    };
    format!("{value:.decimals$}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::claim::Bar;
    use crate::figure::{Figures, alone, times};

    fn claim(says: &str, figure: &str, bar: Bar) -> Claim {
        Claim {
            says: says.into(),
            published: Some("8.5 times as early".into()),
            figure: figure.into(),
            bar,
            reason: Some(format!("reason of {figure}")),
        }
    }

    fn report() -> Report {
        let mut figures =
            Figures::new(const { &[times("test.first", "s", "in turn"), alone("test.rate", "GB/s")] });
        for ours in [1.0, 2.0, 4.0] {
            figures.sooner("test.first", ours, 10.0).unwrap();
        }
        figures.add("test.rate", 3.0).unwrap();
        Report {
            conditions: vec!["A machine.".into()],
            claims: Claims {
                measured: vec![
                    claim("early", "test.first", Bar::AtLeast(4.5)),
                    claim("earlier", "test.first", Bar::AtLeast(8.5)),
                    claim("never", "test.never", Bar::AtMost(1.0)),
                ],
                predicted: vec![claim("computed", "test.rate", Bar::AtLeast(1.0))],
            },
            figures: figures.into_measured().figures,
            left_out: vec!["energy: no counter".into()],
            images: vec![("ratios.svg".into(), "ratios")],
        }
    }

    #[test]
    fn a_missed_claim_is_printed_as_missed_with_its_reason() {
        let report = report();
        let text = report.markdown();
        let row = |says: &str| text.lines().find(|line| line.starts_with(&format!("| {says} |"))).unwrap();
        assert!(row("early").ends_with("| held |"), "{text}");
        assert!(row("early").contains("**5.00** × (2.50 to 10.0)"), "{text}");
        assert!(
            row("early").contains("| ≥ 4.5 × |") && row("early").contains("2.00 s; in turn: 10.0 s"),
            "{text}"
        );
        assert!(row("earlier").ends_with("| **missed** |"), "{text}");
        assert!(text.contains("Not measured: never.") && !text.contains("| never |"), "{text}");
        assert!(text.contains("- earlier: reason of test.first."), "{text}");
        assert_eq!(
            text.matches("reason of").count(),
            1,
            "what holds or was not measured has no reason: {text}"
        );
        assert!(row("computed").ends_with("| held |"), "{text}");
        assert!(text.find("Computed from").unwrap() < text.find("| computed |").unwrap(), "{text}");
        for said in ["A machine.", "- energy: no counter", "![ratios](ratios.svg)"] {
            assert!(text.contains(said), "{text}");
        }
        assert_eq!(report.score(), (1, 2));
    }

    #[test]
    fn numbers_have_three_digits() {
        for (value, shown) in [
            (3487.6, "3488"),
            (57.02, "57.0"),
            (2.316, "2.32"),
            (-0.5678, "-0.568"),
            (0.00044, "0.000440"),
            (0.0, "0"),
        ] {
            assert_eq!(number(value), shown);
        }
    }
}
