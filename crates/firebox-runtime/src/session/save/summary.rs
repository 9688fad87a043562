//! Reads a session file without its model.

use std::io::Read as _;
use std::path::Path;

use firebox_cache::{KvType, Turn};
use firebox_store::Dtype;
use firebox_store::files::File;

use super::{FORMAT, HEAD, NOTE, TOKENS, opened, record};
use crate::RuntimeError;

/// The first bytes of a file, which name its format if it is a session.
const FORMAT_PREFIX: u64 = 64 << 10;

/// The contents of a session file, for callers without the model that it was saved by.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct SessionSummary {
    /// All its tokens, cached or accepted.
    pub tokens: Vec<u32>,
    /// Its turns and facts in order, cached or not.
    pub turns: Vec<Turn>,
    /// The note that it was saved with.
    pub note: String,
    /// The name of its trunk: the hash of its weights, and where heads begin if it has any.
    pub trunk: String,
    /// The head that computed the cached layers behind the split; empty if none had.
    pub head: String,
    /// The type of keys and values.
    pub kv_type: KvType,
    /// Bytes of the file.
    pub bytes: u64,
}

impl SessionSummary {
    /// Reads a file, and refuses one that is not whole.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, RuntimeError> {
        let file = opened(path.as_ref())?;
        let record = record(&file)?;
        let kv_type = match file.text("kv format")? {
            "f32" => KvType::F32,
            "f16" => KvType::F16,
            "int8" => KvType::Int8,
            other => return Err(file.fault("kv format", format!("{other:?} is none")).into()),
        };
        let tokens = file.tensor(TOKENS, Dtype::U32)?.data;
        Ok(Self {
            tokens: tokens.as_chunks().0.iter().map(|word| u32::from_le_bytes(*word)).collect(),
            turns: record.turns.into_iter().chain(record.uncached_turns).map(Turn::from).collect(),
            note: file.text(NOTE)?.to_owned(),
            trunk: file.text("trunk")?.to_owned(),
            head: file.text(HEAD)?.to_owned(),
            kv_type,
            bytes: path.as_ref().metadata().map_or(0, |metadata| metadata.len()),
        })
    }

    /// Returns whether a file says that it is a session, without reading all of it.
    pub fn is_session_file(path: impl AsRef<Path>) -> bool {
        let mut beginning = Vec::new();
        let read =
            File::open(path.as_ref()).and_then(|file| file.take(FORMAT_PREFIX).read_to_end(&mut beginning));
        let format = format!("\"format\":\"{FORMAT}\"");
        read.is_ok() && beginning.windows(format.len()).any(|window| window == format.as_bytes())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::session::save::tests::{kinds, model, some_tokens};
    use crate::{Role, Session, SessionFile};

    #[test]
    fn a_summary_agrees_with_the_opened_session() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("session");
        for (fixture, kv_type) in kinds() {
            let model = model(fixture);
            let mut session: Session = model.session().unwrap().with_kv_type(kv_type);
            let fact = session.add_fact(&some_tokens(1, 4)).unwrap();
            let turn = session.begin_turn(&[Role::User, Role::Assistant]).unwrap();
            session.feed(&some_tokens(2, 9)).unwrap();
            session.pin(turn, true).unwrap();
            session.supersede(fact, &some_tokens(3, 5)).unwrap();
            session.append(7);
            session.save_with_note(&path, &model, "a note").unwrap();
            assert!(SessionSummary::is_session_file(&path));
            let summary = SessionSummary::open(&path).unwrap();
            let saved = SessionFile::open(&path, &model, kv_type).unwrap();
            assert_eq!(summary.tokens, saved.tokens());
            assert_eq!(summary.turns, saved.turns());
            assert_eq!((summary.note.as_str(), summary.kv_type), (saved.note(), kv_type), "{fixture}");
            assert_eq!(summary.turns.iter().filter(|turn| turn.pinned).count(), 1);
            assert_eq!(summary.bytes, path.metadata().unwrap().len());
        }
    }

    #[test]
    fn other_files_are_not_sessions() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("other");
        for content in [&b""[..], b"short", &[0; 4096]] {
            std::fs::write(&path, content).unwrap();
            assert!(!SessionSummary::is_session_file(&path) && SessionSummary::open(&path).is_err());
        }
        assert!(
            !SessionSummary::is_session_file(folder.path())
                && !SessionSummary::is_session_file(folder.path().join("none"))
        );
    }
}
