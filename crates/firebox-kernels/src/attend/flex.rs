use std::ops::Range;

use burn::backend::Flex;
use burn::backend::flex::FlexTensor;
use burn::tensor::{DType, Shape, Tensor, TensorData};
use half::f16;
use half::slice::HalfFloatSliceExt;

use super::kernel::{Block, Gathered, Place, Scene, Tile};
use super::merge::Parts;
use super::rows::{StoredRows, Strided, ask_for};
use super::stored::Held;
use super::{AttendOps, Attended, Attending, Part, Span, Stored, Visibility};
use crate::crew::share;
use crate::flex::{dims, elements, ordered, tensor, whole};
use crate::simd::{Kernel, Lanes, dispatch};

const ON_FLEX: &str = "all tensors of an attention are on one device";

/// Multiplications below which a second thread costs more than it gains.
const SINGLE_THREAD_WORK: usize = 1 << 17;

/// Queries that pass over the same keys together: enough for reading keys to cost little beside multiplying
/// them, few enough to stay in the second-level cache with what they gather.
const TILE_QUERIES: usize = 128;

/// Blocks that a thread gathers from before what they gave is put together.
const BLOCKS_PER_THREAD: usize = 8;

/// Bytes of a head that are asked for before they are written over.
const MOST_ASKED_FOR: usize = 1024;

impl AttendOps for Flex {
    fn attend_span(
        query: FlexTensor,
        keys: Held<Flex>,
        values: Held<Flex>,
        position: usize,
        visible: Option<Visibility>,
        attending: Attending,
    ) -> (FlexTensor, FlexTensor) {
        let place = Place::new(keys, values, position, visible);
        let query = ordered(query);
        let [rows, heads, head_dim] = dims(&query);
        let scene = Scene::of(elements(&query), [heads, head_dim], vec![place], attending);
        let (output, log_sum_exp) = gather(&[(scene, rows)]);
        (tensor(output, [rows, heads, head_dim]), tensor(log_sum_exp, [rows, heads]))
    }

    fn merge(outputs: FlexTensor, log_sum_exps: FlexTensor, rows: usize) -> (FlexTensor, FlexTensor) {
        let (outputs, log_sum_exps) = (ordered(outputs), ordered(log_sum_exps));
        let [_, heads, head_dim] = dims(&outputs);
        let parts = Parts {
            outputs: elements(&outputs),
            log_sum_exps: elements(&log_sum_exps),
            queries: rows * heads,
            head_dim,
        };
        let (output, log_sum_exp) = parts.merge();
        (tensor(output, [rows, heads, head_dim]), tensor(log_sum_exp, [rows, heads]))
    }

    fn quantize(values: FlexTensor) -> (FlexTensor, FlexTensor) {
        let values = ordered(values);
        let [heads, positions, head_dim] = dims(&values);
        let words_per_row = head_dim.div_ceil(4);
        let mut words = vec![0i32; heads * positions * words_per_row];
        let mut scales = vec![0.0; heads * positions];
        let bytes: &mut [i8] = bytemuck::cast_slice_mut(&mut words);
        let rows = bytes.chunks_exact_mut(4 * words_per_row).zip(&mut scales);
        for ((bytes, scale), values) in rows.zip(elements::<f32>(&values).chunks_exact(head_dim)) {
            // As integers, magnitudes compare as they do as numbers, and what is no number is the largest: bytes cannot
            // say that there was any, so the scale does.
            let highest = values.iter().fold(0, |highest, value| value.abs().to_bits().max(highest));
            *scale = f32::from_bits(highest) / 127.0;
            let divisor = if *scale == 0.0 { 1.0 } else { *scale };
            for (byte, value) in bytes.iter_mut().zip(values) {
                *byte = (value / divisor).round_ties_even().clamp(-127.0, 127.0) as i8;
            }
        }
        let words = TensorData::new(words, Shape::new([heads, positions, words_per_row]));
        (FlexTensor::from_data(words), tensor(scales, [heads, positions]))
    }
}

/// See [`attend_each`](super::attend_each): all spans of a sequence as one, and all sequences at once.
///
/// # Panics
/// If the tensors are not all on Flex, as operations of Burn do for tensors of different devices.
pub(super) fn attend_each(query: Tensor<3>, parts: Vec<Part>) -> Attended {
    let query = ordered(query.try_into_primitive::<Flex>().expect(ON_FLEX));
    assert_eq!(query.dtype(), DType::F32, "queries are f32");
    let [rows, heads, head_dim] = dims(&query);
    let mut queries = elements(&query);
    let mut scenes = Vec::with_capacity(parts.len());
    for Part { rows, spans, attending } in parts {
        let (of_part, rest) = queries.split_at(rows * heads * head_dim);
        queries = rest;
        let places = spans.into_iter().map(Place::of).collect();
        scenes.push((Scene::of(of_part, [heads, head_dim], places, attending), rows));
    }
    let (output, log_sum_exp) = gather(&scenes);
    Attended {
        output: Tensor::from_primitive::<Flex>(tensor(output, [rows, heads, head_dim])),
        log_sum_exp: Tensor::from_primitive::<Flex>(tensor(log_sum_exp, [rows, heads])),
    }
}

/// Writes numbers of f32 over the positions from `at` on, as whatever is stored: f32 or f16, with room for them and of the
/// same heads.
///
/// # Panics
/// If the tensors are not on Flex.
pub(super) fn assign(stored: Tensor<3>, at: usize, added: Tensor<3>) -> Tensor<3> {
    let mut stored = whole(stored.try_into_primitive::<Flex>().expect(ON_FLEX));
    let added = added.try_into_primitive::<Flex>().expect(ON_FLEX);
    let ([heads, positions, width], [_, count, _]) = (dims(&stored), dims(&added));
    let added = Strided::rows(added);
    let row = width * stored.dtype().size();
    // More than fits the cache would push out what was asked for first.
    if (1..=MOST_ASKED_FOR).contains(&(count * row)) {
        let (bytes, every, part) = (stored.bytes(), positions * row, at * row..(at + count) * row);
        dispatch(AskFor { bytes, every, part });
    }
    let places = (0..heads).flat_map(|head| (0..count).map(move |index| (head, index)));
    let place = |(head, index)| ((head * positions + at + index) * width, added.from::<f32>(head, index));
    match stored.dtype() {
        DType::F32 => {
            let numbers = stored.storage_mut::<f32>();
            for (to, row) in places.map(place) {
                numbers[to..to + width].copy_from_slice(&row[..width]);
            }
        }
        DType::F16 => {
            let numbers = stored.storage_mut::<f16>();
            for (to, row) in places.map(place) {
                numbers[to..to + width].convert_from_f32_slice(&row[..width]);
            }
        }
        other => unreachable!("{other:?} is not written over"),
    }
    Tensor::from_primitive::<Flex>(stored)
}

/// Asks for what is about to be written over, a part of every head: written one after the other, each would wait for the
/// memory.
struct AskFor<'a> {
    bytes: &'a [u8],
    /// Bytes of a head.
    every: usize,
    part: Range<usize>,
}

impl Kernel for AskFor<'_> {
    #[inline(always)]
    fn run<L: Lanes>(self) {
        for head in self.bytes.chunks_exact(self.every) {
            ask_for::<L>(&head[self.part.clone()]);
        }
    }
}

impl Place {
    fn of(span: Span) -> Self {
        let held = |stored| match stored {
            Stored::Float(values) => Held::Float(values.try_into_primitive::<Flex>().expect(ON_FLEX)),
            Stored::Bytes { words, scales } => Held::Bytes {
                words: words.try_into_primitive::<Flex>().expect(ON_FLEX),
                scales: scales.try_into_primitive::<Flex>().expect(ON_FLEX),
            },
        };
        Self::new(held(span.keys), held(span.values), span.position, span.visible)
    }

    fn new(keys: Held<Flex>, values: Held<Flex>, position: usize, visible: Option<Visibility>) -> Self {
        let [_, positions, _] = match &keys {
            Held::Float(keys) => dims(keys),
            Held::Bytes { words, .. } => dims(words),
        };
        Self { keys: StoredRows::new(keys), values: StoredRows::new(values), positions, position, visible }
    }
}

impl<'a> Scene<'a> {
    fn of(
        queries: &'a [f32],
        [heads, head_dim]: [usize; 2],
        spans: Vec<Place>,
        attending: Attending,
    ) -> Self {
        let kv_heads = spans.first().map_or(heads, |span| span.keys.heads());
        Self { queries, heads, kv_heads, head_dim, spans, attending }
    }
}

/// Some rows and one head of keys, and where their results go: a slice for every row.
struct Task<'a> {
    kv_head: usize,
    rows: Range<usize>,
    outputs: Vec<&'a mut [f32]>,
    log_sum_exps: Vec<&'a mut [f32]>,
}

impl Task<'_> {
    #[inline(always)]
    fn finish(&mut self, gathered: &Gathered, head_dim: usize) {
        let mut query = 0;
        for (outputs, sums) in self.outputs.iter_mut().zip(&mut self.log_sum_exps) {
            for (output, sum) in outputs.chunks_exact_mut(head_dim).zip(sums.iter_mut()) {
                *sum = gathered.finish(query, output);
                query += 1;
            }
        }
    }
}

/// What so many rows of each scene gather, one scene after the other. All have the same heads.
fn gather(scenes: &[(Scene<'_>, usize)]) -> (Vec<f32>, Vec<f32>) {
    let elements = |(scene, rows): &(Scene<'_>, usize)| rows * scene.heads * scene.head_dim;
    let positions = |scene: &Scene<'_>| scene.spans.iter().map(|span| span.positions).sum::<usize>();
    let mut output = vec![0.0; scenes.iter().map(elements).sum()];
    let mut log_sum_exp = vec![0.0; scenes.iter().map(|(scene, rows)| rows * scene.heads).sum()];
    let (mut outputs, mut sums) = (&mut output[..], &mut log_sum_exp[..]);
    let mut all = Vec::new();
    for part in scenes {
        let (scene, rows) = part;
        let (of_scene, others) = outputs.split_at_mut(elements(part));
        let (sums_of_scene, other_sums) = sums.split_at_mut(rows * scene.heads);
        all.extend(tasks(scene, *rows, of_scene, sums_of_scene).into_iter().map(|task| (scene, task)));
        (outputs, sums) = (others, other_sums);
    }
    let work: usize = scenes.iter().map(|part| elements(part) * positions(&part.0)).sum();
    let threads = if work < SINGLE_THREAD_WORK { 1 } else { rayon::current_num_threads() };
    if threads == 1 {
        for (scene, task) in &mut all {
            dispatch(AllBlocks { scene, task });
        }
    } else if all.len() >= 2 * threads {
        share(&mut all, |(scene, task)| dispatch(AllBlocks { scene, task }));
    } else {
        // Too few for all threads: the blocks apart, and put together in their order.
        for (scene, task) in &mut all {
            gather_in_waves(scene, task, threads);
        }
    }
    drop(all);
    (output, log_sum_exp)
}

/// Cuts the rows into tiles for every head of keys.
fn tasks<'a>(
    scene: &Scene<'_>,
    rows: usize,
    output: &'a mut [f32],
    log_sum_exp: &'a mut [f32],
) -> Vec<Task<'a>> {
    let Scene { kv_heads, head_dim, .. } = *scene;
    let sharing = scene.sharing();
    let tile_rows = (TILE_QUERIES / sharing).max(1);
    let tiles = rows.div_ceil(tile_rows);
    let mut tasks = Vec::with_capacity(tiles * kv_heads);
    // Tiles of the same keys follow each other, so that they find them in the cache.
    for kv_head in 0..kv_heads {
        for tile in 0..tiles {
            let rows = tile * tile_rows..rows.min((tile + 1) * tile_rows);
            let (outputs, log_sum_exps) = (Vec::with_capacity(rows.len()), Vec::with_capacity(rows.len()));
            tasks.push(Task { kv_head, rows, outputs, log_sum_exps });
        }
    }
    let outputs = output.chunks_exact_mut(sharing * head_dim).zip(log_sum_exp.chunks_exact_mut(sharing));
    for (index, (output, sums)) in outputs.enumerate() {
        let (row, kv_head) = (index / kv_heads, index % kv_heads);
        let task = &mut tasks[kv_head * tiles + row / tile_rows];
        task.outputs.push(output);
        task.log_sum_exps.push(sums);
    }
    tasks
}

/// A task from beginning to end.
struct AllBlocks<'a, 'b> {
    scene: &'a Scene<'a>,
    task: &'a mut Task<'b>,
}

impl Kernel for AllBlocks<'_, '_> {
    #[inline(always)]
    fn run<L: Lanes>(self) {
        let Self { scene, task } = self;
        let rows = task.rows.clone();
        let mut tile = Tile::new(scene, task.kv_head, rows.clone());
        let mut blocks = scene.blocks(&rows).peekable();
        if let Some(first) = blocks.peek() {
            tile.ask_for::<L>(*first);
        }
        let (mut all, mut next) = (scene.nothing_gathered(&rows), scene.nothing_gathered(&rows));
        while let Some(block) = blocks.next() {
            tile.gather::<L>(block, blocks.peek().copied(), &mut next);
            all.add(&next);
        }
        task.finish(&all, scene.head_dim);
    }
}

/// A task by all threads: as many blocks at a time as keep them busy, so that what blocks give takes room for a few of
/// them however long the spans are.
fn gather_in_waves(scene: &Scene<'_>, task: &mut Task<'_>, threads: usize) {
    let blocks: Vec<Block> = scene.blocks(&task.rows).collect();
    let mut tiles: Vec<_> = (0..blocks.len().min(threads * BLOCKS_PER_THREAD))
        .map(|_| (Tile::new(scene, task.kv_head, task.rows.clone()), scene.nothing_gathered(&task.rows)))
        .collect();
    let mut all = scene.nothing_gathered(&task.rows);
    for wave in blocks.chunks(tiles.len().max(1)) {
        share(tiles.iter_mut().zip(wave), |((tile, gathered), block)| {
            dispatch(OneBlock { tile, block: *block, gathered });
        });
        dispatch(Join { parts: &tiles[..wave.len()], all: &mut all });
    }
    task.finish(&all, scene.head_dim);
}

/// What a tile gathers from one block.
struct OneBlock<'a, 'b> {
    tile: &'a mut Tile<'b>,
    block: Block,
    gathered: &'a mut Gathered,
}

impl Kernel for OneBlock<'_, '_> {
    #[inline(always)]
    fn run<L: Lanes>(self) {
        self.tile.gather::<L>(self.block, None, self.gathered);
    }
}

/// What blocks of a wave have given, added in their order.
struct Join<'a, 'b> {
    parts: &'a [(Tile<'b>, Gathered)],
    all: &'a mut Gathered,
}

impl Kernel for Join<'_, '_> {
    #[inline(always)]
    fn run<L: Lanes>(self) {
        for (_, part) in self.parts {
            self.all.add(part);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simd::on_each_kind;

    const HEADS: usize = 6;
    const KV_HEADS: usize = 2;
    const POSITIONS: usize = 290;
    const ROWS: usize = 5;

    fn ramp(count: usize, step: usize) -> Vec<f32> {
        (0..count).map(|i| (i * step % 23) as f32 / 11.0 - 1.0).collect()
    }

    /// What a query of the last rows gathers, in f64.
    fn expected(scene: &Scene<'_>, values: &[f32], keys: &[f32], row: usize, head: usize) -> (Vec<f64>, f64) {
        let head_dim = scene.head_dim;
        let of = |numbers: &[f32], at: usize| -> Vec<f64> {
            numbers[at * head_dim..][..head_dim].iter().map(|number| f64::from(*number)).collect()
        };
        let query = of(scene.queries, row * HEADS + head);
        let (mut output, mut total) = (vec![0.0; head_dim], 0.0);
        let place = &scene.spans[0];
        for index in scene.attending.visible(row, place.position, POSITIONS) {
            if !place.visible.as_ref().is_none_or(|visible| visible.contains(index)) {
                continue;
            }
            let at = head / (HEADS / KV_HEADS) * POSITIONS + index;
            let score: f64 = query.iter().zip(of(keys, at)).map(|(q, k)| q * k).sum();
            let mut score = score * f64::from(scene.attending.scale);
            if let Some(cap) = scene.attending.softcap.map(f64::from) {
                score = cap * (score / cap).tanh();
            }
            total += score.exp();
            for (output, value) in output.iter_mut().zip(of(values, at)) {
                *output += score.exp() * value;
            }
        }
        (output.into_iter().map(|value| value / total).collect(), total.ln())
    }

    /// The processor of a test machine takes the widest lanes; others have to be right too.
    #[test]
    fn every_kind_of_lanes_attends() {
        for head_dim in [16, 80, 83] {
            let queries = ramp(ROWS * HEADS * head_dim, 5);
            let keys = ramp(KV_HEADS * POSITIONS * head_dim, 7);
            let values = ramp(KV_HEADS * POSITIONS * head_dim, 3);
            let held =
                |numbers: &[f32]| Held::Float(tensor(numbers.to_vec(), [KV_HEADS, POSITIONS, head_dim]));
            let visible: Visibility = (0..POSITIONS).map(|index| index % 7 != 2).collect();
            for (softcap, visible, window) in
                [(None, None, None), (Some(0.7), Some(&visible), None), (None, Some(&visible), Some(50))]
            {
                let scene = Scene {
                    queries: &queries,
                    heads: HEADS,
                    kv_heads: KV_HEADS,
                    head_dim,
                    spans: vec![Place::new(held(&keys), held(&values), 3, visible.cloned())],
                    attending: Attending { position: POSITIONS - 2, window, scale: 0.2, softcap },
                };
                let kinds = std::cell::RefCell::new(Vec::new());
                on_each_kind(|name| Check { scene: &scene, name, results: &kinds });
                for (name, output, sums) in kinds.into_inner() {
                    for query in 0..ROWS * HEADS {
                        let (row, head) = (query / HEADS, query % HEADS);
                        let (expected, sum) = expected(&scene, &values, &keys, row, head);
                        assert!((f64::from(sums[query]) - sum).abs() < 1e-5, "{name}, {head_dim} wide");
                        for (found, expected) in output[query * head_dim..].iter().zip(expected) {
                            let off = (f64::from(*found) - expected).abs();
                            assert!(off < 1e-5, "{name}, {head_dim} wide: {found} instead of {expected}");
                        }
                    }
                }
            }
        }
    }

    /// How many queries share what is read decides whether it is converted first, and for how many at a time.
    #[test]
    fn a_row_alone_gathers_the_same_on_every_kind_of_lanes() {
        for head_dim in [16, 80, 83] {
            let queries = ramp(ROWS * HEADS * head_dim, 5);
            let shape = [KV_HEADS, POSITIONS, head_dim];
            let numbers = |step| ramp(KV_HEADS * POSITIONS * head_dim, step);
            let single = |step| Held::<Flex>::Float(tensor(numbers(step), shape));
            let half = |step| {
                let halves: Vec<f16> = numbers(step).into_iter().map(f16::from_f32).collect();
                Held::<Flex>::Float(tensor(halves, shape))
            };
            let bytes = |step| {
                let (words, scales) = <Flex as AttendOps>::quantize(tensor(numbers(step), shape));
                Held::<Flex>::Bytes { words, scales }
            };
            for (keys, values) in [(single(7), single(3)), (half(7), half(3)), (bytes(7), bytes(3))] {
                let scene = Scene {
                    queries: &queries,
                    heads: HEADS,
                    kv_heads: KV_HEADS,
                    head_dim,
                    spans: vec![Place::new(keys, values, 3, None)],
                    attending: Attending { position: POSITIONS - 2, window: None, scale: 0.2, softcap: None },
                };
                on_each_kind(|name| Alone { scene: &scene, name });
            }
        }
    }

    struct Alone<'a> {
        scene: &'a Scene<'a>,
        name: &'static str,
    }

    impl Kernel for Alone<'_> {
        #[inline(always)]
        fn run<L: Lanes>(self) {
            let Self { scene, name } = self;
            let (sharing, head_dim) = (scene.sharing(), scene.head_dim);
            let mut output = vec![0.0; ROWS * HEADS * head_dim];
            let mut sums = vec![0.0; ROWS * HEADS];
            for task in &mut tasks(scene, ROWS, &mut output, &mut sums) {
                AllBlocks { scene, task }.run::<L>();
            }
            let bits = |numbers: &[f32]| numbers.iter().map(|number| number.to_bits()).collect::<Vec<_>>();
            for (row, kv_head) in (0..ROWS).flat_map(|row| (0..KV_HEADS).map(move |head| (row, head))) {
                let mut alone = vec![0.0; sharing * head_dim];
                let mut sums_alone = vec![0.0; sharing];
                let mut task = Task {
                    kv_head,
                    rows: row..row + 1,
                    outputs: vec![&mut alone[..]],
                    log_sum_exps: vec![&mut sums_alone[..]],
                };
                AllBlocks { scene, task: &mut task }.run::<L>();
                drop(task);
                let from = row * HEADS + kv_head * sharing;
                let together = &output[from * head_dim..][..sharing * head_dim];
                assert_eq!(bits(&alone), bits(together), "{name}, {head_dim} wide, row {row}");
                assert_eq!(bits(&sums_alone), bits(&sums[from..][..sharing]), "{name}, {head_dim} wide");
            }
        }
    }

    type Results = std::cell::RefCell<Vec<(&'static str, Vec<f32>, Vec<f32>)>>;

    struct Check<'a> {
        scene: &'a Scene<'a>,
        name: &'static str,
        results: &'a Results,
    }

    impl Kernel for Check<'_> {
        #[inline(always)]
        fn run<L: Lanes>(self) {
            let Self { scene, name, results } = self;
            let mut output = vec![0.0; ROWS * HEADS * scene.head_dim];
            let mut sums = vec![0.0; ROWS * HEADS];
            for task in &mut tasks(scene, ROWS, &mut output, &mut sums) {
                AllBlocks { scene, task }.run::<L>();
            }
            results.borrow_mut().push((name, output, sums));
        }
    }
}
