//! A saved session, or a persistent prefix, which is one: whoever made the file, it is refused, or a session goes on from
//! it. The hash is made to fit what was changed, because damage is found by it before anything else is read.
#![no_main]

use std::path::Path;
use std::sync::LazyLock;

use firebox_runtime::{KvType, Model, SessionFile, device};

/// Inputs that begin so replace the record of the sequence by what follows; others overwrite tensors.
const RECORD: u8 = b'{';

struct Base {
    model: Model,
    header: serde_json::Value,
    content: Vec<u8>,
    path: tempfile::TempPath,
}

static BASE: LazyLock<Base> = LazyLock::new(|| {
    let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/reference/qwen3_5_text");
    let model = Model::open(fixture, &device("cpu").expect("every build has it")).expect("a fixture");
    let path = tempfile::NamedTempFile::new().expect("a temporary file").into_temp_path();
    let mut session = model.session().expect("a decoder");
    session.feed(&(5..25).collect::<Vec<_>>()).expect("tokens of the model");
    session.add_fact(&[30, 31, 32]).expect("there is room for a fact");
    session.save(&path, &model).expect("a session that was just fed");
    let file = std::fs::read(&path).expect("it was just written");
    let (length, rest) = file.split_first_chunk().expect("a header");
    let (header, content) = rest.split_at(u64::from_le_bytes(*length) as usize);
    let header = serde_json::from_slice(header).expect("a header is JSON");
    Base { model, header, content: content.to_vec(), path }
});

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    let Base { model, header, content, path } = &*BASE;
    let (mut header, mut content) = (header.clone(), content.clone());
    match input {
        [RECORD, ..] => header["__metadata__"]["sequence"] = String::from_utf8_lossy(input).into(),
        [low, high, bytes @ ..] => {
            let at = usize::from(u16::from_le_bytes([*low, *high])) % content.len();
            content.iter_mut().skip(at).zip(bytes).for_each(|(old, new)| *old = *new);
        }
        _ => {}
    }
    let header = header.to_string();
    let header = format!("{header:width$}", width = header.len().next_multiple_of(64) + 56);
    let mut file = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &content].concat();
    let sealed = file.len() - blake3::OUT_LEN;
    let hash = blake3::hash(&file[..sealed]);
    file[sealed..].copy_from_slice(hash.as_bytes());
    std::fs::write(path, file).expect("a temporary file");
    let Ok(saved) = SessionFile::open(path, model, KvType::default()) else { return };
    let mut session = saved.session().expect("it was checked when it was opened");
    if session.feed(&[7]).is_ok() {
        session.rewind(session.tokens().len() / 2);
        // Positions may be such that there is no more; that is an error and no panic.
        let _ = session.feed(&[8, 9]);
    }
});
