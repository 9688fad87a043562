//! Code shared by `run` and `chat`: settings, opening a model, and streaming an answer.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use clap::Args;
use firebox_runtime::heads::{HeadHistory, HeadPoolConfig, Router};
use firebox_runtime::{Finish, Generation, GenerationConfig, Model, Session, Speculation, Summary};
use firebox_text::Tokenizer;

use crate::compute::{CacheType, DeviceArgs};
use crate::console::Console;
use crate::fitting::FittingArgs;
use crate::head_pool::HeadPoolArgs;
use crate::interrupt::{Interrupt, Working};
use crate::opening::open_fitted;
use crate::outcome::usage;
use crate::prompt::PromptArgs;
use crate::router::AUTO;
use crate::sampling::SamplingArgs;
use crate::speculating::SpeculatingArgs;
use crate::tracing::TraceArgs;

/// Options of generating.
#[derive(Debug, Clone, Args)]
pub struct GeneratingArgs {
    /// Stop after this many tokens; -1 is no limit [default: -1]
    #[arg(
        short = 'n',
        long,
        value_name = "N",
        env = "FIREBOX_PREDICT",
        visible_alias = "n-predict",
        allow_negative_numbers = true
    )]
    pub predict: Option<i64>,
    /// Longest sequence, prompt included, in tokens; 0 is what the model was trained for
    #[arg(short, long, value_name = "N", env = "FIREBOX_CTX_SIZE", default_value_t = 0)]
    pub ctx_size: usize,
    /// What keys and values are kept in
    #[arg(long, value_name = "TYPE", env = "FIREBOX_CACHE_TYPE", value_enum, default_value_t)]
    pub cache_type: CacheType,
    /// Stop before this text; may be given several times
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
    pub stop: Vec<String>,
    /// Go on after the model has ended its answer
    #[arg(long)]
    pub ignore_eos: bool,
    /// Answer with this head; `firebox head list` says which there are, and auto lets the router choose [default: auto if
    /// there is a head called router]
    #[arg(long, value_name = "NAME", env = "FIREBOX_HEAD")]
    pub head: Option<String>,
    #[command(flatten)]
    pub head_pool: HeadPoolArgs,
    #[command(flatten)]
    pub device: DeviceArgs,
    #[command(flatten)]
    pub fitting: FittingArgs,
    #[command(flatten)]
    pub prompt: PromptArgs,
    #[command(flatten)]
    pub sampling: SamplingArgs,
    #[command(flatten)]
    pub speculating: SpeculatingArgs,
    #[command(flatten)]
    pub tracing: TraceArgs,
}

impl GeneratingArgs {
    /// The model that is to generate.
    pub fn open(&self, name: &Path, console: &Console) -> anyhow::Result<Model> {
        let fitting = self.fitting.of(name);
        if self.speculating.draft.is_some() && fitting.memory.is_some() {
            let reason =
                "the memory that firebox.toml gives says nothing of a draft's; run one without the other";
            return Err(usage(format!("--draft: {reason}")));
        }
        let limit = fitting.config(self.cache_type, Some(self.ctx_size));
        let model = open_fitted(name, &self.device, limit.as_ref(), console)?;
        // Which head usually follows which; a guess that cannot be read is no guess.
        let history = history_file().and_then(|path| HeadHistory::open(path).ok()).unwrap_or_default();
        Ok(model.with_heads(HeadPoolConfig { history, ..self.head_pool.config() })?)
    }

    /// Begins a session of a model with these options, which stops at Ctrl-C.
    pub fn session(&self, model: &Model, interrupt: &Interrupt) -> anyhow::Result<Session> {
        self.dressed(model.session()?, interrupt)
    }

    /// Applies these options to an existing session of the model, which then stops at Ctrl-C.
    pub fn dressed(&self, session: Session, interrupt: &Interrupt) -> anyhow::Result<Session> {
        let mut session = self.configured(session, interrupt);
        if let Some(name) = self.head.as_deref().filter(|name| *name != AUTO)
            && let Some(reason) = session.use_head(name).fallback_reason
        {
            return Err(anyhow::anyhow!("{reason}"));
        }
        Ok(session)
    }

    /// Returns the router that chooses a head for each message, or `None` if the command line names a head.
    pub fn router(&self, session: &Session) -> anyhow::Result<Option<Router>> {
        let router = match self.head.as_deref() {
            None | Some(AUTO) => Router::for_session(session),
            Some(_) => return Ok(None),
        };
        if router.is_none() && self.head.is_some() {
            return Err(usage(
                "--head auto: the model has no head called router that could choose; `firebox head list` shows what \
                 it has",
            ));
        }
        Ok(router)
    }

    /// Returns the drafter, if one is configured.
    pub fn speculation(
        &self,
        model: &Model,
        interrupt: &Interrupt,
        console: &Console,
    ) -> anyhow::Result<Option<Speculation>> {
        let configured = |session| self.configured(session, interrupt);
        self.speculating.speculation(model, &self.device, configured, console)
    }

    fn configured(&self, session: Session, interrupt: &Interrupt) -> Session {
        session.with_kv_type(self.cache_type.into()).with_cancel(interrupt.flag())
    }

    /// Returns the configuration of a generation.
    pub fn config(&self, model: &Model, console: &Console) -> anyhow::Result<GenerationConfig> {
        let trained = model.decoder()?.config().max_positions;
        if self.ctx_size > trained {
            console.note(format!(
                "note: the model was trained for {trained} positions; beyond them it may lose the thread"
            ));
        }
        if self.stop.iter().any(String::is_empty) {
            return Err(usage("--stop: an empty text would stop everything"));
        }
        let recommended = model.checkpoint().text().generation_config.as_ref();
        let tokenizer = model.tokenizer().ok().map(|tokenizer| &**tokenizer);
        let mut config = GenerationConfig::new()
            .with_context(if self.ctx_size == 0 { trained } else { self.ctx_size })
            .with_end_tokens(model.end_tokens())
            .with_ignore_end(self.ignore_eos)
            .with_sampler(self.sampling.config(recommended, tokenizer)?);
        config.max_tokens = self.predict.and_then(|most| usize::try_from(most).ok());
        config.stop = self.stop.clone();
        Ok(config)
    }
}

/// Returns the path of the history of heads.
fn history_file() -> Option<PathBuf> {
    Some(dirs::data_local_dir()?.join("firebox").join("heads.json"))
}

/// Answers a prompt, handing out tokens and text as they come, until the end or Ctrl-C.
pub fn answer(
    session: &mut Session,
    tokenizer: Option<Arc<Tokenizer>>,
    prompt: &[u32],
    config: GenerationConfig,
    speculation: Option<&mut Speculation>,
    working: &Working<'_>,
    mut took: impl FnMut(Option<u32>, &str) -> anyhow::Result<()>,
) -> anyhow::Result<Summary> {
    let mut generation = Generation::begin(session, tokenizer, prompt, config)?;
    if let Some(speculation) = speculation {
        generation = generation.with_speculation(speculation);
    }
    loop {
        let piece = if working.stop_requested() { generation.cancel() } else { generation.next_piece()? };
        let Some(piece) = piece else { break };
        took(piece.token, &piece.text)?;
    }
    Ok(generation.finish()?)
}

/// Formats the speed of a generation in one line.
pub fn speed(summary: &Summary) -> String {
    let drafts = match summary.drafted_tokens {
        0 => String::new(),
        drafted => format!("{} of {drafted} drafted tokens accepted, ", summary.accepted_tokens),
    };
    format!(
        "{} prompt tokens ({:.1}/s), first token after {:.0} ms, {} tokens ({:.1}/s), {drafts}{}",
        summary.prompt_tokens,
        summary.prefill_tps,
        summary.ttft_ms,
        summary.tokens.len(),
        summary.decode_tps,
        match summary.finish {
            Finish::Stop => "the model ended",
            Finish::Length => "length reached",
            Finish::Cancelled => "cancelled",
            Finish::Repetition => "it repeated itself",
        },
    )
}
