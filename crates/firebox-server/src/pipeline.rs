//! Pipelines: a router chooses the model that answers a request, and a fallback answers if that one cannot.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use axum::http::HeaderValue;
use axum::response::Response;
use firebox_model::HeadForm;
use firebox_runtime::heads::ROUTER;
use firebox_runtime::telemetry;

use crate::error::ServerError;
use crate::served_model::ServedModel;

/// The header of a response that names the chosen specialist.
const ROUTE_HEADER: &str = "x-firebox-route";

/// The route of requests that the fallback answers.
pub(crate) const FALLBACK: &str = "fallback";

/// The metric that counts requests by route.
const METRIC: &str = "firebox_pipeline_requests_total";

/// A pipeline for a server: requests by its name are answered by one of several models.
///
/// ```
/// use firebox_server::{PipelineSpec, ServerConfig};
///
/// let pipeline = PipelineSpec::new("assistant", "small:router", "small")
///     .with_specialist("code", "coder")
///     .with_specialist("summarize", "small:summarize")
///     .with_confidence(0.5);
/// let config = ServerConfig { pipelines: vec![pipeline], ..ServerConfig::default() };
/// # drop(config);
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct PipelineSpec {
    name: String,
    router: String,
    pub(crate) specialists: BTreeMap<String, String>,
    pub(crate) fallback: String,
    pub(crate) confidence: f32,
}

impl PipelineSpec {
    /// A pipeline with a name for requests. The router is a classifier among a model's heads, as `model:head`; a model's name
    /// alone means its head called `router`. The fallback is a model, or a head as `model:head`.
    pub fn new(name: impl Into<String>, router: impl Into<String>, fallback: impl Into<String>) -> Self {
        Self {
            name: name.into(),
            router: router.into(),
            specialists: BTreeMap::new(),
            fallback: fallback.into(),
            confidence: 0.0,
        }
    }

    /// Lets a model, or a head as `model:head`, answer what the router labels so.
    pub fn with_specialist(mut self, label: impl Into<String>, model: impl Into<String>) -> Self {
        self.specialists.insert(label.into(), model.into());
        self
    }

    /// Sets the probability of a label below which the fallback answers.
    pub fn with_confidence(self, confidence: f32) -> Self {
        Self { confidence, ..self }
    }

    /// Returns its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the models that it names, with their heads as `model:head`.
    pub fn models(&self) -> impl Iterator<Item = &str> {
        let specialists = self.specialists.values();
        [&self.router, &self.fallback].into_iter().chain(specialists).map(String::as_str)
    }

    /// Returns the router's model and head.
    fn router(&self, is_model: impl Fn(&str) -> bool) -> (&str, &str) {
        match self.router.rsplit_once(':') {
            Some((model, head)) if !is_model(&self.router) && is_model(model) => (model, head),
            _ => (&self.router, ROUTER),
        }
    }
}

/// A pipeline in service.
#[derive(Debug)]
pub(crate) struct Pipeline {
    pub spec: PipelineSpec,
    router: (String, String),
    /// The number of requests by route.
    requests: Mutex<BTreeMap<String, u64>>,
}

impl Pipeline {
    /// Checks a pipeline against the names of the models. `served` returns a model that is open.
    pub fn new<'m>(
        spec: PipelineSpec,
        models: &[&str],
        served: impl Fn(&str) -> Option<&'m ServedModel>,
    ) -> Result<Self, ServerError> {
        let is_model = |name: &str| models.contains(&name);
        let (model, head) = spec.router(is_model);
        let router = (model.to_owned(), head.to_owned());
        let refused = |reason: String| ServerError::Pipeline { name: spec.name.clone(), reason };
        if spec.name.is_empty() || is_model(&spec.name) {
            return Err(refused("a model is called so, or it has no name; choose another name".into()));
        }
        if spec.specialists.is_empty() {
            return Err(refused("there are no specialists; give each label of the router a model".into()));
        }
        for name in spec.models() {
            let model = name.rsplit_once(':').map_or(name, |(model, _)| model);
            if !is_model(name) && !is_model(model) {
                let known = models.join(", ");
                return Err(refused(format!("there is no model {name:?}; there are: {known}")));
            }
        }
        if let Some(served) = served(model) {
            if !served.heads().iter().any(|known| known == head) {
                let remedy = "train one, or name a model that has one";
                return Err(refused(format!("{model:?} has no head {head:?} that could choose; {remedy}")));
            }
            // If the head cannot be loaded now, requests go to the fallback until it can be.
            let acquired = served.model.heads().and_then(|heads| heads.acquire(head).head);
            match acquired.as_deref().map(|head| head.form()) {
                Some(HeadForm::Classifier { labels }) => {
                    let unknown = spec.specialists.keys().find(|label| !labels.contains(label));
                    if let Some(label) = unknown {
                        let known = labels.join(", ");
                        return Err(refused(format!("the router has no label {label:?}; it has {known}")));
                    }
                }
                Some(_) => {
                    let remedy = "name a classifier";
                    return Err(refused(format!("the head {head:?} continues texts; {remedy}")));
                }
                None => {}
            }
        }
        Ok(Self { spec, router, requests: Mutex::default() })
    }

    /// Returns the model and the head of the router.
    pub fn router(&self) -> (&str, &str) {
        (&self.router.0, &self.router.1)
    }

    /// Counts a request, and names its route in the response.
    pub fn report(&self, mut response: Response, route: &str) -> Response {
        let mut requests = self.requests.lock().unwrap_or_else(PoisonError::into_inner);
        *requests.entry(route.to_owned()).or_default() += 1;
        if let Ok(value) = HeaderValue::from_str(route) {
            response.headers_mut().insert(ROUTE_HEADER, value);
        }
        response
    }
}

/// Renders the requests of pipelines by route for Prometheus.
pub(crate) fn metrics(pipelines: &[Pipeline]) -> String {
    let samples = pipelines.iter().flat_map(|pipeline| {
        let requests = pipeline.requests.lock().unwrap_or_else(PoisonError::into_inner).clone();
        requests.into_iter().map(|(route, count)| ([pipeline.spec.name.clone(), route], count))
    });
    let help = "Requests that pipelines answered, by the label of the router or as fallback.";
    telemetry::render_counter(METRIC, help, ["pipeline", "route"], samples)
}
