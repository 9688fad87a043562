use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::time::Duration;

use super::{LaneId, Priority, Readiness, Scheduler, TaskId};

/// Layers of which each may go on while somebody else becomes more urgent: the one that runs, the one that ends a quantum
/// which is given for having waited, and one more for a clock that is looked at between layers.
const LAYERS: u32 = 3;

/// Looks over a scheduler's shoulder: whether somebody starves, or is held up by who matters less.
#[derive(Debug, Default)]
pub(super) struct Monitor {
    ready_since: BTreeMap<LaneId, Duration>,
    held_up: HashMap<TaskId, Duration>,
    longest_layer: Duration,
    longest_wait: Duration,
    longest_quantum: Duration,
}

/// A wrong that was done to somebody.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Wrong {
    /// A lane was ready and did not run.
    Starved { lane: String, waited: Duration },
    /// A task was late while only those ran that matter less.
    HeldUp { lane: String, priority: Priority, held_up: Duration },
}

impl fmt::Display for Wrong {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Starved { lane, waited } => write!(f, "{lane} was ready for {waited:.1?} and did not run"),
            Self::HeldUp { lane, priority, held_up } => {
                write!(f, "a {priority} task of {lane} was late and held up for {held_up:.1?}")
            }
        }
    }
}

impl Monitor {
    /// Looks at a layer that has run and is not noted yet.
    pub fn look(
        &mut self,
        scheduler: &Scheduler,
        began: Duration,
        took: Duration,
        running: LaneId,
        readiness: impl Fn(LaneId) -> Readiness,
    ) -> Option<Wrong> {
        self.longest_layer = self.longest_layer.max(took);
        self.longest_wait = self.longest_wait.max(scheduler.longest_wait());
        self.longest_quantum = self.longest_quantum.max(scheduler.quantum());
        let lanes = scheduler.lanes().count() as u32;
        let longest_wait = self.longest_wait + self.longest_layer * (lanes + LAYERS);
        let longest_hold = self.longest_quantum + self.longest_layer * LAYERS;
        let best = scheduler
            .lanes()
            .filter(|(id, _)| *id == running)
            .flat_map(|(_, lane)| lane.tasks.values())
            .filter(|track| !track.is_demoted() && track.due.is_some())
            .map(|track| track.task.priority)
            .max();
        for (id, lane) in scheduler.lanes() {
            if id == running || readiness(id) != Readiness::Ready {
                self.ready_since.remove(&id);
                if !self.held_up.is_empty() {
                    self.held_up.retain(|task, _| !lane.tasks.contains_key(task));
                }
                continue;
            }
            let waited = began + took - *self.ready_since.entry(id).or_insert(began);
            if waited > longest_wait {
                return Some(Wrong::Starved { lane: lane.name.clone(), waited });
            }
            for (&task, track) in &lane.tasks {
                let priority = track.task.priority;
                let is_late = track.due.is_some_and(|due| due < began) && !track.is_demoted();
                if !is_late || best.is_some_and(|best| best >= priority) {
                    self.held_up.remove(&task);
                    continue;
                }
                let held_up = self.held_up.entry(task).or_default();
                *held_up += took;
                if *held_up > longest_hold {
                    return Some(Wrong::HeldUp { lane: lane.name.clone(), priority, held_up: *held_up });
                }
            }
        }
        None
    }
}
