//! The errors of building and running a model.

use std::path::PathBuf;

use burn::tensor::Tensor;
use firebox_cache::CacheError;
use firebox_kernels::likeliest::LikeliestError;
use firebox_kernels::step::StepError;
use firebox_store::StoreError;

/// Why a model could not be built or run.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    /// The checkpoint could not be read.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The sequence cannot remember more.
    #[error(transparent)]
    Cache(#[from] CacheError),
    /// A decode step could not be recorded or run.
    #[error(transparent)]
    Recording(#[from] StepError),
    /// The family is not one of those this engine runs.
    #[error("model_type {model_type:?} is not supported; supported are {}", supported.join(", "))]
    UnknownFamily {
        /// What the configuration says.
        model_type: String,
        /// What it could say.
        supported: Vec<&'static str>,
    },
    /// The configuration cannot be used.
    #[error("config.json: {field}: {reason}")]
    Config {
        /// The field at fault.
        field: String,
        /// What is wrong with it.
        reason: String,
    },
    /// The checkpoint lacks a tensor.
    #[error("tensor {name} {shape:?} is missing from {}; the checkpoint does not match its config.json", path.display())]
    MissingTensor {
        /// Its name.
        name: String,
        /// The shape it should have.
        shape: Vec<usize>,
        /// The checkpoint.
        path: PathBuf,
    },
    /// The checkpoint has tensors the configuration does not account for.
    #[error(
        "{} holds {} that config.json does not account for: {}",
        path.display(),
        if names.len() == 1 { "a tensor".into() } else { format!("{} tensors", names.len()) },
        listed(names)
    )]
    ExtraTensors {
        /// Their names.
        names: Vec<String>,
        /// The checkpoint.
        path: PathBuf,
    },
    /// A tensor has another shape than the configuration says.
    #[error("tensor {name} has shape {found:?}, but config.json asks for {expected:?}")]
    Shape {
        /// Its name.
        name: String,
        /// What the configuration says.
        expected: Vec<usize>,
        /// What the checkpoint holds.
        found: Vec<usize>,
    },
    /// A tensor is stored in a way that its role does not allow.
    #[error("tensor {name} is stored as {encoding}, which cannot be used there; {remedy}")]
    Encoding {
        /// Its name.
        name: String,
        /// How it is stored.
        encoding: String,
        /// What would help.
        remedy: &'static str,
    },
    /// A token is not in the vocabulary.
    #[error(
        "token {token} is outside the vocabulary of {vocab_size}; the tokenizer does not belong to this model"
    )]
    Token {
        /// The token.
        token: u32,
        /// Rows of the embedding.
        vocab_size: usize,
    },
    /// There is nothing to compute.
    #[error("no tokens were given; a pass needs at least one")]
    NoTokens,
    /// A pass was asked for a layer that is not there, or with caches that are not those of its inputs.
    #[error(
        "layer {layer} of {layers} cannot be run: a pass steps through each layer once, with one cache for each \
         input, at that input's position"
    )]
    Step {
        /// The layer that was to run.
        layer: usize,
        /// How many there are.
        layers: usize,
    },
    /// A head was asked for where there are none, or a sequence was begun before there were any.
    #[error(
        "the model was not split into a trunk and heads when the sequence was begun; install a head, and begin \
         the sequence again"
    )]
    NoSplit,
    /// A text is longer than the model can take.
    #[error("{tokens} tokens are more than the {longest} this model takes; shorten the text or split it")]
    TooLong {
        /// Its length in tokens.
        tokens: usize,
        /// The longest possible.
        longest: usize,
    },
    /// The device did not hand out what it has computed.
    #[error("results could not be read from the device: {reason}; if it was lost, open the model again")]
    Readback {
        /// What it reports.
        reason: String,
    },
    /// Logits were asked of a pass that has found the likeliest tokens instead.
    #[error(
        "the pass was begun for its likeliest tokens, and has no logits; begin it without asking for them"
    )]
    NoLogits,
    /// The device failed while computing.
    #[error("the device failed: {reason}")]
    Device {
        /// What it reports.
        reason: String,
    },
    /// The model is of another kind than asked for.
    #[error("{model_type} is {found}, not {wanted}; {remedy}")]
    Kind {
        /// What the configuration says.
        model_type: String,
        /// What it is.
        found: &'static str,
        /// What it was to be.
        wanted: &'static str,
        /// What would help.
        remedy: &'static str,
    },
    /// A custom component failed.
    #[error("component {id:?} failed: {source}")]
    Component {
        /// What it calls itself.
        id: String,
        /// What it says.
        source: ComponentError,
    },
    /// A custom component cannot take the layer that it was put in.
    #[error("layer {layer} takes no component of one's own: {reason}")]
    Misplaced {
        /// Where it was to stand.
        layer: usize,
        /// Why not.
        reason: String,
    },
}

impl From<LikeliestError> for ModelError {
    fn from(LikeliestError { reason }: LikeliestError) -> Self {
        Self::Readback { reason }
    }
}

/// The error of a custom component.
pub type ComponentError = Box<dyn std::error::Error + Send + Sync>;

/// What a component made of rows, if it is as wide as they were.
pub(crate) fn of_width(
    id: &str,
    expected: [usize; 2],
    made: Result<Tensor<2>, ComponentError>,
) -> Result<Tensor<2>, ModelError> {
    let made = made.and_then(|made| match made.dims() {
        found if found == expected => Ok(made),
        found => Err(format!("it made {found:?} of rows {expected:?}; it has to leave their shape").into()),
    });
    made.map_err(|source| ModelError::Component { id: id.into(), source })
}

fn listed(names: &[String]) -> String {
    const SHOWN: usize = 5;
    let mut text = names.iter().take(SHOWN).cloned().collect::<Vec<_>>().join(", ");
    if names.len() > SHOWN {
        text.push_str(", …");
    }
    text
}
