//! The recipe of the pocket model, as its `recipe.toml` spells it.

use std::path::Path;

use firebox_model::{ExitPlan, Seeded};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::{Shape, Split, Task};
use crate::error::TrainError;
use crate::schedule::Schedule;
use crate::settings::{AdamSettings, Settings};

/// A recipe: everything that decides which model comes out.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Recipe {
    /// Decides whatever is random.
    pub seed: u64,
    /// The vocabulary.
    pub tokenizer: TokenizerPlan,
    /// The network.
    pub architecture: ArchitecturePlan,
    /// The numbers it begins with.
    pub initialization: InitializationPlan,
    /// The optimizer of every phase.
    pub optimizer: OptimizerPlan,
    /// The whole model, on all tasks.
    pub base: BasePlan,
    /// The last layers, on one task each.
    pub heads: HeadsPlan,
    /// The fallback, which is used while a head is not available.
    pub fallback: FallbackPlan,
    /// The router, which chooses the head for a request.
    pub router: RouterPlan,
    /// The final evaluation.
    pub evaluation: EvaluationPlan,
}

/// The vocabulary.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TokenizerPlan {
    /// The number of pieces.
    pub pieces: usize,
    /// The number of conversations of each task that the pieces are learnt from.
    pub conversations_per_task: usize,
}

/// The network: most of a `config.json`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ArchitecturePlan {
    /// The family; `qwen3` is the one that the recipe's other numbers were found for.
    pub model_type: String,
    /// Width of the hidden states.
    pub hidden_size: usize,
    /// Width of the feed-forward networks.
    pub intermediate_size: usize,
    /// Layers.
    pub num_hidden_layers: usize,
    /// Heads of queries.
    pub num_attention_heads: usize,
    /// Heads of keys and values.
    pub num_key_value_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// The slowest rotation.
    pub rope_theta: f64,
    /// Added to mean squares.
    pub rms_norm_eps: f64,
    /// Uses the embedding as unembedding.
    pub tie_word_embeddings: bool,
    /// The maximum length of a sequence.
    pub max_position_embeddings: usize,
    /// The number of layers in the trunk.
    pub trunk_layers: usize,
}

/// The numbers it begins with.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct InitializationPlan {
    /// Standard deviation of embeddings.
    pub embedding: f32,
    /// The initial weight of the norms of query and key heads.
    pub head_norms: f32,
}

/// The settings of the optimizer in every phase.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OptimizerPlan {
    /// The decay rates of the mean gradient and of the mean squared gradient.
    pub betas: [f32; 2],
    /// Keeps the division from dividing by zero.
    pub epsilon: f32,
    /// The weight decay of matrices.
    pub weight_decay: f32,
    /// The norm that longer gradients are scaled down to.
    pub clip_norm: f64,
    /// The final learning rate, as a share of the highest.
    pub final_share: f64,
}

/// The named shapes of conversations.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ShapeName {
    /// [`Shape::short`]
    Short,
    /// [`Shape::full`]
    Full,
    /// [`Shape::distant`]
    Distant,
}

impl ShapeName {
    /// Returns the shape of this name.
    pub fn shape(self) -> Shape {
        match self {
            Self::Short => Shape::short(),
            Self::Full => Shape::full(),
            Self::Distant => Shape::distant(),
        }
    }
}

/// Some of what the whole model learns from.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Stage {
    /// Shapes, with as many tokens of each.
    pub shapes: Vec<ShapeName>,
    /// Tokens in all.
    pub tokens: usize,
}

/// The whole model, on all tasks.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BasePlan {
    /// Most tokens of a step.
    pub tokens_per_step: usize,
    /// The highest learning rate.
    pub learning_rate: f64,
    /// Steps until it is reached.
    pub warm_up_steps: u64,
    /// The weight in the loss of tokens outside the answers that are learned.
    pub prompt_weight: f32,
    /// The weight of the loss of the fallback, which is trained along with the base.
    pub fallback_weight: f32,
    /// The stages of the training data, in order.
    pub stages: Vec<Stage>,
}

/// The last layers, on one task each.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HeadsPlan {
    /// The tasks.
    pub tasks: Vec<Task>,
    /// Shapes, with as many tokens of each.
    pub shapes: Vec<ShapeName>,
    /// Most tokens of a step.
    pub tokens_per_step: usize,
    /// The highest learning rate.
    pub learning_rate: f64,
    /// Steps until it is reached.
    pub warm_up_steps: u64,
    /// Steps in all.
    pub steps: u64,
    /// The weight in the loss of tokens outside the answers that are learned.
    pub prompt_weight: f32,
}

/// The training of the fallback, which is used while a head is not available.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FallbackPlan {
    /// Its inner width.
    pub rank: usize,
    /// Shapes, with as many tokens of each.
    pub shapes: Vec<ShapeName>,
    /// Most tokens of a step.
    pub tokens_per_step: usize,
    /// The highest learning rate.
    pub learning_rate: f64,
    /// The weight decay of its matrices.
    pub weight_decay: f32,
    /// Steps until the highest rate is reached.
    pub warm_up_steps: u64,
    /// Steps in all.
    pub steps: u64,
}

/// The training of the router, which chooses the head for a request.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RouterPlan {
    /// Conversations whose requests it learns from.
    pub conversations: usize,
    /// The shape of these conversations.
    pub shape: ShapeName,
    /// The highest learning rate.
    pub learning_rate: f64,
    /// The weight decay of the router.
    pub weight_decay: f32,
    /// Steps, each on all requests.
    pub steps: u64,
}

/// The final evaluation.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EvaluationPlan {
    /// The split that conversations are drawn from.
    pub split: Split,
    /// The shape of the conversations.
    pub shape: ShapeName,
    /// The seed of the conversations.
    pub seed: u64,
    /// The number of conversations of each task.
    pub conversations_per_task: usize,
}

impl Recipe {
    /// Reads a recipe and checks it.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, TrainError> {
        let path = path.as_ref();
        let text = std::fs::read_to_string(path).map_err(|error| TrainError::io(path, "read", error))?;
        Self::parse(&text).map_err(|reason| TrainError::malformed(path, reason))
    }

    /// The recipe that a text is, or what is wrong with it.
    pub fn parse(text: &str) -> Result<Self, String> {
        let recipe: Self = toml::from_str(text).map_err(|error| error.to_string().trim().to_owned())?;
        recipe.check()?;
        Ok(recipe)
    }

    fn check(&self) -> Result<(), String> {
        let Self { architecture, base, heads, fallback, router, evaluation, .. } = self;
        let counts = [
            ("tokenizer.conversations_per_task", self.tokenizer.conversations_per_task),
            ("architecture.hidden_size", architecture.hidden_size),
            ("architecture.trunk_layers", architecture.trunk_layers),
            ("base.tokens_per_step", base.tokens_per_step),
            ("base.stages", base.stages.len()),
            ("heads.tasks", heads.tasks.len()),
            ("heads.shapes", heads.shapes.len()),
            ("heads.tokens_per_step", heads.tokens_per_step),
            ("heads.steps", heads.steps as usize),
            ("fallback.rank", fallback.rank),
            ("fallback.shapes", fallback.shapes.len()),
            ("fallback.tokens_per_step", fallback.tokens_per_step),
            ("fallback.steps", fallback.steps as usize),
            ("router.conversations", router.conversations),
            ("router.steps", router.steps as usize),
            ("evaluation.conversations_per_task", evaluation.conversations_per_task),
        ];
        if let Some((field, _)) = counts.into_iter().find(|(_, count)| *count == 0) {
            return Err(format!("{field} is nothing; it has to be at least one"));
        }
        for (number, stage) in base.stages.iter().enumerate() {
            if stage.shapes.is_empty() || stage.tokens == 0 {
                return Err(format!("base.stages: number {} has no shapes or no tokens", number + 1));
            }
        }
        // 5 special pieces, 256 bytes and the printable signs.
        const FEWEST: usize = 5 + 256 + 95;
        if self.tokenizer.pieces < FEWEST {
            let pieces = self.tokenizer.pieces;
            return Err(format!("tokenizer.pieces is {pieces}; {FEWEST} are needed before any is learnt"));
        }
        let (trunk, layers) = (architecture.trunk_layers, architecture.num_hidden_layers);
        if trunk >= layers {
            return Err(format!(
                "architecture.trunk_layers is {trunk} of {layers} layers; leave some to heads"
            ));
        }
        let positive = [
            ("base.learning_rate", base.learning_rate),
            ("heads.learning_rate", heads.learning_rate),
            ("fallback.learning_rate", fallback.learning_rate),
            ("router.learning_rate", router.learning_rate),
            ("optimizer.clip_norm", self.optimizer.clip_norm),
        ];
        if let Some((field, value)) = positive.into_iter().find(|(_, value)| value.is_nan() || *value <= 0.0)
        {
            return Err(format!("{field} is {value}; it has to be above zero"));
        }
        let shares = [
            ("base.prompt_weight", f64::from(base.prompt_weight)),
            ("base.fallback_weight", f64::from(base.fallback_weight)),
            ("heads.prompt_weight", f64::from(heads.prompt_weight)),
            ("optimizer.final_share", self.optimizer.final_share),
        ];
        if let Some((field, value)) = shares.into_iter().find(|(_, value)| !(0.0..=1.0).contains(value)) {
            return Err(format!("{field} is {value}; it has to be between 0 and 1"));
        }
        Ok(())
    }

    /// The model's `config.json`, for so many pieces of which one pads and one ends.
    pub(super) fn config(&self, vocabulary: usize, pad: u32, end: u32) -> Value {
        let ArchitecturePlan { model_type, .. } = &self.architecture;
        json!({
            "architectures": [format!("{}ForCausalLM", capitalized(model_type))],
            "model_type": model_type,
            "vocab_size": vocabulary,
            "hidden_size": self.architecture.hidden_size,
            "intermediate_size": self.architecture.intermediate_size,
            "num_hidden_layers": self.architecture.num_hidden_layers,
            "num_attention_heads": self.architecture.num_attention_heads,
            "num_key_value_heads": self.architecture.num_key_value_heads,
            "head_dim": self.architecture.head_dim,
            "hidden_act": "silu",
            "attention_bias": false,
            "rope_theta": self.architecture.rope_theta,
            "rms_norm_eps": self.architecture.rms_norm_eps,
            "tie_word_embeddings": self.architecture.tie_word_embeddings,
            "max_position_embeddings": self.architecture.max_position_embeddings,
            "eos_token_id": end,
            "pad_token_id": pad,
            "torch_dtype": "float16",
        })
    }

    /// The numbers that the network of a phase begins with.
    pub(super) fn seeded(&self, phase: &str) -> Seeded {
        let InitializationPlan { embedding, head_norms } = self.initialization;
        Seeded { seed: self.seed_of(phase), embedding, head_norms }
    }

    /// Where the fallback learns along, and how.
    pub(super) fn exit(&self) -> ExitPlan {
        ExitPlan {
            split: self.architecture.trunk_layers,
            width: self.fallback.rank,
            weight: self.base.fallback_weight,
        }
    }

    /// A seed of its own for everything that has a name.
    pub(super) fn seed_of(&self, name: &str) -> u64 {
        // FNV-1a: the seeds are part of the recipe and must not change with a library.
        name.bytes().fold(0xcbf2_9ce4_8422_2325 ^ self.seed.rotate_left(32), |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
        })
    }

    /// Returns the training settings of a phase.
    pub(super) fn settings(
        &self,
        phase: &str,
        steps: u64,
        rate: f64,
        warm_up: u64,
        decay: Option<f32>,
    ) -> Settings {
        let OptimizerPlan { betas: [beta_1, beta_2], epsilon, weight_decay, clip_norm, final_share } =
            self.optimizer;
        Settings {
            seed: self.seed_of(phase),
            clip: Some(clip_norm),
            keep: 1,
            optimizer: AdamSettings { beta_1, beta_2, epsilon, weight_decay: decay.unwrap_or(weight_decay) },
            ..Settings::new(steps, Schedule { peak: rate, warm_up, floor: rate * final_share })
        }
    }
}

fn capitalized(text: &str) -> String {
    let mut letters = text.chars();
    letters.next().map(|first| first.to_uppercase().chain(letters).collect()).unwrap_or_default()
}
