//! The rule on accelerators, in f32.
//!
//! The columns of a head's memory do not see each other, so a cube takes a few of them through all tokens and
//! keeps them in shared memory; units share a column's rows among them. Lengths of queries and keys are summed on the
//! way: what a key recalls is proportional to it, so it need not have length one before it is multiplied.

use burn::backend::tensor::FloatTensor;
use burn_cubecl::CubeBackend;
use burn_cubecl::cubecl::{self, prelude::*};

use super::{DeltaOps, EPSILON, Heads, MAX_KEY_WIDTH};
use crate::cube::{dims, floats, room, zeroed};

/// Units of a cube: columns times the units that share a column's rows.
const UNITS: u32 = 128;
/// Numbers of a memory that a cube has room for beside its sums: 12 of the 16 KiB that every device has. A column of
/// the widest key has to fit.
const ROOM: usize = MAX_KEY_WIDTH;
/// Keys are rounded up to this in the size of shared memory, so that similar widths share a kernel.
const KEY_STEP: usize = 32;

/// Columns of a cube for a memory of so many rows.
fn columns(rows: usize) -> u32 {
    let fitting = (ROOM / rows).clamp(1, 16);
    1 << fitting.ilog2()
}

impl DeltaOps for CubeBackend {
    fn delta_rule(
        mixed: FloatTensor<Self>,
        step: FloatTensor<Self>,
        decay: FloatTensor<Self>,
        rate: FloatTensor<Self>,
        bias: FloatTensor<Self>,
        memory: FloatTensor<Self>,
        heads: Heads,
        logarithmic: bool,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let [mixed, step, decay, rate, bias, memory] = [mixed, step, decay, rate, bias, memory].map(floats);
        let [count, channels] = dims(&mixed);
        let Heads { key_heads, value_heads, key_width, value_width, tiled } = heads;
        assert_eq!(channels, heads.channels(), "channels of other heads");
        assert_eq!(dims(&memory), [value_heads, key_width, value_width], "memory of other heads");
        assert_eq!((dims(&step), dims(&decay)), ([count, value_heads], [count, value_heads]));
        let width = value_heads * value_width;
        if count * width * key_width == 0 {
            // Nothing is remembered without keys and nothing changes without tokens.
            return (zeroed(&mixed, [count, width]), memory);
        }
        let (read, after) =
            (room(&mixed, [count, width]), room(&memory, [value_heads, key_width, value_width]));
        let most_keys = key_width.next_multiple_of(KEY_STEP);
        let columns = columns(most_keys);
        delta_rule::launch(
            &memory.client.clone(),
            CubeCount::Static((value_width as u32).div_ceil(columns), value_heads as u32, 1),
            CubeDim::new_2d(columns, UNITS / columns),
            mixed.into_buffer_arg(),
            step.into_buffer_arg(),
            decay.into_buffer_arg(),
            rate.into_buffer_arg(),
            bias.into_buffer_arg(),
            memory.into_buffer_arg(),
            read.clone().into_buffer_arg(),
            after.clone().into_buffer_arg(),
            SizesLaunch::new(
                count as u32,
                key_heads as u32,
                value_heads as u32,
                key_width as u32,
                value_width as u32,
            ),
            EPSILON as f32,
            How { tiled, logarithmic, columns, most_keys: most_keys as u32 },
        );
        (read, after)
    }
}

/// Lengths, which are arguments.
#[derive(CubeType, CubeLaunch)]
struct Sizes {
    count: u32,
    key_heads: u32,
    value_heads: u32,
    key_width: u32,
    value_width: u32,
}

/// What is built into a kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct How {
    tiled: bool,
    logarithmic: bool,
    columns: u32,
    /// Rows of a memory that there is room for.
    most_keys: u32,
}

#[cube(launch)]
fn delta_rule(
    mixed: &[f32],
    step: &[f32],
    decay: &[f32],
    rate: &[f32],
    bias: &[f32],
    memory: &[f32],
    read: &mut [f32],
    after: &mut [f32],
    sizes: Sizes,
    epsilon: f32,
    #[comptime] how: How,
) {
    let columns = comptime!(how.columns);
    let parts = comptime!(UNITS / how.columns);
    let (key_width, value_width) = (sizes.key_width, sizes.value_width);
    let (lane, part, head) = (UNIT_POS_X, UNIT_POS_Y, CUBE_POS_Y);
    let column = CUBE_POS_X * columns + lane;
    let mine = column < value_width;
    // Units beyond the last column go along with it, so that all meet at the barriers.
    let column = min(column, value_width - 1);
    let here = (part * columns + lane) as usize;
    let mut state = Shared::<[f32]>::new_slice(comptime!((how.most_keys * how.columns) as usize));
    let mut recalled = Shared::<[f32]>::new_slice(comptime!(UNITS as usize));
    let mut key_squares = Shared::<[f32]>::new_slice(comptime!(UNITS as usize));
    let mut query_squares = Shared::<[f32]>::new_slice(comptime!(UNITS as usize));
    let mut gathered = Shared::<[f32]>::new_slice(comptime!(UNITS as usize));

    let key_head = if comptime!(how.tiled) {
        head % sizes.key_heads
    } else {
        head / (sizes.value_heads / sizes.key_heads)
    };
    let keys_from = sizes.key_heads * key_width;
    let channels = 2 * keys_from + sizes.value_heads * value_width;
    let rate = if comptime!(how.logarithmic) { -f32::exp(rate[head as usize]) } else { rate[head as usize] };
    let bias = bias[head as usize];
    let query_scale = 1.0f32 / f32::sqrt(f32::cast_from(key_width));

    let first_row = head * key_width;
    let mut row = part;
    while row < key_width {
        state[(row * columns + lane) as usize] = memory[((first_row + row) * value_width + column) as usize];
        row += parts;
    }
    for token in 0..sizes.count {
        let queries = token * channels + key_head * key_width;
        let keys = queries + keys_from;
        let value = mixed[(token * channels + 2 * keys_from + head * value_width + column) as usize];
        let gates = (token * sizes.value_heads + head) as usize;
        let kept = f32::exp(softplus(decay[gates] + bias) * rate);
        let far = 1.0f32 / (1.0f32 + f32::exp(-step[gates]));

        let mut sum = 0.0f32;
        let mut key_square = 0.0f32;
        let mut query_square = 0.0f32;
        let mut row = part;
        while row < key_width {
            let (key, query) = (mixed[(keys + row) as usize], mixed[(queries + row) as usize]);
            let element = state[(row * columns + lane) as usize] * kept;
            state[(row * columns + lane) as usize] = element;
            sum += key * element;
            key_square += key * key;
            query_square += query * query;
            row += parts;
        }
        recalled[here] = sum;
        key_squares[here] = key_square;
        query_squares[here] = query_square;
        sync_cube();
        let key_scale = 1.0f32 / f32::sqrt(sum_parts(&key_squares, columns) + epsilon);
        let query_scale = query_scale / f32::sqrt(sum_parts(&query_squares, columns) + epsilon);
        let known = sum_parts(&recalled, columns) * key_scale;
        let correction = (value - known) * far * key_scale;
        let mut sum = 0.0f32;
        let mut row = part;
        while row < key_width {
            let element = state[(row * columns + lane) as usize] + mixed[(keys + row) as usize] * correction;
            state[(row * columns + lane) as usize] = element;
            sum += mixed[(queries + row) as usize] * element;
            row += parts;
        }
        gathered[here] = sum;
        // The next token writes the other sums after this and `gathered` after the barrier that follows.
        sync_cube();
        if part == 0 && mine {
            let at = (token * sizes.value_heads + head) * value_width + column;
            read[at as usize] = sum_parts(&gathered, columns) * query_scale;
        }
    }
    if mine {
        let mut row = part;
        while row < key_width {
            after[((first_row + row) * value_width + column) as usize] =
                state[(row * columns + lane) as usize];
            row += parts;
        }
    }
}

/// The logarithm of one and the exponential, where that exponential may be too large for a float.
#[cube]
fn softplus(x: f32) -> f32 {
    max(x, 0.0f32) + f32::ln(1.0f32 + f32::exp(-f32::abs(x)))
}

/// What the units of this unit's column have, added up.
#[cube]
fn sum_parts(parts: &Shared<[f32]>, #[comptime] columns: u32) -> f32 {
    let mut sum = 0.0f32;
    for part in 0..comptime!(UNITS / columns) {
        sum += parts[(part * columns + UNIT_POS_X) as usize];
    }
    sum
}
