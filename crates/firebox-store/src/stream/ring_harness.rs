//! A check of a stream's buffers under any order of events: no buffer is lost or made up, no unit is read twice at once, no
//! failure outlives the requests that it is reported to, and every request that waits is served in the end.

use std::collections::VecDeque;

use super::ring::Ring;
use crate::error::StoreError;
use crate::memory::{Memory, allocate};

/// A model of a ring with its users: readers, waiting requests, and holders of buffers.
struct RingModel {
    ring: Ring,
    units: usize,
    /// Ids and units of requests.
    asked: Vec<(u64, usize)>,
    /// Ids and units of the requests of one batch, which a reader needs all at once, that are not served yet. Two batches at a
    /// time could wait for each other.
    batch: VecDeque<(u64, usize)>,
    /// The buffers of the batch's served requests, held until all of them are served.
    held: Vec<Memory>,
    lent: Vec<Memory>,
}

/// Runs a stream's buffers through the events that bytes encode, and panics where a rule is violated. The first two bytes are
/// the numbers of units and buffers; each of the others is an event. Returns how many units were handed out.
pub fn check_stream_events(bytes: &[u8]) -> usize {
    let [units, buffers, events @ ..] = bytes else { return 0 };
    let units = usize::from(units % 8) + 1;
    let mut model = RingModel {
        ring: Ring::new(usize::from(buffers % 5), units),
        units,
        asked: Vec::new(),
        batch: VecDeque::new(),
        held: Vec::new(),
        lent: Vec::new(),
    };
    let mut handed_out = 0;
    for event in events {
        handed_out += usize::from(model.run(*event));
        model.check_invariants();
    }
    handed_out + model.come_to_rest()
}

impl RingModel {
    /// Runs an event. Returns whether a unit was handed out.
    fn run(&mut self, event: u8) -> bool {
        let (what, which) = (event % 16, usize::from(event / 16));
        let (unit, ring) = (which % self.units, &mut self.ring);
        match what {
            2 if self.batch.is_empty() => {
                let count = 2 + which / 8;
                for unit in unit..unit + count {
                    let request = ring.request(unit % self.units, count);
                    self.batch.push_back((request.id, request.unit));
                }
                ring.next = unit;
            }
            0..=2 => {
                let request = ring.request(unit, 1);
                ring.next = unit;
                self.asked.push((request.id, request.unit));
            }
            3 => {
                if let Some((id, _)) = nth(&self.takable(), which) {
                    self.ring.wait_for(id);
                }
            }
            4..=6 => return self.take(which),
            7 => {
                if let Some((id, _)) = nth(&self.takable(), which) {
                    self.leave(id);
                }
            }
            8 if !self.lent.is_empty() => {
                let buffer = self.lent.remove(which % self.lent.len());
                ring.release(buffer);
            }
            9 | 10 => self.read(),
            11 | 12 => self.end_reading(which, false),
            13 => self.end_reading(which, true),
            14 => {
                ring.skipped[unit] = which >= 8;
                ring.drop_stale();
            }
            15 if which % 2 == 0 => ring.priority = unit..self.units.min(unit + 1 + which / 8),
            15 => {
                ring.round = unit.min(which)..self.units;
                ring.drop_stale();
            }
            _ => {}
        }
        false
    }

    /// Ids and units of the requests that can be served next; those of the batch are served in order.
    fn takable(&self) -> Vec<(u64, usize)> {
        self.asked.iter().chain(self.batch.front()).copied().collect()
    }

    /// Hands a unit that is ready to a waiting request.
    fn take(&mut self, which: usize) -> bool {
        let Some((id, unit)) = nth(&self.takable(), which) else { return false };
        self.ring.wait_for(id);
        let Some(at) = self.ring.ready.iter().position(|(ready, _)| *ready == unit) else { return false };
        let Some((_, read)) = self.ring.ready.remove(at) else { return false };
        let is_in_batch = self.is_in_batch(id);
        self.ring.cancel(id);
        self.ring.advance_past(unit);
        if !is_in_batch {
            self.asked.retain(|(other, _)| *other != id);
            self.lent.extend(read);
            return true;
        }
        self.batch.pop_front();
        let has_failed = read.is_err();
        self.held.extend(read);
        if has_failed || self.batch.is_empty() {
            self.cancel_batch();
        }
        true
    }

    /// Cancels a request, and the rest of its batch if it is in one.
    fn leave(&mut self, id: u64) {
        if self.is_in_batch(id) {
            self.cancel_batch();
        } else {
            self.asked.retain(|(other, _)| *other != id);
            self.ring.cancel(id);
        }
    }

    /// Returns whether a request is the next one of the batch.
    fn is_in_batch(&self, id: u64) -> bool {
        self.batch.front().is_some_and(|(first, _)| *first == id)
    }

    /// Cancels the requests of the batch, and lends out its buffers.
    fn cancel_batch(&mut self) {
        for (id, _) in self.batch.drain(..) {
            self.ring.cancel(id);
        }
        self.lent.append(&mut self.held);
    }

    /// Begins a read, if there is one to do.
    fn read(&mut self) {
        let Some(unit) = self.ring.next_read() else { return };
        assert!(unit < self.units);
        assert!(!self.ring.reading.contains(&unit), "{unit} is being read already");
        self.ring.reading.push(unit);
        // The buffer is the reader's until it is done; here it is made then.
        if self.ring.free.pop().is_none() {
            self.ring.made += 1;
        }
    }

    fn end_reading(&mut self, which: usize, fails: bool) {
        let Some(unit) = nth(&self.ring.reading, which) else { return };
        let read = if fails { Err(StoreError::ReaderPanicked) } else { Ok(buffer()) };
        self.ring.finish_read(unit, read);
    }

    fn check_invariants(&self) {
        let Ring { free, reading, ready, made, .. } = &self.ring;
        let read = ready.iter().filter(|(_, read)| read.is_ok()).count();
        assert_eq!(free.len() + reading.len() + read + self.held.len() + self.lent.len(), *made);
        for (at, unit) in reading.iter().enumerate() {
            assert!(!reading[..at].contains(unit), "{unit} is read twice at once");
        }
        for (unit, _) in ready.iter().filter(|(_, read)| read.is_err()) {
            let is_wanted = self.asked.iter().chain(&self.batch).any(|(_, asked)| asked == unit);
            assert!(is_wanted, "the failure to read {unit} is kept although no request wants the unit");
        }
    }

    /// Returns all buffers that are not held, lets readers succeed, and serves all requests. Returns the number of units that
    /// were handed out.
    fn come_to_rest(&mut self) -> usize {
        let mut handed_out = 0;
        let most = 4 * (self.asked.len() + self.batch.len() + self.units + self.ring.made) + 16;
        for _ in 0..most {
            std::mem::take(&mut self.lent).into_iter().for_each(|buffer| self.ring.release(buffer));
            while !self.ring.reading.is_empty() {
                self.end_reading(0, false);
            }
            for at in 0..self.takable().len() {
                handed_out += usize::from(self.take(at));
            }
            if self.takable().is_empty() {
                return handed_out;
            }
            self.read();
            self.check_invariants();
        }
        panic!("{:?} wait for ever, {} buffers", self.takable(), self.ring.made);
    }
}

fn nth<T: Copy>(all: &[T], which: usize) -> Option<T> {
    all.get(which % all.len().max(1)).copied()
}

fn buffer() -> Memory {
    allocate(1).expect("a page")
}
