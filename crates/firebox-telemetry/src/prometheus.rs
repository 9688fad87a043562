//! Snapshots in the text format of Prometheus.

use std::fmt::{self, Display, Write};

use super::{Counter, Distribution, Gauge, Histogram, ProcessSnapshot, Snapshot, Unit};

/// The content type of the text.
pub const CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

/// Renders a snapshot. Sessions are left out, because each would leave a series behind that never changes again.
pub fn render(snapshot: &Snapshot) -> String {
    let mut text = String::new();
    // Writing to a string cannot fail.
    let _ = write_all(snapshot, &mut text);
    text
}

/// Renders a counter with two labels; nothing if it has no samples.
pub fn render_counter<const LABELS: usize>(
    name: &str,
    help: &str,
    labels: [&str; LABELS],
    samples: impl IntoIterator<Item = ([String; LABELS], u64)>,
) -> String {
    let mut text = String::new();
    for (values, count) in samples {
        if text.is_empty() {
            let _ = family(&mut text, name, "counter", help);
        }
        let pairs =
            labels.iter().zip(&values).map(|(label, value)| format!("{label}=\"{}\"", Escaped(value)));
        let pairs = pairs.collect::<Vec<_>>().join(",");
        let _ = if pairs.is_empty() {
            writeln!(text, "{name} {count}")
        } else {
            writeln!(text, "{name}{{{pairs}}} {count}")
        };
    }
    text
}

impl Counter {
    /// Returns the exported name.
    pub fn metric(self) -> String {
        format!("firebox_{}{}_total", self.name(), self.unit().suffix())
    }
}

impl Gauge {
    /// Returns the exported name.
    pub fn metric(self) -> String {
        format!("firebox_{}{}", self.name(), self.unit().suffix())
    }
}

impl Histogram {
    /// Returns the exported name, without the suffixes of its series.
    pub fn metric(self) -> String {
        format!("firebox_{}{}", self.name(), self.unit().suffix())
    }
}

fn write_all(snapshot: &Snapshot, to: &mut String) -> fmt::Result {
    write_process(&snapshot.process, to)?;
    write_budgets(snapshot, to)?;
    for &counter in Counter::ALL {
        let unit = counter.unit();
        let name = counter.metric();
        let values = snapshot.models.iter().map(|model| (model.name.as_str(), model.count(counter)));
        family(to, &name, "counter", counter.help())?;
        for (model, value) in values {
            writeln!(to, "{name}{{model=\"{}\"}} {}", Escaped(model), shown(unit, value, 1e9))?;
        }
    }
    for &gauge in Gauge::ALL {
        let name = gauge.metric();
        family(to, &name, "gauge", gauge.help())?;
        for model in &snapshot.models {
            let value = model.gauges.get(&gauge).copied().unwrap_or(0);
            writeln!(to, "{name}{{model=\"{}\"}} {value}", Escaped(&model.name))?;
        }
    }
    for &histogram in Histogram::ALL {
        let name = histogram.metric();
        family(to, &name, "histogram", histogram.help())?;
        for model in &snapshot.models {
            if let Some(distribution) = model.meters.histograms.get(&histogram) {
                write_distribution(to, &name, &model.name, histogram.unit(), distribution)?;
            }
        }
    }
    Ok(())
}

fn write_distribution(
    to: &mut String,
    name: &str,
    model: &str,
    unit: Unit,
    distribution: &Distribution,
) -> fmt::Result {
    let model = Escaped(model);
    for (bound, below) in distribution.below_powers() {
        // Integers below a bound are at most one less.
        let bound = if unit == Unit::Seconds { bound } else { bound - 1 };
        let bound = shown(unit, bound, 1e6);
        writeln!(to, "{name}_bucket{{model=\"{model}\",le=\"{bound}\"}} {below}")?;
    }
    let count = distribution.count();
    writeln!(to, "{name}_bucket{{model=\"{model}\",le=\"+Inf\"}} {count}")?;
    writeln!(to, "{name}_sum{{model=\"{model}\"}} {}", shown(unit, distribution.sum(), 1e6))?;
    writeln!(to, "{name}_count{{model=\"{model}\"}} {count}")
}

fn write_process(process: &ProcessSnapshot, to: &mut String) -> fmt::Result {
    let gauges = [
        ("process_resident_memory_bytes", "Bytes that are resident.", process.resident_bytes),
        (
            "firebox_peak_resident_memory_bytes",
            "The most bytes that were resident.",
            process.peak_resident_bytes,
        ),
        ("firebox_anonymous_memory_bytes", "Bytes that no file backs.", process.anonymous_bytes),
        ("firebox_mapped_file_bytes", "Resident bytes of mapped files.", process.mapped_file_bytes),
    ];
    for (name, help, value) in gauges {
        let Some(value) = value else { continue };
        family(to, name, "gauge", help)?;
        writeln!(to, "{name} {value}")?;
    }
    let faults = [("minor", process.minor_faults), ("major", process.major_faults)];
    let name = "firebox_process_faults_total";
    family(to, name, "counter", "Pages that were missing: minor ones were in memory, major ones on disk.")?;
    for (kind, value) in faults {
        let Some(value) = value else { continue };
        writeln!(to, "{name}{{kind=\"{kind}\"}} {value}")?;
    }
    Ok(())
}

fn write_budgets(snapshot: &Snapshot, to: &mut String) -> fmt::Result {
    family(to, "firebox_budget_bytes", "gauge", "Memory that a budget has in all.")?;
    for budget in &snapshot.budgets {
        let Some(total) = budget.total else { continue };
        writeln!(to, "firebox_budget_bytes{{budget=\"{}\"}} {total}", Escaped(&budget.name))?;
    }
    family(to, "firebox_budget_reserved_bytes", "gauge", "Memory that is kept for a part of a budget.")?;
    for budget in &snapshot.budgets {
        let Some(reserved) = budget.reserved else { continue };
        writeln!(to, "firebox_budget_reserved_bytes{{budget=\"{}\"}} {reserved}", Escaped(&budget.name))?;
    }
    family(to, "firebox_budget_most_held_bytes", "gauge", "The most that was held of a budget at once.")?;
    for budget in &snapshot.budgets {
        let name = Escaped(&budget.name);
        writeln!(to, "firebox_budget_most_held_bytes{{budget=\"{name}\"}} {}", budget.most_held)?;
    }
    family(to, "firebox_budget_held_bytes", "gauge", "Memory that is held of a budget, by what it is for.")?;
    for budget in &snapshot.budgets {
        for (account, bytes) in &budget.held {
            let (name, account) = (Escaped(&budget.name), account.name());
            writeln!(to, "firebox_budget_held_bytes{{budget=\"{name}\",account=\"{account}\"}} {bytes}")?;
        }
    }
    Ok(())
}

fn family(to: &mut String, name: &str, kind: &str, help: &str) -> fmt::Result {
    writeln!(to, "# HELP {name} {help}\n# TYPE {name} {kind}")
}

/// Formats a number in its exported unit. `each` is the number of stored units in a second.
fn shown(unit: Unit, value: u64, each: f64) -> String {
    match unit {
        Unit::Seconds => (value as f64 / each).to_string(),
        Unit::Count | Unit::Bytes => value.to_string(),
    }
}

/// The value of a label, with escapes.
struct Escaped<'a>(&'a str);

impl Display for Escaped<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for letter in self.0.chars() {
            match letter {
                '\\' => f.write_str("\\\\")?,
                '"' => f.write_str("\\\"")?,
                '\n' => f.write_str("\\n")?,
                letter => f.write_char(letter)?,
            }
        }
        Ok(())
    }
}
