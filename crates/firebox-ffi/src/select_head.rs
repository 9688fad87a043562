//! Selects the head that answers.

use firebox_runtime::heads::Router;
use firebox_runtime::{OWN_HEAD, Session};

use crate::error::FireboxError;

/// Selects the head of a session. `None` leaves the choice to the router, by the next prompt, or falls back to
/// the model's own head.
pub(crate) fn select_head(
    session: &mut Session,
    head: Option<&str>,
    prompt: &[u32],
) -> Result<(), FireboxError> {
    let Some(name) = head else {
        let chosen = match Router::for_session(session) {
            Some(router) => router.choose(session, prompt)?,
            None => None,
        };
        // If the chosen head is unavailable, its fallback answers.
        session.use_head(chosen.as_deref().unwrap_or(OWN_HEAD));
        return Ok(());
    };
    match session.use_head(name).fallback_reason {
        Some(source) => Err(FireboxError::NoHead { name: name.to_owned(), source }),
        None => Ok(()),
    }
}
