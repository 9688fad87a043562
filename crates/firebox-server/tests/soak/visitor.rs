//! A client with a conversation that stays, who does all that can be done to it, in an order by chance.

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::client::{Answer, read_some, request};
use crate::deed::{Beginning, Deed, Heard};
use crate::house::{HEADS, House, MODELS};
use crate::plain::Plains;
use crate::tally::Tally;

/// Longer than anything takes on a machine that does ten things beside this one.
const PATIENCE: Duration = Duration::from_secs(600);

/// A conversation of more deeds ends, and another begins: what is recomputed is all of it.
const DEEDS: usize = 40;
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

/// Numbers by chance that are the same for the same seed.
#[derive(Debug)]
pub struct Dice(u64);

impl Dice {
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

/// A session as its client knows it.
struct Open {
    /// As a path.
    path: String,
    beginning: Beginning,
    deeds: Vec<Deed>,
    /// As the server said last.
    seen: Value,
}

impl Open {
    /// Turns of a kind that are remembered; of any but the first, where none is said.
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

/// How long somebody stays.
#[derive(Debug, Clone, Copy)]
pub enum Stay {
    Until(Instant),
    Deeds(u32),
}

pub struct Visitor {
    number: u64,
    dice: Dice,
    shadowed: u64,
    open: Option<Open>,
}

/// A visitor in a house.
struct Visit<'a> {
    visitor: &'a mut Visitor,
    address: SocketAddr,
    sessions: &'a Path,
    plains: &'a Plains,
    tally: &'a Tally,
}

impl Visitor {
    pub fn new(number: u64, seed: u64, shadowed: u64) -> Self {
        Self { number, dice: Dice::new(seed.wrapping_mul(1000) + number), shadowed, open: None }
    }

    /// Does this and that. What the conversation is by then is saved, and goes on in the next house.
    pub fn stay(&mut self, house: &House, plains: &Plains, tally: &Tally, stay: Stay) {
        let mut visit =
            Visit { visitor: self, address: house.address, sessions: &house.sessions, plains, tally };
        if visit.visitor.open.is_some() && visit.restore() {
            tally.one("restore after a restart");
        }
        match stay {
            Stay::Until(end) => {
                while Instant::now() < end {
                    visit.act();
                }
            }
            Stay::Deeds(deeds) => (0..deeds).for_each(|_| visit.act()),
        }
        visit.save();
    }
}

impl Visit<'_> {
    fn act(&mut self) {
        let tired = |open: &Open| open.deeds.len() >= DEEDS;
        if self.visitor.open.as_ref().is_some_and(tired) {
            self.end();
        }
        if self.visitor.open.is_none() {
            return self.begin();
        }
        match self.visitor.dice.below(100) {
            0..46 => self.say(),
            46..54 => self.leave(),
            54..62 => self.wear(),
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
        self.visitor.open.as_mut().unwrap()
    }

    fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(self.address).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
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

    /// What was asked for, if it was done. What is refused has changed nothing; where there is no room, the conversation
    /// ends, because what it has used of its pages is not known.
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
        if self.visitor.open.is_some() {
            self.drop_session();
            self.visitor.open = None;
        }
    }

    /// Does something to the session, and notes it where it was done.
    fn does(&mut self, what: &str, path: &str, body: &Value, deed: Deed) {
        let method = if what == "branch dropped" { "DELETE" } else { "POST" };
        let path = format!("{}/{path}", self.session().path);
        let answer = self.ask(method, &path, body);
        if let Some(seen) = self.done(what, answer) {
            let open = self.session();
            open.seen = seen;
            open.deeds.push(deed);
        }
    }

    fn begin(&mut self) {
        let dice = &mut self.visitor.dice;
        let model = if dice.one_in(2) { MODELS[0].0 } else { dice.one(&MODELS).0 };
        let head = if model == MODELS[0].0 { dice.one(&HEADS).map(str::to_owned) } else { None };
        let system = dice.one_in(2).then(|| dice.one(&SYSTEMS).to_owned());
        let facts: Vec<String> = dice.one_in(3).then(|| dice.one(&FACTS).to_owned()).into_iter().collect();
        let turn_tokens = dice.one(&[None, Some(120), Some(180)]);
        let named = head.as_ref().map_or(model.to_owned(), |head| format!("{model}:{head}"));
        let wish = json!({"model": named, "system": system, "facts": facts, "turn_tokens": turn_tokens});
        let answer = self.ask("POST", "/v1/sessions", &wish);
        let Some(seen) = self.done("begin", answer) else { return };
        let capacity = |of: &str| seen[of]["capacity"].as_u64().unwrap() as usize;
        let (turn_tokens, fact_tokens) = (capacity("turn_tokens"), capacity("fact_tokens"));
        let beginning = Beginning { model, system, facts, head, turn_tokens, fact_tokens };
        let path = format!("/v1/sessions/{}", seen["id"].as_str().unwrap());
        self.visitor.open = Some(Open { path, beginning, deeds: Vec::new(), seen });
    }

    fn question(&mut self) -> (String, usize, bool) {
        let dice = &mut self.visitor.dice;
        (dice.one(&TEXTS).to_owned(), 1 + dice.below(40) as usize, dice.one_in(3))
    }

    fn say(&mut self) {
        let (text, most, ignores_end) = self.question();
        let stream = self.visitor.dice.one_in(2);
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
        let heard = Heard { text: done["answer"].as_str().unwrap().to_owned(), tokens };
        let open = self.session();
        let before = open.evicted();
        open.seen = done["session"].take();
        let evicted = open.evicted().saturating_sub(before);
        open.deeds.push(Deed::Said { text, most, ignores_end, heard });
        self.tally.add("evicted turn", evicted as u64);
        if self.visitor.dice.one_in(self.visitor.shadowed) {
            self.shadow();
        }
    }

    /// Leaves in the middle of an answer. What was said by then stays.
    fn leave(&mut self) {
        let (text, most, ignores_end) = self.question();
        let pieces = 1 + self.visitor.dice.below(6) as usize;
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
            assert!(began.elapsed() < PATIENCE, "an answer that nobody hears goes on: {seen}");
            std::thread::sleep(Duration::from_millis(5));
        };
        if read.contains("\"error\"") {
            assert!(lacks_room(&read), "{read}");
            return self.lacked_room("client left");
        }
        if newest(&seen) == before {
            // What went wrong came when nobody listened any more.
            return self.lacked_room("client left");
        }
        let newest = seen["turns"].as_array().unwrap().last().unwrap();
        let tokens = newest["answer"]["tokens"].as_u64().unwrap() as usize;
        self.tally.add("token", tokens as u64);
        let heard = Heard { text: newest["answer"]["text"].as_str().unwrap().to_owned(), tokens };
        // An answer that ended by itself has been fed to its last token, and what closes it is fed apart: that decides what is forgotten
        // when.
        let most = if newest["answer"]["finish"] == "cancelled" { tokens } else { most };
        let open = self.session();
        open.seen = seen;
        open.deeds.push(Deed::Said { text, most, ignores_end, heard });
    }

    fn wear(&mut self) {
        if self.session().beginning.model != MODELS[0].0 {
            return self.say();
        }
        let head = self.visitor.dice.one(&HEADS);
        self.does("head", "head", &json!({"head": head}), Deed::Wore(head.map(str::to_owned)));
    }

    fn fork(&mut self) {
        let open = self.session();
        let turns = open.turns(Some("turn"));
        if open.branches(|_| true).len() >= BRANCHES {
            return self.branch("branch dropped");
        }
        let dice = &mut self.visitor.dice;
        let turn = if dice.one_in(2) { dice.any(&turns).copied() } else { None };
        self.does("fork", "fork", &json!({"turn": turn}), Deed::Forked(turn));
    }

    fn branch(&mut self, what: &str) {
        let is_meant = |branch: &Value| match what {
            "switch" => branch["active"] == false,
            _ => !branch["parent"].is_null(),
        };
        let branches = self.session().branches(is_meant);
        let Some(&branch) = self.visitor.dice.any(&branches) else { return self.say() };
        let path = format!("branches/{branch}");
        match what {
            "switch" => self.does(what, &path, &json!({}), Deed::Switched(branch)),
            "promote" => self.does(what, &format!("{path}/promote"), &json!({}), Deed::Promoted(branch)),
            _ => self.does(what, &path, &Value::Null, Deed::Dropped(branch)),
        }
    }

    fn mark(&mut self) {
        let turns = self.session().turns(Some("turn"));
        let Some(&turn) = self.visitor.dice.any(&turns) else { return self.say() };
        let held = self.session().turn(turn);
        let (pinned, hidden) = (held["pinned"] == true, !held["hidden"].is_null());
        let path = format!("turns/{turn}");
        if self.visitor.dice.one_in(3) {
            self.does("pin", &path, &json!({"pinned": !pinned}), Deed::Pinned(turn, !pinned));
        } else {
            self.does("hide", &path, &json!({"hidden": !hidden}), Deed::Hidden(turn, !hidden));
        }
    }

    fn tell(&mut self) {
        let text = self.visitor.dice.one(&FACTS).to_owned();
        let facts = self.session().turns(Some("fact"));
        let body = json!({"text": text});
        match self.visitor.dice.any(&facts).copied() {
            Some(fact) => {
                self.does("supersede", &format!("facts/{fact}"), &body, Deed::Superseded(fact, text))
            }
            None => self.does("fact", "facts", &body, Deed::Told(text)),
        }
    }

    fn rewind(&mut self) {
        let turns = self.session().turns(None);
        let Some(&turn) = self.visitor.dice.any(&turns) else { return self.say() };
        self.does("rewind", "rewind", &json!({"turn": turn}), Deed::Rewound(turn));
    }

    fn name(&self) -> String {
        format!("visitor-{}", self.visitor.number)
    }

    /// Whether it could be saved, if there is anything to save.
    fn save(&mut self) -> bool {
        let name = self.name();
        let Some(open) = &self.visitor.open else { return false };
        let path = format!("{}/save", open.path);
        let answer = self.ask("POST", &path, &json!({"name": name}));
        self.done("save", answer).is_some()
    }

    /// Whether it goes on where it was saved.
    fn restore(&mut self) -> bool {
        let (model, name) = (self.session().beginning.model, self.name());
        let answer = self.ask("POST", "/v1/sessions", &json!({"model": model, "restore": name}));
        // There is none to end, if it cannot.
        let open = self.visitor.open.take().unwrap();
        let Some(seen) = self.done("restore", answer) else { return false };
        let path = format!("/v1/sessions/{}", seen["id"].as_str().unwrap());
        let mut deeds = open.deeds;
        deeds.push(Deed::Restored);
        self.visitor.open = Some(Open { path, seen, deeds, ..open });
        true
    }

    fn end(&mut self) {
        self.drop_session();
        self.visitor.open = None;
    }

    fn drop_session(&mut self) {
        let path = self.session().path.clone();
        self.ask("DELETE", &path, &Value::Null).ok();
    }

    fn chat(&mut self) {
        let (text, most, _) = self.question();
        let model = self.visitor.dice.one(&MODELS).0;
        let messages = [json!({"role": "user", "content": text})];
        let body = json!({"model": model, "messages": messages, "max_tokens": most, "temperature": 0});
        let answer = self.ask("POST", "/v1/chat/completions", &body);
        let Some(chat) = self.done("chat", answer) else { return };
        let tokens = chat["usage"]["completion_tokens"].as_u64().unwrap();
        self.tally.add("token", tokens);
        if !self.visitor.dice.one_in(self.visitor.shadowed) {
            return;
        }
        let said = chat["choices"][0]["message"]["content"].as_str().unwrap().to_owned();
        let heard = Heard { text: said, tokens: tokens as usize };
        assert_eq!(heard, self.plains.chat(model, &text, most), "{model}: {text:?}");
        self.tally.add("answer recomputed", 1);
        self.tally.add("token recomputed", tokens);
    }

    /// Leaves before anything could be answered, or in the middle of asking.
    fn break_off(&mut self) {
        let (text, ..) = self.question();
        let messages = [json!({"role": "user", "content": text})];
        let body = json!({"model": MODELS[0].0, "messages": messages, "max_tokens": 400, "ignore_eos": true});
        let request = request("/v1/chat/completions", "", &body.to_string());
        let sent = if self.visitor.dice.one_in(2) { request.len() } else { request.len() / 2 };
        self.connect().write_all(&request.as_bytes()[..sent]).unwrap();
        self.tally.one("connection broken off");
    }

    /// Has all of the conversation recomputed.
    fn shadow(&mut self) {
        let name = format!("shadow-{}", self.visitor.number);
        let path = format!("{}/save", self.session().path);
        let answer = self.ask("POST", &path, &json!({"name": name}));
        if self.done("save", answer).is_none() {
            return;
        }
        let file = self.sessions.join("open").join(format!("{name}.session"));
        let Open { beginning, deeds, .. } = self.visitor.open.as_ref().unwrap();
        match self.plains.compare(beginning, deeds, &file) {
            Ok(compared) => {
                self.tally.one("shadow");
                self.tally.add("answer recomputed", compared.answers);
                self.tally.add("token recomputed", compared.tokens);
            }
            Err(wrong) => panic!("{wrong}\nin {beginning:?}\n{deeds:#?}"),
        }
    }
}

/// Whether an error says that there was no memory for it.
/// Whether a head could not be read in time, where the machine does something else: it was asked too soon, and nothing has changed.
fn is_late(text: &str) -> bool {
    text.contains("was not in memory within")
}

fn lacks_room(text: &str) -> bool {
    text.contains("pages of the pool are in use") || text.contains("do not fit")
}
