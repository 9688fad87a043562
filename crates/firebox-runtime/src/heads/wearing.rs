//! How a session comes to wear a head.

use std::sync::Arc;

use firebox_model::Head;

use super::{HeadRack, Worn};
use crate::telemetry::{Counter, Histogram, Kind, Meters};
use crate::{OWN_HEAD, RuntimeError, Session};

/// What was found in answer to a wish for a head, to be put on.
#[derive(Debug)]
pub(crate) struct Fetched {
    name: Arc<str>,
    pub worn: Worn,
}

impl Fetched {
    /// Looks for a head, however long that takes. Nobody wears it yet.
    pub fn of(name: &str, rack: Option<&HeadRack>, meters: &Meters) -> Self {
        let began = meters.began();
        let worn = match rack {
            _ if name == OWN_HEAD => Worn::at_once(None, None),
            Some(rack) => rack.wear(name),
            None => {
                let instead = Arc::new(RuntimeError::NoHead { name: name.into() });
                Worn::at_once(None, Some(instead))
            }
        };
        let came = match (&worn.instead, worn.waited) {
            (Some(_), _) => Counter::HeadFallbacks,
            (None, true) => Counter::ColdHeadSwaps,
            (None, false) => Counter::WarmHeadSwaps,
        };
        meters.add(came, 1);
        meters.took(Histogram::HeadSwap, worn.took);
        meters.drawn(Kind::HeadSwap, [worn.instead.is_some().into(), 0], began);
        Self { name: name.into(), worn }
    }
}

/// What a session wears, to be worn again.
#[derive(Debug, Clone)]
pub(crate) struct Outfit {
    head: Option<Arc<Head>>,
    worn: Option<Arc<str>>,
}

impl Session {
    /// Like [`set_head`](Self::set_head) with the head of that name among those of its model, or with what stands in for it:
    /// from the next token on, and without waiting long. [`OWN_HEAD`] is the model's own.
    pub fn use_head(&mut self, name: &str) -> Worn {
        let fetched = Fetched::of(name, self.rack.as_ref(), self.meters());
        let worn = fetched.worn.clone();
        self.put_on(fetched);
        worn
    }

    /// Wears what was found before.
    pub(crate) fn put_on(&mut self, Fetched { name, worn }: Fetched) {
        let before = self.worn.replace(name.clone()).unwrap_or_else(|| OWN_HEAD.into());
        if let Some(rack) = &self.rack
            && worn.instead.is_none()
            && *name != *OWN_HEAD
        {
            rack.note(&before, &name);
        }
        self.set_head(worn.head);
    }

    /// What it wears.
    pub(crate) fn outfit(&self) -> Outfit {
        Outfit { head: self.head.clone(), worn: self.worn.clone() }
    }

    /// Wears again what it wore.
    pub(crate) fn change_into(&mut self, Outfit { head, worn }: Outfit) {
        (self.head, self.worn) = (head, worn);
    }
}
