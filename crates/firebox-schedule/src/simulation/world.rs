//! The event loop of a simulation.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::time::Duration;

use super::Profile;
use super::device::{Device, TICK};
use super::mix::Mix;
use super::random::Random;
use super::report::{ClassReport, ModelReport, Report, quantile};
use super::served::{Pass, Request, Served};
use super::tally::{ClassTally, Tally};
use crate::ScheduleError;
use crate::monitor::Monitor;
use crate::{
    Change, Choice, ModelId, NextModel, Priority, Readiness, ScheduleConfig, Scheduler, Task, Ticket,
};
use firebox_memory::Account;
use firebox_memory::planner::KV_PAGE_TOKENS;
use firebox_memory::thermal::Heat;

/// Tokens of a page of keys and values.
const PAGE: u64 = KV_PAGE_TOKENS as u64;
/// The most violations that are described.
const MAX_EXAMPLES: usize = 20;
/// The probability from which on the next model is read ahead.
const READ_AHEAD_PROBABILITY: f64 = 0.3;
/// The share of the deadlines of pinned tasks that may be missed without an excuse.
const MAX_UNEXCUSED: f64 = 0.01;
/// The time after which a ready model that has not run counts as stuck: no share of the machine is so small, and no disk so
/// slow.
const STUCK_AFTER: Duration = Duration::from_secs(60);
/// The seconds that a governor has to free memory when other programs have taken it.
const MAX_OVERCOMMITTED_SECONDS: u64 = 3;

/// Models on a device, and their load.
pub(super) struct World {
    mix: Mix,
    device: Device,
    random: Random,
    begin: Duration,
    now: Duration,
    next_tick: Duration,
    scheduler: Scheduler,
    models: Vec<Served>,
    /// The next arrivals, with the order of insertion as a tie-breaker.
    arrivals: BinaryHeap<Reverse<(Duration, u64, usize)>>,
    planned: u64,
    reading: Option<Reading>,
    next_model: NextModel,
    monitor: Monitor,
    tally: Tally,
}

#[derive(Debug, Clone, Copy)]
struct Reading {
    model: usize,
    layer: usize,
    done: Duration,
}

impl World {
    pub fn new(profile: &Profile, mix: &Mix, begin: Duration, seed: u64) -> Result<Self, ScheduleError> {
        let mut device = Device::new(profile)?;
        let mut scheduler = Scheduler::new(ScheduleConfig::default());
        let shares = mix.shares(profile.budget);
        let mut models = Vec::new();
        for (index, (model, memory)) in mix.models.iter().zip(shares).enumerate() {
            let id = scheduler.add_model(&model.name);
            models.push(Served::new(id, model, memory, mix.is_pinned(index), &mut device)?);
        }
        let mut world = Self {
            mix: mix.clone(),
            device,
            random: Random::new(seed),
            begin,
            now: Duration::ZERO,
            next_tick: TICK,
            scheduler,
            models,
            arrivals: BinaryHeap::new(),
            planned: 0,
            reading: None,
            next_model: NextModel::default(),
            monitor: Monitor::default(),
            tally: Tally::default(),
        };
        for traffic in 0..world.mix.traffic.len() {
            world.plan_arrival(traffic, Duration::ZERO);
        }
        Ok(world)
    }

    pub fn run(&mut self, length: Duration) {
        while self.now < length {
            self.handle_events();
            self.read_ahead();
            match self.choose() {
                Some(model) => self.run_layer(model),
                None => self.wait(length),
            }
        }
    }

    /// Handles all events up to now.
    fn handle_events(&mut self) {
        if let Some(reading) = self.reading.take_if(|reading| reading.done <= self.now) {
            self.models[reading.model].has_read(reading.layer);
        }
        while let Some(&Reverse((at, _, traffic))) = self.arrivals.peek()
            && at <= self.now
        {
            self.arrivals.pop();
            // An hour without such requests is planned again at its end.
            if self.mix.traffic[traffic].per_hour[self.hour(at)] > 0.0 {
                self.arrive(traffic);
            }
            self.plan_arrival(traffic, at);
        }
        while self.next_tick <= self.now {
            self.tick();
        }
    }

    fn hour(&self, at: Duration) -> usize {
        ((self.begin + at).as_secs() / 3600 % 24) as usize
    }

    /// Plans the next arrival of a kind, at the rate of this hour, or in a later hour at its rate.
    fn plan_arrival(&mut self, traffic: usize, from: Duration) {
        let mut from = from;
        for _ in 0..48 {
            let rate = self.mix.traffic[traffic].per_hour[self.hour(from)];
            let next_hour = Duration::from_secs(((self.begin + from).as_secs() / 3600 + 1) * 3600);
            let next_hour = next_hour.saturating_sub(self.begin);
            if rate > 0.0 {
                let at = from + self.random.wait(3600.0 / rate);
                if at < next_hour {
                    self.planned += 1;
                    self.arrivals.push(Reverse((at, self.planned, traffic)));
                    return;
                }
            }
            from = next_hour;
        }
        // Nothing arrives for two days; then it is planned again.
        if self.mix.traffic[traffic].per_hour.iter().any(|rate| *rate > 0.0) {
            self.planned += 1;
            self.arrivals.push(Reverse((from, self.planned, traffic)));
        }
    }

    fn arrive(&mut self, traffic: usize) {
        let kind = &self.mix.traffic[traffic];
        let (index, priority) = (kind.model, kind.priority);
        let (prompt, answer) = (self.random.within(&kind.prompt), self.random.within(&kind.answer));
        let model = &mut self.models[index];
        self.tally.asked += model.work_seconds(prompt, answer);
        let class = &mut self.tally.classes[priority as usize];
        class.arrived += 1;
        let Ok(ticket) = model.queue.enter(self.now, priority) else {
            class.refused += 1;
            return;
        };
        let pages = ((prompt + answer) as u64).div_ceil(PAGE);
        let kv_bytes = pages * PAGE * self.mix.models[index].kv_bytes_per_token;
        let request = Request {
            traffic,
            arrived: self.now,
            task: None,
            prompt,
            answer,
            tokens: 0,
            kv_bytes,
            kv: None,
            excused: false,
            spent: Duration::ZERO,
        };
        model.requests.insert(ticket, request);
        self.admit(index);
    }

    /// Lets as many requests run as memory allows.
    fn admit(&mut self, index: usize) {
        self.models[index].refill();
        let model = &self.models[index];
        let is_scarce = self.device.is_overcommitted() && !model.is_pinned;
        // If others have taken memory, it has to be freed at once: half of the running requests pause at every check.
        let room = if is_scarce { model.queue.running().div_ceil(2).max(1) } else { self.room(index) };
        self.models[index].queue.set_room(room);
        for change in self.models[index].queue.update(self.now) {
            match change {
                Change::Start(ticket) => self.start(index, ticket),
                Change::Pause(ticket) => {
                    let Some(request) = self.models[index].requests.get_mut(&ticket) else { continue };
                    if let Some(task) = request.task.take() {
                        self.scheduler.remove(task);
                    }
                    // It resumes from disk.
                    request.kv.take_if(|_| is_scarce);
                }
            }
        }
    }

    /// Returns how many requests fit into memory, counting layers that can be evicted.
    fn room(&self, index: usize) -> usize {
        let running = self.models[index].queue.running();
        if self.models[index].queue.waiting() == 0 || running >= self.models[index].most_running {
            return running;
        }
        let spare: u64 = self.models.iter().map(Served::evictable_bytes).sum();
        let shared = self.device.budget.left().min(self.device.available()).saturating_add(spare);
        let model = &self.models[index];
        let mut left = model.reserved().saturating_add(shared);
        let mut fits = |ticket: &Ticket| {
            let request = &model.requests[ticket];
            let needed = if request.kv.is_some() { 0 } else { request.kv_bytes };
            let fits = needed <= left;
            left = left.saturating_sub(needed);
            fits
        };
        let order = model.queue.order(self.now);
        let more = model.most_running - running;
        running + order.iter().take(more).take_while(|ticket| fits(ticket)).count()
    }

    fn start(&mut self, index: usize, ticket: Ticket) {
        let Some(request) = self.models[index].requests.get(&ticket) else { return };
        if request.kv.is_none() {
            let bytes = request.kv_bytes;
            self.models[index].release_reserve(bytes);
            let charge = loop {
                match self.device.budget.charge(Account::Streams, bytes) {
                    Ok(charge) => break Some(charge),
                    // As in a fitted model, keys and values are worth more than resident layers.
                    Err(_) if self.evict_for(index) => {}
                    Err(_) => break None,
                }
            };
            if charge.is_none() {
                self.violate(format!("{bytes} bytes were promised to a request and are not there"));
            }
            if let Some(request) = self.models[index].requests.get_mut(&ticket) {
                request.kv = charge;
            }
        }
        let id = self.models[index].id;
        let Some(request) = self.models[index].requests.get_mut(&ticket) else { return };
        let kind = &self.mix.traffic[request.traffic];
        let waited = self.now - request.arrived;
        let usual = self.scheduler.config().first_token;
        let first_by = (request.tokens == 0 && kind.priority >= Priority::Interactive)
            .then(|| usual.saturating_sub(waited));
        let task = Task { priority: kind.priority, pace: kind.pace, first_by };
        request.task = Some(self.scheduler.add(self.now, id, task));
        self.note_use(index);
    }

    /// Evicts the last layer of the model with the most resident layers, this model last.
    fn evict_for(&mut self, index: usize) -> bool {
        let most = (0..self.models.len())
            .filter(|&model| self.models[model].evictable_bytes() > 0)
            .max_by_key(|&model| (model != index, self.models[model].kept.count()));
        most.is_some_and(|model| self.models[model].kept.evict_last())
    }

    /// Records that a model is in use.
    fn note_use(&mut self, index: usize) {
        let name = self.models[index].name.clone();
        if self.next_model.likely(0.0).any(|model| model == name) {
            self.tally.changes += 1;
            self.tally.ready_at_once += u64::from(self.models[index].readiness() == Readiness::Ready);
        }
        self.next_model.note(&name);
    }

    fn tick(&mut self) {
        let load = (self.tally.busy - self.tally.busy_at_tick).as_secs_f64() / TICK.as_secs_f64();
        self.tally.busy_at_tick = self.tally.busy;
        let before = self.device.heat();
        let heat = self.device.tick(self.now, load, &mut self.random);
        self.next_tick += TICK;
        for index in 0..self.models.len() {
            // An idle model has no pass after which its governor would act.
            if self.models[index].readiness() == Readiness::Idle {
                self.models[index].govern(None, TICK);
            }
            if heat != before {
                self.models[index].queue.set_heat(heat);
            }
            self.admit(index);
        }
        self.scheduler.set_heat(heat);
        self.check();
    }

    /// Checks that accounts and requests add up.
    fn check(&mut self) {
        if self.device.budget.most_held() > self.device.budget.total() {
            self.violate("more is held than the budget has".into());
        }
        for index in 0..self.models.len() {
            let model = &self.models[index];
            let running = model.requests.values().filter(|request| request.task.is_some()).count();
            if running != model.queue.running() || model.requests.len() != running + model.queue.waiting() {
                self.violate(format!("{} has lost a request", self.models[index].name));
            }
            if self.models[index].readiness() == Readiness::Idle {
                self.models[index].last_ran = self.now;
            } else if self.now.saturating_sub(self.models[index].last_ran) > STUCK_AFTER {
                self.models[index].last_ran = self.now;
                self.violate(format!("{} has work and does not run", self.models[index].name));
            }
        }
        let open: usize = self.models.iter().map(|model| model.requests.len()).sum();
        let sum = |of: fn(&ClassTally) -> u64| self.tally.classes.iter().map(of).sum::<u64>();
        if sum(|class| class.arrived) != sum(|class| class.done + class.refused) + open as u64 {
            self.violate("requests that came are not those that are there, done or refused".into());
        }
    }

    fn violate(&mut self, what: String) {
        self.tally.violations += 1;
        if self.tally.examples.len() < MAX_EXAMPLES {
            self.tally.examples.push(format!("{:.3} s: {what}", self.now.as_secs_f64()));
        }
    }

    /// Lets the disk read what is needed next, in the order in which models will run, and then what usually follows.
    fn read_ahead(&mut self) {
        if self.reading.is_some() {
            return;
        }
        let heat = self.device.heat();
        let models = &self.models;
        let wanted = |index: usize| {
            let layer = models[index].wanted(heat.prefetch_depth(models[index].ring))?;
            Some((index, layer))
        };
        let index_of = |id: ModelId| models.iter().position(|model| model.id == id);
        let scheduled = self.scheduler.prefetch(self.now).filter_map(index_of).find_map(wanted);
        let of_name = |name: &str| models.iter().position(|model| model.name == name);
        let next = scheduled
            .or_else(|| self.next_model.likely(READ_AHEAD_PROBABILITY).filter_map(of_name).find_map(wanted));
        if let Some((model, layer)) = next {
            let speed = &self.device.profile.speed;
            let seconds =
                speed.read_latency + self.models[model].layer_bytes as f64 / speed.read_bytes_per_second;
            let slowdown = self.device.profile.heat.slowdown(heat);
            let done = self.now + Duration::from_secs_f64(seconds * slowdown);
            self.models[model].make_room();
            self.reading = Some(Reading { model, layer, done });
        }
    }

    fn choose(&mut self) -> Option<usize> {
        let models = &self.models;
        let index = |id: ModelId| models.iter().position(|model| model.id == id).unwrap_or(0);
        let choice = self.scheduler.choose(self.now, |id| models[index(id)].readiness());
        match choice {
            Choice::Run { model: id, .. } => {
                let index = index(id);
                if self.models[index].readiness() != Readiness::Ready {
                    self.violate(format!("{} runs and is not ready", self.models[index].name));
                    return None;
                }
                Some(index)
            }
            Choice::Wait { .. } => {
                let ready = models.iter().find(|model| model.readiness() == Readiness::Ready);
                if let Some(ready) = ready {
                    let what = format!("the machine is idle and {} is ready", ready.name);
                    self.violate(what);
                }
                None
            }
        }
    }

    /// Advances to the next event because nothing is ready.
    fn wait(&mut self, end: Duration) {
        let arrival = self.arrivals.peek().map(|Reverse((at, ..))| *at);
        let read = self.reading.map(|reading| reading.done);
        let next = [arrival, read, Some(self.next_tick)].into_iter().flatten().fold(end, Duration::min);
        let next = next.max(self.now + Duration::from_nanos(1));
        for model in &mut self.models {
            if model.readiness() == Readiness::Waiting {
                model.begin_pass();
                if let Some(pass) = &mut model.pass {
                    pass.waited = true;
                    pass.spent += next - self.now;
                }
            }
        }
        if self.models.iter().any(|model| model.readiness() == Readiness::Waiting) {
            self.tally.waiting += next - self.now;
        }
        self.now = next;
    }

    fn run_layer(&mut self, index: usize) {
        let began = self.now;
        self.models[index].begin_pass();
        let profile = &self.device.profile;
        let contention = if self.reading.is_some() { profile.speed.contention } else { 1.0 };
        let slowdown = profile.heat.slowdown(self.device.heat()) * contention;
        let took = Duration::from_secs_f64(self.models[index].layer_seconds() * slowdown);
        self.now += took;
        self.tally.busy += took;
        let (id, models) = (self.models[index].id, &self.models);
        let readiness = |id: ModelId| {
            models.iter().find(|model| model.id == id).map_or(Readiness::Idle, Served::readiness)
        };
        let violation = self.monitor.look(&self.scheduler, began, took, id, readiness);
        for model in &mut self.models {
            if model.readiness() == Readiness::Waiting
                && let Some(pass) = &mut model.pass
            {
                pass.waited = true;
            }
        }
        if let Some(violation) = violation {
            self.violate(violation.to_string());
        }
        self.models[index].last_ran = self.now;
        self.scheduler.ran(self.now, id, took, 1);
        if let Some(pass) = self.models[index].ran(took) {
            self.finish_pass(index, &pass);
        }
    }

    fn finish_pass(&mut self, index: usize, pass: &Pass) {
        let prompt = pass.prompt;
        if let Some((ticket, rows)) = prompt
            && let Some(request) = self.models[index].requests.get_mut(&ticket)
        {
            request.prompt -= rows;
        }
        let complete = prompt.map(|(ticket, _)| ticket).filter(|ticket| {
            self.models[index].requests.get(ticket).is_some_and(|request| request.prompt == 0)
        });
        let incomplete = prompt.map(|(ticket, _)| ticket).filter(|_| complete.is_none());
        if let Some(request) = incomplete.and_then(|ticket| self.models[index].requests.get_mut(&ticket)) {
            request.spent += pass.spent;
            request.excused |= pass.waited;
        }
        for &ticket in pass.decoding.iter().chain(&complete) {
            self.token(index, ticket, pass);
        }
        self.models[index].govern(Some(pass), pass.spent);
        self.admit(index);
    }

    fn token(&mut self, index: usize, ticket: Ticket, pass: &Pass) {
        let model = &mut self.models[index];
        let Some(request) = model.requests.get_mut(&ticket) else { return };
        // A request that was paused computes its cache again.
        let Some(task) = request.task else { return };
        let priority = self.mix.traffic[request.traffic].priority;
        let is_late = self.scheduler.due(task).is_some_and(|due| self.now > due);
        request.spent += pass.spent;
        request.excused |= pass.waited;
        if priority == Priority::Pinned {
            let config = self.scheduler.config();
            let period = Duration::from_secs_f64(1.0 / config.target);
            let allowed = if request.tokens == 0 { config.first_token } else { period };
            self.tally.pinned_deadlines += 1;
            self.tally.unexcused += u64::from(is_late && !request.excused && request.spent <= allowed);
        }
        if request.tokens == 0 {
            let waited = self.now - request.arrived;
            self.tally.classes[priority as usize].first_tokens.push(waited);
        }
        request.tokens += 1;
        request.excused = false;
        request.spent = Duration::ZERO;
        model.tokens += 1;
        self.scheduler.token(self.now, task);
        if request.tokens < request.answer {
            return;
        }
        let then = self.mix.traffic[request.traffic].then.clone();
        self.scheduler.remove(task);
        model.requests.remove(&ticket);
        model.queue.leave(ticket);
        self.tally.classes[priority as usize].done += 1;
        let mut chance = self.random.share();
        for (traffic, likely) in then {
            if chance < likely {
                self.arrive(traffic);
                return;
            }
            chance -= likely;
        }
        self.next_model.end();
    }

    pub fn report(mut self, seed: u64) -> Report {
        self.check();
        if self.device.longest_overcommitment > MAX_OVERCOMMITTED_SECONDS {
            let seconds = self.device.longest_overcommitment;
            self.violate(format!("more memory was in use than there is for {seconds} s"));
        }
        let unexcused = self.tally.unexcused as f64 / self.tally.pinned_deadlines.max(1) as f64;
        if unexcused > MAX_UNEXCUSED {
            self.violate(format!("{:.1} % of the pinned deadlines were missed", unexcused * 100.0));
        }
        let seconds = self.now.as_secs_f64().max(1e-9);
        let share = |of: Duration| of.as_secs_f64() / seconds;
        let ticks = self.device.heat_seconds.iter().sum::<u64>().max(1) as f64;
        let heats = [Heat::Nominal, Heat::Fair, Heat::Serious, Heat::Critical];
        let heat = heats.map(|heat| (heat, self.device.heat_seconds[heat as usize] as f64 / ticks));
        let classes = Priority::ALL.map(|priority| self.class(priority));
        Report {
            device: self.device.profile.speed.name.clone(),
            cores: self.device.profile.cores,
            hours: seconds / 3600.0,
            seed,
            asked: self.tally.asked / seconds,
            busy: share(self.tally.busy),
            waiting: share(self.tally.waiting),
            classes: classes.into(),
            models: self.models.iter().map(model_report).collect(),
            heat: heat.into(),
            hottest: self.device.hottest,
            budget: self.device.budget.total(),
            most_held: self.device.budget.most_held(),
            warnings: self.device.raised,
            short_seconds: self.device.short_seconds,
            longest_overcommitment: self.device.longest_overcommitment,
            ready_at_once: self.tally.ready_at_once,
            changes: self.tally.changes,
            schedule: self.scheduler.counters().clone(),
            unexcused: self.tally.unexcused,
            violations: self.tally.violations,
            examples: self.tally.examples,
        }
    }

    fn class(&self, priority: Priority) -> ClassReport {
        let tally = &self.tally.classes[priority as usize];
        let counters = self.scheduler.counters().class(priority);
        let mut first_tokens = tally.first_tokens.clone();
        first_tokens.sort();
        ClassReport {
            priority,
            arrived: tally.arrived,
            done: tally.done,
            refused: tally.refused,
            open: tally.arrived - tally.done - tally.refused,
            tokens: counters.tokens,
            met: counters.met_share(),
            first_token: (quantile(&first_tokens, 0.5), quantile(&first_tokens, 0.99)),
        }
    }
}

fn model_report(model: &Served) -> ModelReport {
    ModelReport {
        name: model.name.clone(),
        layers: model.layers(),
        planned: model.planned,
        fewest_kept: model.fewest_kept,
        kept: model.kept.count(),
        tokens: model.tokens,
        streamed_bytes: model.streamed_bytes,
        sheds: model.events[0],
        growths: model.events[1],
    }
}
