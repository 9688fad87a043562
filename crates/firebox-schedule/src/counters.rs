//! Counters and events of a scheduler.

use std::collections::VecDeque;
use std::fmt;
use std::time::Duration;

use serde::Serialize;

use super::{Priority, TaskId};

/// The most recent events that are kept.
const MAX_EVENTS: usize = 256;

/// What a scheduler has counted.
#[derive(Debug, Clone, PartialEq, Default, Serialize)]
pub struct ScheduleCounters {
    /// Quanta given to models.
    pub quanta: u64,
    /// Layers that ran.
    pub layers: u64,
    /// The time that models ran, in total.
    pub busy: Duration,
    /// Quanta that overran by more than the slippage.
    pub overruns: u64,
    /// Quanta that a more urgent model ended early.
    pub preemptions: u64,
    /// Quanta given for having waited.
    pub shares: u64,
    /// Choices at which there was work and none of it was in memory.
    pub waits: u64,
    /// Demotions.
    pub demotions: u64,
    /// Demoted tasks that got their priority back.
    pub returns: u64,
    /// Counters of each priority, the least urgent first.
    pub classes: [ClassCounters; Priority::ALL.len()],
    /// Recent events.
    pub events: VecDeque<ScheduleEvent>,
}

/// Counters of the tasks of one priority.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub struct ClassCounters {
    /// Tasks that were added.
    pub tasks: u64,
    /// Tokens they got.
    pub tokens: u64,
    /// Tokens that met their deadline.
    pub met: u64,
    /// Tokens that missed it.
    pub slips: u64,
    /// First tokens that missed it.
    pub late_firsts: u64,
}

impl ClassCounters {
    /// Returns the share of deadlines that were met, and 1 if there were none.
    pub fn met_share(&self) -> f64 {
        let all = self.met + self.slips;
        if all == 0 { 1.0 } else { self.met as f64 / all as f64 }
    }
}

impl ScheduleCounters {
    /// Returns the counters of a priority.
    pub fn class(&self, priority: Priority) -> &ClassCounters {
        &self.classes[priority as usize]
    }

    pub(super) fn note(&mut self, event: ScheduleEvent) {
        match event {
            ScheduleEvent::Demoted { .. } => self.demotions += 1,
            ScheduleEvent::Restored { .. } => self.returns += 1,
        }
        if self.events.len() == MAX_EVENTS {
            self.events.pop_front();
        }
        self.events.push_back(event);
    }
}

/// An event for a log.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum ScheduleEvent {
    /// A task falls behind its pace and loses its priority.
    Demoted {
        /// The time.
        at: Duration,
        /// The task.
        task: TaskId,
        /// The name of its model.
        #[serde(rename = "lane")]
        model: String,
        /// Its priority before.
        priority: Priority,
        /// Its average lateness as a share of its period.
        slippage: f64,
        /// The share of the machine that its pace would take.
        demand: f64,
    },
    /// A task keeps its pace again and gets its priority back.
    Restored {
        /// The time.
        at: Duration,
        /// The task.
        task: TaskId,
        /// The name of its model.
        #[serde(rename = "lane")]
        model: String,
        /// Its priority.
        priority: Priority,
    },
}

impl fmt::Display for ScheduleEvent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Demoted { at, task, model, priority, slippage, demand } => write!(
                f,
                "{:.3} s: {priority} task {} of {model} is late by {:.0} % and would take {:.0} % of the machine: \
                 demoted",
                at.as_secs_f64(),
                task.0,
                slippage * 100.0,
                demand * 100.0
            ),
            Self::Restored { at, task, model, priority } => write!(
                f,
                "{:.3} s: task {} of {model} keeps its pace and is {priority} again",
                at.as_secs_f64(),
                task.0
            ),
        }
    }
}
