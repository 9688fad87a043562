use std::collections::VecDeque;
use std::fmt;
use std::time::Duration;

use serde::Serialize;

use super::{Priority, TaskId};

/// Older events make room for newer ones.
const MOST_EVENTS: usize = 256;

/// What a schedule has come to.
#[derive(Debug, Clone, PartialEq, Default, Serialize)]
pub struct ScheduleCounters {
    /// How often a lane was given the machine.
    pub quanta: u64,
    /// Layers that ran.
    pub layers: u64,
    /// How long lanes ran, all of them together.
    pub busy: Duration,
    /// Quanta that went on for longer than they should by more than the slippage.
    pub overruns: u64,
    /// How often a lane lost the machine before its quantum was over.
    pub preemptions: u64,
    /// Quanta that were given for having waited.
    pub shares: u64,
    /// How often there was work, and none of it was in memory.
    pub waits: u64,
    /// How often a task was demoted.
    pub demotions: u64,
    /// How often one came back.
    pub returns: u64,
    /// By priority, the least urgent first.
    pub classes: [ClassCounters; Priority::ALL.len()],
    /// What happened lately.
    pub events: VecDeque<ScheduleEvent>,
}

/// What tasks of one priority have come to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub struct ClassCounters {
    /// Tasks that were added.
    pub tasks: u64,
    /// Tokens they got.
    pub tokens: u64,
    /// Tokens that came by their deadline.
    pub met: u64,
    /// Tokens that came after it.
    pub slips: u64,
    /// Of those, first ones.
    pub late_firsts: u64,
}

impl ClassCounters {
    /// The share of the deadlines that were met; all of none.
    pub fn met_share(&self) -> f64 {
        let all = self.met + self.slips;
        if all == 0 { 1.0 } else { self.met as f64 / all as f64 }
    }
}

impl ScheduleCounters {
    /// Those of one priority.
    pub fn class(&self, priority: Priority) -> &ClassCounters {
        &self.classes[priority as usize]
    }

    pub(super) fn note(&mut self, event: ScheduleEvent) {
        match event {
            ScheduleEvent::Demoted { .. } => self.demotions += 1,
            ScheduleEvent::Restored { .. } => self.returns += 1,
        }
        if self.events.len() == MOST_EVENTS {
            self.events.pop_front();
        }
        self.events.push_back(event);
    }
}

/// Something that a log should have.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum ScheduleEvent {
    /// A task does not keep its pace, and does without its priority from now on.
    Demoted {
        /// When.
        at: Duration,
        /// Which.
        task: TaskId,
        /// The name of its lane.
        lane: String,
        /// What it had.
        priority: Priority,
        /// The share of its period that it was late by.
        slippage: f64,
        /// The share of the machine that it would take to keep the pace.
        demand: f64,
    },
    /// A task keeps its pace again and has its priority back.
    Restored {
        /// When.
        at: Duration,
        /// Which.
        task: TaskId,
        /// The name of its lane.
        lane: String,
        /// What it has again.
        priority: Priority,
    },
}

impl fmt::Display for ScheduleEvent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Demoted { at, task, lane, priority, slippage, demand } => write!(
                f,
                "{:.3} s: {priority} task {} of {lane} is late by {:.0} % and would take {:.0} % of the machine: \
                 demoted",
                at.as_secs_f64(),
                task.0,
                slippage * 100.0,
                demand * 100.0
            ),
            Self::Restored { at, task, lane, priority } => write!(
                f,
                "{:.3} s: task {} of {lane} keeps its pace and is {priority} again",
                at.as_secs_f64(),
                task.0
            ),
        }
    }
}
