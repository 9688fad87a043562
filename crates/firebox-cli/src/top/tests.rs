//! Tests of the view of `firebox top` and of the HTTP source of its figures.

use std::io::{Read as _, Write as _};
use std::net::TcpListener;
use std::time::Instant;

use firebox_runtime::telemetry::{Counter, Gauge, Histogram, Telemetry, render};
use ratatui::Terminal;
use ratatui::backend::TestBackend;

use super::metrics::parse;
use super::*;

/// Returns the metrics of a server of two models after so many tokens.
fn said(tokens: u64) -> String {
    let telemetry = Telemetry::default();
    for name in ["chat", "code\x1b[31m"] {
        let model = telemetry.model(name);
        model.add(Counter::GeneratedTokens, tokens);
        model.add(Counter::DeadlineSlips, 3);
        model.add(Counter::Rows, tokens);
        model.took(Histogram::TimeToFirstToken, Duration::from_millis(40));
        telemetry.ask(&model, "test", |snapshot| {
            snapshot.gauges.insert(Gauge::RunningRequests, 2);
            snapshot.gauges.insert(Gauge::Parts, 28);
            snapshot.gauges.insert(Gauge::KeptParts, 14);
            true
        });
    }
    render(&telemetry.snapshot())
}

/// Starts a server that sends these answers in order, repeating the last, to clients with its key.
fn serve(answers: Vec<(u16, String)>, key: Option<&'static str>) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    thread::spawn(move || {
        let mut answers = answers.into_iter().peekable();
        let mut last = None;
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            let mut head = Vec::new();
            let mut byte = [0];
            while !head.ends_with(b"\r\n\r\n") && stream.read(&mut byte).is_ok_and(|read| read == 1) {
                head.push(byte[0]);
            }
            let head = String::from_utf8(head).unwrap();
            assert!(head.starts_with("GET /metrics "), "{head}");
            let knows = key.is_none_or(|key| head.contains(&format!("Bearer {key}")));
            let (status, body) = match (knows, answers.next()) {
                (false, _) => (401, String::new()),
                (true, Some(answer)) => last.insert(answer).clone(),
                (true, None) => last.clone().unwrap(),
            };
            let length = body.len();
            let head =
                format!("HTTP/1.1 {status} x\r\ncontent-length: {length}\r\nconnection: close\r\n\r\n");
            let _ = stream.write_all((head + &body).as_bytes());
        }
    });
    url
}

fn seen(view: &View) -> String {
    let mut terminal = Terminal::new(TestBackend::new(110, 26)).unwrap();
    terminal.draw(|frame| view.draw(frame)).unwrap();
    let buffer = terminal.backend().buffer().clone();
    let line = |row: u16| (0..110).map(|column| buffer[(column, row)].symbol()).collect::<String>();
    (0..26).map(line).collect::<Vec<_>>().join("\n")
}

fn view() -> View {
    let mut view = View::new("http://here".into());
    let began = Instant::now();
    for (index, tokens) in [10, 30, 90].into_iter().enumerate() {
        let at = began + Duration::from_millis(500) * index as u32;
        view.history.add(Figures::of(&parse(&said(tokens)).unwrap(), at));
    }
    view
}

#[test]
fn everything_is_seen_and_a_name_cannot_steer_the_terminal() {
    let mut view = view();
    let text = seen(&view);
    for word in [
        "http://here",
        "chat",
        "120.0",
        "14/28",
        "deadline slips",
        "tokens a second of chat",
        "resident",
        "q leaves",
    ] {
        assert!(text.contains(word), "no {word:?} in\n{text}");
    }
    assert!(text.contains('█') && !text.contains('\x1b'), "{text}");
    view.step(true);
    view.is_paused = true;
    let text = seen(&view);
    assert!(text.contains("tokens a second of code\\u{1b}[31m") && text.contains("paused"), "{text}");
    view.step(true);
    assert_eq!(view.chosen, 1, "there is no third model");
}

#[test]
fn trouble_is_seen_and_what_was_known_stays() {
    let mut view = view();
    view.trouble = Some("the server has left".into());
    let text = seen(&view);
    assert!(text.contains("the server has left") && text.contains("chat"), "{text}");
    seen(&View::new("refused yet".into()));
}

#[test]
fn a_small_terminal_is_no_reason_to_fail() {
    for (width, height) in [(1, 1), (20, 3), (300, 5)] {
        let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
        terminal.draw(|frame| view().draw(frame)).unwrap();
    }
}

#[test]
fn figures_come_over_http() {
    let url = serve(vec![(200, said(10)), (200, said(40))], Some("secret"));
    let source = Metrics::at(&format!("{url}/v1/"), Some("secret"));
    let mut view = View::new(source.name().to_owned());
    assert_eq!(view.server, url);
    for _ in 0..2 {
        view.history.add(source.read().unwrap());
        thread::sleep(Duration::from_millis(20));
    }
    assert!(view.history.rate("chat", Counter::GeneratedTokens) > 0.0);
    let text = view.plain();
    assert!(text.contains("14/28") && text.contains("deadline slips"), "{text}");
}

#[test]
fn who_is_not_let_in_is_told_what_to_do() {
    let url = serve(vec![(200, said(1))], Some("secret"));
    let refused = |key: Option<&str>| Metrics::at(&url, key).read().unwrap_err().to_string();
    assert!(refused(None).contains("--api-key"));
    assert!(refused(Some("wrong")).contains("does not know"));
    let other = serve(vec![(404, "no".into()), (200, "<html>".into()), (500, String::new())], None);
    for word in ["Firebox server", "line 1", "500"] {
        let said = Metrics::at(&other, None).read().unwrap_err().to_string();
        assert!(said.contains(word), "{said}");
    }
    let refused = Metrics::at("127.0.0.1:1", None).read().unwrap_err().to_string();
    assert!(refused.contains("firebox serve") && refused.contains("http://127.0.0.1:1"), "{refused}");
}

#[test]
fn readings_come_in_and_a_pause_leaves_them_out() {
    let mut view = view();
    let (sender, receiver) = sync_channel(4);
    let newer = || Figures::of(&parse(&said(500)).unwrap(), Instant::now());
    let tokens =
        |view: &View| view.history.newest().unwrap().models["chat"].counter(Counter::GeneratedTokens);
    view.is_paused = true;
    sender.send(Ok(newer())).unwrap();
    take(&mut view, &receiver);
    assert_eq!(tokens(&view), 90.0);
    view.is_paused = false;
    sender.send(Ok(newer())).unwrap();
    sender.send(Err(anyhow::anyhow!("gone"))).unwrap();
    take(&mut view, &receiver);
    assert_eq!((tokens(&view), view.trouble.as_deref()), (500.0, Some("gone")));
}
