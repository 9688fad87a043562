//! The models a server offers, opened on first use if so configured.

use std::sync::Arc;

use firebox_engine::{Engine, EngineError};
use firebox_runtime::Model;
use firebox_runtime::residency::Residency;
use firebox_runtime::schedule::Priority;
use firebox_runtime::telemetry::Telemetry;
use serde_json::{Value, json};
use tokio::sync::OnceCell;

use crate::blocking::blocking;
use crate::error::ApiError;
use crate::error::ServerError;
use crate::model_spec::ModelSpec;
use crate::model_spec::{ModelSource, Opener};
use crate::pipeline::{Pipeline, PipelineSpec};
use crate::served_model::ServedModel;

/// The models of a server, in the order they were given.
#[derive(Debug)]
pub(crate) struct Catalog {
    entries: Vec<Arc<CatalogEntry>>,
    pipelines: Vec<Pipeline>,
    engine: Engine,
    telemetry: Telemetry,
}

/// A model that may not be open yet.
#[derive(Debug)]
pub(crate) struct CatalogEntry {
    pub name: String,
    pub priority: Priority,
    /// Opens the model, if it is opened on first use.
    opener: Option<Opener>,
    served: OnceCell<Arc<ServedModel>>,
}

/// A model, and the head a request selected.
#[derive(Debug, Clone)]
pub(crate) struct SelectedModel {
    pub served: Arc<ServedModel>,
    pub head: Option<String>,
    /// The name the request gave.
    pub name: String,
}

impl Catalog {
    /// Creates a catalog. Open models that generate text are added to the engine.
    pub fn new(
        models: Vec<ModelSpec>,
        pipelines: Vec<PipelineSpec>,
        engine: &Engine,
        telemetry: &Telemetry,
    ) -> Result<Self, ServerError> {
        if models.is_empty() {
            return Err(ServerError::NoModels);
        }
        let mut entries: Vec<Arc<CatalogEntry>> = Vec::new();
        for ModelSpec { name, source, priority } in models {
            if entries.iter().any(|other| other.name == name) {
                return Err(EngineError::ModelNamed { name }.into());
            }
            let (opener, served) = match source {
                ModelSource::Open(model) => {
                    let served = ServedModel::new(&name, *model, priority, engine, telemetry)?;
                    (None, Some(Arc::new(served)))
                }
                ModelSource::Lazy(open) => (Some(open), None),
            };
            entries.push(Arc::new(CatalogEntry {
                name,
                priority,
                opener,
                served: OnceCell::new_with(served),
            }));
        }
        let names: Vec<&str> = entries.iter().map(|entry| entry.name.as_str()).collect();
        let served = |name: &str| {
            let entry = entries.iter().find(|entry| entry.name == name)?;
            entry.served().map(|served| &**served)
        };
        let mut checked: Vec<Pipeline> = Vec::new();
        for spec in pipelines {
            if checked.iter().any(|other| other.spec.name() == spec.name()) {
                let reason = "there are two of this name; choose another for one".into();
                return Err(ServerError::Pipeline { name: spec.name().to_owned(), reason });
            }
            checked.push(Pipeline::new(spec, &names, served)?);
        }
        let (engine, telemetry) = (engine.clone(), telemetry.clone());
        Ok(Self { pipelines: checked, entries, engine, telemetry })
    }

    /// Finds a model by name or `model:head`, and opens it if necessary. Without a name, returns the only
    /// model.
    pub async fn find(&self, name: Option<&str>) -> Result<SelectedModel, ApiError> {
        let Some(name) = name else {
            let [only] = &self.entries[..] else {
                return Err(ApiError::field(
                    "model",
                    format!("is missing; there are: {}", self.names().join(", ")),
                ));
            };
            return Ok(SelectedModel { served: self.open(only).await?, head: None, name: only.name.clone() });
        };
        let of = |wanted: &str| self.entries.iter().find(|entry| entry.name == wanted);
        if let Some(entry) = of(name) {
            return Ok(SelectedModel { served: self.open(entry).await?, head: None, name: name.into() });
        }
        if let Some((model, head)) = name.rsplit_once(':')
            && let Some(entry) = of(model)
        {
            let served = self.open(entry).await?;
            if served.heads().iter().any(|other| other == head) {
                return Ok(SelectedModel { served, head: Some(head.into()), name: name.into() });
            }
        }
        if self.pipeline(name).is_some() {
            let reason = format!("{name:?} is a pipeline, which answers chats, completions and responses");
            return Err(ApiError::field("model", reason + "; name a model"));
        }
        Err(ApiError::no_model(name, &self.names()))
    }

    /// Returns the pipeline of this name.
    pub fn pipeline(&self, name: &str) -> Option<&Pipeline> {
        self.pipelines.iter().find(|pipeline| pipeline.spec.name() == name)
    }

    /// Returns all pipelines.
    pub fn pipelines(&self) -> &[Pipeline] {
        &self.pipelines
    }

    async fn open(&self, entry: &Arc<CatalogEntry>) -> Result<Arc<ServedModel>, ApiError> {
        if let Some(served) = entry.served() {
            return Ok(served.clone());
        }
        let (entry, engine, telemetry) = (entry.clone(), self.engine.clone(), self.telemetry.clone());
        // A task of its own: the client may disconnect while others wait for the same model.
        let opening = tokio::spawn(async move {
            let open = || {
                let entry = entry.clone();
                blocking(move || entry.open(&engine, &telemetry))
            };
            entry.served.get_or_try_init(open).await.cloned()
        });
        opening.await.unwrap_or_else(|_| Err(ApiError::stopping()))
    }

    /// Returns the most tokens that a model can ever have pages for. Unlimited if it shares memory with other
    /// models, which may release theirs.
    pub fn max_planned_tokens(&self, model: &Model) -> usize {
        let shares = |residency: &Residency| residency.budget().reserved().is_some();
        match &self.entries[..] {
            [_, _, ..] if model.residency().is_some_and(shares) => usize::MAX,
            _ => model.planned_tokens(),
        }
    }

    /// Returns all models, open or not.
    pub fn entries(&self) -> impl Iterator<Item = &Arc<CatalogEntry>> {
        self.entries.iter()
    }

    /// Returns the open models.
    pub fn served(&self) -> impl Iterator<Item = &Arc<ServedModel>> {
        self.entries.iter().filter_map(|entry| entry.served())
    }

    /// Returns all names a request may use. Heads are known once their model is open.
    pub fn names(&self) -> Vec<String> {
        let of = |entry: &Arc<CatalogEntry>| {
            let heads = entry.heads().into_iter().map(|head| format!("{}:{head}", entry.name));
            [entry.name.clone()].into_iter().chain(heads).collect::<Vec<_>>()
        };
        let pipelines = self.pipelines.iter().map(|pipeline| pipeline.spec.name().to_owned());
        self.entries.iter().flat_map(of).chain(pipelines).collect()
    }

    /// Returns the models, heads and pipelines as `/v1/models` lists them.
    pub fn values(&self, created: u64) -> Vec<Value> {
        let of = |entry: &Arc<CatalogEntry>| {
            let heads = entry.heads();
            let own = entry.value(None, created);
            [own]
                .into_iter()
                .chain(heads.iter().map(|head| entry.value(Some(head), created)))
                .collect::<Vec<_>>()
        };
        let pipelines = self.pipelines.iter().map(|pipeline| {
            let name = pipeline.spec.name();
            json!({
                "id": name,
                "object": "model",
                "created": created,
                "owned_by": "firebox",
                "root": name,
                "parent": null,
                "max_model_len": null,
            })
        });
        self.entries.iter().flat_map(of).chain(pipelines).collect()
    }
}

impl CatalogEntry {
    /// Returns the model if it is open.
    pub fn served(&self) -> Option<&Arc<ServedModel>> {
        self.served.get()
    }

    fn open(&self, engine: &Engine, telemetry: &Telemetry) -> Result<Arc<ServedModel>, ApiError> {
        // Unreachable: a model without an opener was open from the start.
        let Some(opener) = &self.opener else { return Err(ApiError::stopping()) };
        let served = opener
            .open()
            .map_err(EngineError::from)
            .and_then(|model| ServedModel::new(&self.name, model, self.priority, engine, telemetry));
        served.map(Arc::new).map_err(|error| {
            EngineError::NotOpened { name: self.name.clone(), source: Arc::new(error) }.into()
        })
    }

    fn heads(&self) -> Vec<String> {
        self.served().map(|served| served.heads()).unwrap_or_default()
    }

    fn value(&self, head: Option<&String>, created: u64) -> Value {
        json!({
            "id": head.map_or_else(|| self.name.clone(), |head| format!("{}:{head}", self.name)),
            "object": "model",
            "created": created,
            "owned_by": "firebox",
            "root": self.name,
            "parent": head.map(|_| &self.name),
            "max_model_len": self.served().and_then(|served| served.context),
        })
    }
}
