//! The buffers of a stream and the order in which units are read into them, without threads or locks.

use std::collections::VecDeque;
use std::ops::Range;

use crate::error::StoreError;
use crate::memory::Memory;

/// A stream's buffers, what is in them, and what is read into them next.
pub(super) struct Ring {
    /// How many buffers there may be.
    pub buffers: usize,
    /// How many there are: free, being read into, ready or in use.
    pub made: usize,
    pub free: Vec<Memory>,
    pub reading: Vec<usize>,
    pub ready: VecDeque<(usize, Result<Memory, StoreError>)>,
    /// Requests in their order.
    requests: Vec<Request>,
    /// Units that could not be read ahead. They are tried again when they are requested.
    pub failed: Vec<usize>,
    next_id: u64,
    /// Where reading ahead begins.
    pub next: usize,
    /// Units that are read before those that no caller waits for. Skipped ones are not among them.
    pub priority: Range<usize>,
    /// The units that are read ahead.
    pub round: Range<usize>,
    pub skipped: Vec<bool>,
    pub stopped: bool,
}

/// A requested unit.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct Request {
    pub id: u64,
    pub unit: usize,
    /// Whether a caller waits for it.
    pub is_awaited: bool,
    /// How many units are needed at once, itself included.
    pub together: usize,
}

impl Ring {
    /// A ring that may have so many buffers, for so many units.
    pub fn new(buffers: usize, units: usize) -> Self {
        Self {
            buffers,
            made: 0,
            free: Vec::new(),
            reading: Vec::new(),
            ready: VecDeque::new(),
            requests: Vec::new(),
            failed: Vec::new(),
            next_id: 0,
            next: 0,
            priority: 0..0,
            round: 0..units,
            skipped: vec![false; units],
            stopped: false,
        }
    }

    /// Takes back a buffer that was in use.
    pub fn release(&mut self, buffer: Memory) {
        if self.made > self.buffers {
            self.made -= 1;
        } else {
            self.free.push(buffer);
        }
    }

    /// Requests one of `together` units that are needed at once.
    pub fn request(&mut self, unit: usize, together: usize) -> Request {
        let request = Request { id: self.next_id, unit, is_awaited: false, together };
        self.next_id += 1;
        self.requests.push(request);
        self.failed.retain(|failed| *failed != unit);
        request
    }

    /// Notes that a caller waits for a request.
    pub fn wait_for(&mut self, id: u64) {
        for request in self.requests.iter_mut().filter(|request| request.id == id) {
            request.is_awaited = true;
        }
    }

    /// Removes a request that was served or is cancelled. A unit that could not be read, and that nothing requests any more, is tried
    /// again when it is requested: the disk may have recovered by then.
    pub fn cancel(&mut self, id: u64) {
        self.requests.retain(|request| request.id != id);
        while let Some(at) =
            self.ready.iter().position(|(ready, read)| read.is_err() && !self.is_requested(*ready))
        {
            let failed = self.ready.remove(at).map(|(unit, _)| unit);
            self.failed.extend(failed);
        }
    }

    fn is_coming(&self, unit: usize) -> bool {
        self.reading.contains(&unit) || self.ready.iter().any(|(ready, _)| *ready == unit)
    }

    /// Whether a unit can be read ahead.
    fn may_read_ahead(&self, unit: usize) -> bool {
        !self.skipped[unit] && !self.failed.contains(&unit) && !self.is_coming(unit)
    }

    fn is_requested(&self, unit: usize) -> bool {
        self.requests.iter().any(|request| request.unit == unit)
    }

    /// Whether a unit is requested or prioritized.
    fn is_needed(&self, unit: usize) -> bool {
        self.is_prioritized(unit) || self.is_requested(unit)
    }

    fn is_prioritized(&self, unit: usize) -> bool {
        self.priority.contains(&unit) && !self.skipped[unit]
    }

    /// Whether a unit can be taken without waiting: it is ready or could not be read.
    pub fn is_settled(&self, unit: usize) -> bool {
        self.failed.contains(&unit) || self.ready.iter().any(|(ready, _)| *ready == unit)
    }

    /// Continues behind a unit that was taken. Units before it are not prioritized any more.
    pub fn advance_past(&mut self, unit: usize) {
        self.next = unit + 1;
        if self.priority.contains(&unit) {
            self.priority.start = unit + 1;
        }
    }

    fn is_awaited(&self, unit: usize) -> bool {
        self.requests.iter().any(|request| request.unit == unit && request.is_awaited)
    }

    fn has_buffer(&self) -> bool {
        !self.free.is_empty() || self.made < self.buffers
    }

    /// Whether one of `together` units can be read: there may always be as many buffers as are needed at once.
    fn has_buffer_for(&self, together: usize) -> bool {
        self.has_buffer() || self.made < together
    }

    /// The unit to read next, if there is one and a buffer for it. Awaited units come before requested ones and may take their buffers:
    /// otherwise two callers could wait for each other.
    pub fn next_read(&mut self) -> Option<usize> {
        let missing: Vec<Request> =
            self.requests.iter().filter(|request| !self.is_coming(request.unit)).copied().collect();
        let mut awaited = missing.iter().filter(|request| request.is_awaited).peekable();
        if awaited.peek().is_some() {
            // A buffer for the first of them may be held by a caller that releases it only after a later one.
            return awaited.find(|request| self.make_room(request.together)).map(|request| request.unit);
        }
        if let Some(unit) = self.priority.clone().find(|unit| self.may_read_ahead(*unit)) {
            let together = self.priority.clone().filter(|unit| self.is_prioritized(*unit)).count();
            while !self.has_buffer_for(together) && self.sacrifice(Self::is_needed) {}
            return self.has_buffer_for(together).then_some(unit);
        }
        if let Some(Request { unit, .. }) = missing.first() {
            while !self.has_buffer() && self.sacrifice(Self::is_needed) {}
            return self.has_buffer().then_some(*unit);
        }
        let Range { start, end } = self.round;
        let next = self.next.clamp(start, end);
        (next..end).chain(start..next).filter(|_| self.has_buffer()).find(|unit| self.may_read_ahead(*unit))
    }

    /// Makes room for an awaited unit, with the buffer of another unit if need be. Returns whether there is a buffer.
    fn make_room(&mut self, together: usize) -> bool {
        while !self.has_buffer_for(together)
            && (self.sacrifice(Self::is_needed) || self.sacrifice(Self::is_awaited))
        {}
        self.has_buffer_for(together)
    }

    /// Drops the ready unit that is needed last and not spared, if there is one. A surplus buffer is freed with it.
    fn sacrifice(&mut self, is_spared: impl Fn(&Self, usize) -> bool) -> bool {
        let count = self.skipped.len();
        let distance = |unit: usize| (unit + count - self.next) % count;
        let lost = self.ready.iter().enumerate().filter(|(_, (ready, _))| !is_spared(self, *ready));
        let Some((at, _)) = lost.max_by_key(|(_, (ready, _))| distance(*ready)) else { return false };
        self.drop_ready(at);
        true
    }

    /// A ready unit that is not needed.
    pub fn unrequested(&self) -> Option<usize> {
        self.ready.iter().position(|(ready, _)| !self.is_needed(*ready))
    }

    pub fn drop_ready(&mut self, at: usize) {
        if let Some((_, Ok(buffer))) = self.ready.remove(at) {
            self.release(buffer);
        }
    }

    /// Drops units that were read ahead and are not in the round any more.
    pub fn drop_stale(&mut self) {
        let is_stale = |state: &Self, unit: usize| {
            !state.is_needed(unit) && (state.skipped[unit] || !state.round.contains(&unit))
        };
        while let Some(at) = self.ready.iter().position(|(ready, _)| is_stale(self, *ready)) {
            self.drop_ready(at);
        }
    }

    /// Takes in the result of a read, unless nothing needs it any more.
    pub fn finish_read(&mut self, unit: usize, read: Result<Memory, StoreError>) {
        self.reading.retain(|reading| *reading != unit);
        let is_needed = self.is_needed(unit);
        match read {
            Err(error) => {
                self.made -= 1;
                if self.is_requested(unit) {
                    self.ready.push_back((unit, Err(error)));
                } else {
                    self.failed.push(unit);
                }
            }
            Ok(buffer) if !is_needed && self.made > self.buffers => self.release(buffer),
            Ok(buffer) => {
                self.ready.push_back((unit, Ok(buffer)));
                self.drop_stale();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::ring_harness::check_stream_events as check;

    #[test]
    fn two_units_requested_at_once_do_not_deadlock() {
        // Which unit, or which of those that can be taken: units needed at once come last.
        let [first, second, third] = [0, 16, 32];
        let [request, request_two, wait, take, release, read, has_read] = [0_u8, 2, 3, 4, 8, 9, 11];
        let eight_portions_one_buffer = [7, 1];
        let one = [request + first, request + second, read, has_read, take + first];
        let other = [request_two + third, wait + second, read, has_read, take + second];
        let story = [&eight_portions_one_buffer[..], &one, &other, &[release]].concat();
        assert_eq!(check(&story), 4);
    }
}
