//! Opens sessions of a model.

use firebox_cache::PagePool;

use super::{Session, SessionFile};
use crate::{Model, RuntimeError};

impl Model {
    /// Creates an empty session.
    pub fn session(&self) -> Result<Session, RuntimeError> {
        match &self.residency {
            Some(residency) => self.session_in(residency.pool()),
            None => Ok(self.configured(Session::new(self.decoder()?))),
        }
    }

    /// Creates an empty session with pages from a pool that several sessions share.
    pub fn session_in(&self, pool: &PagePool) -> Result<Session, RuntimeError> {
        Ok(self.configured(Session::in_pool(self.decoder()?, pool)))
    }

    /// Creates a session that continues a saved one, with pages from a pool.
    pub fn restored_in(&self, saved: &SessionFile, pool: &PagePool) -> Result<Session, RuntimeError> {
        Ok(self.configured(saved.session_in(pool)?))
    }

    /// Creates a session that continues a saved one, with pages from the pool of [the model's sessions](Self::session).
    pub fn restored(&self, saved: &SessionFile) -> Result<Session, RuntimeError> {
        let Some(residency) = &self.residency else { return Ok(self.configured(saved.session()?)) };
        let (pool, layout) = (residency.pool(), saved.layout());
        if pool.layout().kv_dtype == layout.kv_dtype && pool.layout().layers == layout.layers {
            return self.restored_in(saved, pool);
        }
        self.restored_in(saved, &pool.with_layout(layout))
    }

    /// Gives a session the model's meters and heads, and chunks that fit into its memory.
    fn configured(&self, mut session: Session) -> Session {
        if let Some(residency) = &self.residency {
            session = session.with_chunk(residency.plan().chunk);
            session.residency = Some(residency.clone());
        }
        if let Some(heads) = self.heads() {
            session = session.with_heads(heads.clone());
        }
        session.with_meters(self.session_meters())
    }
}
