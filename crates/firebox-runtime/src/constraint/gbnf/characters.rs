use std::fmt::Write as _;

/// All characters; what lies between the two are halves of characters in UTF-16.
const ALL: [(u32, u32); 2] = [(0, 0xD7FF), (0xE000, 0x10FFFF)];

/// A set of characters, as ascending ranges that do not touch.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Characters {
    ranges: Vec<(u32, u32)>,
}

impl Characters {
    pub fn all() -> Self {
        Self { ranges: ALL.to_vec() }
    }

    pub fn one(character: char) -> Self {
        Self::range(character, character)
    }

    /// From one to another, both included; none if they are the wrong way round.
    pub fn range(first: char, last: char) -> Self {
        let (first, last) = (u32::from(first), u32::from(last));
        let all = ALL.iter().map(|&(from, to)| (from.max(first), to.min(last)));
        Self { ranges: all.filter(|(from, to)| from <= to).collect() }
    }

    pub fn is_empty(&self) -> bool {
        self.ranges.is_empty()
    }

    pub fn add(&mut self, other: &Self) {
        if other.is_empty() {
            return;
        }
        let mut ranges = std::mem::take(&mut self.ranges);
        ranges.extend(&other.ranges);
        ranges.sort_unstable();
        for (from, to) in ranges {
            match self.ranges.last_mut() {
                Some(last) if from <= last.1 + 1 => last.1 = last.1.max(to),
                _ => self.ranges.push((from, to)),
            }
        }
    }

    pub fn and(mut self, other: &Self) -> Self {
        self.add(other);
        self
    }

    pub fn others(&self) -> Self {
        let mut ranges = Vec::new();
        for (begin, to) in ALL {
            let mut from = begin;
            for &(first, last) in self.ranges.iter().filter(|range| range.1 >= begin && range.0 <= to) {
                if first > from {
                    ranges.push((from, first - 1));
                }
                from = last + 1;
            }
            if from <= to {
                ranges.push((from, to));
            }
        }
        Self { ranges }
    }

    pub fn meets(&self, other: &Self) -> bool {
        let (mut mine, mut theirs) = (self.ranges.iter().peekable(), other.ranges.iter().peekable());
        while let (Some(a), Some(b)) = (mine.peek(), theirs.peek()) {
            if a.1 < b.0 {
                mine.next();
            } else if b.1 < a.0 {
                theirs.next();
            } else {
                return true;
            }
        }
        false
    }

    /// As a regular expression has it.
    pub fn write(&self, out: &mut String) {
        let one = |out: &mut String, code: u32| match char::from_u32(code) {
            Some(plain) if plain.is_ascii_alphanumeric() => out.push(plain),
            _ => {
                let _ = write!(out, "\\x{{{code:X}}}");
            }
        };
        if let [(from, to)] = self.ranges[..]
            && from == to
        {
            return one(out, from);
        }
        out.push('[');
        for &(from, to) in &self.ranges {
            one(out, from);
            if from < to {
                out.push('-');
                one(out, to);
            }
        }
        out.push(']');
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(ranges: &[(char, char)]) -> Characters {
        ranges.iter().fold(Characters::default(), |set, &(from, to)| set.and(&Characters::range(from, to)))
    }

    #[test]
    fn ranges_that_touch_are_one() {
        assert_eq!(set(&[('c', 'd'), ('a', 'b'), ('x', 'x')]), set(&[('x', 'x'), ('a', 'd')]));
        assert!(set(&[('b', 'a')]).is_empty());
    }

    #[test]
    fn others_are_all_that_is_left() {
        let some = set(&[('\0', '\x1F'), ('"', '"'), ('\u{E000}', '\u{F000}')]);
        assert!(!some.meets(&some.others()));
        assert_eq!(some.clone().and(&some.others()).others(), Characters::default());
        assert_eq!(some.others().others(), some);
        assert_eq!(Characters::default().others(), Characters::all());
        assert!(set(&[('a', 'f')]).meets(&set(&[('A', 'Z'), ('f', 'z')])));
        assert!(!set(&[('a', 'f')]).meets(&set(&[('A', 'Z'), ('g', 'z')])));
    }

    #[test]
    fn written_sets_need_no_further_escapes() {
        let mut text = String::new();
        set(&[('a', 'c'), ('/', '/')]).write(&mut text);
        Characters::one('/').write(&mut text);
        assert_eq!(text, r"[\x{2F}a-c]\x{2F}");
    }
}
