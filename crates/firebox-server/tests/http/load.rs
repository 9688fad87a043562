//! A load test with many streaming clients.

use std::collections::HashMap;
use std::io::{BufRead as _, BufReader, Write as _};
use std::time::{Duration, Instant};

use firebox_runtime::{Model, device};
use serde_json::{Value, json};

use crate::client::{Running, request, root};

/// Concurrent clients.
const CLIENTS: usize = 64;
const QUESTIONS: [&str; 6] = [
    "Who are you?",
    "What can you do?",
    "My dog is called Max. What is my dog called?",
    "Write a function that adds two numbers.",
    "I live in Oslo. Where do I live?",
    "Thank you!",
];

/// Observations of a client.
#[derive(Default)]
struct Observations {
    answers: usize,
    first: Times,
    between: Times,
}

/// A histogram of durations by eighths of powers of two of microseconds. Its size is constant, as the test
/// checks memory growth.
struct Times([u64; 256]);

impl Default for Times {
    fn default() -> Self {
        Self([0; 256])
    }
}

impl Times {
    fn push(&mut self, time: Duration) {
        let eighths = (time.as_secs_f64() * 1e6).max(1.0).log2() * 8.0;
        self.0[(eighths as usize).min(255)] += 1;
    }

    fn add(&mut self, other: &Self) {
        for (count, more) in self.0.iter_mut().zip(other.0) {
            *count += more;
        }
    }

    fn count(&self) -> u64 {
        self.0.iter().sum()
    }

    /// Returns the duration at a quantile.
    fn quantile(&self, share: f64) -> Duration {
        let mut left = (self.count() as f64 * share) as u64;
        let at = self.0.iter().position(|count| {
            let here = left < *count;
            left = left.saturating_sub(*count);
            here
        });
        Duration::from_secs_f64(((at.unwrap_or(255) + 1) as f64 / 8.0).exp2() / 1e6)
    }
}

fn asked(question: &str) -> Value {
    json!({
        "model": "pocket", "stream": true, "temperature": 0, "max_tokens": 48,
        "messages": [{"role": "user", "content": question}],
    })
}

/// Reads a streamed answer and the times of its chunks.
fn taken(server: &Running, question: &str, seen: &mut Observations) -> String {
    let mut stream = server.connect().stream;
    let began = Instant::now();
    stream.write_all(request("/v1/chat/completions", "", &asked(question).to_string()).as_bytes()).unwrap();
    let (mut text, mut last, mut ended) = (String::new(), None::<Instant>, false);
    for line in BufReader::new(stream).lines() {
        let line = line.unwrap();
        let Some(event) = line.strip_prefix("data: ") else { continue };
        if event == "[DONE]" {
            ended = true;
            continue;
        }
        let event: Value = serde_json::from_str(event).unwrap();
        let Some(piece) = event["choices"][0]["delta"]["content"].as_str().filter(|piece| !piece.is_empty())
        else {
            assert!(event.get("error").is_none(), "{event}");
            continue;
        };
        let now = Instant::now();
        match last.replace(now) {
            None => seen.first.push(now - began),
            Some(before) => seen.between.push(now - before),
        }
        text.push_str(piece);
    }
    assert!(ended, "the stream of {question:?} broke off after {text:?}");
    seen.answers += 1;
    text
}

/// Returns the resident memory of the process, which runs server and clients.
#[cfg(target_os = "linux")]
fn resident() -> u64 {
    let pages = std::fs::read_to_string("/proc/self/statm").unwrap();
    pages.split(' ').nth(1).unwrap().parse::<u64>().unwrap() * 4096
}

/// Every answer equals that of a single client. `FIREBOX_LOAD_SECONDS` sets the duration.
#[test]
#[cfg(target_os = "linux")]
fn concurrent_streams_are_complete() {
    let seconds: f64 = std::env::var("FIREBOX_LOAD_SECONDS").map_or(1.5, |text| text.parse().unwrap());
    let model = Model::open(root("assets/pocket"), &device("cpu").unwrap()).unwrap();
    let server = Running::serve(vec![("pocket".into(), model)], |_| {});
    let alone: HashMap<&str, String> = QUESTIONS
        .iter()
        .map(|question| (*question, taken(&server, question, &mut Observations::default())))
        .collect();
    let round = |time: Duration| {
        let began = Instant::now();
        let (server, alone) = (&server, &alone);
        std::thread::scope(|scope| {
            let clients: Vec<_> = (0..CLIENTS)
                .map(|client| {
                    scope.spawn(move || {
                        let mut seen = Observations::default();
                        for at in client.. {
                            let question = QUESTIONS[at % QUESTIONS.len()];
                            assert_eq!(taken(server, question, &mut seen), alone[question], "{question}");
                            if began.elapsed() >= time {
                                break;
                            }
                        }
                        seen
                    })
                })
                .collect();
            clients.into_iter().map(|client| client.join().unwrap()).fold(
                Observations::default(),
                |mut all, seen| {
                    all.answers += seen.answers;
                    all.first.add(&seen.first);
                    all.between.add(&seen.between);
                    all
                },
            )
        })
    };
    // Pools and threads have their full size after the first fifth.
    round(Duration::from_secs_f64(seconds / 5.0));
    let before = resident();
    let all = round(Duration::from_secs_f64(seconds));
    let after = resident();
    println!(
        "{CLIENTS} clients, {seconds} s: {} answers, {} pieces; first after {:?} (p99 {:?}), then every {:?} (p99 {:?}); \
         {} MiB before, {} after",
        all.answers,
        all.between.count() + all.first.count(),
        all.first.quantile(0.5),
        all.first.quantile(0.99),
        all.between.quantile(0.5),
        all.between.quantile(0.99),
        before >> 20,
        after >> 20,
    );
    assert!(all.answers >= CLIENTS);
    assert!(after < before + before / 10 + (8 << 20), "{before} bytes before, {after} after");
    server.comes_to_of("firebox_running_requests", "pocket", 0);
}
