use firebox_runtime::heads::Router;
use firebox_runtime::{OWN_HEAD, Session};

use crate::FireboxError;

/// Has a session answer with a head; nothing leaves the choice to the router, if the model has one that can be used, and
/// is the model's own layers otherwise. The prompt is what comes next.
pub(crate) fn dress(session: &mut Session, head: Option<&str>, prompt: &[u32]) -> Result<(), FireboxError> {
    let Some(name) = head else {
        let chosen = match Router::of(session) {
            Some(router) => router.choice(session, prompt)?,
            None => None,
        };
        // Where that cannot be used, what stands in for it answers.
        session.use_head(chosen.as_deref().unwrap_or(OWN_HEAD));
        return Ok(());
    };
    match session.use_head(name).instead {
        Some(source) => Err(FireboxError::NoHead { name: name.to_owned(), source }),
        None => Ok(()),
    }
}
