//! A check of invariants while a scheduler runs.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::time::Duration;

use super::{ModelId, Priority, Readiness, Scheduler, TaskId};

/// Layers that may each run on after a more urgent model became ready: the running one, the one that ends a share quantum,
/// and one more because the clock is read between layers.
const OVERRUN_LAYERS: u32 = 3;

/// Checks a scheduler for starvation and for late tasks blocked by less urgent ones.
#[derive(Debug, Default)]
pub(super) struct Monitor {
    ready_since: BTreeMap<ModelId, Duration>,
    blocked: HashMap<TaskId, Duration>,
    longest_layer: Duration,
    longest_wait: Duration,
    longest_quantum: Duration,
}

/// A violated invariant.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Violation {
    /// A model was ready and did not run.
    Starved { model: String, waited: Duration },
    /// A task was late while only less urgent ones ran.
    Blocked { model: String, priority: Priority, blocked: Duration },
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Starved { model, waited } => {
                write!(f, "{model} was ready for {waited:.1?} and did not run")
            }
            Self::Blocked { model, priority, blocked } => {
                write!(f, "a {priority} task of {model} was late and held up for {blocked:.1?}")
            }
        }
    }
}

impl Monitor {
    /// Checks a layer that has run, before the scheduler is told of it.
    pub fn look(
        &mut self,
        scheduler: &Scheduler,
        began: Duration,
        took: Duration,
        running: ModelId,
        readiness: impl Fn(ModelId) -> Readiness,
    ) -> Option<Violation> {
        self.longest_layer = self.longest_layer.max(took);
        self.longest_wait = self.longest_wait.max(scheduler.longest_wait());
        self.longest_quantum = self.longest_quantum.max(scheduler.quantum());
        let models = scheduler.models().count() as u32;
        let longest_wait = self.longest_wait + self.longest_layer * (models + OVERRUN_LAYERS);
        let longest_block = self.longest_quantum + self.longest_layer * OVERRUN_LAYERS;
        let best = scheduler
            .models()
            .filter(|(id, _)| *id == running)
            .flat_map(|(_, model)| model.tasks.values())
            .filter(|track| !track.is_demoted() && track.due.is_some())
            .map(|track| track.task.priority)
            .max();
        for (id, model) in scheduler.models() {
            if id == running || readiness(id) != Readiness::Ready {
                self.ready_since.remove(&id);
                if !self.blocked.is_empty() {
                    self.blocked.retain(|task, _| !model.tasks.contains_key(task));
                }
                continue;
            }
            let waited = began + took - *self.ready_since.entry(id).or_insert(began);
            if waited > longest_wait {
                return Some(Violation::Starved { model: model.name.clone(), waited });
            }
            for (&task, track) in &model.tasks {
                let priority = track.task.priority;
                let is_late = track.due.is_some_and(|due| due < began) && !track.is_demoted();
                if !is_late || best.is_some_and(|best| best >= priority) {
                    self.blocked.remove(&task);
                    continue;
                }
                let blocked = self.blocked.entry(task).or_default();
                *blocked += took;
                if *blocked > longest_block {
                    return Some(Violation::Blocked {
                        model: model.name.clone(),
                        priority,
                        blocked: *blocked,
                    });
                }
            }
        }
        None
    }
}
