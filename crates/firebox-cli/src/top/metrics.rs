//! A parser of the Prometheus text format.

/// One line of what a server says to Prometheus.
#[derive(Debug, Clone, PartialEq)]
pub struct Sample {
    pub name: String,
    pub labels: Vec<(String, String)>,
    pub value: f64,
}

impl Sample {
    /// A label's value.
    pub fn label(&self, name: &str) -> Option<&str> {
        self.labels.iter().find(|(label, _)| label == name).map(|(_, value)| value.as_str())
    }
}

/// Reads the text format of Prometheus; what is wrong is said with its line.
pub fn parse(text: &str) -> Result<Vec<Sample>, String> {
    let lines =
        text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty() && !line.starts_with('#'));
    lines
        .map(|(index, line)| {
            sample(line.trim()).ok_or_else(|| format!("line {} is no sample: {line}", index + 1))
        })
        .collect()
}

fn sample(line: &str) -> Option<Sample> {
    let end = line.find(|letter: char| letter == '{' || letter.is_whitespace())?;
    let (name, rest) = line.split_at(end);
    let (labels, rest) = match rest.strip_prefix('{') {
        Some(rest) => labels(rest)?,
        None => (Vec::new(), rest),
    };
    // A time may follow.
    let value = rest.split_whitespace().next()?;
    let value = match value {
        "+Inf" => f64::INFINITY,
        "-Inf" => f64::NEG_INFINITY,
        number => number.parse().ok()?,
    };
    (!name.is_empty()).then(|| Sample { name: name.to_owned(), labels, value })
}

/// Labels, and what is behind their brace.
fn labels(mut rest: &str) -> Option<(Vec<(String, String)>, &str)> {
    let mut found = Vec::new();
    loop {
        rest = rest.trim_start().trim_start_matches(',').trim_start();
        if let Some(rest) = rest.strip_prefix('}') {
            return Some((found, rest));
        }
        let (name, behind) = rest.split_once("=\"")?;
        let mut value = String::new();
        let mut letters = behind.char_indices();
        let end = loop {
            match letters.next()? {
                (at, '"') => break at,
                (_, '\\') => value.push(match letters.next()?.1 {
                    'n' => '\n',
                    letter => letter,
                }),
                (_, letter) => value.push(letter),
            }
        };
        found.push((name.to_owned(), value));
        rest = &behind[end + 1..];
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use firebox_runtime::telemetry::{Counter, Histogram, Telemetry, render};

    #[test]
    fn what_is_rendered_is_read() {
        let telemetry = Telemetry::default();
        let model = telemetry.model("a \"b\"\\\n{c}, d");
        model.add(Counter::GeneratedTokens, 7);
        model.took(Histogram::TimeToFirstToken, std::time::Duration::from_millis(3));
        let samples = parse(&render(&telemetry.snapshot())).unwrap();
        let tokens = samples.iter().find(|sample| sample.name == "firebox_generated_tokens_total").unwrap();
        assert_eq!((tokens.value, tokens.label("model")), (7.0, Some("a \"b\"\\\n{c}, d")));
        let last = samples.iter().find(|sample| {
            sample.name.ends_with("first_token_seconds_bucket") && sample.label("le") == Some("+Inf")
        });
        assert_eq!(last.unwrap().value, 1.0);
    }

    #[test]
    fn other_servers_are_read_too_and_nonsense_is_refused_with_its_line() {
        let text = "# HELP x y\n\nup 1 1700000000\nrpc{a=\"1\", b=\"2\",} +Inf\n";
        let samples = parse(text).unwrap();
        assert_eq!((samples[0].value, samples[1].value), (1.0, f64::INFINITY));
        assert_eq!(samples[1].label("b"), Some("2"));
        for bad in ["up", "up{", "up{a=\"1\" 1", "up one", "{a=\"1\"} 1", "<html>"] {
            let text = format!("up 1\n{bad}\n");
            assert!(parse(&text).unwrap_err().contains("line 2"), "{bad}");
        }
    }
}
