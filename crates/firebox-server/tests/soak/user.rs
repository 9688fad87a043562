//! A user with a session who does random actions.

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::action::{Action, Answered, Beginning};
use crate::client::{Answer, read_some, request};
use crate::reference::References;
use crate::servers::{HEADS, MODELS, TestServer};
use crate::tally::Tally;

/// Longer than anything takes on a busy machine.
const TIMEOUT: Duration = Duration::from_secs(600);

/// Actions before a session is replaced; a comparison recomputes all of them.
const MAX_ACTIONS: usize = 40;
const BRANCHES: usize = 4;

const SYSTEMS: [&str; 2] = ["You are a helpful assistant. The user's name is Ada.", "Be brief."];
const FACTS: [&str; 4] = [
    "The user likes tea.",
    "The user's dog is called Rex.",
    "The user's dog is called Bruno.",
    "The user lives in Oslo.",
];
const TEXTS: [&str; 10] = [
    "Who are you?",
    "What can you do?",
    "My brother is called Tom.",
    "Who is my brother?",
    "What is my name?",
    "My dog is called Max. What is my dog called?",
    "Write a function that adds two numbers.",
    "Where do I live?",
    "Summarize: the train was late, so we walked home in the rain.",
    "Thank you!",
];

/// A seeded random generator.
#[derive(Debug)]
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub fn below(&mut self, most: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ (mixed >> 31)) % most
    }

    pub fn one_in(&mut self, count: u64) -> bool {
        self.below(count) == 0
    }

    fn any<'a, T>(&mut self, all: &'a [T]) -> Option<&'a T> {
        if all.is_empty() { None } else { all.get(self.below(all.len() as u64) as usize) }
    }

    fn one<T: Copy>(&mut self, all: &[T]) -> T {
        all[self.below(all.len() as u64) as usize]
    }
}

/// A session as its user knows it.
struct Open {
    /// Its path.
    path: String,
    beginning: Beginning,
    actions: Vec<Action>,
    /// The last state reported by the server.
    seen: Value,
}

impl Open {
    /// Ids of remembered turns of a kind; of all but the opening by default.
    fn turns(&self, kind: Option<&str>) -> Vec<u64> {
        let is_meant = |turn: &&Value| match kind {
            Some(kind) => turn["kind"] == kind,
            None => turn["kind"] != "opening",
        };
        let turns = self.seen["turns"].as_array().unwrap().iter();
        turns.filter(|turn| turn["evicted"] == false).filter(is_meant).map(id).collect()
    }

    fn evicted(&self) -> usize {
        self.seen["turns"].as_array().unwrap().iter().filter(|turn| turn["evicted"] == true).count()
    }

    fn turn(&self, turn: u64) -> &Value {
        self.seen["turns"].as_array().unwrap().iter().find(|held| id(held) == turn).unwrap()
    }

    fn branches(&self, is_meant: impl Fn(&Value) -> bool) -> Vec<u64> {
        self.seen["branches"].as_array().unwrap().iter().filter(|branch| is_meant(branch)).map(id).collect()
    }
}

fn id(value: &Value) -> u64 {
    value["id"].as_u64().unwrap()
}

/// How long a user runs.
#[derive(Debug, Clone, Copy)]
pub enum RunLimit {
    Until(Instant),
    Actions(u32),
}

pub struct User {
    number: u64,
    random: Random,
    compared_every: u64,
    open: Option<Open>,
}

/// A user's run against a server.
struct Run<'a> {
    user: &'a mut User,
    address: SocketAddr,
    sessions: &'a Path,
    references: &'a References,
    tally: &'a Tally,
}

impl User {
    pub fn new(number: u64, seed: u64, compared_every: u64) -> Self {
        Self { number, random: Random::new(seed.wrapping_mul(1000) + number), compared_every, open: None }
    }

    /// Does random actions, then saves the session for the next server.
    pub fn stay(&mut self, server: &TestServer, references: &References, tally: &Tally, stay: RunLimit) {
        let mut visit =
            Run { user: self, address: server.address, sessions: &server.sessions, references, tally };
        if visit.user.open.is_some() && visit.restore() {
            tally.one("restore after a restart");
        }
        match stay {
            RunLimit::Until(end) => {
                while Instant::now() < end {
                    visit.act();
                }
            }
            RunLimit::Actions(actions) => (0..actions).for_each(|_| visit.act()),
        }
        visit.save();
    }
}

impl Run<'_> {
    fn act(&mut self) {
        let tired = |open: &Open| open.actions.len() >= MAX_ACTIONS;
        if self.user.open.as_ref().is_some_and(tired) {
            self.end();
        }
        if self.user.open.is_none() {
            return self.begin();
        }
        match self.user.random.below(100) {
            0..46 => self.say(),
            46..54 => self.leave(),
            54..62 => self.set_head(),
            62..68 => self.fork(),
            68..72 => self.branch("switch"),
            72..75 => self.branch("promote"),
            75..77 => self.branch("branch dropped"),
            77..84 => self.mark(),
            84..88 => self.tell(),
            88..92 => self.rewind(),
            92..94 => {
                if self.save() {
                    self.drop_session();
                    self.restore();
                }
            }
            94..97 => self.chat(),
            97..99 => self.break_off(),
            _ => self.end(),
        }
    }

    fn session(&mut self) -> &mut Open {
        self.user.open.as_mut().unwrap()
    }

    fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(self.address).unwrap();
        stream.set_read_timeout(Some(TIMEOUT)).unwrap();
        stream
    }

    fn ask(&self, method: &str, path: &str, body: &Value) -> Answer {
        let body = if method == "POST" { body.to_string() } else { String::new() };
        let mut stream = self.connect();
        let head = format!("Host: localhost\r\nConnection: close\r\nContent-Length: {}", body.len());
        stream.write_all(format!("{method} {path} HTTP/1.1\r\n{head}\r\n\r\n{body}").as_bytes()).unwrap();
        let mut text = String::new();
        let read = stream.read_to_string(&mut text);
        read.unwrap_or_else(|error| panic!("{method} {path}: {error}, after {text:?}"));
        Answer::parse(&text)
    }

    /// Returns a successful response. A rejection changed nothing; if pages ran out the session ends, because
    /// its use of pages is unknown.
    fn done(&mut self, what: &str, answer: Answer) -> Option<Value> {
        match answer.status {
            200 => {
                self.tally.one(what);
                Some(answer.ok())
            }
            400 | 404 => {
                self.tally.one(&format!("{what} refused"));
                None
            }
            503 => {
                let text = answer.text(503);
                if is_late(&text) {
                    self.tally.one(&format!("{what} too late"));
                    return None;
                }
                assert!(lacks_room(&text), "{what}: {text}");
                self.lacked_room(what);
                None
            }
            _ => panic!("{what}: {answer:?}"),
        }
    }

    fn lacked_room(&mut self, what: &str) {
        self.tally.one(&format!("{what} without room"));
        if self.user.open.is_some() {
            self.drop_session();
            self.user.open = None;
        }
    }

    /// Changes the session and records the action.
    fn does(&mut self, what: &str, path: &str, body: &Value, action: Action) {
        let method = if what == "branch dropped" { "DELETE" } else { "POST" };
        let path = format!("{}/{path}", self.session().path);
        let answer = self.ask(method, &path, body);
        if let Some(seen) = self.done(what, answer) {
            let open = self.session();
            open.seen = seen;
            open.actions.push(action);
        }
    }

    fn begin(&mut self) {
        let random = &mut self.user.random;
        let model = if random.one_in(2) { MODELS[0].0 } else { random.one(&MODELS).0 };
        let head = if model == MODELS[0].0 { random.one(&HEADS).map(str::to_owned) } else { None };
        let system = random.one_in(2).then(|| random.one(&SYSTEMS).to_owned());
        let facts: Vec<String> =
            random.one_in(3).then(|| random.one(&FACTS).to_owned()).into_iter().collect();
        let turn_tokens = random.one(&[None, Some(120), Some(180)]);
        let named = head.as_ref().map_or(model.to_owned(), |head| format!("{model}:{head}"));
        let wish = json!({"model": named, "system": system, "facts": facts, "turn_tokens": turn_tokens});
        let answer = self.ask("POST", "/v1/sessions", &wish);
        let Some(seen) = self.done("begin", answer) else { return };
        let capacity = |of: &str| seen[of]["capacity"].as_u64().unwrap() as usize;
        let (turn_tokens, fact_tokens) = (capacity("turn_tokens"), capacity("fact_tokens"));
        let beginning = Beginning { model, system, facts, head, turn_tokens, fact_tokens };
        let path = format!("/v1/sessions/{}", seen["id"].as_str().unwrap());
        self.user.open = Some(Open { path, beginning, actions: Vec::new(), seen });
    }

    fn question(&mut self) -> (String, usize, bool) {
        let random = &mut self.user.random;
        (random.one(&TEXTS).to_owned(), 1 + random.below(40) as usize, random.one_in(3))
    }

    fn say(&mut self) {
        let (text, most, ignores_end) = self.question();
        let stream = self.user.random.one_in(2);
        let body = json!({
            "content": text, "max_tokens": most, "temperature": 0, "ignore_eos": ignores_end, "stream": stream,
        });
        let path = format!("{}/say", self.session().path);
        let answer = self.ask("POST", &path, &body);
        let done = if stream && answer.status == 200 {
            let text = answer.text(200);
            let events = text.split("\n\n").filter_map(|event| event.strip_prefix("data: "));
            let last = events.filter(|event| *event != "[DONE]").last().unwrap();
            let last: Value = serde_json::from_str(last).unwrap();
            if last["type"] == "error" && lacks_room(&text) {
                return self.lacked_room("answer");
            }
            assert_eq!(last["type"], "done", "{text}");
            self.tally.one("answer");
            Some(last)
        } else {
            self.done("answer", answer)
        };
        let Some(mut done) = done else { return };
        let tokens = done["usage"]["completion_tokens"].as_u64().unwrap() as usize;
        self.tally.add("token", tokens as u64);
        let heard = Answered { text: done["answer"].as_str().unwrap().to_owned(), tokens };
        let open = self.session();
        let before = open.evicted();
        open.seen = done["session"].take();
        let evicted = open.evicted().saturating_sub(before);
        open.actions.push(Action::Said { text, most, ignores_end, heard });
        self.tally.add("evicted turn", evicted as u64);
        if self.user.random.one_in(self.user.compared_every) {
            self.compare();
        }
    }

    /// Disconnects during an answer. The text so far stays.
    fn leave(&mut self) {
        let (text, most, ignores_end) = self.question();
        let pieces = 1 + self.user.random.below(6) as usize;
        let body = json!({
            "content": text, "max_tokens": most, "temperature": 0, "ignore_eos": ignores_end, "stream": true,
        });
        let path = self.session().path.clone();
        let newest = |seen: &Value| seen["turns"].as_array().unwrap().last().map(|turn| turn["id"].clone());
        let before = newest(&self.session().seen);
        let mut stream = self.connect();
        stream.write_all(request(&format!("{path}/say"), "", &body.to_string()).as_bytes()).unwrap();
        let (mut read, mut bytes) = (String::new(), [0; 1024]);
        loop {
            let count = read_some(&mut stream, &mut bytes);
            read.push_str(&String::from_utf8_lossy(&bytes[..count]));
            if count == 0 || read.matches("\"delta\"").count() >= pieces {
                break;
            }
        }
        drop(stream);
        if !read.starts_with("HTTP/1.1 200") {
            let answer = Answer::parse(&read);
            assert!(self.done("client left", answer).is_none());
            return;
        }
        self.tally.one("client left");
        let began = Instant::now();
        let seen = loop {
            let seen = self.ask("GET", &path, &Value::Null).ok();
            if seen["busy"] == false {
                break seen;
            }
            assert!(began.elapsed() < TIMEOUT, "an answer without a receiver goes on: {seen}");
            std::thread::sleep(Duration::from_millis(5));
        };
        if read.contains("\"error\"") {
            assert!(lacks_room(&read), "{read}");
            return self.lacked_room("client left");
        }
        if newest(&seen) == before {
            // The error came after the disconnect.
            return self.lacked_room("client left");
        }
        let newest = seen["turns"].as_array().unwrap().last().unwrap();
        let tokens = newest["answer"]["tokens"].as_u64().unwrap() as usize;
        self.tally.add("token", tokens as u64);
        let heard = Answered { text: newest["answer"]["text"].as_str().unwrap().to_owned(), tokens };
        // An answer that ended by itself was fed to its last token, and its closing text separately: this
        // decides when turns are evicted.
        let most = if newest["answer"]["finish"] == "cancelled" { tokens } else { most };
        let open = self.session();
        open.seen = seen;
        open.actions.push(Action::Said { text, most, ignores_end, heard });
    }

    fn set_head(&mut self) {
        if self.session().beginning.model != MODELS[0].0 {
            return self.say();
        }
        let head = self.user.random.one(&HEADS);
        self.does("head", "head", &json!({"head": head}), Action::SetHead(head.map(str::to_owned)));
    }

    fn fork(&mut self) {
        let open = self.session();
        let turns = open.turns(Some("turn"));
        if open.branches(|_| true).len() >= BRANCHES {
            return self.branch("branch dropped");
        }
        let random = &mut self.user.random;
        let turn = if random.one_in(2) { random.any(&turns).copied() } else { None };
        self.does("fork", "fork", &json!({"turn": turn}), Action::Forked(turn));
    }

    fn branch(&mut self, what: &str) {
        let is_meant = |branch: &Value| match what {
            "switch" => branch["active"] == false,
            _ => !branch["parent"].is_null(),
        };
        let branches = self.session().branches(is_meant);
        let Some(&branch) = self.user.random.any(&branches) else { return self.say() };
        let path = format!("branches/{branch}");
        match what {
            "switch" => self.does(what, &path, &json!({}), Action::Switched(branch)),
            "promote" => self.does(what, &format!("{path}/promote"), &json!({}), Action::Promoted(branch)),
            _ => self.does(what, &path, &Value::Null, Action::Dropped(branch)),
        }
    }

    fn mark(&mut self) {
        let turns = self.session().turns(Some("turn"));
        let Some(&turn) = self.user.random.any(&turns) else { return self.say() };
        let held = self.session().turn(turn);
        let (pinned, hidden) = (held["pinned"] == true, !held["hidden"].is_null());
        let path = format!("turns/{turn}");
        if self.user.random.one_in(3) {
            self.does("pin", &path, &json!({"pinned": !pinned}), Action::Pinned(turn, !pinned));
        } else {
            self.does("hide", &path, &json!({"hidden": !hidden}), Action::Hidden(turn, !hidden));
        }
    }

    fn tell(&mut self) {
        let text = self.user.random.one(&FACTS).to_owned();
        let facts = self.session().turns(Some("fact"));
        let body = json!({"text": text});
        match self.user.random.any(&facts).copied() {
            Some(fact) => {
                self.does("supersede", &format!("facts/{fact}"), &body, Action::Superseded(fact, text))
            }
            None => self.does("fact", "facts", &body, Action::BranchState(text)),
        }
    }

    fn rewind(&mut self) {
        let turns = self.session().turns(None);
        let Some(&turn) = self.user.random.any(&turns) else { return self.say() };
        self.does("rewind", "rewind", &json!({"turn": turn}), Action::Rewound(turn));
    }

    fn name(&self) -> String {
        format!("user-{}", self.user.number)
    }

    /// Saves the session if there is one; returns true on success.
    fn save(&mut self) -> bool {
        let name = self.name();
        let Some(open) = &self.user.open else { return false };
        let path = format!("{}/save", open.path);
        let answer = self.ask("POST", &path, &json!({"name": name}));
        self.done("save", answer).is_some()
    }

    /// Restores the session; returns true on success.
    fn restore(&mut self) -> bool {
        let (model, name) = (self.session().beginning.model, self.name());
        let answer = self.ask("POST", "/v1/sessions", &json!({"model": model, "restore": name}));
        // The session was deleted before.
        let open = self.user.open.take().unwrap();
        let Some(seen) = self.done("restore", answer) else { return false };
        let path = format!("/v1/sessions/{}", seen["id"].as_str().unwrap());
        let mut actions = open.actions;
        actions.push(Action::Restored);
        self.user.open = Some(Open { path, seen, actions, ..open });
        true
    }

    fn end(&mut self) {
        self.drop_session();
        self.user.open = None;
    }

    fn drop_session(&mut self) {
        let path = self.session().path.clone();
        self.ask("DELETE", &path, &Value::Null).ok();
    }

    fn chat(&mut self) {
        let (text, most, _) = self.question();
        let model = self.user.random.one(&MODELS).0;
        let messages = [json!({"role": "user", "content": text})];
        let body = json!({"model": model, "messages": messages, "max_tokens": most, "temperature": 0});
        let answer = self.ask("POST", "/v1/chat/completions", &body);
        let Some(chat) = self.done("chat", answer) else { return };
        let tokens = chat["usage"]["completion_tokens"].as_u64().unwrap();
        self.tally.add("token", tokens);
        if !self.user.random.one_in(self.user.compared_every) {
            return;
        }
        let said = chat["choices"][0]["message"]["content"].as_str().unwrap().to_owned();
        let heard = Answered { text: said, tokens: tokens as usize };
        assert_eq!(heard, self.references.chat(model, &text, most), "{model}: {text:?}");
        self.tally.add("answer recomputed", 1);
        self.tally.add("token recomputed", tokens);
    }

    /// Disconnects before an answer, or while sending.
    fn break_off(&mut self) {
        let (text, ..) = self.question();
        let messages = [json!({"role": "user", "content": text})];
        let body = json!({"model": MODELS[0].0, "messages": messages, "max_tokens": 400, "ignore_eos": true});
        let request = request("/v1/chat/completions", "", &body.to_string());
        let sent = if self.user.random.one_in(2) { request.len() } else { request.len() / 2 };
        self.connect().write_all(&request.as_bytes()[..sent]).unwrap();
        self.tally.one("connection broken off");
    }

    /// Recomputes the whole session.
    fn compare(&mut self) {
        let name = format!("compared-{}", self.user.number);
        let path = format!("{}/save", self.session().path);
        let answer = self.ask("POST", &path, &json!({"name": name}));
        if self.done("save", answer).is_none() {
            return;
        }
        let file = self.sessions.join("open").join(format!("{name}.session"));
        let Open { beginning, actions, .. } = self.user.open.as_ref().unwrap();
        match self.references.compare(beginning, actions, &file) {
            Ok(compared) => {
                self.tally.one("comparison");
                self.tally.add("answer recomputed", compared.answers);
                self.tally.add("token recomputed", compared.tokens);
            }
            Err(wrong) => panic!("{wrong}\nin {beginning:?}\n{actions:#?}"),
        }
    }
}

/// Returns true if an error reports a lack of memory, or a head that a busy machine did not load in time.
/// Neither changed anything.
fn is_late(text: &str) -> bool {
    text.contains("was not in memory within")
}

fn lacks_room(text: &str) -> bool {
    text.contains("pages of the pool are in use") || text.contains("do not fit")
}
