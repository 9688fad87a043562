//! Kernels for attention of few rows, by cubes that each attend to a part of a span.
//!
//! Products are summed by `fma` throughout, so that kernels of different shapes round alike.

use burn_cubecl::cubecl::ir::ElemType;
use burn_cubecl::cubecl::{self, prelude::*};

use super::blocks::UNSEEN;
use super::heads_kernels::{How as Placing, LANES, LINES, Sizes as HeadSizes, divisor_of, placed_element};
use super::memories::read_ahead;
use super::part_table::{ENTRY_WORDS, PARTS, POSITIONS};
use crate::cube::{magnitude, sum_vector, tanh};

/// Units of a cube.
pub(super) const UNITS: u32 = LANES * LINES;
/// Units that share the key of a position.
const SHARING: u32 = UNITS / POSITIONS as u32;
/// Loads that are under way at once.
pub(super) const AHEAD: usize = 8;
const UNSEEN_BITS: u32 = UNSEEN.to_bits();

/// Options that are compiled into the kernels.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct How {
    /// Queries of a cube, four at most.
    pub queries: usize,
    /// Units that share the elements of a head, four to each; a power of two.
    pub columns: u32,
    pub capped: bool,
    /// Units of a plane; see [`plane_size`](crate::cube::plane_size).
    pub plane: u32,
}

/// Sizes that all rows share.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct Sizes {
    pub heads: u32,
    /// Query heads of a key head.
    pub sharing: u32,
    /// Vectors of a head.
    pub quads: u32,
    /// The word of the table that entries begin at, and the first entry of the launch.
    pub entries_at: u32,
    pub first_entry: u32,
    pub window: i32,
    pub scale: f32,
    pub softcap: f32,
    /// The logarithm of nothing.
    pub nothing: f32,
}

/// A part of a span as a cube of one key head looks at it. Places are in vectors.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
struct Part {
    key_memory: u32,
    value_memory: u32,
    key_start: u32,
    value_start: u32,
    key_step: u32,
    value_step: u32,
    /// The positions that are visible, apart from masked ones.
    start: u32,
    end: u32,
    /// A bit for every position.
    mask: u32,
    /// The position of the row itself, where this is its part, and otherwise one that no part has.
    own: u32,
    row: u32,
}

/// Attends with queries as they are.
#[cube(launch)]
pub(super) fn attend_parts<K: Numeric, N: Size>(
    query: &[Vector<f32, N>],
    table: &[u32],
    counter: &[u32],
    first: &[Vector<K, N>],
    second: &[Vector<K, N>],
    third: &[Vector<K, N>],
    fourth: &[Vector<K, N>],
    fifth: &[Vector<K, N>],
    sixth: &[Vector<K, N>],
    seventh: &[Vector<K, N>],
    eighth: &[Vector<K, N>],
    parts: &mut [Vector<f32, N>],
    sizes: Sizes,
    #[comptime] how: How,
    #[define(K)] _stored: ElemType,
) {
    let queries = comptime!(how.queries);
    let columns = comptime!(how.columns);
    let part = part_of(table, counter, sizes);
    let mut asked = Shared::<[Vector<f32, N>]>::new_slice(comptime!(queries * columns as usize));
    let mut at = UNIT_POS;
    while at < queries as u32 * columns {
        let (head, column) = (query_head(at / columns, sizes, queries), at % columns);
        let place = (part.row * sizes.heads + head) * sizes.quads + min(column, sizes.quads - 1);
        asked[at as usize] = query[place as usize];
        at += UNITS;
    }
    sync_cube();
    attend_part::<K, N>(
        &asked, first, second, third, fourth, fifth, sixth, seventh, eighth, parts, part, sizes, how,
    );
}

/// Normalises and rotates queries and the row's own key first, and writes that key and the value to their position.
#[cube(launch)]
pub(super) fn place_and_attend_parts<K: Numeric, N: Size>(
    query: &[f32],
    key: &[f32],
    value: &[f32],
    query_weight: &[f32],
    key_weight: &[f32],
    cos: &[f32],
    sin: &[f32],
    table: &[u32],
    counter: &[u32],
    first: &mut [Vector<K, N>],
    second: &mut [Vector<K, N>],
    third: &mut [Vector<K, N>],
    fourth: &mut [Vector<K, N>],
    fifth: &mut [Vector<K, N>],
    sixth: &mut [Vector<K, N>],
    seventh: &mut [Vector<K, N>],
    eighth: &mut [Vector<K, N>],
    parts: &mut [Vector<f32, N>],
    head_sizes: HeadSizes,
    sizes: Sizes,
    #[comptime] placing: Placing,
    #[comptime] how: How,
    #[define(K)] _stored: ElemType,
) {
    let queries = comptime!(how.queries);
    let columns = comptime!(how.columns);
    let part = part_of(table, counter, sizes);
    let mut asked = Shared::<[Vector<f32, N>]>::new_slice(comptime!(queries * columns as usize));
    let kv_head = CUBE_POS_Y;
    let is_own = part.own < comptime!(POSITIONS as u32);
    // Lines take the queries, then the key and the value.
    let rounds = comptime!((queries + 2).div_ceil(LINES as usize));
    #[unroll]
    for round in 0..rounds {
        let item = round as u32 * LINES + UNIT_POS_Y;
        let mut head = sizes.heads + head_sizes.kv_heads + kv_head;
        if item < queries as u32 {
            head = query_head(item, sizes, queries);
        } else if item == queries as u32 {
            head = sizes.heads + kv_head;
        }
        let divisor = divisor_of(query, key, part.row, head, head_sizes, placing, how.plane);
        let mut quad = UNIT_POS_X;
        while quad < sizes.quads {
            let mut numbers = Vector::<f32, N>::new(0.0f32);
            #[unroll]
            for element in 0..4usize {
                let number = placed_element(
                    query,
                    key,
                    value,
                    query_weight,
                    key_weight,
                    cos,
                    sin,
                    part.row,
                    head,
                    quad * 4 + element as u32,
                    divisor,
                    head_sizes,
                    placing,
                );
                numbers.insert(element, number);
            }
            if item < queries as u32 {
                asked[(item * columns + quad) as usize] = numbers;
            } else if is_own && item < queries as u32 + 2 {
                let mut stored = Vector::<K, N>::new(K::cast_from(0.0f32));
                #[unroll]
                for element in 0..4usize {
                    stored.insert(element, K::cast_from(numbers.extract(element)));
                }
                let mut memory = part.key_memory;
                let mut place = part.key_start + part.own * part.key_step + quad;
                if item > queries as u32 {
                    memory = part.value_memory;
                    place = part.value_start + part.own * part.value_step + quad;
                }
                let place = place as usize;
                if memory == 0 {
                    first[place] = stored;
                } else if memory == 1 {
                    second[place] = stored;
                } else if memory == 2 {
                    third[place] = stored;
                } else if memory == 3 {
                    fourth[place] = stored;
                } else if memory == 4 {
                    fifth[place] = stored;
                } else if memory == 5 {
                    sixth[place] = stored;
                } else if memory == 6 {
                    seventh[place] = stored;
                } else {
                    eighth[place] = stored;
                }
            }
            quad += LANES;
        }
    }
    // The cube reads what it has written.
    sync_storage();
    attend_part::<K, N>(
        &asked, &*first, &*second, &*third, &*fourth, &*fifth, &*sixth, &*seventh, &*eighth, parts, part,
        sizes, how,
    );
}

/// The query head at an index of the cube; those beyond the last repeat it.
#[cube]
fn query_head(index: u32, sizes: Sizes, #[comptime] queries: usize) -> u32 {
    let group = CUBE_POS_X / comptime!(PARTS as u32);
    CUBE_POS_Y * sizes.sharing + min(group * queries as u32 + index, sizes.sharing - 1)
}

/// Reads the part of the cube from the table.
#[cube]
fn part_of(table: &[u32], counter: &[u32], sizes: Sizes) -> Part {
    let entry = sizes.entries_at + (sizes.first_entry + CUBE_POS_Z) * comptime!(ENTRY_WORDS as u32);
    let kv_head = CUBE_POS_Y;
    let from = CUBE_POS_X % comptime!(PARTS as u32) * comptime!(POSITIONS as u32);
    let steps = counter[0];
    let grows = table[(entry + 10) as usize];
    let positions = i32::cast_from(table[(entry + 7) as usize] + steps * grows);
    let reach = i32::cast_from(table[(entry + 8) as usize]) + i32::cast_from(steps);
    let (key_step, value_step) = (table[(entry + 4) as usize], table[(entry + 6) as usize]);
    let first = i32::cast_from(from);
    let most = comptime!(POSITIONS as i32).runtime();
    // Positions from here on count from the part's first.
    let start = clamp_to(reach - sizes.window - first, most);
    let end = clamp_to(min(positions, reach) - first, most);
    let mut own = u32::MAX.runtime();
    if grows == 1 && reach > first {
        own = u32::cast_from(reach - 1 - first);
    }
    Part {
        key_memory: table[entry as usize] & 255,
        value_memory: table[entry as usize] >> 8,
        key_start: table[(entry + 1) as usize] + kv_head * table[(entry + 3) as usize] + from * key_step,
        value_start: table[(entry + 2) as usize] + kv_head * table[(entry + 5) as usize] + from * value_step,
        key_step,
        value_step,
        start,
        end,
        mask: table[(entry + 11 + CUBE_POS_X % comptime!(PARTS as u32)) as usize],
        own,
        row: table[(entry + 9) as usize],
    }
}

#[cube]
fn clamp_to(number: i32, most: i32) -> u32 {
    u32::cast_from(max(min(number, most), 0i32))
}

#[cube]
fn is_seen(part: Part, position: u32) -> bool {
    position >= part.start && position < part.end && (part.mask >> position) & 1 == 1
}

/// Computes attention of the queries of a cube to its part, and writes it to the part's record of every query: the output, then
/// the logarithm of the sum.
#[cube]
fn attend_part<K: Numeric, N: Size>(
    asked: &Shared<[Vector<f32, N>]>,
    first: &[Vector<K, N>],
    second: &[Vector<K, N>],
    third: &[Vector<K, N>],
    fourth: &[Vector<K, N>],
    fifth: &[Vector<K, N>],
    sixth: &[Vector<K, N>],
    seventh: &[Vector<K, N>],
    eighth: &[Vector<K, N>],
    parts: &mut [Vector<f32, N>],
    part: Part,
    sizes: Sizes,
    #[comptime] how: How,
) {
    let queries = comptime!(how.queries);
    let columns = comptime!(how.columns);
    let positions = comptime!(POSITIONS as u32);
    let quads = sizes.quads;
    let pairs = comptime!(queries as u32 * POSITIONS as u32);

    let mut shares = Shared::<[f32]>::new_slice(comptime!(UNITS as usize * queries));
    let (position, lane) = (UNIT_POS / SHARING, UNIT_POS % SHARING);
    let mut sums = Array::<Vector<f32, N>>::new(queries);
    #[unroll]
    for index in 0..queries {
        sums[index] = Vector::new(0.0f32);
    }
    if is_seen(part, position) {
        let start = part.key_start + position * part.key_step;
        let mut quad = lane;
        while quad < quads {
            let mut numbers = Array::<Vector<f32, N>>::new(AHEAD);
            read_ahead::<K, N>(
                first,
                second,
                third,
                fourth,
                fifth,
                sixth,
                seventh,
                eighth,
                part.key_memory,
                start,
                quad,
                SHARING.runtime(),
                quads - 1,
                1u32.runtime(),
                &mut numbers,
                AHEAD,
            );
            #[unroll]
            for ahead in 0..AHEAD {
                let at = quad + ahead as u32 * SHARING;
                if at < quads {
                    #[unroll]
                    for index in 0..queries {
                        let of_query = asked[(index as u32 * columns + at) as usize];
                        sums[index] = fma(numbers[ahead], of_query, sums[index]);
                    }
                }
            }
            quad += AHEAD as u32 * SHARING;
        }
    }
    #[unroll]
    for index in 0..queries {
        shares[(index as u32 * UNITS + UNIT_POS) as usize] = sum_vector::<N>(sums[index]);
    }

    // Values are on their way while scores become weights.
    let (column, member) = (UNIT_POS % columns, UNIT_POS / columns);
    let members = comptime!(min_of(UNITS / columns, POSITIONS as u32));
    let each = comptime!((POSITIONS as u32 / members) as usize);
    let ahead_values = comptime!(if each < AHEAD { each } else { AHEAD });
    let is_reading = member < members && column < quads && part.end > 0;
    let mut numbers = Array::<Vector<f32, N>>::new(ahead_values);
    if is_reading {
        read_ahead::<K, N>(
            first,
            second,
            third,
            fourth,
            fifth,
            sixth,
            seventh,
            eighth,
            part.value_memory,
            part.value_start + column,
            member,
            members.runtime(),
            part.end - 1,
            part.value_step,
            &mut numbers,
            ahead_values,
        );
    }
    sync_cube();

    let mut scores = Shared::<[f32]>::new_slice(comptime!(UNITS as usize));
    let mut weights = Shared::<[f32]>::new_slice(comptime!(UNITS as usize));
    let mut highs = Shared::<[f32]>::new_slice(comptime!(queries));
    let (mine, at) = (UNIT_POS / positions, UNIT_POS % positions);
    let mut score = UNSEEN.runtime();
    if UNIT_POS < pairs && is_seen(part, at) {
        let from = mine * UNITS + at * SHARING;
        let mut sum = shares[from as usize];
        #[unroll]
        for other in 1..SHARING {
            sum += shares[(from + other) as usize];
        }
        score = sum * sizes.scale;
        if comptime!(how.capped) {
            score = tanh(score / sizes.softcap) * sizes.softcap;
        }
    }
    scores[UNIT_POS as usize] = score;
    sync_cube();
    // As it was stored: a product must not become part of the difference below.
    let score = scores[UNIT_POS as usize];
    let mut high = UNSEEN.runtime();
    if comptime!(how.plane == POSITIONS as u32) {
        high = plane_max(score);
    } else {
        for other in 0..positions {
            high = max(high, scores[(mine * positions + other) as usize]);
        }
    }
    let mut weight = score;
    // By its bits, because what is no number has to come through.
    if u32::reinterpret(score) != UNSEEN_BITS {
        weight = (score - high).exp();
    }
    weights[UNIT_POS as usize] = weight;
    if UNIT_POS < pairs && at == 0 {
        highs[mine as usize] = high;
    }
    sync_cube();

    let mut totals = Array::<f32>::new(queries);
    #[unroll]
    for index in 0..queries {
        sums[index] = Vector::new(0.0f32);
        totals[index] = 0.0f32;
    }
    if is_reading {
        let rounds = comptime!(each / ahead_values);
        #[unroll]
        for round in 0..rounds {
            let from = member + comptime!((round * ahead_values) as u32) * members;
            if comptime!(round > 0) {
                read_ahead::<K, N>(
                    first,
                    second,
                    third,
                    fourth,
                    fifth,
                    sixth,
                    seventh,
                    eighth,
                    part.value_memory,
                    part.value_start + column,
                    from,
                    members.runtime(),
                    part.end - 1,
                    part.value_step,
                    &mut numbers,
                    ahead_values,
                );
            }
            #[unroll]
            for ahead in 0..ahead_values {
                let position = from + ahead as u32 * members;
                #[unroll]
                for index in 0..queries {
                    let weight = weights[(index as u32 * positions + position) as usize];
                    // What a query does not see may hold what is no number; what it sees comes through, whatever it weighs.
                    if u32::reinterpret(weight) != UNSEEN_BITS {
                        sums[index] = fma(numbers[ahead], Vector::new(weight), sums[index]);
                        totals[index] += weight;
                    }
                }
            }
        }
    }

    let mut gathered = Shared::<[Vector<f32, N>]>::new_slice(comptime!(queries * UNITS as usize));
    #[unroll]
    for index in 0..queries {
        gathered[(index as u32 * UNITS + UNIT_POS) as usize] = sums[index];
        // The shares of scores have been read.
        shares[(index as u32 * UNITS + UNIT_POS) as usize] = totals[index];
    }
    sync_cube();
    let mut at = UNIT_POS;
    while at < queries as u32 * columns {
        let (index, column) = (at / columns, at % columns);
        let group = CUBE_POS_X / comptime!(PARTS as u32);
        if column < quads && group * queries as u32 + index < sizes.sharing {
            let mut sum = Vector::<f32, N>::new(0.0f32);
            let mut total = 0.0f32;
            for other in 0..members {
                let place = (index * UNITS + other * columns + column) as usize;
                sum += gathered[place];
                total += shares[place];
            }
            let mut logarithm = sizes.nothing;
            if magnitude(total) != 0u32 {
                sum /= Vector::new(total);
                logarithm = highs[index as usize] + total.ln();
            }
            let entry = sizes.first_entry + CUBE_POS_Z;
            let of_row = entry * comptime!(PARTS as u32) + CUBE_POS_X % comptime!(PARTS as u32);
            let head = CUBE_POS_Y * sizes.sharing + group * queries as u32 + index;
            let record = (of_row * sizes.heads + head) * (quads + 1);
            parts[(record + column) as usize] = sum;
            if column == 0 {
                parts[(record + quads) as usize] = Vector::new(logarithm);
            }
        }
        at += UNITS;
    }
}

/// The smaller of two compiled-in numbers.
fn min_of(one: u32, other: u32) -> u32 {
    one.min(other)
}
