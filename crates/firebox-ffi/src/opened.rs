use std::path::{Path, PathBuf};
use std::time::Duration;

use firebox_runtime::fit::FitConfig;
use firebox_runtime::heads::RackConfig;
use firebox_runtime::{Model, RuntimeError, Saved, Session, device};
use firebox_text::{ChatTemplate, Continued, TemplateOptions, TextError};

use crate::FireboxError;

/// For models without a template: what is said, line after line, with nobody named.
const PLAIN: &str = "{% for message in messages %}{{ message.content }}\n{% endfor %}";

/// The pocket model in the source tree that the library was built from.
const IN_THE_SOURCES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../assets/pocket");

/// The same beside the program, where the command `firebox` has it too.
const BESIDE_THE_PROGRAM: &str = "../share/firebox/pocket";

/// Whoever names a head rather waits for it than has another stand in.
const PATIENCE: Duration = Duration::from_secs(60);

/// An opened model that one can talk to.
#[derive(Debug)]
pub(crate) struct Opened {
    pub model: Model,
    template: ChatTemplate,
    options: TemplateOptions,
    /// Whether the template is the model's own.
    own_template: bool,
    /// Tokens that it was trained for.
    pub context: usize,
}

impl Opened {
    /// By its path, or the pocket model; in so many bytes for the whole process, or as a whole.
    pub fn open(path: Option<&Path>, memory: Option<u64>) -> Result<Self, FireboxError> {
        let path = path.map_or_else(pocket_model, |path| Ok(path.to_owned()))?;
        Self::loaded(&path, memory).map_err(|source| FireboxError::Model { source })
    }

    fn loaded(path: &Path, memory: Option<u64>) -> Result<Self, RuntimeError> {
        let cpu = device("cpu")?;
        let model = match memory {
            Some(memory) => Model::open_within(path, &cpu, &FitConfig::new(memory))?,
            None => Model::open(path, &cpu)?,
        };
        let context = model.decoder()?.config().max_positions;
        let model = model.with_heads(RackConfig { patience: PATIENCE, ..RackConfig::default() })?;
        let (template, own_template) = match ChatTemplate::new(model.checkpoint().text(), model.tokenizer()?)
        {
            Ok(template) => (template, true),
            Err(TextError::MissingChatTemplate) => {
                (ChatTemplate::from_source(PLAIN, serde_json::Map::new())?, false)
            }
            Err(error) => return Err(error.into()),
        };
        Ok(Self { model, template, options: TemplateOptions::default(), own_template, context })
    }

    /// The parts that conversations are written from.
    pub fn parts(&self) -> Result<Continued<'_>, RuntimeError> {
        Ok(Continued::new(&self.template, self.model.tokenizer()?, &self.options))
    }

    /// What comes before the first question, and stays whatever is forgotten.
    pub fn opening(&self, system: Option<&str>) -> Result<Vec<u32>, RuntimeError> {
        let tokenizer = self.model.tokenizer()?;
        let begins = !self.own_template && tokenizer.adds_bos();
        let mut tokens: Vec<u32> = tokenizer.bos_id().filter(|_| begins).into_iter().collect();
        let parts = self.parts()?;
        match parts.opening(system)? {
            Some(opening) => tokens.extend(opening),
            None => {
                // The template makes it part of the first question, which may be forgotten.
                tokens.extend(parts.opening(None)?.unwrap_or_default());
                if let Some(system) = system {
                    tokens.extend(parts.told(system)?);
                }
            }
        }
        Ok(tokens)
    }

    /// A session that goes on from a file.
    pub fn resumed(&self, path: &Path) -> Result<(Session, String), RuntimeError> {
        let fresh = self.model.session()?;
        let pool = fresh.cache().pool();
        let saved = Saved::open(path, &self.model, pool.layout().kept)?;
        let (note, session) = (saved.note().to_owned(), saved.session_in(pool)?);
        let session = match self.model.fit() {
            Some(fit) => session.with_chunk(fit.plan().chunk),
            None => session,
        };
        let session = session.with_meters(self.model.session_meters());
        let session = match self.model.heads() {
            Some(heads) => session.with_heads(heads.clone()),
            None => session,
        };
        Ok((session, note))
    }
}

fn pocket_model() -> Result<PathBuf, FireboxError> {
    let program = std::env::current_exe().unwrap_or_default();
    let beside = program.parent().unwrap_or(Path::new(".")).join(BESIDE_THE_PROGRAM);
    // The recipe alone is no model.
    let is_there = |place: &Path| place.join("config.json").is_file();
    let places = [PathBuf::from(IN_THE_SOURCES), beside.clone()];
    places.into_iter().find(|place| is_there(place)).ok_or(FireboxError::NoPocketModel { beside })
}
