//! Tests of `firebox serve` with several models in one memory budget.

use std::fmt::Write as _;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::TcpStream;
use std::path::Path;
use std::process::Child;
use std::thread;

use serde_json::{Value, json};

use crate::args;
use crate::fitting::{VOCABULARY, model_of};
use crate::support::*;

const NAMES: [&str; 3] = ["small", "middle", "large"];
const MIB: u64 = 1 << 20;

/// Three models of 32, 64 and 160 MB whose tokens are words.
fn models(folder: &Path) {
    let words: serde_json::Map<String, Value> =
        (0..VOCABULARY).map(|token| (format!("w{token}"), token.into())).collect();
    let tokenizer = json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
        "pre_tokenizer": {"type": "WhitespaceSplit"}, "post_processor": null, "decoder": null,
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "w0"}
    });
    for (at, (name, layers)) in NAMES.iter().zip([2, 6, 18]).enumerate() {
        let place = folder.join(name);
        std::fs::create_dir(&place).unwrap();
        model_of(&place, layers, at as u64 + 7);
        std::fs::write(place.join("tokenizer.json"), tokenizer.to_string()).unwrap();
    }
}

fn prompt(from: usize, count: usize) -> Vec<usize> {
    (0..count).map(|at| (from + at * 7919) % VOCABULARY).collect()
}

/// Returns the tokens of a model that runs alone.
fn alone(model: &Path, prompt: &[usize], most: usize) -> Vec<u64> {
    let ids: Vec<String> = prompt.iter().map(usize::to_string).collect();
    let (ids, most) = (ids.join(","), most.to_string());
    let ran =
        firebox_with(args!["run", model, "--ids", ids, "-n", most, "--temp", "0", "--ignore-eos", "--json"]);
    serde_json::from_value(ran.ends_with(0).json()["tokens"].clone()).unwrap()
}

/// `firebox serve`, which ends with this.
pub struct Serving {
    child: Child,
    pub address: String,
}

impl Serving {
    pub fn start(folder: &Path, more: &[&str]) -> Self {
        let mut child =
            firebox().current_dir(folder).args(["serve", "--port", "0"]).args(more).spawn().unwrap();
        let mut remarks = BufReader::new(child.stderr.take().unwrap());
        let mut said = String::new();
        while !said.contains("/v1\n") {
            let before = said.len();
            assert!(remarks.read_line(&mut said).unwrap() > 0, "it ended: {}", &said[..before]);
        }
        let address = said.split("http://").nth(1).unwrap().split('/').next().unwrap().to_owned();
        // The server would block on a full pipe if its output were not read.
        thread::spawn(move || std::io::copy(&mut remarks, &mut std::io::sink()));
        Self { child, address }
    }

    fn ask(&self, method: &str, path: &str, body: &str) -> (u16, Value) {
        self.ask_as("", method, path, body)
    }

    fn ask_as(&self, key: &str, method: &str, path: &str, body: &str) -> (u16, Value) {
        let mut stream = TcpStream::connect(&self.address).unwrap();
        let mut text = format!("{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n");
        write!(text, "Authorization: Bearer {key}\r\n").unwrap();
        write!(text, "Content-Type: application/json\r\nContent-Length: {}\r\n\r\n{body}", body.len())
            .unwrap();
        stream.write_all(text.as_bytes()).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        let (head, body) = answer.split_once("\r\n\r\n").unwrap();
        let status = head.split(' ').nth(1).unwrap().parse().unwrap();
        (status, serde_json::from_str(body).unwrap_or_else(|error| panic!("{error}: {answer}")))
    }

    fn engine(&self) -> Value {
        self.ask("GET", "/v1/engine", "").1
    }

    fn said(&self, model: &str, prompt: &[usize], most: usize) -> Vec<u64> {
        let body = json!({
            "model": model, "prompt": prompt, "max_tokens": most, "temperature": 0, "ignore_eos": true
        });
        let (status, answer) = self.ask("POST", "/v1/completions", &body.to_string());
        assert_eq!(status, 200, "{answer}");
        let text = answer["choices"][0]["text"].as_str().unwrap();
        text.split_whitespace().map(|word| word[1..].parse().unwrap()).collect()
    }

    /// The most that the process has had in memory.
    #[cfg(target_os = "linux")]
    pub fn peak(&self) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.id())).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
        line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() << 10
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn budget<'a>(engine: &'a Value, name: &str) -> &'a Value {
    let budgets = engine["budgets"].as_array().unwrap();
    budgets.iter().find(|budget| budget["name"] == name).unwrap_or_else(|| panic!("no {name} in {budgets:?}"))
}

fn of<'a>(engine: &'a Value, model: &str) -> &'a Value {
    engine["models"].as_array().unwrap().iter().find(|known| known["name"] == model).unwrap()
}

fn toml(folder: &Path, settings: &str, more: [&str; 3]) {
    let mut text = format!("[serve]\n{settings}\n");
    for (name, more) in NAMES.iter().zip(more) {
        write!(text, "[[model]]\nname = {name:?}\npath = {name:?}\n{more}\n").unwrap();
    }
    std::fs::write(folder.join("firebox.toml"), text).unwrap();
}

/// A process with a shared memory budget stays within it, whichever model is asked, and each model answers as it does alone.
#[cfg(target_os = "linux")]
#[test]
fn models_share_a_memory_that_is_smaller_than_they_are() {
    const MEMORY: u64 = 220 * MIB;
    let folder = tempfile::tempdir().unwrap();
    models(folder.path());
    let terms = ["pinned = true\npriority = \"interactive\"", "", "lazy = true"];
    toml(folder.path(), &format!("memory = {MEMORY}"), terms);
    let server = Serving::start(folder.path(), &[]);
    let before = server.engine();
    assert_eq!(of(&before, "small")["priority"], "interactive");
    let opened = NAMES.map(|name| of(&before, name)["opened"].as_bool().unwrap());
    assert_eq!(opened, [true, true, false]);
    let asked: Vec<_> = (0..6).map(|at| (NAMES[at % 3], prompt(at, 20 + 30 * at), 8 + at)).collect();
    let said: Vec<Vec<u64>> = thread::scope(|scope| {
        let asking = |(name, prompt, most): &'_ (&'static str, Vec<usize>, usize)| {
            let (name, prompt, most, server) = (*name, prompt.clone(), *most, &server);
            scope.spawn(move || server.said(name, &prompt, most))
        };
        let asking: Vec<_> = asked.iter().map(asking).collect();
        asking.into_iter().map(|asking| asking.join().unwrap()).collect()
    });
    let (engine, peak) = (server.engine(), server.peak());
    assert!(peak <= MEMORY, "{} MiB of {}", peak / MIB, MEMORY / MIB);
    let all = budget(&engine, "all models");
    assert_eq!(all["total"], MEMORY);
    assert!(all["most_held"].as_u64().unwrap() <= MEMORY, "{all}");
    let held = |budget: &Value| -> u64 {
        budget["held"].as_object().unwrap().values().map(|bytes| bytes.as_u64().unwrap()).sum()
    };
    let parts: u64 = NAMES.iter().map(|name| held(budget(&engine, name))).sum();
    assert!(parts > 0 && parts <= held(all) && held(all) <= MEMORY, "{parts} of {}", held(all));
    for name in NAMES {
        let part = budget(&engine, name);
        assert!(part["total"].is_null() && part["reserved"].as_u64().unwrap() > 0, "{part}");
    }
    let states = |name: &str| -> Vec<String> {
        let segments = of(&engine, name)["segments"].as_array().unwrap();
        segments.iter().map(|segment| segment["state"].as_str().unwrap().to_owned()).collect()
    };
    assert!(!states("small").contains(&"streamed".to_owned()), "who is pinned stays: {:?}", states("small"));
    // Who was asked last may have taken from the other one until all of it was there.
    let rest = [states("middle"), states("large")].concat();
    assert!(rest.contains(&"streamed".to_owned()), "{rest:?}");
    drop(server);
    for ((name, prompt, most), said) in asked.iter().zip(said) {
        assert_eq!(said, alone(&folder.path().join(name), prompt, *most), "{name}");
    }
}

#[test]
fn memory_of_each_is_kept_for_it() {
    let folder = tempfile::tempdir().unwrap();
    models(folder.path());
    toml(folder.path(), "", ["memory = \"60M\"", "memory = \"80M\"", "memory = \"120M\""]);
    let server = Serving::start(folder.path(), &[]);
    let engine = server.engine();
    assert_eq!(budget(&engine, "all models")["total"], 260 * MIB);
    let filled = budget(&engine, "all models")["held"]["weights"].as_u64().unwrap();
    assert!(filled > 60 * MIB, "free memory is filled before the first request: {filled}");
    let reserved = NAMES.map(|name| budget(&engine, name)["reserved"].as_u64().unwrap());
    assert!(reserved[0] < reserved[1] && reserved[1] < reserved[2], "{reserved:?}");
    assert!(reserved.iter().sum::<u64>() < 260 * MIB);
    assert_eq!(server.said("large", &prompt(1, 9), 4).len(), 4);
    drop(server);
    // The memory of all models outranks the sum of the single ones, and each gets its part of it.
    let server = Serving::start(folder.path(), &["--memory", "240M"]);
    let engine = server.engine();
    assert_eq!(budget(&engine, "all models")["total"], 240 * MIB);
    let fewer = NAMES.map(|name| budget(&engine, name)["reserved"].as_u64().unwrap());
    assert!(
        fewer.iter().zip(reserved).all(|(fewer, reserved)| *fewer <= reserved),
        "{fewer:?} of {reserved:?}"
    );
}

#[test]
fn what_does_not_fit_is_told_at_once() {
    let folder = tempfile::tempdir().unwrap();
    models(folder.path());
    let serve = |more: &[&str]| {
        let mut command = firebox();
        Ran::from(
            command.current_dir(folder.path()).args(["serve", "--port", "0"]).args(more).output().unwrap(),
        )
    };
    toml(folder.path(), "", ["", "", "pinned = true"]);
    serve(&["--memory", "150M"])
        .fails(UNUSABLE, &["large", "beside the other models", "pin and reserve less"]);
    serve(&["--memory", "20M"]).fails(UNUSABLE, &["the program", "raise --memory"]);
    // A model that is opened later is looked for now.
    toml(folder.path(), "", ["", "", ""]);
    let text = std::fs::read_to_string(folder.path().join("firebox.toml")).unwrap();
    let text = text + "[[model]]\npath = \"nowhere\"\nlazy = true\n";
    std::fs::write(folder.path().join("firebox.toml"), text).unwrap();
    serve(&[]).fails(UNUSABLE, &["nowhere"]);
}

#[test]
fn a_pipeline_of_the_file_is_served_or_says_what_it_lacks() {
    let folder = tempfile::tempdir().unwrap();
    let write = |specialist: &str| {
        let text = format!(
            "[[model]]\nname = \"pocket\"\npath = {:?}\n[[model]]\nname = \"llama\"\npath = {:?}\n\
             [pipelines.assistant]\nrouter = \"pocket\"\nspecialists = {{ code = {specialist:?} }}\n\
             fallback = \"llama\"\n",
            fixture("../../assets/pocket"),
            gguf("llama")
        );
        std::fs::write(folder.path().join("firebox.toml"), text).unwrap();
    };
    write("pocket:code");
    let server = Serving::start(folder.path(), &[]);
    let ask = |text: &str| {
        let body = json!({
            "model": "assistant", "max_tokens": 4, "messages": [{"role": "user", "content": text}]
        });
        server.ask("POST", "/v1/chat/completions", &body.to_string())
    };
    assert_eq!(ask("Write a loop from 3 to 12.").1["model"], "pocket:code");
    assert_eq!(ask("Who are you?").1["model"], "llama");
    drop(server);
    // A model alone is served without the pipelines that need others.
    drop(Serving::start(folder.path(), &["pocket"]));
    write("nowhere");
    let mut command = firebox();
    let ran = command.current_dir(folder.path()).args(["serve", "--port", "0"]).output().unwrap();
    Ran::from(ran).fails(UNUSABLE, &["pipeline assistant", "nowhere", "there are: pocket, llama"]);
}

#[test]
fn cores_that_the_process_does_not_have_are_refused() {
    let serve = |cores: &str| firebox_with(args!["serve", gguf("llama"), "--port", "0", "--cores", cores]);
    serve("fast").fails(USAGE, &["--cores", "performance, all, or a list such as 0-3,6"]);
    if cfg!(target_os = "linux") {
        serve("60000").fails(UNUSABLE, &["cores 60000", "it may use 0"]);
    }
}

/// Bound threads compute the same tokens.
#[cfg(target_os = "linux")]
#[test]
fn a_server_computes_on_the_cores_that_it_is_given() {
    let folder = tempfile::tempdir().unwrap();
    models(folder.path());
    toml(folder.path(), "cores = 0", ["", "", ""]);
    let server = Serving::start(folder.path(), &["small"]);
    let said = server.said("small", &prompt(3, 40), 6);
    let tasks = std::fs::read_dir(format!("/proc/{}/task", server.child.id())).unwrap();
    let bound = tasks.filter(|task| {
        let status = task.as_ref().unwrap().path().join("status");
        let status = std::fs::read_to_string(status).unwrap_or_default();
        status.lines().any(|line| line == "Cpus_allowed_list:\t0")
    });
    assert_eq!(bound.count(), 1, "one thread for one core");
    drop(server);
    assert_eq!(said, alone(&folder.path().join("small"), &prompt(3, 40), 6));
}

#[test]
fn a_server_that_others_reach_needs_a_key_or_says_that_it_does_not() {
    let serve = |more: &[&str]| {
        let mut command = firebox();
        command.args(["serve"]).arg(gguf("llama")).args(["--port", "0", "--host", "0.0.0.0"]).args(more);
        Ran::from(command.output().unwrap())
    };
    serve(&[]).fails(USAGE, &["0.0.0.0", "--api-key", "--insecure"]);
    serve(&["--insecure=false"]).fails(USAGE, &["--insecure"]);
    serve(&["--tls-cert", "a.pem"]).fails(USAGE, &["--tls-key"]);
    serve(&["--tls-cert", "a.pem", "--tls-key", "a.key"]).fails(UNUSABLE, &["a.pem", "PEM"]);
}

/// Keys of firebox.toml and of a key file are replaced by SIGHUP; what is wrong changes nothing.
#[cfg(unix)]
#[test]
fn keys_are_read_anew_at_a_hangup() {
    let folder = tempfile::tempdir().unwrap();
    let (toml, keys) = (folder.path().join("firebox.toml"), folder.path().join("keys"));
    let listed = |key: &str| {
        let text = format!(
            "[serve]\napi_key_file = {keys:?}\n[[model]]\nname = \"llama\"\npath = {:?}\n[[key]]\nkey = {key:?}\nadmin = true\n",
            gguf("llama")
        );
        std::fs::write(&toml, text).unwrap();
    };
    listed("listed");
    std::fs::write(&keys, "filed\nadmin admin\n").unwrap();
    let server = Serving::start(folder.path(), &["--insecure"]);
    let status = |key: &str| server.ask_as(key, "GET", "/v1/models", "").0;
    let load = |key: &str| server.ask_as(key, "POST", "/v1/heads", "{\"head\": \"none\"}").0;
    assert_eq!(["listed", "filed", "admin", "new", ""].map(status), [200, 200, 200, 401, 401]);
    assert_eq!(
        ["listed", "filed", "admin"].map(load),
        [404, 403, 404],
        "an admin is told that there is no such head"
    );
    let hang_up = || {
        let pid = server.child.id().to_string();
        assert!(std::process::Command::new("kill").args(["-HUP", &pid]).status().unwrap().success());
    };
    let comes_to = |key: &str, expected: u16| {
        let began = std::time::Instant::now();
        while status(key) != expected {
            assert!(began.elapsed() < std::time::Duration::from_secs(60), "{key:?} is not {expected}");
            thread::sleep(std::time::Duration::from_millis(20));
        }
    };
    listed("new");
    std::fs::write(&keys, "filed\nnewer\n").unwrap();
    hang_up();
    comes_to("newer", 200);
    assert_eq!(["listed", "filed", "admin", "new", ""].map(status), [401, 200, 401, 200, 401]);
    // An empty file is a mistake; the next one is taken.
    std::fs::write(&keys, "").unwrap();
    hang_up();
    std::fs::write(&keys, "last\n").unwrap();
    hang_up();
    comes_to("last", 200);
    assert_eq!(["filed", "newer", "new"].map(status), [401, 401, 200]);
}
