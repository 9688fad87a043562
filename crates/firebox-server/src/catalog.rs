use std::sync::Arc;

use firebox_runtime::engine::Engine;
use firebox_runtime::fit::Fit;
use firebox_runtime::schedule::Priority;
use firebox_runtime::telemetry::Telemetry;
use firebox_runtime::{Model, RuntimeError};
use serde_json::{Value, json};
use tokio::sync::OnceCell;

use crate::app::blocking;
use crate::error::ApiError;
use crate::offer::{Opener, Source};
use crate::served::Served;
use crate::{Offer, ServerError};

/// The models that are served, in the order in which they were named.
#[derive(Debug)]
pub(crate) struct Catalog {
    listed: Vec<Arc<Listed>>,
    engine: Engine,
    telemetry: Telemetry,
}

/// A model that may not be open yet.
#[derive(Debug)]
pub(crate) struct Listed {
    pub name: String,
    pub priority: Priority,
    /// Opens it, where it is not open from the beginning.
    later: Option<Opener>,
    served: OnceCell<Arc<Served>>,
}

/// A model and the head it is to wear.
#[derive(Debug, Clone)]
pub(crate) struct Chosen {
    pub served: Arc<Served>,
    pub head: Option<String>,
    /// As it was asked for.
    pub name: String,
}

impl Catalog {
    /// Takes models in. Those that are open and continue text go to the engine.
    pub fn new(offers: Vec<Offer>, engine: &Engine, telemetry: &Telemetry) -> Result<Self, ServerError> {
        if offers.is_empty() {
            return Err(ServerError::NoModels);
        }
        let mut listed: Vec<Arc<Listed>> = Vec::new();
        for Offer { name, source, priority } in offers {
            if listed.iter().any(|other| other.name == name) {
                return Err(RuntimeError::ModelNamed { name }.into());
            }
            let (later, served) = match source {
                Source::Opened(model) => {
                    let served = Served::new(&name, *model, priority, engine, telemetry)?;
                    (None, Some(Arc::new(served)))
                }
                Source::Later(open) => (Some(open), None),
            };
            listed.push(Arc::new(Listed { name, priority, later, served: OnceCell::new_with(served) }));
        }
        Ok(Self { listed, engine: engine.clone(), telemetry: telemetry.clone() })
    }

    /// The model of a name, or of `model:head`, opened if nobody has asked for it before. Where nobody is named and there is
    /// only one, that.
    pub async fn find(&self, name: Option<&str>) -> Result<Chosen, ApiError> {
        let Some(name) = name else {
            let [only] = &self.listed[..] else {
                return Err(ApiError::field(
                    "model",
                    format!("is missing; there are: {}", self.names().join(", ")),
                ));
            };
            return Ok(Chosen { served: self.open(only).await?, head: None, name: only.name.clone() });
        };
        let of = |wanted: &str| self.listed.iter().find(|listed| listed.name == wanted);
        if let Some(listed) = of(name) {
            return Ok(Chosen { served: self.open(listed).await?, head: None, name: name.into() });
        }
        if let Some((model, head)) = name.rsplit_once(':')
            && let Some(listed) = of(model)
        {
            let served = self.open(listed).await?;
            if served.heads().iter().any(|other| other == head) {
                return Ok(Chosen { served, head: Some(head.into()), name: name.into() });
            }
        }
        Err(ApiError::no_model(name, &self.names()))
    }

    async fn open(&self, listed: &Arc<Listed>) -> Result<Arc<Served>, ApiError> {
        if let Some(served) = listed.served() {
            return Ok(served.clone());
        }
        let (listed, engine, telemetry) = (listed.clone(), self.engine.clone(), self.telemetry.clone());
        // A task of its own: who asked may leave, and others wait for the same.
        let opening = tokio::spawn(async move {
            let open = || {
                let listed = listed.clone();
                blocking(move || listed.open(&engine, &telemetry))
            };
            listed.served.get_or_try_init(open).await.cloned()
        });
        opening.await.unwrap_or_else(|_| Err(ApiError::over()))
    }

    /// Tokens that a model can ever have pages for; any number where it shares its memory, because what another model has now
    /// may be its own later.
    pub fn most_tokens(&self, model: &Model) -> usize {
        let shares = |fit: &Fit| fit.budget().reserved().is_some();
        match &self.listed[..] {
            [_, _, ..] if model.fit().is_some_and(shares) => usize::MAX,
            _ => model.planned_tokens(),
        }
    }

    /// All models, whether they are open or not.
    pub fn listed(&self) -> impl Iterator<Item = &Arc<Listed>> {
        self.listed.iter()
    }

    /// Those that are open.
    pub fn served(&self) -> impl Iterator<Item = &Arc<Served>> {
        self.listed.iter().filter_map(|listed| listed.served())
    }

    /// All that can be asked for. Heads are known once their model is open.
    pub fn names(&self) -> Vec<String> {
        let of = |listed: &Arc<Listed>| {
            let heads = listed.heads().into_iter().map(|head| format!("{}:{head}", listed.name));
            [listed.name.clone()].into_iter().chain(heads).collect::<Vec<_>>()
        };
        self.listed.iter().flat_map(of).collect()
    }

    /// The same as lists of models have it.
    pub fn values(&self, created: u64) -> Vec<Value> {
        let of = |listed: &Arc<Listed>| {
            let heads = listed.heads();
            let own = listed.value(None, created);
            [own]
                .into_iter()
                .chain(heads.iter().map(|head| listed.value(Some(head), created)))
                .collect::<Vec<_>>()
        };
        self.listed.iter().flat_map(of).collect()
    }
}

impl Listed {
    /// The model, if it is open.
    pub fn served(&self) -> Option<&Arc<Served>> {
        self.served.get()
    }

    fn open(&self, engine: &Engine, telemetry: &Telemetry) -> Result<Arc<Served>, ApiError> {
        // Nobody asks to open what is open.
        let Some(opener) = &self.later else { return Err(ApiError::over()) };
        let served =
            opener.open().and_then(|model| Served::new(&self.name, model, self.priority, engine, telemetry));
        served.map(Arc::new).map_err(|error| {
            RuntimeError::NotOpened { name: self.name.clone(), source: Arc::new(error) }.into()
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
