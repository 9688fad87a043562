//! An HTTP client that reads a server's `/metrics`.

use std::time::{Duration, Instant};

use anyhow::{Context as _, anyhow};
use ureq::Agent;

use super::figures::Figures;
use super::metrics::parse;

/// The timeout of a request to the server.
const PATIENCE: Duration = Duration::from_secs(5);

/// A server's `/metrics`.
pub struct Metrics {
    base: String,
    url: String,
    key: Option<String>,
    agent: Agent,
}

impl Metrics {
    /// Returns the metrics source of the server at an address, which may be that of its API.
    pub fn at(url: &str, key: Option<&str>) -> Self {
        let base = url.trim_end_matches('/').trim_end_matches("/v1").to_owned();
        let base = if base.contains("://") { base } else { format!("http://{base}") };
        let agent =
            Agent::config_builder().timeout_global(Some(PATIENCE)).http_status_as_error(false).build();
        Self { url: format!("{base}/metrics"), base, key: key.map(str::to_owned), agent: agent.into() }
    }

    /// Returns the server's address.
    pub fn name(&self) -> &str {
        &self.base
    }

    /// Reads the server's current metrics.
    pub fn read(&self) -> anyhow::Result<Figures> {
        let mut request = self.agent.get(&self.url);
        if let Some(key) = &self.key {
            request = request.header("authorization", format!("Bearer {key}"));
        }
        let mut response = request.call().map_err(|error| {
            anyhow!(
                "{}: no server answers ({error}); start one by `firebox serve`, or name another by --url",
                self.base
            )
        })?;
        match response.status().as_u16() {
            200 => {}
            401 | 403 if self.key.is_none() => {
                return Err(anyhow!("{}: the server wants a key; give it by --api-key", self.base));
            }
            401 | 403 => return Err(anyhow!("{}: the server does not know this key", self.base)),
            404 => return Err(anyhow!("{}: there is no /metrics; is it a Firebox server?", self.base)),
            status => return Err(anyhow!("{}: the server answers {status}", self.base)),
        }
        let text =
            response.body_mut().read_to_string().with_context(|| format!("{}: cannot read", self.url))?;
        let samples = parse(&text).map_err(|reason| anyhow!("{}: {reason}", self.url))?;
        Ok(Figures::of(&samples, Instant::now()))
    }
}
