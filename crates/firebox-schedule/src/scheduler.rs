use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use super::counters::{ScheduleCounters, ScheduleEvent};
use super::lane::{Claim, Lane, Rank};
use super::track::Track;
use super::{Choice, LaneId, Priority, Readiness, ScheduleConfig, Task, TaskId};
use firebox_memory::thermal::Heat;

/// How many quanta a task may be ahead of its pace before others come first: enough that one quantum of another lane, and
/// the layer that ends it, make nobody late.
const LEAD_QUANTA: u32 = 2;
/// Quanta from one demotion to the next, in which it shows what the first was good for.
const SETTLING_QUANTA: u32 = 8;

/// When somebody is late enough to demote somebody, all count who are late by this part of that.
const ACCOMPLICE: f64 = 0.5;

/// Says which model runs next. Knows no clock: every call is told the time since the start.
///
/// ```
/// use std::time::Duration;
/// use firebox_schedule::{Choice, Priority, Readiness, ScheduleConfig, Scheduler, Task};
///
/// let mut scheduler = Scheduler::new(ScheduleConfig::default());
/// let (small, large) = (scheduler.lane("small"), scheduler.lane("large"));
/// let now = Duration::ZERO;
/// scheduler.add(now, large, Task::new(Priority::Background));
/// scheduler.add(now, small, Task::new(Priority::Interactive));
/// let choice = scheduler.choose(now, |_| Readiness::Ready);
/// assert_eq!(choice, Choice::Run { lane: small, until: Duration::from_millis(50) });
/// ```
#[derive(Debug)]
pub struct Scheduler {
    config: ScheduleConfig,
    heat: Heat,
    lanes: BTreeMap<LaneId, Lane>,
    lane_of: HashMap<TaskId, LaneId>,
    lanes_made: u32,
    tasks_made: u64,
    running: Option<Running>,
    last_share: Duration,
    last_demotion: Option<Duration>,
    counters: ScheduleCounters,
}

/// A quantum that is not over.
#[derive(Debug, Clone, Copy)]
struct Running {
    lane: LaneId,
    until: Duration,
    /// It was given for having waited, and is not taken back.
    is_share: bool,
}

impl Scheduler {
    /// With no lanes yet.
    pub fn new(config: ScheduleConfig) -> Self {
        Self {
            config,
            heat: Heat::Nominal,
            lanes: BTreeMap::new(),
            lane_of: HashMap::new(),
            lanes_made: 0,
            tasks_made: 0,
            running: None,
            last_share: Duration::ZERO,
            last_demotion: None,
            counters: ScheduleCounters::default(),
        }
    }

    /// Makes a lane for a model. It is none that was dropped: who still means that one does not mean the new one.
    pub fn lane(&mut self, name: &str) -> LaneId {
        let id = LaneId(self.lanes_made);
        self.lanes_made += 1;
        self.lanes.insert(id, Lane::new(name));
        id
    }

    /// Forgets a lane and all its tasks.
    pub fn drop_lane(&mut self, lane: LaneId) {
        self.lanes.remove(&lane);
        self.lane_of.retain(|_, of| *of != lane);
        self.running.take_if(|running| running.lane == lane);
    }

    /// Adds a task. A lane that was dropped takes none, and whatever is told of such a task is ignored.
    pub fn add(&mut self, now: Duration, lane: LaneId, task: Task) -> TaskId {
        let id = TaskId(self.tasks_made);
        self.tasks_made += 1;
        if let Some(found) = self.lanes.get_mut(&lane) {
            self.counters.classes[task.priority as usize].tasks += 1;
            found.tasks.insert(id, Track::new(task, now, &self.config));
            found.waits_since.get_or_insert(now);
            self.lane_of.insert(id, lane);
        }
        id
    }

    /// Forgets a task that is done, or not wanted any more.
    pub fn remove(&mut self, task: TaskId) {
        let Some(lane) = self.lane_of.remove(&task).and_then(|lane| self.lanes.get_mut(&lane)) else {
            return;
        };
        lane.tasks.remove(&task);
        if lane.tasks.is_empty() {
            lane.waits_since = None;
        }
    }

    /// Which lane runs now. A lane keeps the machine until its quantum is over, unless a more urgent one appears.
    pub fn choose(&mut self, now: Duration, mut ready: impl FnMut(LaneId) -> Readiness) -> Choice {
        let mut found = Vec::with_capacity(self.lanes.len());
        let mut misses = None;
        let mut waits = false;
        for (&id, lane) in &mut self.lanes {
            if lane.tasks.is_empty() {
                continue;
            }
            match ready(id) {
                Readiness::Idle => lane.waits_since = None,
                Readiness::Ready => {
                    lane.waits_since.get_or_insert(now);
                    found.push(id);
                }
                Readiness::Waiting => {
                    lane.waits_since.get_or_insert(now);
                    waits = true;
                    let dues = lane.tasks.values().filter_map(|track| track.due);
                    misses = dues.chain(misses).filter(|&due| due > now).min();
                }
            }
        }
        if let Some(running) = self.current(now).filter(|running| found.contains(&running.lane)) {
            if !found.iter().any(|&other| self.breaks(now, other, &running)) {
                return Choice::Run { lane: running.lane, until: running.until };
            }
            self.counters.preemptions += 1;
        }
        let best = found.iter().filter_map(|&id| Some((self.claim(now, id)?, id))).min();
        let Some((claim, lane)) = best else {
            self.running = None;
            self.counters.waits += u64::from(waits);
            return Choice::Wait { until: misses };
        };
        let is_share = claim.rank == Rank::Share;
        if is_share {
            self.last_share = now;
            self.counters.shares += 1;
        }
        let until = now.saturating_add(self.quantum());
        self.counters.quanta += 1;
        self.running = Some(Running { lane, until, is_share });
        Choice::Run { lane, until }
    }

    /// The lanes in the order in which they are going to want the machine, so that what they need is read meanwhile.
    ///
    /// Those that have waited for long come first, as they do for the machine: a disk that only reads for the most urgent
    /// would let the others starve without their ever being ready.
    pub fn prefetch(&self, now: Duration) -> impl Iterator<Item = LaneId> + use<> {
        let interval = self.share_interval();
        let wanted = |(&id, lane): (&LaneId, &Lane)| {
            let since = lane.waits_since?;
            let claim = lane.claim(now, self.lead())?;
            let has_waited = now.saturating_sub(since) >= interval;
            Some((if has_waited { Claim { rank: Rank::Share, at: since, then: since } } else { claim }, id))
        };
        let mut wanted: Vec<(Claim, LaneId)> = self.lanes.iter().filter_map(wanted).collect();
        wanted.sort();
        wanted.into_iter().map(|(_, lane)| lane)
    }

    /// Whether a lane that runs should make room before its next layer: at once for a more urgent one, and from the end
    /// of its quantum on for any that would be chosen.
    pub fn preempts(
        &self,
        now: Duration,
        running: LaneId,
        mut ready: impl FnMut(LaneId) -> Readiness,
    ) -> bool {
        let others = self.lanes.keys().copied().filter(|&lane| lane != running);
        let mut wins = |other: LaneId, before: bool| before && ready(other) == Readiness::Ready;
        if let Some(quantum) = self.current(now).filter(|quantum| quantum.lane == running) {
            return others.into_iter().any(|other| wins(other, self.breaks(now, other, &quantum)));
        }
        let own = self.claim(now, running);
        let comes_before = |other| match (self.claim(now, other), own) {
            (Some(other), Some(own)) => other < own,
            (other, None) => other.is_some(),
            (None, _) => false,
        };
        others.into_iter().any(|other| wins(other, comes_before(other)))
    }

    /// Notes that a lane ran, after every layer or quantum.
    pub fn ran(&mut self, now: Duration, lane: LaneId, took: Duration, layers: usize) {
        self.counters.layers += layers as u64;
        self.counters.busy = self.counters.busy.saturating_add(took);
        if let Some(lane) = self.lanes.get_mut(&lane) {
            lane.ran(now, took);
        }
        let quantum = self.quantum();
        let over = self.running.take_if(|running| running.lane == lane && now >= running.until);
        if let Some(over) = over {
            let most = quantum.mul_f64(self.config.slippage);
            self.counters.overruns += u64::from(now - over.until > most);
            self.demote_laggard(now);
        }
    }

    /// Notes that a task got a token.
    pub fn token(&mut self, now: Duration, task: TaskId) {
        let lead = self.lead();
        let Some(lane) = self.lane_of.get(&task).and_then(|lane| self.lanes.get_mut(lane)) else { return };
        let Some(track) = lane.tasks.get_mut(&task) else { return };
        let arrival = track.arrive(now, self.config.slippage, lead);
        let priority = track.task.priority;
        lane.stepped(arrival.is_first);
        let class = &mut self.counters.classes[priority as usize];
        class.tokens += 1;
        match arrival.late {
            Some(true) => {
                class.slips += 1;
                class.late_firsts += u64::from(arrival.is_first);
            }
            Some(false) => class.met += 1,
            None => {}
        }
        if arrival.restored {
            let lane = lane.name.clone();
            self.counters.note(ScheduleEvent::Restored { at: now, task, lane, priority });
        }
        if arrival.late == Some(true) {
            self.demote_laggard(now);
        }
    }

    /// How hot it was said to be last.
    pub fn heat(&self) -> Heat {
        self.heat
    }

    /// Quanta are shorter while it is hot.
    pub fn set_heat(&mut self, heat: Heat) {
        self.heat = heat;
    }

    /// What it has come to.
    pub fn counters(&self) -> &ScheduleCounters {
        &self.counters
    }

    /// Whether a task does without its priority, because it does not keep its pace.
    pub fn is_demoted(&self, task: TaskId) -> bool {
        self.track(task).is_some_and(Track::is_demoted)
    }

    /// When the next token of a task should be there; absent where it has no pace.
    pub fn due(&self, task: TaskId) -> Option<Duration> {
        self.track(task)?.due
    }

    /// How it is configured.
    pub fn config(&self) -> &ScheduleConfig {
        &self.config
    }

    /// The longest that a lane may have to wait for the machine while it is ready, beside the layers that quanta end
    /// with: every so often one of those that wait is given a quantum.
    pub(super) fn longest_wait(&self) -> Duration {
        self.share_interval() * (self.lanes.len() as u32 + 1) + self.quantum()
    }

    fn track(&self, task: TaskId) -> Option<&Track> {
        self.lanes.get(self.lane_of.get(&task)?)?.tasks.get(&task)
    }

    pub(super) fn lanes(&self) -> impl Iterator<Item = (LaneId, &Lane)> {
        self.lanes.iter().map(|(&id, lane)| (id, lane))
    }

    pub(super) fn quantum(&self) -> Duration {
        self.config.quantum(self.heat)
    }

    fn lead(&self) -> Duration {
        self.quantum() * LEAD_QUANTA
    }

    /// From one quantum that is given for having waited to the next.
    fn share_interval(&self) -> Duration {
        // The share was checked to be sensible, or is at least kept from dividing by zero.
        self.quantum().div_f64(self.config.share.clamp(0.01, 0.5))
    }

    /// The quantum that is not over.
    fn current(&self, now: Duration) -> Option<Running> {
        self.running.filter(|running| now < running.until)
    }

    fn claim(&self, now: Duration, lane: LaneId) -> Option<Claim> {
        let lane = self.lanes.get(&lane)?;
        let claim = lane.claim(now, self.lead())?;
        let since = lane.waits_since.unwrap_or(now);
        let interval = self.share_interval();
        let has_waited = now.saturating_sub(since) >= interval && now - self.last_share.min(now) >= interval;
        Some(if has_waited { Claim { rank: Rank::Share, at: since, then: since } } else { claim })
    }

    /// Whether another lane is so urgent that it does not wait for the end of a quantum: it has a better reason, or a
    /// deadline that it would miss and an earlier one.
    fn breaks(&self, now: Duration, other: LaneId, running: &Running) -> bool {
        if other == running.lane || running.is_share {
            return false;
        }
        let claim = |lane: LaneId| {
            let lane = self.lanes.get(&lane)?;
            Some((lane.claim(now, self.lead())?, lane.step_time()))
        };
        match (claim(other), claim(running.lane)) {
            (Some((other, step_time)), Some((own, _))) => {
                let cannot_wait = other.at < running.until.saturating_add(step_time);
                let is_due = matches!(other.rank, Rank::Due(_));
                other.rank < own.rank
                    || (is_due && other.rank == own.rank && other.at < own.at && cannot_wait)
            }
            (other, None) => other.is_some(),
            (None, _) => false,
        }
    }

    /// Of the tasks that are late, those of the lane that would take the most of the machine do without their priority,
    /// so that others keep theirs. What comes of it is waited for before the next.
    fn demote_laggard(&mut self, now: Duration) {
        let settling = self.quantum() * SETTLING_QUANTA;
        if self.last_demotion.is_some_and(|last| now.saturating_sub(last) < settling) {
            return;
        }
        let all = || {
            let tracks = |(&id, lane)| {
                let lane: &Lane = lane;
                lane.tasks.values().map(move |track| (id, lane, track))
            };
            self.lanes.iter().flat_map(tracks)
        };
        if !all().any(|(_, lane, track)| is_laggard(lane, track, now, self.config.slippage)) {
            return;
        }
        let busy = self.lanes.values().filter(|lane| !lane.tasks.is_empty()).count();
        let part = 1.0 / busy.max(1) as f64;
        // Where one makes all others late, it is chance who is late enough first.
        let most = self.config.slippage * ACCOMPLICE;
        let worst = all()
            .filter(|(_, lane, track)| is_laggard(lane, track, now, most))
            .map(|(id, lane, track)| (lane.demand(track.span().unwrap_or_default()), id))
            // Who would take less than its part is late because of somebody else, or of the disk.
            .filter(|(demand, _)| *demand >= part)
            .max_by(|one, other| one.0.total_cmp(&other.0));
        let Some((demand, worst)) = worst else { return };
        self.last_demotion = Some(now);
        for (&id, lane) in &mut self.lanes {
            let laggards: Vec<TaskId> = lane
                .tasks
                .iter()
                .filter(|(_, track)| is_laggard(lane, track, now, most))
                .map(|(&task, _)| task)
                .collect();
            for task in laggards {
                let Some(track) = lane.tasks.get_mut(&task) else { continue };
                if id != worst {
                    track.forgive();
                    continue;
                }
                let (slippage, priority) = (track.slippage(now), track.task.priority);
                track.demote();
                let lane = lane.name.clone();
                let event = ScheduleEvent::Demoted { at: now, task, lane, priority, slippage, demand };
                self.counters.note(event);
            }
        }
    }
}

fn is_laggard(lane: &Lane, track: &Track, now: Duration, most: f64) -> bool {
    if track.task.priority == Priority::Pinned || track.is_demoted() || track.slippage(now) <= most {
        return false;
    }
    // A first token that has only waited for others is no laggard's.
    track.tokens > 0 || track.span().is_some_and(|span| lane.demand(span) >= 1.0)
}
