use std::collections::VecDeque;
use std::ops::Range;

use memmap2::MmapMut;

use crate::error::StoreError;

/// The buffers of a stream, what is in them, and what is to be read into them next.
pub(super) struct Ring {
    /// How many buffers there may be.
    pub buffers: usize,
    /// How many there are, wherever they are.
    pub made: usize,
    pub free: Vec<MmapMut>,
    pub reading: Vec<usize>,
    pub ready: VecDeque<(usize, Result<MmapMut, StoreError>)>,
    /// What was asked for, in that order.
    wanted: Vec<Wanted>,
    /// Read units that could not be read ahead: they are tried again when somebody asks for them.
    pub failed: Vec<usize>,
    next_id: u64,
    /// Where reading ahead begins.
    pub next: usize,
    /// What somebody is going to ask for, but for what is skipped, and does something else until it is there.
    pub aim: Range<usize>,
    /// What a round consists of.
    pub round: Range<usize>,
    pub skipped: Vec<bool>,
    pub stopped: bool,
}

/// A unit that somebody asked for.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct Wanted {
    /// Tells it from what others asked for.
    pub id: u64,
    pub unit: usize,
    /// Whether somebody does nothing else until it is there.
    pub waited_for: bool,
    /// With how many it is needed at once, itself included.
    pub together: usize,
}

impl Ring {
    /// So many buffers for so many units, with nothing in them.
    pub fn new(buffers: usize, units: usize) -> Self {
        Self {
            buffers,
            made: 0,
            free: Vec::new(),
            reading: Vec::new(),
            ready: VecDeque::new(),
            wanted: Vec::new(),
            failed: Vec::new(),
            next_id: 0,
            next: 0,
            aim: 0..0,
            round: 0..units,
            skipped: vec![false; units],
            stopped: false,
        }
    }

    pub fn give_back(&mut self, buffer: MmapMut) {
        if self.made > self.buffers {
            self.made -= 1;
        } else {
            self.free.push(buffer);
        }
    }

    /// Asks for a unit that is needed at once with others, `together` of them.
    pub fn ask(&mut self, unit: usize, together: usize) -> Wanted {
        let wanted = Wanted { id: self.next_id, unit, waited_for: false, together };
        self.next_id += 1;
        self.wanted.push(wanted);
        self.failed.retain(|failed| *failed != unit);
        wanted
    }

    pub fn wait_for(&mut self, id: u64) {
        for wanted in self.wanted.iter_mut().filter(|wanted| wanted.id == id) {
            wanted.waited_for = true;
        }
    }

    /// Somebody has what was asked for, or does not want it any more. What could not be read and nobody is to be told of is
    /// tried again when somebody asks for it: the disk may have recovered by then.
    pub fn forget(&mut self, id: u64) {
        self.wanted.retain(|wanted| wanted.id != id);
        while let Some(at) =
            self.ready.iter().position(|(ready, read)| read.is_err() && !self.is_wanted(*ready))
        {
            let failed = self.ready.remove(at).map(|(unit, _)| unit);
            self.failed.extend(failed);
        }
    }

    fn is_coming(&self, unit: usize) -> bool {
        self.reading.contains(&unit) || self.ready.iter().any(|(ready, _)| *ready == unit)
    }

    /// Whether it can be read before somebody asks for it.
    fn may_come(&self, unit: usize) -> bool {
        !self.skipped[unit] && !self.failed.contains(&unit) && !self.is_coming(unit)
    }

    fn is_wanted(&self, unit: usize) -> bool {
        self.wanted.iter().any(|wanted| wanted.unit == unit)
    }

    /// Whether somebody has asked for it or is going to.
    fn is_spared(&self, unit: usize) -> bool {
        self.is_aimed_at(unit) || self.is_wanted(unit)
    }

    fn is_aimed_at(&self, unit: usize) -> bool {
        self.aim.contains(&unit) && !self.skipped[unit]
    }

    /// Whether it can be taken without waiting, or could not be read, which whoever takes it is told.
    pub fn is_there(&self, unit: usize) -> bool {
        self.failed.contains(&unit) || self.ready.iter().any(|(ready, _)| *ready == unit)
    }

    /// A unit was taken: those before it are not waited for any more.
    pub fn taken(&mut self, unit: usize) {
        self.next = unit + 1;
        if self.aim.contains(&unit) {
            self.aim.start = unit + 1;
        }
    }

    fn is_waited_for(&self, unit: usize) -> bool {
        self.wanted.iter().any(|wanted| wanted.unit == unit && wanted.waited_for)
    }

    fn has_buffer(&self) -> bool {
        !self.free.is_empty() || self.made < self.buffers
    }

    /// Whether what is waited for can be read: there are always as many buffers as are needed together.
    fn has_buffer_of(&self, together: usize) -> bool {
        self.has_buffer() || self.made < together
    }

    /// What to read next, if there is something and a buffer for it. What is waited for comes before what was asked for,
    /// and may take the buffer of that: otherwise two who wait could hold what the other one needs.
    pub fn job(&mut self) -> Option<usize> {
        let missing: Vec<Wanted> =
            self.wanted.iter().filter(|wanted| !self.is_coming(wanted.unit)).copied().collect();
        let mut waited_for = missing.iter().filter(|wanted| wanted.waited_for).peekable();
        if waited_for.peek().is_some() {
            // Where there is no buffer for the first of them, somebody can have it who gives it back only when there
            // is another one.
            return waited_for.find(|wanted| self.makes_room(wanted.together)).map(|wanted| wanted.unit);
        }
        if let Some(unit) = self.aim.clone().find(|unit| self.may_come(*unit)) {
            let together = self.aim.clone().filter(|unit| self.is_aimed_at(*unit)).count();
            while !self.has_buffer_of(together) && self.sacrifice(Self::is_spared) {}
            return self.has_buffer_of(together).then_some(unit);
        }
        if let Some(Wanted { unit, .. }) = missing.first() {
            while !self.has_buffer() && self.sacrifice(Self::is_spared) {}
            return self.has_buffer().then_some(*unit);
        }
        let Range { start, end } = self.round;
        let next = self.next.clamp(start, end);
        (next..end).chain(start..next).filter(|_| self.has_buffer()).find(|unit| self.may_come(*unit))
    }

    /// Whether there is a buffer for what is waited for, be it that of something else.
    fn makes_room(&mut self, together: usize) -> bool {
        while !self.has_buffer_of(together)
            && (self.sacrifice(Self::is_spared) || self.sacrifice(Self::is_waited_for))
        {}
        self.has_buffer_of(together)
    }

    /// Drops a unit that was read and is not spared, the one that is needed last, if there is one. Where there are more
    /// buffers than there may be, its buffer goes with it.
    fn sacrifice(&mut self, is_spared: impl Fn(&Self, usize) -> bool) -> bool {
        let count = self.skipped.len();
        let distance = |unit: usize| (unit + count - self.next) % count;
        let lost = self.ready.iter().enumerate().filter(|(_, (ready, _))| !is_spared(self, *ready));
        let Some((at, _)) = lost.max_by_key(|(_, (ready, _))| distance(*ready)) else { return false };
        self.drop_ready(at);
        true
    }

    /// Something that was read and nobody has asked for.
    pub fn unasked(&self) -> Option<usize> {
        self.ready.iter().position(|(ready, _)| !self.is_spared(*ready))
    }

    pub fn drop_ready(&mut self, at: usize) {
        if let Some((_, Ok(buffer))) = self.ready.remove(at) {
            self.give_back(buffer);
        }
    }

    /// Drops what was read ahead and is not going to be asked for.
    pub fn drop_stale(&mut self) {
        let is_stale = |state: &Self, unit: usize| {
            !state.is_spared(unit) && (state.skipped[unit] || !state.round.contains(&unit))
        };
        while let Some(at) = self.ready.iter().position(|(ready, _)| is_stale(self, *ready)) {
            self.drop_ready(at);
        }
    }

    /// Takes in what was read, if anybody still wants it.
    pub fn take_in(&mut self, unit: usize, read: Result<MmapMut, StoreError>) {
        self.reading.retain(|reading| *reading != unit);
        let is_spared = self.is_spared(unit);
        match read {
            Err(error) => {
                self.made -= 1;
                if self.is_wanted(unit) {
                    self.ready.push_back((unit, Err(error)));
                } else {
                    self.failed.push(unit);
                }
            }
            Ok(buffer) if !is_spared && self.made > self.buffers => self.give_back(buffer),
            Ok(buffer) => {
                self.ready.push_back((unit, Ok(buffer)));
                self.drop_stale();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::check::check;

    #[test]
    fn who_needs_two_at_once_does_not_wait_for_who_waits_for_these() {
        // Which of the units, or of what can be taken: what is needed at once comes last.
        let [first, second, third] = [0, 16, 32];
        let [ask, ask_two, wait, take, give_back, read, has_read] = [0_u8, 2, 3, 4, 8, 9, 11];
        let eight_portions_one_buffer = [7, 1];
        let one = [ask + first, ask + second, read, has_read, take + first];
        let other = [ask_two + third, wait + second, read, has_read, take + second];
        let story = [&eight_portions_one_buffer[..], &one, &other, &[give_back]].concat();
        assert_eq!(check(&story), 4);
    }
}
