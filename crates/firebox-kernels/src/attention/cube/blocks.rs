//! The kernel that attends.

use burn_cubecl::cubecl::ir::ElemType;
use burn_cubecl::cubecl::{self, prelude::*};

use super::reading::{Reading, four_of};
use crate::cube::{magnitude, sum_vector, tanh};

/// Units of a cube and positions of a block; a quarter of the elements of the widest head.
pub(super) const UNITS: u32 = 128;
/// Loads that are under way at once: one after the other they would take a memory's latency each.
const AHEAD: usize = 8;
/// Stands for the score of what is not visible, and for the highest score before there is one. Shaders do not
/// have an infinity to write down.
pub(super) const UNSEEN: f32 = -1e30;
const UNSEEN_BITS: u32 = UNSEEN.to_bits();

/// What is built into a kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct How {
    /// Queries of a cube.
    pub queries: usize,
    /// Units that share out a head's elements, four to each; a power of two.
    pub columns: u32,
    pub keys: Reading,
    pub values: Reading,
    pub masked: bool,
    pub capped: bool,
    /// Whether the first word of `visible` is the counter of a recorded step.
    pub counted: bool,
    /// Whether cubes behind each other look at spans of their own instead of parts of one.
    pub several: bool,
    /// Units of a plane; see [`plane_size`](crate::cube::plane_size).
    pub plane: u32,
}

/// Steps between heads and between positions, of scales or of what is added.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct Strides {
    pub head: u32,
    pub position: u32,
}

/// A span.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct Place {
    pub key_head: u32,
    pub key_position: u32,
    pub value_head: u32,
    pub value_position: u32,
    pub positions: u32,
    /// The first row's own position, counted from the first key, and one.
    pub reach: i32,
    /// The first row in the query, and the first row of its results.
    pub row: u32,
    pub slot: u32,
    /// 1 if a recorded step adds to the positions, otherwise 0.
    pub grows: u32,
}

/// How scores are made, and of which positions.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct Scores {
    pub window: i32,
    pub scale: f32,
    pub softcap: f32,
    /// The logarithm of nothing.
    pub nothing: f32,
}

#[derive(CubeType, CubeLaunch, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct Sizes {
    /// Rows that attend to a span.
    pub rows: u32,
    pub sharing: u32,
    pub head_dim: u32,
    /// Positions that a cube looks at.
    pub piece: u32,
    /// Words of visibility.
    pub words: u32,
}

/// One span, whose parts cubes behind each other look at.
#[cube(launch)]
pub(super) fn attend_blocks<K: Numeric, NK: Size, V: Numeric, NV: Size>(
    query: &[f32],
    keys: &[Vector<K, NK>],
    key_scales: &[f32],
    values: &[Vector<V, NV>],
    value_scales: &[f32],
    visible: &[u32],
    output: &mut [f32],
    log_sum_exp: &mut [f32],
    place: Place,
    key_scale_strides: Strides,
    value_scale_strides: Strides,
    sizes: Sizes,
    scores: Scores,
    #[comptime] how: How,
    #[define(K)] _key: ElemType,
    #[define(V)] _value: ElemType,
) {
    gather::<K, NK, V, NV>(
        query,
        keys,
        keys,
        keys,
        keys,
        key_scales,
        values,
        values,
        values,
        values,
        value_scales,
        visible,
        output,
        log_sum_exp,
        0u32,
        CUBE_POS_Z * sizes.piece,
        place.slot + CUBE_POS_Z * sizes.rows,
        place,
        key_scale_strides,
        value_scale_strides,
        sizes,
        scores,
        how,
    );
}

/// Up to [`TOGETHER`](super::TOGETHER) short spans of floats, of which all may be seen, each by cubes of its own.
#[cube(launch)]
pub(super) fn attend_several<K: Numeric, NK: Size, V: Numeric, NV: Size>(
    query: &[f32],
    first_keys: &[Vector<K, NK>],
    second_keys: &[Vector<K, NK>],
    third_keys: &[Vector<K, NK>],
    fourth_keys: &[Vector<K, NK>],
    first_values: &[Vector<V, NV>],
    second_values: &[Vector<V, NV>],
    third_values: &[Vector<V, NV>],
    fourth_values: &[Vector<V, NV>],
    // Holds nothing but the counter of a recorded step.
    visible: &[u32],
    output: &mut [f32],
    log_sum_exp: &mut [f32],
    first_place: Place,
    second_place: Place,
    third_place: Place,
    fourth_place: Place,
    sizes: Sizes,
    scores: Scores,
    #[comptime] how: How,
    #[define(K)] _key: ElemType,
    #[define(V)] _value: ElemType,
) {
    let which = CUBE_POS_Z;
    let place = Place {
        key_head: one_of::<u32>(
            which,
            first_place.key_head,
            second_place.key_head,
            third_place.key_head,
            fourth_place.key_head,
        ),
        key_position: one_of::<u32>(
            which,
            first_place.key_position,
            second_place.key_position,
            third_place.key_position,
            fourth_place.key_position,
        ),
        value_head: one_of::<u32>(
            which,
            first_place.value_head,
            second_place.value_head,
            third_place.value_head,
            fourth_place.value_head,
        ),
        value_position: one_of::<u32>(
            which,
            first_place.value_position,
            second_place.value_position,
            third_place.value_position,
            fourth_place.value_position,
        ),
        positions: one_of::<u32>(
            which,
            first_place.positions,
            second_place.positions,
            third_place.positions,
            fourth_place.positions,
        ),
        reach: one_of::<i32>(
            which,
            first_place.reach,
            second_place.reach,
            third_place.reach,
            fourth_place.reach,
        ),
        row: one_of::<u32>(which, first_place.row, second_place.row, third_place.row, fourth_place.row),
        slot: one_of::<u32>(which, first_place.slot, second_place.slot, third_place.slot, fourth_place.slot),
        grows: one_of::<u32>(
            which,
            first_place.grows,
            second_place.grows,
            third_place.grows,
            fourth_place.grows,
        ),
    };
    let nowhere = Strides { head: 0u32.runtime(), position: 0u32.runtime() };
    gather::<K, NK, V, NV>(
        query,
        first_keys,
        second_keys,
        third_keys,
        fourth_keys,
        query,
        first_values,
        second_values,
        third_values,
        fourth_values,
        query,
        visible,
        output,
        log_sum_exp,
        which,
        0u32,
        place.slot,
        place,
        nowhere,
        nowhere,
        sizes,
        scores,
        how,
    );
}

#[cube]
pub(super) fn one_of<T: Numeric>(which: u32, first: T, second: T, third: T, fourth: T) -> T {
    let mut one = first;
    if which == 1 {
        one = second;
    } else if which == 2 {
        one = third;
    } else if which == 3 {
        one = fourth;
    }
    one
}

/// Computes attention of a cube's queries to one of up to four spans, from position `piece` on, and writes it from row `slot` on.
#[cube]
fn gather<K: Numeric, NK: Size, V: Numeric, NV: Size>(
    query: &[f32],
    first_keys: &[Vector<K, NK>],
    second_keys: &[Vector<K, NK>],
    third_keys: &[Vector<K, NK>],
    fourth_keys: &[Vector<K, NK>],
    key_scales: &[f32],
    first_values: &[Vector<V, NV>],
    second_values: &[Vector<V, NV>],
    third_values: &[Vector<V, NV>],
    fourth_values: &[Vector<V, NV>],
    value_scales: &[f32],
    visible: &[u32],
    output: &mut [f32],
    log_sum_exp: &mut [f32],
    which: u32,
    piece: u32,
    slot: u32,
    place: Place,
    key_scale_strides: Strides,
    value_scale_strides: Strides,
    sizes: Sizes,
    scores_of: Scores,
    #[comptime] how: How,
) {
    let queries = comptime!(how.queries);
    let columns = comptime!(how.columns);
    // Units that find the weights of one query, and the positions that each of them looks at.
    let group = comptime!(UNITS / queries as u32);
    let quads = sizes.head_dim.div_ceil(4);
    let kv_head = CUBE_POS_Y;
    let first = CUBE_POS_X * queries as u32;
    let count = sizes.rows * sizes.sharing;

    let (window, mut reach, mut positions) = (scores_of.window, place.reach, place.positions);
    if comptime!(how.counted) {
        let steps = visible[0];
        positions += steps * place.grows;
        reach += i32::cast_from(steps);
    }
    let mut asked = Shared::<[Vector<f32, Const<4>>]>::new_slice(comptime!(queries * columns as usize));
    let mut weights = Shared::<[f32]>::new_slice(comptime!(queries * UNITS as usize));
    let mut highs = Shared::<[f32]>::new_slice(comptime!(UNITS as usize));
    let mut factors = Shared::<[f32]>::new_slice(comptime!(queries));

    let mut at = UNIT_POS;
    while at < queries as u32 * columns {
        let index = first + at / columns;
        let mut numbers = Vector::<f32, Const<4>>::new(0.0f32);
        if index < count {
            let row = (heads(sizes) * place.row + query_row(index, kv_head, sizes)) * sizes.head_dim;
            #[unroll]
            for element in 0..4usize {
                let column = at % columns * 4 + element as u32;
                if column < sizes.head_dim {
                    numbers.insert(element, query[(row + column) as usize]);
                }
            }
        }
        asked[at as usize] = numbers;
        at += UNITS;
    }
    sync_cube();

    let last_row = (min(first + queries as u32, count) - 1) / sizes.sharing;
    let start = max(piece, clamped(reach + i32::cast_from(first / sizes.sharing) - window, positions));
    let end = min(piece + sizes.piece, clamped(reach + i32::cast_from(last_row), positions));

    let (mine, member) = (UNIT_POS / group, UNIT_POS % group);
    let (column, part) = (UNIT_POS % columns, UNIT_POS / columns);
    let parts = comptime!(UNITS / columns);
    let mut highest = UNSEEN.runtime();
    let mut total = 0.0f32;
    let mut gathered = Array::<Vector<f32, Const<4>>>::new(queries);
    #[unroll]
    for index in 0..queries {
        gathered[index] = Vector::new(0.0f32);
    }

    let mut block = start / UNITS * UNITS;
    while block < end {
        let position = block + UNIT_POS;
        let mut scores = Array::<Vector<f32, Const<4>>>::new(queries);
        #[unroll]
        for index in 0..queries {
            scores[index] = Vector::new(0.0f32);
        }
        let mut seen = position >= start && position < end;
        if comptime!(how.masked) {
            seen = seen && may_be_seen(visible, position, sizes.words);
        }
        let mut factor = scores_of.scale;
        if seen {
            let base = kv_head * place.key_head + position * place.key_position;
            let mut from = 0u32.runtime();
            while from < quads {
                let mut numbers = Array::<Vector<f32, Const<4>>>::new(AHEAD);
                #[unroll]
                for ahead in 0..AHEAD {
                    numbers[ahead] = four_of::<K, NK>(
                        first_keys,
                        second_keys,
                        third_keys,
                        fourth_keys,
                        which,
                        base,
                        min(from + ahead as u32, quads - 1),
                        sizes.head_dim,
                        how.keys,
                        how.several,
                    );
                }
                #[unroll]
                for ahead in 0..AHEAD {
                    let quad = from + ahead as u32;
                    if quad < quads {
                        #[unroll]
                        for index in 0..queries {
                            scores[index] += numbers[ahead] * asked[(index as u32 * columns + quad) as usize];
                        }
                    }
                }
                from += AHEAD as u32;
            }
            if comptime!(how.keys == Reading::Bytes) {
                let at = kv_head * key_scale_strides.head + position * key_scale_strides.position;
                factor *= key_scales[at as usize];
            }
        }
        #[unroll]
        for index in 0..queries {
            let own = reach + i32::cast_from((first + index as u32) / sizes.sharing);
            let at = i32::cast_from(position);
            let mut score = UNSEEN.runtime();
            if seen && at < own && at >= own - window {
                score = sum_vector::<Const<4>>(scores[index]) * factor;
                if comptime!(how.capped) {
                    score = tanh(score / scores_of.softcap) * scores_of.softcap;
                }
            }
            weights[(index as u32 * UNITS + UNIT_POS) as usize] = score;
        }
        sync_cube();

        let mut high = UNSEEN.runtime();
        for index in 0..queries {
            high = max(high, weights[(mine * UNITS + index as u32 * group + member) as usize]);
        }
        if comptime!(how.plane == group) {
            high = plane_max(high);
        } else {
            highs[UNIT_POS as usize] = high;
            sync_cube();
            for index in 0..group {
                high = max(high, highs[(mine * group + index) as usize]);
            }
        }
        high = max(high, highest);
        let fade = (highest - high).exp();
        highest = high;
        total *= fade;
        for index in 0..queries {
            let at = (mine * UNITS + index as u32 * group + member) as usize;
            let score = weights[at];
            // By its bits, because what is no number has to come through.
            if u32::reinterpret(score) != UNSEEN_BITS {
                let weight = (score - high).exp();
                weights[at] = weight;
                total += weight;
            }
        }
        if member == 0 {
            factors[mine as usize] = fade;
        }
        sync_cube();

        if column < quads {
            #[unroll]
            for index in 0..queries {
                gathered[index] *= Vector::new(factors[index]);
            }
            let limit = min(UNITS, end - block);
            let mut from = part;
            while from < limit {
                let mut numbers = Array::<Vector<f32, Const<4>>>::new(AHEAD);
                #[unroll]
                for ahead in 0..AHEAD {
                    let at = min(from + ahead as u32 * parts, limit - 1);
                    let base = kv_head * place.value_head + (block + at) * place.value_position;
                    numbers[ahead] = four_of::<V, NV>(
                        first_values,
                        second_values,
                        third_values,
                        fourth_values,
                        which,
                        base,
                        column,
                        sizes.head_dim,
                        how.values,
                        how.several,
                    );
                    if comptime!(how.values == Reading::Bytes) {
                        let scale =
                            kv_head * value_scale_strides.head + (block + at) * value_scale_strides.position;
                        numbers[ahead] *= Vector::new(value_scales[scale as usize]);
                    }
                }
                #[unroll]
                for ahead in 0..AHEAD {
                    let at = from + ahead as u32 * parts;
                    if at < limit {
                        #[unroll]
                        for index in 0..queries {
                            let weight = weights[(index as u32 * UNITS + at) as usize];
                            // What a query does not see may hold what is no number; what it sees comes through,
                            // whatever it weighs.
                            if u32::reinterpret(weight) != UNSEEN_BITS {
                                gathered[index] += numbers[ahead] * Vector::new(weight);
                            }
                        }
                    }
                }
                from += AHEAD as u32 * parts;
            }
        }
        sync_cube();
        block += UNITS;
    }

    highs[UNIT_POS as usize] = total;
    sync_cube();
    if member == 0 {
        let mut total = 0.0f32;
        for index in 0..group {
            total += highs[(mine * group + index) as usize];
        }
        factors[mine as usize] = total;
        if first + mine < count {
            let mut logarithm = scores_of.nothing;
            if magnitude(total) != 0u32 {
                logarithm = highest + total.ln();
            }
            let row = query_row(first + mine, kv_head, sizes);
            log_sum_exp[(slot * heads(sizes) + row) as usize] = logarithm;
        }
    }
    let mut scratch = Shared::<[Vector<f32, Const<4>>]>::new_slice(comptime!(UNITS as usize));
    #[unroll]
    for index in 0..queries {
        scratch[UNIT_POS as usize] = gathered[index];
        sync_cube();
        let total = factors[index];
        if part == 0 && first + (index as u32) < count {
            let mut sum = scratch[column as usize];
            for other in 1..parts {
                sum += scratch[(other * columns + column) as usize];
            }
            if magnitude(total) != 0u32 {
                sum /= Vector::new(total);
            }
            let row = slot * heads(sizes) + query_row(first + index as u32, kv_head, sizes);
            #[unroll]
            for element in 0..4usize {
                let at = column * 4 + element as u32;
                if at < sizes.head_dim {
                    output[(row * sizes.head_dim + at) as usize] = sum.extract(element);
                }
            }
        }
        sync_cube();
    }
}

/// Where a query of a key head lies, in rows times heads.
#[cube]
fn query_row(index: u32, kv_head: u32, sizes: Sizes) -> u32 {
    index / sizes.sharing * heads(sizes) + kv_head * sizes.sharing + index % sizes.sharing
}

#[cube]
fn heads(sizes: Sizes) -> u32 {
    CUBE_COUNT_Y * sizes.sharing
}

#[cube]
fn clamped(index: i32, positions: u32) -> u32 {
    u32::cast_from(max(min(index, i32::cast_from(positions)), 0i32))
}

#[cube]
fn may_be_seen(visible: &[u32], position: u32, words: u32) -> bool {
    let mut seen = false;
    if position / 32 < words {
        seen = (visible[(position / 32) as usize] >> (position % 32)) & 1 == 1;
    }
    seen
}
