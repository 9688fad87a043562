//! Embeddings beside chats: turns, cancelling and memory.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Instant;

use firebox_model::{Observer, Passed, StreamedConfig};
use firebox_runtime::{Model, device};
use firebox_store::{Checkpoint, ReadMethod, StreamConfig};
use serde_json::{Value, json};

use crate::client::{Running, root};

/// Rows of one pass of a prompt, and those of sequences that decode.
const CHUNK_ROWS: usize = 512 + 16;

/// Counts the rows that go through layers between two tokens of a chat.
#[derive(Debug, Default)]
struct RowsBetweenTokens {
    rows: AtomicUsize,
    /// Rows of every gap so far.
    gaps: Mutex<Vec<usize>>,
}

impl Observer for RowsBetweenTokens {
    fn follows(&self) -> bool {
        true
    }

    fn layer(&self, _: usize, rows: usize, _: Instant) {
        self.rows.fetch_add(rows, Ordering::Relaxed);
    }

    fn logits(&self, _: usize, _: Instant) {
        self.gaps.lock().unwrap().push(self.rows.swap(0, Ordering::Relaxed));
    }

    fn pass(&self, _: Passed, _: Instant) {}

    fn replay(&self, _: usize, _: Instant) {}
}

/// A model whose weights are all read from disk while it runs.
fn streamed() -> Model {
    let checkpoint = Checkpoint::open(root("tests/fixtures/gguf/llama/model.gguf")).unwrap();
    let stream = StreamConfig { buffers: 2, ..StreamConfig::default() };
    let config = StreamedConfig { stream, method: Some(ReadMethod::Buffered), ..StreamedConfig::default() };
    Model::streamed(checkpoint, &device("cpu").unwrap(), &config).unwrap()
}

fn texts(count: usize) -> Value {
    let text = |at| format!("the quick brown fox {at} jumps over the lazy dog");
    json!({ "model": "llama", "input": (0..count).map(text).collect::<Vec<_>>() })
}

#[test]
fn a_token_of_a_streamed_model_waits_for_one_chunk_of_texts_at_most() {
    let model = streamed();
    let layers = model.decoder().unwrap().layers();
    let seen = Arc::new(RowsBetweenTokens::default());
    let server = Running::serve(vec![("llama".into(), model.clone())], |_| {});
    model.decoder().unwrap().set_observer(seen.clone());
    let chat = json!({
        "prompt": "Hello", "max_tokens": 150, "temperature": 0, "stream": true, "ignore_eos": true,
    });
    let chats = AtomicBool::new(true);
    thread::scope(|scope| {
        let embedding = scope.spawn(|| {
            let mut requests = 0;
            while chats.load(Ordering::Relaxed) {
                server.post("/v1/embeddings", &texts(512)).ok();
                requests += 1;
            }
            requests
        });
        while seen.rows.load(Ordering::Relaxed) == 0 {
            thread::yield_now();
        }
        server.post("/v1/completions", &chat).events();
        chats.store(false, Ordering::Relaxed);
        assert!(embedding.join().unwrap() > 0);
    });
    let mut gaps = seen.gaps.lock().unwrap();
    // Texts run alone before the first token.
    gaps.remove(0);
    let (most, shared) =
        (*gaps.iter().max().unwrap(), gaps.iter().filter(|rows| **rows > 2 * layers).count());
    assert!(shared > 0, "texts and the chat ran at the same time: {gaps:?}");
    assert!(most <= CHUNK_ROWS * layers, "{most} rows in {layers} layers between two tokens: {gaps:?}");
}

#[test]
fn wrong_dimensions_are_refused_before_computing() {
    let model = streamed();
    let seen = Arc::new(RowsBetweenTokens::default());
    let server = Running::serve(vec![("llama".into(), model.clone())], |_| {});
    model.decoder().unwrap().set_observer(seen.clone());
    let mut body = texts(64);
    body["dimensions"] = 33.into();
    server.post("/v1/embeddings", &body).fails(400, "dimensions");
    assert_eq!(seen.rows.load(Ordering::Relaxed), 0, "no text went through the layers");
    let vectors = |body: &Value| -> Vec<Vec<f64>> {
        let answer = server.post("/v1/embeddings", body).ok();
        let data = answer["data"].as_array().unwrap().iter();
        data.map(|data| serde_json::from_value(data["embedding"].clone()).unwrap()).collect()
    };
    body["dimensions"] = 32.into();
    let whole = vectors(&body);
    assert_eq!(whole.len(), 64);
    body["dimensions"] = 5.into();
    for (short, whole) in vectors(&body).iter().zip(&whole) {
        assert_eq!((short.len(), whole.len()), (5, 32));
        let length = whole[..5].iter().map(|number| number * number).sum::<f64>().sqrt();
        assert!(short.iter().zip(whole).all(|(short, whole)| (short - whole / length).abs() < 1e-6));
    }
}

#[test]
fn vectors_are_written_as_they_are_computed_and_computing_ends_with_the_connection() {
    let model = streamed();
    let layers = model.decoder().unwrap().layers();
    let seen = Arc::new(RowsBetweenTokens::default());
    let server = Running::serve(vec![("llama".into(), model.clone())], |_| {});
    model.decoder().unwrap().set_observer(seen.clone());
    let long: Vec<String> = (0..2000).map(|at| format!("the quick brown fox {at} ").repeat(12)).collect();
    let mut reading = server.open("/v1/embeddings", &json!({ "model": "llama", "input": long }));
    assert!(reading.read_some() > 0);
    let at_first = seen.rows.load(Ordering::Relaxed);
    drop(reading);
    server.comes_to("firebox_running_requests", 0);
    let at_end = seen.rows.load(Ordering::Relaxed);
    // Each text has more than 60 tokens.
    let all = 2000 * 60 * layers;
    assert!(at_first < all / 2, "{at_first} rows before the first byte");
    assert!(at_end < all, "{at_end} rows in spite of the end of the connection");
    let (mut few, whole) =
        (texts(70), model.embed(&["the quick brown fox 7 jumps over the lazy dog"], &Default::default()));
    let found = server.post("/v1/embeddings", &few).ok();
    let vector: Vec<f32> = serde_json::from_value(found["data"][7]["embedding"].clone()).unwrap();
    assert_eq!((vector, found["data"].as_array().unwrap().len()), (whole.unwrap().remove(0), 70));
    few["encoding_format"] = "base64".into();
    let packed = server.post("/v1/embeddings", &few).ok();
    assert!(packed["data"][69]["embedding"].is_string() && packed["usage"] == found["usage"]);
}
