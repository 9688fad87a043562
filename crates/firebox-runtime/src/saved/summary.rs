use std::io::Read as _;
use std::path::Path;

use firebox_cache::{KvType, Turn};
use firebox_store::Dtype;
use firebox_store::files::File;

use super::{FORMAT, HEAD, NOTE, TOKENS, opened, record};
use crate::RuntimeError;

/// A file that says what it is says so in its first bytes.
const BEGINNING: u64 = 64 << 10;

/// What is in the file of a saved session, for who has not got the model that it is of.
#[derive(Debug, Clone, PartialEq)]
pub struct SavedSummary {
    /// Every token that was remembered, or had been accepted.
    pub tokens: Vec<u32>,
    /// Its turns and facts, in order, those included whose keys it had lost.
    pub turns: Vec<Turn>,
    /// What whoever saved it had to say.
    pub note: String,
    /// What its trunk is called: the hash of its weights, and where heads begin if it has any.
    pub trunk: String,
    /// The head that its layers behind the split were those of; empty where nothing had filled them.
    pub head: String,
    /// What keys and values are kept in.
    pub kept: KvType,
    /// Bytes of the file.
    pub bytes: u64,
}

impl SavedSummary {
    /// Reads a file, and refuses it where it is not whole.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, RuntimeError> {
        let file = opened(path.as_ref())?;
        let record = record(&file)?;
        let kept = match file.text("kv format")? {
            "f32" => KvType::F32,
            "f16" => KvType::F16,
            "int8" => KvType::Int8,
            other => return Err(file.fault("kv format", format!("{other:?} is none")).into()),
        };
        let tokens = file.tensor(TOKENS, Dtype::U32)?.data;
        Ok(Self {
            tokens: tokens.as_chunks().0.iter().map(|word| u32::from_le_bytes(*word)).collect(),
            turns: record.turns.into_iter().chain(record.lost).map(Turn::from).collect(),
            note: file.text(NOTE)?.to_owned(),
            trunk: file.text("trunk")?.to_owned(),
            head: file.text(HEAD)?.to_owned(),
            kept,
            bytes: path.as_ref().metadata().map_or(0, |metadata| metadata.len()),
        })
    }

    /// Whether a file says that it is one, without reading all of it.
    pub fn is_one(path: impl AsRef<Path>) -> bool {
        let mut beginning = Vec::new();
        let read =
            File::open(path.as_ref()).and_then(|file| file.take(BEGINNING).read_to_end(&mut beginning));
        let said = format!("\"format\":\"{FORMAT}\"");
        read.is_ok() && beginning.windows(said.len()).any(|window| window == said.as_bytes())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::saved::tests::{kinds, model, some_tokens};
    use crate::{Role, Saved, Session};

    #[test]
    fn a_summary_says_what_the_session_would() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("session");
        for (fixture, kept) in kinds() {
            let model = model(fixture);
            let mut session: Session = model.session().unwrap().with_kv_type(kept);
            let fact = session.add_fact(&some_tokens(1, 4)).unwrap();
            let turn = session.begin_turn(&[Role::User, Role::Assistant]).unwrap();
            session.feed(&some_tokens(2, 9)).unwrap();
            session.pin(turn, true).unwrap();
            session.supersede(fact, &some_tokens(3, 5)).unwrap();
            session.append(7);
            session.save_with_note(&path, &model, "a note").unwrap();
            assert!(SavedSummary::is_one(&path));
            let summary = SavedSummary::open(&path).unwrap();
            let saved = Saved::open(&path, &model, kept).unwrap();
            assert_eq!(summary.tokens, saved.tokens());
            assert_eq!(summary.turns, saved.turns());
            assert_eq!((summary.note.as_str(), summary.kept), (saved.note(), kept), "{fixture}");
            assert_eq!(summary.turns.iter().filter(|turn| turn.pinned).count(), 1);
            assert_eq!(summary.bytes, path.metadata().unwrap().len());
        }
    }

    #[test]
    fn other_files_are_none() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("other");
        for content in [&b""[..], b"short", &[0; 4096]] {
            std::fs::write(&path, content).unwrap();
            assert!(!SavedSummary::is_one(&path) && SavedSummary::open(&path).is_err());
        }
        assert!(!SavedSummary::is_one(folder.path()) && !SavedSummary::is_one(folder.path().join("none")));
    }
}
