//! Switches the head of a session, classifies text, and routes.

use std::sync::Arc;

use firebox_model::{Head, HeadForm};

use super::Session;
use crate::RuntimeError;
use crate::heads::pool::{HeadPool, HeadSwitch};
use crate::telemetry::{Counter, Histogram, Kind, Meters};

/// The name of the model's own last layers among heads.
pub const OWN_HEAD: &str = "0";

/// The name of the head that chooses among the others.
pub const ROUTER: &str = "router";

/// A head that was acquired for a session and is not in use yet.
#[derive(Debug)]
pub struct FetchedHead {
    name: Arc<str>,
    /// The head, or the fallback and its reason.
    pub switch: HeadSwitch,
}

impl FetchedHead {
    /// Acquires a head, and waits for it if it is not in memory.
    pub fn fetch(name: &str, pool: Option<&HeadPool>, meters: &Meters) -> Self {
        let began = meters.began();
        let switch = match pool {
            _ if name == OWN_HEAD => HeadSwitch::immediate(None, None),
            Some(pool) => pool.acquire(name),
            None => {
                let reason = Arc::new(RuntimeError::NoHead { name: name.into() });
                HeadSwitch::immediate(None, Some(reason))
            }
        };
        let counter = match (&switch.fallback_reason, switch.waited) {
            (Some(_), _) => Counter::HeadFallbacks,
            (None, true) => Counter::ColdHeadSwaps,
            (None, false) => Counter::WarmHeadSwaps,
        };
        meters.add(counter, 1);
        meters.took(Histogram::HeadSwap, switch.took);
        meters.drawn(Kind::HeadSwap, [switch.fallback_reason.is_some().into(), 0], began);
        Self { name: name.into(), switch }
    }
}

/// The head of a session at some time, to return to.
#[derive(Debug, Clone)]
pub struct HeadSelection {
    head: Option<Arc<Head>>,
    requested: Option<Arc<str>>,
}

/// A label of a classifier, with its probability.
#[derive(Debug, Clone, PartialEq)]
pub struct Likelihood {
    /// The label.
    pub label: String,
    /// From 0 to 1.
    pub probability: f32,
}

impl Session {
    /// Uses this head from the next token on, or the model's own last layers for `None`. The trunk's part of the cache stays;
    /// the head's part is recomputed from the trunk's states with the next feed.
    pub fn set_head(&mut self, head: Option<Arc<Head>>) {
        self.head = head;
    }

    /// Uses the head of that name from the pool from the next token on, or a fallback if the pool does not have it in time.
    /// [`OWN_HEAD`] is the model's own.
    pub fn use_head(&mut self, name: &str) -> HeadSwitch {
        let fetched = FetchedHead::fetch(name, self.head_pool.as_ref(), self.meters());
        let switch = fetched.switch.clone();
        self.switch_head(fetched);
        switch
    }

    /// Uses a head that was fetched before.
    pub fn switch_head(&mut self, FetchedHead { name, switch }: FetchedHead) {
        let before = self.requested_head.replace(name.clone()).unwrap_or_else(|| OWN_HEAD.into());
        if let Some(pool) = &self.head_pool
            && switch.fallback_reason.is_none()
            && *name != *OWN_HEAD
        {
            pool.note(&before, &name);
        }
        self.set_head(switch.head);
    }

    /// Returns the head in use, for [`restore_head`](Self::restore_head).
    pub fn head_selection(&self) -> HeadSelection {
        HeadSelection { head: self.head.clone(), requested: self.requested_head.clone() }
    }

    /// Uses a head that it used before.
    pub fn restore_head(&mut self, HeadSelection { head, requested }: HeadSelection) {
        (self.head, self.requested_head) = (head, requested);
    }

    /// Returns the pool that it takes heads from.
    pub fn heads(&self) -> Option<&HeadPool> {
        self.head_pool.as_ref()
    }

    /// Takes heads from this pool.
    pub fn with_heads(self, pool: HeadPool) -> Self {
        Self { head_pool: Some(pool), ..self }
    }

    /// Returns the head in use, or `None` for the model's own last layers.
    pub fn head(&self) -> Option<&Arc<Head>> {
        self.head.as_ref()
    }

    /// Returns the name of the head that was requested last, if one was. A fallback may be in use instead.
    pub fn requested_head(&self) -> Option<&str> {
        self.requested_head.as_deref()
    }

    pub(crate) fn head_id(&self) -> Arc<str> {
        self.head.as_ref().map_or_else(|| OWN_HEAD.into(), |head| head.id().clone())
    }

    /// Labels this sequence followed by `tokens` with a classifier, the most likely label first. The session itself does not
    /// change, and its cached tokens do not go through the trunk again.
    pub fn classify(&self, head: &Arc<Head>, tokens: &[u32]) -> Result<Vec<Likelihood>, RuntimeError> {
        let HeadForm::Classifier { labels } = head.form() else {
            return Err(RuntimeError::Kind {
                found: "a head that continues text",
                remedy: "labels come from a classifier; use one",
            });
        };
        let mut branch = self.clone();
        branch.set_head(Some(head.clone()));
        let scores = branch.feed(tokens)?;
        let highest = scores.iter().copied().fold(f32::MIN, f32::max);
        let total: f32 = scores.iter().map(|score| (score - highest).exp()).sum();
        let mut likelihoods: Vec<_> = labels
            .iter()
            .zip(scores)
            .map(|(label, score)| Likelihood {
                label: label.clone(),
                probability: (score - highest).exp() / total,
            })
            .collect();
        likelihoods.sort_by(|one, other| other.probability.total_cmp(&one.probability));
        Ok(likelihoods)
    }
}

/// A classifier whose labels are names of heads.
#[derive(Debug, Clone)]
pub struct Router(Arc<Head>);

impl Router {
    /// Acquires the router from a session's heads. Returns `None` if there is none, or if it cannot be used.
    pub fn for_session(session: &Session) -> Option<Self> {
        Self::named(session, ROUTER)
    }

    /// Acquires a classifier from a session's heads. Returns `None` if there is none of that name, or if it cannot be used.
    pub fn named(session: &Session, name: &str) -> Option<Self> {
        let pool = session.heads().filter(|pool| pool.names().iter().any(|known| known == name))?;
        let switch = pool.acquire(name);
        switch.head.filter(|head| switch.fallback_reason.is_none() && head.is_classifier()).map(Self)
    }

    /// Chooses a head for a prompt that follows in a session. Returns `None` if the router has no labels.
    pub fn choose(&self, session: &Session, prompt: &[u32]) -> Result<Option<String>, RuntimeError> {
        let likelihoods = self.likelihoods(session, prompt)?;
        Ok(likelihoods.into_iter().next().map(|likeliest| likeliest.label))
    }

    /// Returns all labels for a prompt that follows in a session, the likeliest first.
    pub fn likelihoods(&self, session: &Session, prompt: &[u32]) -> Result<Vec<Likelihood>, RuntimeError> {
        session.classify(&self.0, prompt)
    }
}
