//! Measures how long switching heads takes.

use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use firebox_runtime::heads::HeadPoolConfig;
use firebox_runtime::{Device, Model, OWN_HEAD, RuntimeError, Session};
use firebox_store::{Checkpoint, Heads};

/// A name that no head can be installed under.
const NO_HEAD: &str = "";

/// Seconds that switching heads takes, compared with opening the model again.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SwapTimings {
    /// Switching to a resident head.
    pub warm: f64,
    /// Switching to a resident head, until the first token.
    pub warm_first_token: f64,
    /// Switching to a head without a resident page.
    pub cold: f64,
    /// Switching to a head without a resident page, until the first token.
    pub cold_first_token: f64,
    /// Switching to the fallback of a missing head.
    pub fallback: f64,
    /// Switching to the fallback of a missing head, until the first token.
    pub fallback_first_token: f64,
    /// Opening the model without a resident page, and switching to the head.
    pub reload: f64,
    /// Opening the model without a resident page, and switching to the head, until the first token.
    pub reload_first_token: f64,
}

impl SwapTimings {
    /// Opens a model, feeds `prompt`, and switches to a head and back, once for each timing.
    pub fn measure(
        path: &Path,
        device: &Device,
        name: &str,
        prompt: &[u32],
    ) -> Result<(Self, Model), Arc<RuntimeError>> {
        Checkpoint::open(path).and_then(|checkpoint| checkpoint.evict()).map_err(RuntimeError::from)?;
        let files = || -> Result<_, RuntimeError> { Ok(Heads::open(path)?.head(name)?) };
        files()?.release().map_err(RuntimeError::from)?;

        let began = Instant::now();
        let model = Model::open(path, device)?.with_heads(HeadPoolConfig::patient())?;
        let mut session = model.session()?;
        switch_to(&mut session, name)?;
        let reload = began.elapsed().as_secs_f64();
        session.feed(prompt)?;
        let reload_first_token = began.elapsed().as_secs_f64();

        let own = |session: &mut Session| -> Result<(), RuntimeError> {
            session.use_head(OWN_HEAD);
            session.feed(&[1]).map(drop)
        };
        // Both the head and the trunk are in memory.
        own(&mut session)?;
        let began = Instant::now();
        switch_to(&mut session, name)?;
        let warm = began.elapsed().as_secs_f64();
        session.feed(&[1])?;
        let warm_first_token = began.elapsed().as_secs_f64();

        own(&mut session)?;
        let files = files()?;
        if let Some(head_pool) = model.heads() {
            head_pool.evict(name);
        }
        files.release().map_err(RuntimeError::from)?;
        let began = Instant::now();
        switch_to(&mut session, name)?;
        let cold = began.elapsed().as_secs_f64();
        session.feed(&[1])?;
        let cold_first_token = began.elapsed().as_secs_f64();

        let began = Instant::now();
        session.use_head(NO_HEAD);
        let fallback = began.elapsed().as_secs_f64();
        session.feed(&[1])?;
        let fallback_first_token = began.elapsed().as_secs_f64();
        let changes = Self {
            warm,
            warm_first_token,
            cold,
            cold_first_token,
            fallback,
            fallback_first_token,
            reload,
            reload_first_token,
        };
        Ok((changes, model))
    }
}

fn switch_to(session: &mut Session, name: &str) -> Result<(), Arc<RuntimeError>> {
    session.use_head(name).fallback_reason.map_or(Ok(()), Err)
}
