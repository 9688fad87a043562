//! Operations on a session in any order.
#![no_main]

use std::path::Path;
use std::sync::LazyLock;

use firebox_runtime::{Model, check_session_operations, device};

static MODELS: LazyLock<[Model; 2]> = LazyLock::new(|| {
    ["llama", "qwen3_5_text"].map(|name| {
        let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/reference").join(name);
        Model::open(fixture, &device("cpu").expect("every build has it")).expect("a fixture")
    })
});
static FILE: LazyLock<tempfile::TempPath> =
    LazyLock::new(|| tempfile::NamedTempFile::new().expect("a temporary file").into_temp_path());

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    let [model, operations @ ..] = input else { return };
    check_session_operations(&MODELS[usize::from(model % 2)], &FILE, operations);
});
