//! Kernels for head norm, rotation and cache write: a line of units for every head.

use burn_cubecl::cubecl::ir::ElemType;
use burn_cubecl::cubecl::{self, prelude::*};

use super::blocks::one_of;
use crate::norm::cube::root_mean_square;

/// Units of a line, which share the elements of a head.
pub(super) const LANES: u32 = 32;
/// Heads of a cube.
pub(super) const LINES: u32 = 4;
/// Options that are compiled into the kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct How {
    pub query_normed: bool,
    pub key_normed: bool,
    pub interleaved: bool,
    /// Whether a recorded step adds its counter to the slots.
    pub counted: bool,
}

/// Sizes and norm parameters that all rows share.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct Sizes {
    pub heads: u32,
    pub kv_heads: u32,
    pub head_dim: u32,
    pub pairs: u32,
    /// Rows per page.
    pub rows: u32,
    pub query_epsilon: f32,
    pub query_offset: f32,
    pub key_epsilon: f32,
    pub key_offset: f32,
}

/// The slots that the keys and values of some rows are written to.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct Destination {
    /// The first row.
    pub first: u32,
    /// Slots of the page, and the first slot to write.
    pub positions: u32,
    pub at: u32,
}

/// Processes rows that go to one page: a line for every head of queries, keys and values of every row.
#[cube(launch)]
pub(super) fn rope_and_cache_rows<F: Float>(
    query: &[f32],
    key: &[f32],
    value: &[f32],
    query_weight: &[f32],
    key_weight: &[f32],
    cos: &[f32],
    sin: &[f32],
    steps: &[u32],
    placed: &mut [f32],
    kept_keys: &mut [F],
    kept_values: &mut [F],
    destination: Destination,
    sizes: Sizes,
    #[comptime] how: How,
    #[comptime] plane: u32,
    #[define(F)] _kept: ElemType,
) {
    let line = line_of(sizes.rows, sizes);
    let row = destination.first + row_of(line, sizes);
    let head = head_of(line, sizes);
    let divisor = divisor_of(query, key, row, head, sizes, how, plane);
    let to = kept_start(line, destination, steps, sizes, how);
    let mut at = UNIT_POS_X;
    while at < sizes.head_dim {
        let number = placed_element(
            query,
            key,
            value,
            query_weight,
            key_weight,
            cos,
            sin,
            row,
            head,
            at,
            divisor,
            sizes,
            how,
        );
        if head < sizes.heads {
            placed[((row * sizes.heads + head) * sizes.head_dim + at) as usize] = number;
        } else if head < sizes.heads + sizes.kv_heads {
            kept_keys[(to + at) as usize] = F::cast_from(number);
        } else {
            kept_values[(to + at) as usize] = F::cast_from(number);
        }
        at += LANES;
    }
}

/// Processes rows that go to up to [`TOGETHER`] pages, equally many each.
#[cube(launch)]
pub(super) fn rope_and_cache_several<F: Float>(
    query: &[f32],
    key: &[f32],
    value: &[f32],
    query_weight: &[f32],
    key_weight: &[f32],
    cos: &[f32],
    sin: &[f32],
    steps: &[u32],
    placed: &mut [f32],
    first_keys: &mut [F],
    second_keys: &mut [F],
    third_keys: &mut [F],
    fourth_keys: &mut [F],
    first_values: &mut [F],
    second_values: &mut [F],
    third_values: &mut [F],
    fourth_values: &mut [F],
    first: Destination,
    second: Destination,
    third: Destination,
    fourth: Destination,
    sizes: Sizes,
    #[comptime] count: u32,
    #[comptime] how: How,
    #[comptime] plane: u32,
    #[define(F)] _kept: ElemType,
) {
    let all = line_of(count * sizes.rows, sizes);
    let of_place = sizes.rows * (sizes.heads + 2 * sizes.kv_heads);
    let (which, line) = (all / of_place, all % of_place);
    let destination = Destination {
        first: one_of::<u32>(which, first.first, second.first, third.first, fourth.first),
        positions: one_of::<u32>(which, first.positions, second.positions, third.positions, fourth.positions),
        at: one_of::<u32>(which, first.at, second.at, third.at, fourth.at),
    };
    let row = destination.first + row_of(line, sizes);
    let head = head_of(line, sizes);
    let divisor = divisor_of(query, key, row, head, sizes, how, plane);
    let to = kept_start(line, destination, steps, sizes, how);
    let mut at = UNIT_POS_X;
    while at < sizes.head_dim {
        let number = placed_element(
            query,
            key,
            value,
            query_weight,
            key_weight,
            cos,
            sin,
            row,
            head,
            at,
            divisor,
            sizes,
            how,
        );
        let (kept, place) = (F::cast_from(number), (to + at) as usize);
        if head < sizes.heads {
            placed[((row * sizes.heads + head) * sizes.head_dim + at) as usize] = number;
        } else if head < sizes.heads + sizes.kv_heads {
            if which == 0 {
                first_keys[place] = kept;
            } else if which == 1 {
                second_keys[place] = kept;
            } else if which == 2 {
                third_keys[place] = kept;
            } else {
                fourth_keys[place] = kept;
            }
        } else if which == 0 {
            first_values[place] = kept;
        } else if which == 1 {
            second_values[place] = kept;
        } else if which == 2 {
            third_values[place] = kept;
        } else {
            fourth_values[place] = kept;
        }
        at += LANES;
    }
}

/// The line of a unit. Lines beyond the last head repeat it, so that all units reach the barriers, and write the same values.
#[cube]
fn line_of(rows: u32, sizes: Sizes) -> u32 {
    min(CUBE_POS as u32 * LINES + UNIT_POS_Y, rows * (sizes.heads + 2 * sizes.kv_heads) - 1)
}

#[cube]
fn row_of(line: u32, sizes: Sizes) -> u32 {
    line / (sizes.heads + 2 * sizes.kv_heads)
}

/// The head of a line: those of queries come first, then those of keys, then those of values.
#[cube]
fn head_of(line: u32, sizes: Sizes) -> u32 {
    line % (sizes.heads + 2 * sizes.kv_heads)
}

/// The index of a head among those of keys or of values.
#[cube]
fn kv_head_of(head: u32, sizes: Sizes) -> u32 {
    (head - sizes.heads) % sizes.kv_heads
}

/// The first element of a head of keys or values in its page.
#[cube]
fn kept_start(line: u32, destination: Destination, steps: &[u32], sizes: Sizes, #[comptime] how: How) -> u32 {
    let kv_head = kv_head_of(head_of(line, sizes), sizes);
    let mut slot = destination.at + row_of(line, sizes);
    if comptime!(how.counted) {
        slot += steps[0];
    }
    (kv_head * destination.positions + slot) * sizes.head_dim
}

/// The root mean square of a head of queries or keys; 1 if neither is normalised.
#[cube]
pub(super) fn divisor_of(
    query: &[f32],
    key: &[f32],
    row: u32,
    head: u32,
    sizes: Sizes,
    #[comptime] how: How,
    #[comptime] plane: u32,
) -> f32 {
    let mut divisor = 1.0f32;
    if comptime!(how.query_normed || how.key_normed) {
        let query_start = (row * sizes.heads + head) * sizes.head_dim;
        let key_start = (row * sizes.kv_heads + kv_head_of(head, sizes)) * sizes.head_dim;
        let mut squares = 0.0f32;
        let mut epsilon = sizes.query_epsilon;
        if head >= sizes.heads {
            epsilon = sizes.key_epsilon;
        }
        let mut at = UNIT_POS_X;
        while at < sizes.head_dim {
            let mut number = 0.0f32;
            if head < sizes.heads {
                number = query[(query_start + at) as usize];
            } else if head < sizes.heads + sizes.kv_heads {
                number = key[(key_start + at) as usize];
            }
            squares = fma(number, number, squares);
            at += LANES;
        }
        let squares = Vector::<f32, Const<1>>::new(squares);
        let width = f32::cast_from(sizes.head_dim);
        divisor = root_mean_square::<Const<1>>(squares, width, epsilon, LANES, LINES, plane);
    }
    divisor
}

/// An element of a head after its norm and rotation.
#[cube]
pub(super) fn placed_element(
    query: &[f32],
    key: &[f32],
    value: &[f32],
    query_weight: &[f32],
    key_weight: &[f32],
    cos: &[f32],
    sin: &[f32],
    row: u32,
    head: u32,
    at: u32,
    divisor: f32,
    sizes: Sizes,
    #[comptime] how: How,
) -> f32 {
    let mut number = 0.0f32;
    let start = (row * sizes.kv_heads + kv_head_of(head, sizes)) * sizes.head_dim;
    if head < sizes.heads {
        let start = (row * sizes.heads + head) * sizes.head_dim;
        let offset = sizes.query_offset;
        number = turned(
            query,
            query_weight,
            cos,
            sin,
            start,
            at,
            row,
            sizes.pairs,
            divisor,
            offset,
            how.query_normed,
            how.interleaved,
        );
    }
    if head >= sizes.heads && head < sizes.heads + sizes.kv_heads {
        let offset = sizes.key_offset;
        number = turned(
            key,
            key_weight,
            cos,
            sin,
            start,
            at,
            row,
            sizes.pairs,
            divisor,
            offset,
            how.key_normed,
            how.interleaved,
        );
    }
    if head >= sizes.heads + sizes.kv_heads {
        number = value[(start + at) as usize];
    }
    number
}

/// An element of a head, normalised and rotated.
#[cube]
fn turned(
    heads: &[f32],
    weight: &[f32],
    cos: &[f32],
    sin: &[f32],
    start: u32,
    at: u32,
    row: u32,
    pairs: u32,
    divisor: f32,
    offset: f32,
    #[comptime] normed: bool,
    #[comptime] interleaved: bool,
) -> f32 {
    let mut number = normed_element(heads, weight, start, at, divisor, offset, normed);
    if at < 2 * pairs {
        let second = if comptime!(interleaved) { at % 2 == 1 } else { at >= pairs };
        let pair = if comptime!(interleaved) { at / 2 } else { at % pairs };
        let apart = if comptime!(interleaved) { 1u32.runtime() } else { pairs };
        let angle = (row * pairs + pair) as usize;
        let mut other = at + apart;
        if second {
            other = at - apart;
        }
        let beside = normed_element(heads, weight, start, other, divisor, offset, normed) * sin[angle];
        if second {
            number = fma(number, cos[angle], beside);
        } else {
            number = fma(number, cos[angle], -beside);
        }
    }
    number
}

#[cube]
fn normed_element(
    heads: &[f32],
    weight: &[f32],
    start: u32,
    at: u32,
    divisor: f32,
    offset: f32,
    #[comptime] normed: bool,
) -> f32 {
    let mut number = heads[(start + at) as usize];
    if comptime!(normed) {
        number = number / divisor * (weight[at as usize] + offset);
    }
    number
}
