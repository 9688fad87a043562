use std::sync::Arc;

use firebox_model::Head;

use crate::{RuntimeError, Session};

/// The head that chooses among the others, by its name.
pub const ROUTER: &str = "router";

/// A classifier whose labels are names of heads.
#[derive(Debug, Clone)]
pub struct Router(Arc<Head>);

impl Router {
    /// That of a session's heads, if there is one that can be used.
    pub fn of(session: &Session) -> Option<Self> {
        let rack = session.heads().filter(|rack| rack.names().iter().any(|name| name == ROUTER))?;
        let worn = rack.wear(ROUTER);
        worn.head.filter(|head| worn.instead.is_none() && head.is_classifier()).map(Self)
    }

    /// The head that a prompt is for, which comes next in a sequence; none where its labels are none.
    pub fn choice(&self, session: &Session, prompt: &[u32]) -> Result<Option<String>, RuntimeError> {
        let likelihoods = session.classify(&self.0, prompt)?;
        Ok(likelihoods.into_iter().next().map(|likeliest| likeliest.label))
    }
}
