//! Fused head norm, rotation and cache write on accelerators: a line of units for every head.

use burn::tensor::{DType, Tensor};
use burn_cubecl::CubeBackend;
use burn_cubecl::cubecl::ir::ElemType;
use burn_cubecl::cubecl::{self, prelude::*};
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;
use std::cell::RefCell;
use std::ops::Range;

use super::super::head_transform::HeadTransform;
use super::blocks::one_of;
use crate::cube::{cubes, dims, element, floats, plane_size, primitive, room};
use crate::linear::RowNorm;
use crate::norm::cube::root_mean_square;

/// Units of a line, which share the elements of a head.
const LANES: u32 = 32;
/// Heads of a cube.
const LINES: u32 = 4;
/// Buffers of a launch that writes to one page.
const BINDINGS: u32 = 11;
/// Pages that one launch writes to, equally many rows each.
const TOGETHER: usize = 4;
/// Buffers of a launch that writes to several pages.
const SEVERAL_BINDINGS: u32 = BINDINGS + 2 * (TOGETHER as u32 - 1);

/// Options that are compiled into the kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct How {
    query_normed: bool,
    key_normed: bool,
    interleaved: bool,
    /// Whether a recorded step adds its counter to the slots.
    counted: bool,
}

/// Sizes and norm parameters that all rows share.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
#[expand(derive(Clone, Copy))]
struct Sizes {
    heads: u32,
    kv_heads: u32,
    head_dim: u32,
    pairs: u32,
    /// Rows per page.
    rows: u32,
    query_epsilon: f32,
    query_offset: f32,
    key_epsilon: f32,
    key_offset: f32,
}

/// The slots that the keys and values of some rows are written to.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
#[expand(derive(Clone, Copy))]
struct Destination {
    /// The first row.
    first: u32,
    /// Slots of the page, and the first slot to write.
    positions: u32,
    at: u32,
}

/// See [`RopeAndCache`](super::super::RopeAndCache).
#[derive(Debug)]
pub(in super::super) struct CubeRopeAndCache {
    query: CubeTensor,
    key: CubeTensor,
    value: CubeTensor,
    query_norm: Option<(CubeTensor, f32, f32)>,
    key_norm: Option<(CubeTensor, f32, f32)>,
    angles: Option<[CubeTensor; 2]>,
    interleaved: bool,
    steps: Option<CubeTensor>,
    placed: CubeTensor,
    pending: RefCell<Vec<Pending>>,
}

/// Rows that are not launched yet, with the page they go to.
#[derive(Debug, Clone)]
struct Pending {
    rows: Range<usize>,
    keys: CubeTensor,
    values: CubeTensor,
    at: usize,
}

impl Pending {
    fn destination(&self) -> DestinationLaunch {
        let [_, positions, _] = dims(&self.keys);
        DestinationLaunch::new(self.rows.start as u32, positions as u32, self.at as u32)
    }

    /// Returns whether one launch can write both.
    fn goes_with(&self, other: &Self) -> bool {
        self.rows.len() == other.rows.len() && self.keys.dtype == other.keys.dtype
    }
}

/// Returns whether the tensor is on an accelerator that binds enough buffers.
pub(in super::super) fn supports_rope_and_cache<const D: usize>(query: &Tensor<D>) -> bool {
    crate::cube::is_cube(&query.device())
        && primitive(query.clone()).client.properties().hardware.max_bindings >= BINDINGS
}

impl CubeRopeAndCache {
    pub fn new([query, key, value]: [Tensor<3>; 3], transform: HeadTransform) -> Self {
        let [query, key, value] = [query, key, value].map(|heads| floats(primitive(heads)));
        let norm = |norm: Option<RowNorm>| {
            norm.map(|norm| (floats(primitive(norm.weight)), norm.epsilon as f32, norm.offset))
        };
        let angles = transform.angles.map(|angles| angles.map(|angles| floats(primitive(angles))));
        Self {
            placed: room(&query, dims::<3>(&query)),
            query_norm: norm(transform.query_norm),
            key_norm: norm(transform.key_norm),
            angles: angles.filter(|[cos, _]| dims::<3>(cos)[2] > 0),
            interleaved: transform.interleaved,
            steps: transform.steps.map(|steps| steps.0),
            query,
            key,
            value,
            pending: RefCell::default(),
        }
    }

    /// Enqueues some rows, whose keys and values go to the positions of `kept` from `at` on. The launch follows at
    /// [`query`](Self::query) at the latest.
    pub fn write(&self, rows: Range<usize>, kept: [Tensor<3>; 2], at: usize) -> [Tensor<3>; 2] {
        let kept = kept.map(|kept| into_contiguous(primitive(kept)));
        if kept.iter().any(|kept| !kept.can_mut()) {
            // Pending rows may hold the only other references.
            self.flush();
        }
        // A copy may have room between its rows.
        let [keys, values] =
            kept.map(|kept| if kept.can_mut() { kept } else { into_contiguous(kept.copy()) });
        if !rows.is_empty() {
            let pending = Pending { rows, keys: keys.clone(), values: values.clone(), at };
            self.pending.borrow_mut().push(pending);
        }
        [keys, values].map(Tensor::from_primitive::<CubeBackend>)
    }

    /// Launches all pending rows and returns the queries.
    pub fn query(self) -> Tensor<3> {
        self.flush();
        Tensor::from_primitive::<CubeBackend>(self.placed)
    }

    /// Launches all pending rows.
    fn flush(&self) {
        let pending = self.pending.take();
        let binds_several = self.query.client.properties().hardware.max_bindings >= SEVERAL_BINDINGS;
        let mut rest = &pending[..];
        while let Some(first) = rest.first() {
            let most = if binds_several { TOGETHER } else { 1 };
            let count = rest.iter().take(most).take_while(|other| first.goes_with(other)).count();
            let (together, others) = rest.split_at(count);
            self.launch(together);
            rest = others;
        }
    }

    /// Launches rows that go to up to [`TOGETHER`] pages.
    fn launch(&self, together: &[Pending]) {
        let ([_, heads, head_dim], [_, kv_heads, _]) = (dims(&self.query), dims(&self.key));
        let rows = together[0].rows.len();
        let lines = together.len() * rows * (heads + 2 * kv_heads);
        if lines * head_dim == 0 {
            return;
        }
        // Every binding needs a buffer, also those that are not read.
        let none = (self.query.clone(), 0.0, 0.0);
        let (query_weight, query_epsilon, query_offset) = self.query_norm.clone().unwrap_or(none.clone());
        let (key_weight, key_epsilon, key_offset) = self.key_norm.clone().unwrap_or(none);
        let [cos, sin] = self.angles.clone().unwrap_or_else(|| [self.query.clone(), self.query.clone()]);
        let pairs = self.angles.as_ref().map_or(0, |[cos, _]| dims::<3>(cos)[2]);
        let (client, kind) = (self.query.client.clone(), element(&together[0].keys));
        let (cubes, dim) = (cubes(lines.div_ceil(LINES as usize)), CubeDim::new_2d(LANES, LINES));
        let sizes = SizesLaunch::new(
            heads as u32,
            kv_heads as u32,
            head_dim as u32,
            pairs as u32,
            rows as u32,
            query_epsilon,
            query_offset,
            key_epsilon,
            key_offset,
        );
        let how = How {
            query_normed: self.query_norm.is_some(),
            key_normed: self.key_norm.is_some(),
            interleaved: self.interleaved,
            counted: self.steps.is_some(),
        };
        let steps = self.steps.clone().unwrap_or_else(|| self.query.clone());
        let plane = plane_size(&client);
        if let [pending] = together {
            return rope_and_cache_rows::launch(
                &client,
                cubes,
                dim,
                self.query.clone().into_buffer_arg(),
                self.key.clone().into_buffer_arg(),
                self.value.clone().into_buffer_arg(),
                query_weight.into_buffer_arg(),
                key_weight.into_buffer_arg(),
                cos.into_buffer_arg(),
                sin.into_buffer_arg(),
                steps.into_buffer_arg(),
                self.placed.clone().into_buffer_arg(),
                pending.keys.clone().into_buffer_arg(),
                pending.values.clone().into_buffer_arg(),
                pending.destination(),
                sizes,
                how,
                plane,
                kind,
            );
        }
        // Unused bindings repeat the last page.
        let every: [&Pending; TOGETHER] =
            std::array::from_fn(|index| &together[index.min(together.len() - 1)]);
        let [first_keys, second_keys, third_keys, fourth_keys] =
            every.map(|pending| pending.keys.clone().into_buffer_arg());
        let [first_values, second_values, third_values, fourth_values] =
            every.map(|pending| pending.values.clone().into_buffer_arg());
        let [first, second, third, fourth] = every.map(Pending::destination);
        rope_and_cache_several::launch(
            &client,
            cubes,
            dim,
            self.query.clone().into_buffer_arg(),
            self.key.clone().into_buffer_arg(),
            self.value.clone().into_buffer_arg(),
            query_weight.into_buffer_arg(),
            key_weight.into_buffer_arg(),
            cos.into_buffer_arg(),
            sin.into_buffer_arg(),
            steps.into_buffer_arg(),
            self.placed.clone().into_buffer_arg(),
            first_keys,
            second_keys,
            third_keys,
            fourth_keys,
            first_values,
            second_values,
            third_values,
            fourth_values,
            first,
            second,
            third,
            fourth,
            sizes,
            together.len() as u32,
            how,
            plane,
            kind,
        );
    }

    /// Returns whether the heads can be written to a tensor of this dtype and shape.
    pub fn fits(&self, kept: &Tensor<3>) -> bool {
        let ([kv_heads, _, head_dim], [_, key_heads, key_dim]) = (kept.dims(), dims(&self.key));
        matches!(kept.dtype(), DType::F32 | DType::F16) && (kv_heads, head_dim) == (key_heads, key_dim)
    }
}

/// Processes rows that go to one page: a line for every head of queries, keys and values of every row.
#[cube(launch)]
fn rope_and_cache_rows<F: Float>(
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
fn rope_and_cache_several<F: Float>(
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
fn divisor_of(
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
            squares += number * number;
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
fn placed_element(
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
            number = number * cos[angle] + beside;
        } else {
            number = number * cos[angle] - beside;
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
