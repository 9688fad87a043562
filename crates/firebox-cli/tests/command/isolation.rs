//! A soak in which one API key does the worst it may while another one asks.

use std::collections::HashSet;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::TcpStream;
use std::panic::AssertUnwindSafe;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use firebox_testing::model::SyntheticModel;
use serde_json::{Value, json};

use crate::args;
use crate::serve::Serving;
use crate::support::*;

/// What the server may take.
const MEMORY: u64 = 900 << 20;

/// How much longer than beside one polite neighbour the first token and the slowest of a hundred later ones may take.
const MOST: (f64, f64) = (3.0, 2.0);

/// Tokens of a prompt and an answer of the key that is measured.
const ANSWER: (usize, usize) = (24, 32);

impl Serving {
    /// Sends a request and returns the connection.
    fn send_as(&self, key: &str, path: &str, body: &str) -> std::io::Result<TcpStream> {
        let mut stream = TcpStream::connect(&self.address)?;
        stream.set_read_timeout(Some(Duration::from_secs(120)))?;
        stream.set_write_timeout(Some(Duration::from_secs(30)))?;
        let head = format!(
            "POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nAuthorization: Bearer {key}\r\n\
             Content-Type: application/json\r\nContent-Length: {}\r\n\r\n",
            body.len()
        );
        stream.write_all(head.as_bytes())?;
        stream.write_all(body.as_bytes())?;
        Ok(stream)
    }
}

/// The times of streamed answers, in seconds.
#[derive(Debug, Default)]
struct Times {
    first: Vec<f64>,
    gaps: Vec<f64>,
}

impl Times {
    /// Asks one short question after the other for a while, each another one than before. Each has to be answered.
    fn measure(server: &Serving, lasting: Duration, seed: &mut usize) -> Self {
        let (mut times, began) = (Self::default(), Instant::now());
        while began.elapsed() < lasting {
            *seed += 1;
            let prompt: Vec<usize> = (0..ANSWER.0).map(|at| 5 + (at * 131 + *seed * 17) % 1000).collect();
            let body = json!({
                "model": "model", "prompt": prompt, "max_tokens": ANSWER.1, "temperature": 0, "ignore_eos": true,
                "stream": true,
            });
            let asked = Instant::now();
            let stream = server.send_as("measured", "/v1/completions", &body.to_string()).unwrap();
            let mut lines = BufReader::new(stream).lines();
            let status = lines.next().unwrap().unwrap();
            assert!(status.starts_with("HTTP/1.1 200"), "{status}");
            let mut last: Option<Instant> = None;
            let mut is_done = false;
            for line in lines {
                let line = line.unwrap();
                is_done |= line.contains("[DONE]");
                assert!(!line.contains("\"error\""), "{line}");
                if !line.starts_with("data: {") {
                    continue;
                }
                let now = Instant::now();
                match last.replace(now) {
                    None => times.first.push((now - asked).as_secs_f64()),
                    Some(before) => times.gaps.push((now - before).as_secs_f64()),
                }
            }
            assert!(is_done, "an answer ended early");
        }
        times
    }

    /// Returns the median time to the first token, and the gap that 99 of 100 do not exceed.
    fn figures(mut self) -> (f64, f64) {
        self.first.sort_by(f64::total_cmp);
        self.gaps.sort_by(f64::total_cmp);
        let (first, gap) = (self.first.len() / 2, self.gaps.len() * 99 / 100);
        (self.first[first], self.gaps[gap])
    }
}

/// What the worst key does, each on connections of its own, until it is told to end.
fn attack(server: &Serving, which: usize, ends: &AtomicBool) {
    let answer = |more: Value| {
        let mut body = json!({
            "model": "model", "prompt": "w", "max_tokens": 512, "n": 64, "ignore_eos": true, "stream": true,
        });
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        body.to_string()
    };
    let (path, body, reads_slowly) = match which % 4 {
        0 => ("/v1/completions", answer(json!({})), true),
        1 => {
            let property = |at: usize| {
                (format!("property{at}"), json!({"type": "string", "pattern": "^[a-z]{1,40}(x|y){3,60}$"}))
            };
            let properties: serde_json::Map<String, Value> = (0..200).map(property).collect();
            // A grammar that differs is compiled anew.
            let schema = json!({"type": "object", "properties": properties, "title": which.to_string()});
            ("/v1/completions", answer(json!({"json_schema": schema})), true)
        }
        2 => {
            let texts: Vec<String> =
                (0..2048).map(|at| format!("text {at} of {which} that has a few words more")).collect();
            ("/v1/embeddings", json!({"model": "model", "input": texts}).to_string(), false)
        }
        _ => ("/v1/completions", answer(json!({"prompt": "word ".repeat((8 << 20) / 5 - 100)})), false),
    };
    while !ends.load(Ordering::Relaxed) {
        let Ok(mut stream) = server.send_as("worst", path, &body) else {
            thread::sleep(Duration::from_millis(50));
            continue;
        };
        let _ = stream.set_read_timeout(Some(Duration::from_millis(200)));
        let mut bytes = vec![0; if reads_slowly { 1 } else { 64 << 10 }];
        while !ends.load(Ordering::Relaxed) {
            match stream.read(&mut bytes) {
                Ok(0) => break,
                Ok(_) if reads_slowly => thread::sleep(Duration::from_millis(100)),
                Ok(_) => {}
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
                Err(_) => break,
            }
        }
    }
}

/// Opens connections that say nothing, again and again.
fn occupy(server: &Serving, ends: &AtomicBool) {
    let (mut held, address) = (Vec::new(), server.address.parse().unwrap());
    while !ends.load(Ordering::Relaxed) {
        if held.len() == 1024 {
            held.drain(..256);
        }
        match TcpStream::connect_timeout(&address, Duration::from_millis(200)) {
            Ok(stream) => held.push(stream),
            Err(_) => thread::sleep(Duration::from_millis(10)),
        }
    }
}

/// Returns a tokenizer in which every token of the model has a text: a token without one is no event of a stream.
fn with_more_words(tokenizer: &[u8]) -> String {
    let mut tokenizer: Value = serde_json::from_slice(tokenizer).unwrap();
    let added = tokenizer["added_tokens"].as_array().cloned().unwrap_or_default();
    let words = tokenizer["model"]["vocab"].as_object_mut().unwrap();
    let known: HashSet<u64> = words
        .values()
        .filter_map(Value::as_u64)
        .chain(added.iter().filter_map(|one| one["id"].as_u64()))
        .collect();
    for id in (0..SyntheticModel::QWEN3_0_6B.vocab as u64).filter(|id| !known.contains(id)) {
        words.insert(format!("t{id}"), id.into());
    }
    tokenizer.to_string()
}

#[test]
#[ignore = "soak: four minutes of a quiet machine, FIREBOX_ISOLATION_SECONDS for others"]
fn the_worst_of_one_key_is_little_to_another() {
    let seconds = std::env::var("FIREBOX_ISOLATION_SECONDS").map_or(120, |text| text.parse().unwrap());
    let folder = tempfile::tempdir().unwrap();
    let (plain, model) = (folder.path().join("plain"), folder.path().join("model"));
    SyntheticModel::QWEN3_0_6B.write(&plain, 7).unwrap();
    let pocket = fixture("../../assets/pocket");
    std::fs::copy(pocket.join("tokenizer_config.json"), plain.join("tokenizer_config.json")).unwrap();
    let tokenizer = with_more_words(&std::fs::read(pocket.join("tokenizer.json")).unwrap());
    std::fs::write(plain.join("tokenizer.json"), tokenizer).unwrap();
    firebox_with(args!["import", &plain, &model, "--quantize", "q4"]).ends_with(0);
    std::fs::remove_dir_all(&plain).unwrap();
    let mut options = vec!["model", "--name", "model", "--memory", "900M"];
    for key in ["measured", "polite", "worst"] {
        options.extend(["--api-key", key]);
    }
    let server = Serving::start(folder.path(), &options);
    // Weights are read and buffers grow.
    let mut seed = 0;
    Times::measure(&server, Duration::from_secs(5), &mut seed);

    let ends = AtomicBool::new(false);
    let beside_polite = thread::scope(|scope| {
        scope.spawn(|| {
            while !ends.load(Ordering::Relaxed) {
                let body = json!({"model": "model", "prompt": "w", "max_tokens": 64, "ignore_eos": true});
                let mut stream = server.send_as("polite", "/v1/completions", &body.to_string()).unwrap();
                stream.read_to_end(&mut Vec::new()).unwrap();
            }
        });
        let times = Times::measure(&server, Duration::from_secs(seconds / 2), &mut seed);
        ends.store(true, Ordering::Relaxed);
        times.figures()
    });

    let ends = AtomicBool::new(false);
    let beside_worst = thread::scope(|scope| {
        for which in 0..24 {
            let (server, ends) = (&server, &ends);
            scope.spawn(move || attack(server, which, ends));
        }
        scope.spawn(|| occupy(&server, &ends));
        // A failure would otherwise leave the attack running.
        let times = std::panic::catch_unwind(AssertUnwindSafe(|| {
            Times::measure(&server, Duration::from_secs(seconds), &mut seed)
        }));
        ends.store(true, Ordering::Relaxed);
        times
    });
    let peak = server.peak();
    let beside_worst = beside_worst.unwrap_or_else(|panic| std::panic::resume_unwind(panic)).figures();
    let times = [beside_polite, beside_worst].map(|(first, gap)| (first * 1e3, gap * 1e3));
    println!(
        "first token and 99th gap in ms, beside a polite and the worst key: {times:?}; {} MB",
        peak / 1_000_000
    );
    assert!(peak <= MEMORY, "{peak} bytes");
    let ratios = (beside_worst.0 / beside_polite.0, beside_worst.1 / beside_polite.1);
    assert!(ratios.0 <= MOST.0 && ratios.1 <= MOST.1, "{ratios:?} times as long: {times:?}");
}
