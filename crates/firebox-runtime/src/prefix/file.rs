//! Prefixes in files: computed once, and mapped by every session that begins with them.

use std::path::Path;

use firebox_cache::{CacheError, KvType, Turn, TurnKind};
use firebox_model::ModelError;
use firebox_store::StoreError;

use crate::session::OWN_HEAD;
use crate::session::save::KvKey;
use crate::session::turns::DEFAULT_FACT_TOKENS;
use crate::telemetry::{Counter, Kind};
use crate::{Model, RuntimeError, Session, SessionFile};

/// Options of a prefix.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PrefixOptions {
    /// The type of keys and values. Sessions that begin with the prefix need it too.
    pub kv_type: KvType,
    /// The most tokens.
    pub capacity: usize,
}

impl Default for PrefixOptions {
    fn default() -> Self {
        Self { kv_type: KvType::default(), capacity: DEFAULT_FACT_TOKENS }
    }
}

/// How a prefix was obtained.
#[derive(Debug)]
pub enum Origin {
    /// Its file was opened.
    Opened,
    /// There was no file, and it was computed.
    Built,
    /// Its file could not be used, and it was computed again.
    Rebuilt {
        /// Why the file could not be used.
        reason: RuntimeError,
    },
}

/// Tokens that many sessions begin with: a system prompt, a profile, facts. They go through the layers once, and
/// every session of every process maps the resulting file.
///
/// ```no_run
/// use firebox_runtime::{Model, PersistentPrefix, PrefixOptions, device};
///
/// # fn main() -> Result<(), firebox_runtime::RuntimeError> {
/// let model = Model::open("models/pocket", &device("cpu")?)?;
/// let tokens = model.tokenizer()?.encode("You are brief.", true)?;
/// let prefix = PersistentPrefix::open_or_build("prefixes", &model, &tokens, PrefixOptions::default())?;
/// let mut session = model.session()?.with_prefix(&prefix)?;
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct PersistentPrefix {
    saved: SessionFile,
    origin: Origin,
}

impl PersistentPrefix {
    /// Opens the file in `folder` for these tokens of this model. If there is none, or it is damaged or of another
    /// model, the tokens are computed and the file is written.
    ///
    /// Several threads and processes may call this at once: each writes a temporary file, the last one replaces the
    /// others, and all are equal.
    pub fn open_or_build(
        folder: impl AsRef<Path>,
        model: &Model,
        tokens: &[u32],
        options: PrefixOptions,
    ) -> Result<Self, RuntimeError> {
        let PrefixOptions { kv_type, capacity } = options;
        if tokens.is_empty() {
            return Err(ModelError::NoTokens.into());
        }
        if tokens.len() > capacity {
            return Err(CacheError::FactsFull { tokens: tokens.len(), capacity }.into());
        }
        let decoder = model.decoder()?;
        let key = KvKey::new(model, &decoder, decoder.layout(kv_type).kv_dtype, OWN_HEAD)?;
        let path = folder.as_ref().join(format!("{}.kv", key.of_tokens(tokens)));
        let origin = match open(&path, model, tokens, kv_type) {
            Ok(saved) => return Ok(Self { saved, origin: Origin::Opened }),
            Err(RuntimeError::Store(StoreError::Io { source, .. }))
                if source.kind() == std::io::ErrorKind::NotFound =>
            {
                Origin::Built
            }
            Err(reason) => Origin::Rebuilt { reason },
        };
        model.meters().add(Counter::PrefixMisses, 1);
        let mut session = model.session()?.with_kv_type(kv_type).with_fact_capacity(capacity);
        let fact = session.add_fact(tokens)?;
        session.pin(fact, true)?;
        session.save(&path, model)?;
        Ok(Self { saved: open(&path, model, tokens, kv_type)?, origin })
    }

    /// Returns how the prefix was obtained.
    pub fn origin(&self) -> &Origin {
        &self.origin
    }

    /// Returns the tokens.
    pub fn tokens(&self) -> &[u32] {
        self.saved.tokens()
    }
}

/// Opens a file, and refuses one with other tokens.
fn open(path: &Path, model: &Model, tokens: &[u32], kv_type: KvType) -> Result<SessionFile, RuntimeError> {
    let saved = SessionFile::open(path, model, kv_type)?;
    let is_prefix = |turn: &Turn| turn.kind == TurnKind::Fact && turn.hidden.is_none();
    let [turn] = saved.turns() else { return Err(other_tokens(path, tokens, saved.tokens())) };
    if saved.tokens() != tokens || turn.tokens != tokens.len() || !is_prefix(turn) {
        return Err(other_tokens(path, tokens, saved.tokens()));
    }
    Ok(saved)
}

fn other_tokens(path: &Path, expected: &[u32], found: &[u32]) -> RuntimeError {
    let shown = |tokens: &[u32]| format!("{} of them", tokens.len());
    RuntimeError::Foreign {
        path: path.to_owned(),
        field: "tokens of one fact",
        found: shown(found),
        expected: shown(expected),
    }
}

impl Session {
    /// Begins with a prefix, which becomes a pinned fact. The session has to be empty, of the model that the prefix
    /// was opened for, and with its type of keys and values.
    pub fn with_prefix(mut self, prefix: &PersistentPrefix) -> Result<Self, RuntimeError> {
        let saved = &prefix.saved;
        let mismatch = |reason: &str| Err(CacheError::Mismatch { reason: reason.into() }.into());
        if !self.tokens.is_empty() || self.cache.turns().len() > 0 {
            return mismatch("the session has begun already; begin another one with the prefix");
        }
        if !std::sync::Arc::ptr_eq(saved.decoder(), &self.decoder) {
            return mismatch("the session has another model than the prefix was opened for");
        }
        let (tokens, capacity) = (saved.tokens().len(), self.retention.fact_capacity);
        if tokens > capacity {
            return Err(CacheError::FactsFull { tokens, capacity }.into());
        }
        let begun = saved.session_in(self.cache.pool())?;
        self.encoded_length = begun.encoded_length;
        self.cache = begun.cache;
        self.tokens = begun.tokens;
        self.cached_head = begun.cached_head;
        self.meters().add(Counter::PrefixHits, 1);
        self.meters().add(Counter::CachedTokens, tokens as u64);
        self.meters().mark(Kind::PrefixHit, [tokens as u64, 0]);
        Ok(self)
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::sync::Arc;

    use firebox_cache::PagePool;

    use super::*;
    use crate::session::save::tests::{bits, kinds, model};

    fn tokens(count: u32) -> Vec<u32> {
        (0..count).map(|i| 3 + i * 31 % 150).collect()
    }

    #[test]
    fn an_opened_prefix_equals_prefilling() {
        let folder = tempfile::tempdir().unwrap();
        for (fixture, kv_type) in kinds() {
            let model = model(fixture);
            let options = PrefixOptions { kv_type, ..PrefixOptions::default() };
            for count in [1, 100, 128, 300] {
                let tokens = tokens(count);
                let open = || PersistentPrefix::open_or_build(&folder, &model, &tokens, options).unwrap();
                let built = open();
                assert!(matches!(built.origin(), Origin::Built), "{:?}", built.origin());
                let opened = open();
                assert!(matches!(opened.origin(), Origin::Opened), "{:?}", opened.origin());
                assert_eq!(opened.tokens(), tokens);

                let mut plain = model.session().unwrap().with_kv_type(kv_type);
                let fact = plain.add_fact(&tokens).unwrap();
                plain.pin(fact, true).unwrap();
                let pool = PagePool::new(model.decoder().unwrap().layout(kv_type));
                let begin = |prefix| {
                    let session = Session::in_pool(model.decoder().unwrap(), &pool);
                    session.with_prefix(prefix).unwrap()
                };
                let mut sessions = [begin(&built), begin(&opened), begin(&opened)];
                assert_eq!(pool.pages(), 0, "a prefix takes none");
                for fed in [&[5][..], &[9, 8, 7], &[6; 150]] {
                    let expected = plain.feed(fed).unwrap();
                    for session in &mut sessions {
                        assert_eq!(bits(&session.feed(fed).unwrap()), bits(&expected), "{fixture} {count}");
                    }
                }
                let turn = sessions[1].turns().next().unwrap();
                assert!(turn.pinned && turn.kind == TurnKind::Fact && turn.tokens == tokens.len());
                // The rest of a block is copied to the page that the first token needs anyway.
                let rest =
                    (count as usize % firebox_cache::PAGE_TOKENS + 154).div_ceil(firebox_cache::PAGE_TOKENS);
                assert_eq!(pool.pages(), sessions.len() * rest, "{count}");
            }
        }
    }

    #[test]
    fn unusable_prefixes_are_computed_again() {
        let folder = tempfile::tempdir().unwrap();
        let one = model("reference/llama");
        let tokens = tokens(40);
        let open = |model| {
            PersistentPrefix::open_or_build(&folder, model, &tokens, PrefixOptions::default()).unwrap()
        };
        let files = || fs::read_dir(&folder).unwrap().map(|file| file.unwrap().path()).collect::<Vec<_>>();
        let expected = bits(&one.session().unwrap().with_prefix(&open(&one)).unwrap().feed(&[5]).unwrap());
        let [path] = &files()[..] else { panic!("one file") };
        let whole = fs::read(path).unwrap();
        let other = model("reference/qwen3");
        let theirs = PersistentPrefix::open_or_build(
            folder.path().join("theirs"),
            &other,
            &tokens,
            PrefixOptions::default(),
        );
        assert!(matches!(theirs.unwrap().origin(), Origin::Built));
        let theirs = fs::read_dir(folder.path().join("theirs")).unwrap().next().unwrap().unwrap().path();

        let mut flipped = whole.clone();
        flipped[whole.len() / 2] ^= 1;
        for broken in [&whole[..whole.len() / 2], &flipped, b"", &fs::read(theirs).unwrap()] {
            fs::write(path, broken).unwrap();
            let prefix = open(&one);
            let Origin::Rebuilt { reason } = prefix.origin() else { panic!("{:?}", prefix.origin()) };
            assert!(reason.to_string().contains(&path.display().to_string()), "{reason}");
            let mut session = one.session().unwrap().with_prefix(&prefix).unwrap();
            assert_eq!(bits(&session.feed(&[5]).unwrap()), expected);
            assert!(matches!(open(&one).origin(), Origin::Opened));
        }
    }

    #[test]
    fn who_builds_at_once_builds_the_same() {
        let folder = tempfile::tempdir().unwrap();
        let (model, tokens) = (Arc::new(model("reference/llama")), tokens(20));
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    PersistentPrefix::open_or_build(&folder, &model, &tokens, PrefixOptions::default())
                        .unwrap()
                });
            }
        });
        assert_eq!(fs::read_dir(&folder).unwrap().count(), 1);
    }

    #[test]
    fn prefixes_that_do_not_fit_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let model = model("reference/llama");
        let open = |tokens: &[u32], capacity| {
            let options = PrefixOptions { capacity, ..PrefixOptions::default() };
            PersistentPrefix::open_or_build(&folder, &model, tokens, options)
        };
        let full = |tokens, capacity| CacheError::FactsFull { tokens, capacity }.to_string();
        assert_eq!(open(&tokens(513), 512).unwrap_err().to_string(), full(513, 512));
        assert!(open(&[], 512).is_err());
        let prefix = open(&tokens(30), 30).unwrap();
        let session = || model.session().unwrap();
        let error = session().with_fact_capacity(29).with_prefix(&prefix).unwrap_err();
        assert_eq!(error.to_string(), full(30, 29));
        let mut begun = session();
        begun.feed(&[5]).unwrap();
        assert!(begun.with_prefix(&prefix).is_err());
        assert!(session().with_kv_type(KvType::Int8).with_prefix(&prefix).is_err());
        let other = crate::session::save::tests::model("reference/llama");
        assert!(other.session().unwrap().with_prefix(&prefix).is_err());
    }
}
