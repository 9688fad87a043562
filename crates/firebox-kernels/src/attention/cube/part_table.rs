//! Tables of the parts of spans that few rows attend to, from which kernels read where keys and values are.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::PoisonError;

use burn::tensor::{DType, Shape};
use burn_cubecl::tensor::CubeTensor;

use super::sides::{Side, Sides, steps};
use crate::step::StepCounter;

/// Positions of a part.
pub(super) const POSITIONS: usize = 32;
/// Parts of an entry.
pub(super) const PARTS: usize = 4;
/// Memories that a launch binds.
pub(super) const MEMORIES: usize = 8;
/// Words of a row: its index among queries, its first part and the number of its parts.
pub(super) const ROW_WORDS: usize = 3;
/// Words of an entry, positions of a span that cubes share out; see [`Table::add_entry`].
pub(super) const ENTRY_WORDS: usize = 16;
/// Positions of an entry.
const ENTRY_POSITIONS: usize = PARTS * POSITIONS;
/// Numbers of a vector.
const VECTOR: usize = 4;
/// Tables that a thread keeps: layers of a pass have the same one, or few different ones.
const KEPT: usize = 4;

thread_local! {
    /// The tables that the thread has uploaded last.
    static UPLOADED: RefCell<VecDeque<(Vec<u32>, CubeTensor)>> = const { RefCell::new(VecDeque::new()) };
}

/// The parts that some rows attend to.
///
/// Word 0 is zero and stands for the counter where a step is not recorded. Rows follow, then entries.
pub(super) struct PartTable {
    rows: Vec<u32>,
    entries: Vec<u32>,
    launches: Vec<Launch>,
}

/// Entries that share a launch, with the memories that their keys and values are in.
pub(super) struct Launch {
    pub entries: Range<usize>,
    pub memories: Vec<CubeTensor>,
}

impl PartTable {
    pub fn new() -> Self {
        Self { rows: Vec::new(), entries: Vec::new(), launches: Vec::new() }
    }

    /// Adds a row of the query at its position with the spans it attends to.
    pub fn add_row(&mut self, row: usize, position: usize, spans: &[Sides]) {
        let first = self.entries();
        for span in spans {
            let positions = span.positions();
            for start in (0..positions).step_by(ENTRY_POSITIONS) {
                self.add_entry(row, position, span, start);
            }
        }
        let parts = (self.entries() - first) * PARTS;
        self.rows.extend([row, first * PARTS, parts].map(|number| number as u32));
    }

    /// Adds an entry for the positions of a span from `start` on.
    fn add_entry(&mut self, row: usize, position: usize, span: &Sides, start: usize) {
        let count = (span.positions() - start).min(ENTRY_POSITIONS);
        let [key_memory, value_memory] = self.bind(span);
        let place = |side: &Side| {
            let (head, position) = steps(&side.numbers);
            let first = offset(&side.numbers) + start * position;
            [first, head, position].map(|numbers| (numbers / VECTOR) as u32)
        };
        let ([key, key_head, key_step], [value, value_head, value_step]) =
            (place(&span.keys), place(&span.values));
        // Where the row itself is, counted from the first position, and one.
        let reach = position as i64 + 1 - (span.position() + start) as i64;
        let reach_word = reach.clamp(i64::from(i32::MIN / 4), i64::from(i32::MAX / 4)) as i32 as u32;
        self.entries.extend([
            (key_memory | value_memory << 8) as u32,
            key,
            value,
            key_head,
            key_step,
            value_head,
            value_step,
            count as u32,
            reach_word,
            row as u32,
            // Whether the row is the last position, so that a recorded step adds positions.
            u32::from(reach == count as i64),
        ]);
        self.entries.extend(span.mask_words(start / POSITIONS..start / POSITIONS + PARTS));
        self.entries.push(0);
    }

    /// The memories of keys and values among those of the last launch. Begins another launch if it does not bind as many.
    fn bind(&mut self, span: &Sides) -> [usize; 2] {
        let entry = self.entries();
        let sides = [&span.keys.numbers, &span.values.numbers];
        let missing = |launch: &Launch| {
            let new = |side: &&&CubeTensor| launch.memory(side).is_none();
            sides.iter().filter(new).count()
        };
        if self.launches.last().is_none_or(|last| last.memories.len() + missing(last) > MEMORIES) {
            self.launches.push(Launch { entries: entry..entry, memories: Vec::new() });
        }
        let last = self.launches.len() - 1;
        let launch = &mut self.launches[last];
        launch.entries.end = entry + 1;
        sides.map(|side| {
            launch.memory(side).unwrap_or_else(|| {
                launch.memories.push(whole(side));
                launch.memories.len() - 1
            })
        })
    }

    pub fn rows(&self) -> usize {
        self.rows.len() / ROW_WORDS
    }

    pub fn entries(&self) -> usize {
        self.entries.len() / ENTRY_WORDS
    }

    /// The word that entries begin at.
    pub fn entries_at(&self) -> usize {
        1 + self.rows.len()
    }

    pub fn launches(&self) -> &[Launch] {
        &self.launches
    }

    /// The table beside `like`. Recorded steps keep theirs for as long as they may run, and find them again when they
    /// are recorded, since a recording uploads nothing.
    pub fn uploaded(&self, like: &CubeTensor, steps: Option<&StepCounter>) -> CubeTensor {
        let mut words = vec![0];
        words.extend_from_slice(&self.rows);
        words.extend_from_slice(&self.entries);
        if let Some(StepCounter { tables, .. }) = steps {
            let mut tables = tables.lock().unwrap_or_else(PoisonError::into_inner);
            if let Some((_, table)) = tables.iter().find(|(held, _)| *held == words) {
                return table.clone();
            }
            let table = upload(like, &words);
            tables.push((words, table.clone()));
            return table;
        }
        UPLOADED.with_borrow_mut(|uploaded| {
            let same =
                |(held, table): &&(Vec<u32>, CubeTensor)| *held == words && table.device == like.device;
            if let Some((_, table)) = uploaded.iter().find(same) {
                return table.clone();
            }
            let table = upload(like, &words);
            uploaded.truncate(KEPT - 1);
            uploaded.push_front((words, table.clone()));
            table
        })
    }
}

impl Launch {
    /// The index of the memory that a tensor is in.
    fn memory(&self, tensor: &CubeTensor) -> Option<usize> {
        let id = |tensor: &CubeTensor| tensor.handle.memory.clone().binding().id();
        self.memories.iter().position(|memory| id(memory) == id(tensor))
    }
}

/// Returns whether kernels can read keys and values of a span from their memories: vectors of floats.
pub(super) fn fits(span: &Sides) -> bool {
    let aligned = |side: &Side| offset(&side.numbers).is_multiple_of(VECTOR);
    let sides = [&span.keys, &span.values];
    sides.into_iter().all(|side| side.is_in_fours() && aligned(side))
        && span.keys.element == span.values.element
}

/// The place of the first number in its memory.
pub(super) fn offset(tensor: &CubeTensor) -> usize {
    tensor.handle.offset_start.unwrap_or(0) as usize / tensor.dtype.size()
}

/// All of the memory that a tensor is in.
fn whole(tensor: &CubeTensor) -> CubeTensor {
    let mut handle = tensor.handle.clone();
    (handle.offset_start, handle.offset_end) = (None, None);
    let numbers = handle.size() as usize / tensor.dtype.size();
    let shape = Shape::new([numbers / VECTOR * VECTOR]);
    CubeTensor::new_contiguous(tensor.client.clone(), tensor.device.clone(), shape, handle, tensor.dtype)
}

fn upload(like: &CubeTensor, words: &[u32]) -> CubeTensor {
    let (client, device) = (like.client.clone(), like.device.clone());
    let handle = client.create_from_slice(bytemuck::cast_slice(words));
    CubeTensor::new_contiguous(client, device, Shape::new([words.len()]), handle, DType::U32)
}
