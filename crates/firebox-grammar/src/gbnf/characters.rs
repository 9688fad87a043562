//! Sets of characters.

use std::fmt::Write as _;

/// All characters; the gap between the ranges holds UTF-16 surrogates.
const ALL: [(u32, u32); 2] = [(0, 0xD7FF), (0xE000, 0x10FFFF)];

/// A set of characters as ascending ranges that do not touch.
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

    /// Returns an inclusive range, and an empty set if its ends are reversed.
    pub fn range(first: char, last: char) -> Self {
        let (first, last) = (u32::from(first), u32::from(last));
        let all = ALL.iter().map(|&(from, to)| (from.max(first), to.min(last)));
        Self { ranges: all.filter(|(from, to)| from <= to).collect() }
    }

    pub fn is_empty(&self) -> bool {
        self.ranges.is_empty()
    }

    /// Returns the union of several sets.
    pub fn joined(sets: impl IntoIterator<Item = Self>) -> Self {
        let mut ranges: Vec<(u32, u32)> = sets.into_iter().flat_map(|set| set.ranges).collect();
        ranges.sort_unstable();
        let mut joined: Vec<(u32, u32)> = Vec::new();
        for (from, to) in ranges {
            match joined.last_mut() {
                Some(last) if from <= last.1 + 1 => last.1 = last.1.max(to),
                _ => joined.push((from, to)),
            }
        }
        Self { ranges: joined }
    }

    /// Returns the number of ranges.
    pub fn ranges(&self) -> usize {
        self.ranges.len()
    }

    pub fn contains(&self, other: &Self) -> bool {
        other.ranges.iter().all(|&(from, to)| {
            let at = self.ranges.partition_point(|range| range.1 < to);
            self.ranges.get(at).is_some_and(|range| range.0 <= from)
        })
    }

    /// Adds another set. Returns the number of ranges that were visited.
    pub fn add(&mut self, other: &Self) -> usize {
        if self.contains(other) {
            return 1 + other.ranges();
        }
        let looked_at = self.ranges() + other.ranges();
        *self = Self::joined([std::mem::take(self), other.clone()]);
        looked_at
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
        let (few, many) = if self.ranges() < other.ranges() { (self, other) } else { (other, self) };
        few.ranges.iter().any(|&(from, to)| {
            let at = many.ranges.partition_point(|range| range.1 < from);
            many.ranges.get(at).is_some_and(|range| range.0 <= to)
        })
    }

    /// Writes the set for a regular expression.
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
        Characters::joined(ranges.iter().map(|&(from, to)| Characters::range(from, to)))
    }

    #[test]
    fn adjacent_ranges_are_joined() {
        assert_eq!(set(&[('c', 'd'), ('a', 'b'), ('x', 'x')]), set(&[('x', 'x'), ('a', 'd')]));
        assert!(set(&[('b', 'a')]).is_empty());
    }

    #[test]
    fn the_complement_holds_all_other_characters() {
        let some = set(&[('\0', '\x1F'), ('"', '"'), ('\u{E000}', '\u{F000}')]);
        assert!(!some.meets(&some.others()));
        assert_eq!(Characters::joined([some.clone(), some.others()]), Characters::all());
        assert_eq!(some.others().others(), some);
        assert_eq!(Characters::default().others(), Characters::all());
        assert!(set(&[('a', 'f')]).meets(&set(&[('A', 'Z'), ('f', 'z')])));
        assert!(!set(&[('a', 'f')]).meets(&set(&[('A', 'Z'), ('g', 'z')])));
    }

    #[test]
    fn sets_are_compared_whichever_has_more_ranges() {
        let (many, one) = (set(&[('a', 'c'), ('e', 'e'), ('x', 'z')]), set(&[('c', 'd')]));
        for (set, other, meets, contains) in [
            (&many, &one, true, false),
            (&one, &many, true, false),
            (&many, &set(&[('b', 'c'), ('z', 'z')]), true, true),
            (&many, &set(&[('d', 'd'), ('f', 'w')]), false, false),
            (&many, &set(&[('c', 'e')]), true, false),
            (&many, &Characters::default(), false, true),
        ] {
            assert_eq!((set.meets(other), other.meets(set)), (meets, meets), "{set:?}, {other:?}");
            assert_eq!(set.contains(other), contains, "{set:?}, {other:?}");
        }
    }

    #[test]
    fn adding_a_subset_visits_few_ranges() {
        let mut some = set(&[('a', 'c'), ('e', 'e'), ('g', 'g'), ('x', 'z')]);
        let before = some.clone();
        assert_eq!((some.add(&Characters::one('b')), &some), (2, &before));
        assert_eq!(some.add(&Characters::one('d')), 5);
        assert_eq!(some, set(&[('a', 'e'), ('g', 'g'), ('x', 'z')]));
    }

    #[test]
    fn written_sets_need_no_further_escapes() {
        let mut text = String::new();
        set(&[('a', 'c'), ('/', '/')]).write(&mut text);
        Characters::one('/').write(&mut text);
        assert_eq!(text, r"[\x{2F}a-c]\x{2F}");
    }
}
