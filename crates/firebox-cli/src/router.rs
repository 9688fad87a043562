//! Which head a message is for.

use std::sync::Arc;

use firebox_model::Head;
use firebox_runtime::Session;

use crate::console::Console;

/// The name that leaves the choice to the router.
pub const AUTO: &str = "auto";

/// The head that chooses, by its name.
const ROUTER: &str = "router";

/// A classifier whose labels are names of heads.
pub struct Router(Arc<Head>);

impl Router {
    /// That of a session's heads, if there is one that can be used.
    pub fn of(session: &Session) -> Option<Self> {
        let rack = session.heads()?;
        if !rack.names().iter().any(|name| name == ROUTER) {
            return None;
        }
        let worn = rack.wear(ROUTER);
        worn.head.filter(|head| worn.instead.is_none() && head.is_classifier()).map(Self)
    }

    /// Has a session wear the head that the prompt is for, which comes next. Says which in a remark.
    pub fn choose(&self, session: &mut Session, prompt: &[u32], console: &Console) -> anyhow::Result<()> {
        let likelihoods = session.classify(&self.0, prompt)?;
        let Some(likeliest) = likelihoods.first() else { return Ok(()) };
        match session.use_head(&likeliest.label).instead {
            Some(reason) => console.note(format!("({reason})")),
            None => console.note(format!("({})", likeliest.label)),
        }
        Ok(())
    }
}
