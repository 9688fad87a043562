use firebox_runtime::{OWN_HEAD, RuntimeError, Session};

use crate::FireboxError;

/// The head that chooses, by its name.
const ROUTER: &str = "router";

/// Has a session answer with a head; nothing leaves the choice to the router, if the model has one that can be used, and
/// is the model's own layers otherwise. The prompt is what comes next.
pub(crate) fn dress(session: &mut Session, head: Option<&str>, prompt: &[u32]) -> Result<(), FireboxError> {
    let Some(name) = head else {
        let chosen = choice(session, prompt)?;
        // Where that cannot be used, what stands in for it answers.
        session.use_head(chosen.as_deref().unwrap_or(OWN_HEAD));
        return Ok(());
    };
    match session.use_head(name).instead {
        Some(source) => Err(FireboxError::NoHead { name: name.to_owned(), source }),
        None => Ok(()),
    }
}

fn choice(session: &Session, prompt: &[u32]) -> Result<Option<String>, RuntimeError> {
    let rack = session.heads().filter(|rack| rack.names().iter().any(|name| name == ROUTER));
    let Some(worn) = rack.map(|rack| rack.wear(ROUTER)).filter(|worn| worn.instead.is_none()) else {
        return Ok(None);
    };
    let Some(router) = worn.head.filter(|head| head.is_classifier()) else { return Ok(None) };
    let likelihoods = session.classify(&router, prompt)?;
    Ok(likelihoods.into_iter().next().map(|likeliest| likeliest.label))
}
