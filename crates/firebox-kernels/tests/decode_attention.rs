//! Attention of decode steps: a row gathers the same bits beside any other rows, from any memory, and after its heads were transformed in
//! the same launch or before.

#![allow(clippy::unwrap_used)]

mod support;

use burn::tensor::{DType, Device, Tensor};
use firebox_kernels::attention::{
    AttentionParams, AttentionSequence, HeadTransform, KvTensor, RopeAndCache, Span, batch_attention,
};
use firebox_kernels::linear::RowNorm;
use support::{assert_near, bits, devices_with_own, random};

const HEADS: usize = 4;
const KV_HEADS: usize = 2;
const HEAD_DIM: usize = 64;
const PAGE: usize = 128;

fn home<const D: usize>(tensor: Tensor<D>) -> Tensor<D> {
    tensor.to_device(&Device::flex())
}

fn params(position: usize) -> AttentionParams {
    AttentionParams { position, window: None, scale: 0.3, softcap: None }
}

/// A sequence's pages, some in memory that they share and some in memory of their own.
struct Pages {
    pages: Vec<[KvTensor; 2]>,
    positions: usize,
}

impl Pages {
    fn new(positions: usize, seed: u64, device: &Device, shared: bool) -> Self {
        let count = positions.div_ceil(PAGE);
        let shape = [KV_HEADS, PAGE, HEAD_DIM];
        let pairs = if shared { KvTensor::pairs(shape, count + 1, device, DType::F32) } else { None };
        let filled = |page: usize| {
            let numbers =
                |side: u64| KvTensor::Float(random(shape, seed + 2 * page as u64 + side).to_device(device));
            let numbers = [numbers(0), numbers(1)];
            let Some(pairs) = &pairs else { return numbers };
            let [mut keys, mut values] = pairs[page + 1].clone();
            KvTensor::overwrite_both([&mut keys, &mut values], 0, numbers);
            [keys, values]
        };
        Self { pages: (0..count).map(filled).collect(), positions }
    }

    fn spans(&self) -> Vec<Span> {
        let of_page = |(index, [keys, values]): (usize, &[KvTensor; 2])| {
            let count = (self.positions - index * PAGE).min(PAGE);
            let [keys, values] = [keys, values].map(|side| side.part(0..count));
            Span { keys, values, position: index * PAGE, visible: None }
        };
        self.pages.iter().enumerate().map(of_page).collect()
    }

    fn sequence(&self, rows: usize) -> AttentionSequence {
        let params = params(self.positions - rows);
        AttentionSequence { rows, spans: self.spans(), params, steps: None }
    }
}

#[test]
fn rows_beside_each_other_have_the_bits_of_rows_alone() {
    for device in devices_with_own() {
        for shared in [false, true] {
            let lengths = [1, 700, 33, 128, 129, 1500, 97];
            let pages = lengths.map(|length| Pages::new(length, length as u64, &device, shared));
            let query = random([lengths.len(), HEADS, HEAD_DIM], 3).to_device(&device);
            let together =
                home(batch_attention(query.clone(), pages.iter().map(|pages| pages.sequence(1)).collect()));
            for (index, pages) in pages.iter().enumerate() {
                let alone = batch_attention(query.clone().narrow(0, index, 1), vec![pages.sequence(1)]);
                let among = together.clone().narrow(0, index, 1);
                assert_eq!(bits(home(alone)), bits(among), "{} on {device:?}", pages.positions);
            }
        }
    }
}

/// As drafts are verified.
#[test]
fn rows_of_a_sequence_have_the_bits_of_single_rows() {
    for device in devices_with_own() {
        let pages = Pages::new(300, 5, &device, true);
        let query = random([8, HEADS, HEAD_DIM], 4).to_device(&device);
        let together = home(batch_attention(query.clone(), vec![pages.sequence(8)]));
        for row in 0..8 {
            let until = Pages { pages: pages.pages.clone(), positions: 293 + row };
            let alone = batch_attention(query.clone().narrow(0, row, 1), vec![until.sequence(1)]);
            let among = together.clone().narrow(0, row, 1);
            assert_eq!(bits(home(alone)), bits(among), "row {row} on {device:?}");
        }
    }
}

#[test]
fn memory_does_not_matter() {
    for device in devices_with_own() {
        let query = random([1, HEADS, HEAD_DIM], 4).to_device(&device);
        for positions in [20, 600, 1300] {
            let [one, other] = [false, true].map(|shared| {
                let pages = Pages::new(positions, 9, &device, shared);
                bits(home(batch_attention(query.clone(), vec![pages.sequence(1)])))
            });
            assert_eq!(one, other, "{positions} positions on {device:?}");
        }
    }
}

#[test]
fn heads_are_placed_by_the_launch_that_attends() {
    for device in devices_with_own() {
        for (heads, normed, interleaved, pairs) in
            [(4, true, false, 32), (2, false, true, 20), (12, true, false, 0)]
        {
            let lengths = [1, 16, 300, 129];
            let rows = lengths.len();
            let of = |count, seed| random([rows, count, HEAD_DIM], seed).to_device(&device);
            let in_heads = || [of(heads, 1), of(KV_HEADS, 2), of(KV_HEADS, 3)];
            let angles = || [4, 5].map(|seed| random([rows, 1, pairs], seed).to_device(&device));
            let norm = |seed: u64| {
                let weight = || random([HEAD_DIM], seed).to_device(&device);
                normed.then(|| RowNorm { weight: weight(), epsilon: 1e-6, offset: 0.5 })
            };
            let transform = || HeadTransform {
                query_norm: norm(6),
                key_norm: norm(7),
                angles: (pairs > 0).then(angles),
                interleaved,
                steps: None,
            };
            let mut fused = lengths.map(|length| Pages::new(length, length as u64, &device, true));
            let mut apart = lengths.map(|length| Pages::new(length, length as u64, &device, true));
            let written = |pages: &mut [Pages], heads_cache: &RopeAndCache| {
                for (row, pages) in pages.iter_mut().enumerate() {
                    let at = (pages.positions - 1) % PAGE;
                    let [keys, values] = pages.pages.last_mut().unwrap();
                    heads_cache.write(row..row + 1, [keys, values], at);
                }
            };
            let sequences = |pages: &[Pages]| pages.iter().map(|pages| pages.sequence(1)).collect();
            let both = RopeAndCache::new(in_heads(), transform());
            written(&mut fused, &both);
            let found = home(both.attend(sequences(&fused)));
            let first = RopeAndCache::new(in_heads(), transform());
            written(&mut apart, &first);
            let expected = batch_attention(first.query(), sequences(&apart));
            assert_near(found.clone(), home(expected), 1e-5, 4e-6);
            for (fused, apart) in fused.iter().zip(&apart) {
                for (fused, apart) in fused.pages.iter().flatten().zip(apart.pages.iter().flatten()) {
                    let [fused, apart] = [fused, apart].map(|side| home(side.dequantize(HEAD_DIM)));
                    assert_near(fused, apart, 1e-5, 4e-6);
                }
            }
            for (row, &length) in lengths.iter().enumerate().take(rows) {
                let one = |tensor: Tensor<3>| tensor.narrow(0, row, 1);
                let transform = transform();
                let angles = transform.angles.clone().map(|angles| angles.map(one));
                let alone = RopeAndCache::new(in_heads().map(one), HeadTransform { angles, ..transform });
                let mut pages = Pages::new(length, length as u64, &device, true);
                let [keys, values] = pages.pages.last_mut().unwrap();
                alone.write(0..1, [keys, values], (length - 1) % PAGE);
                let alone = home(alone.attend(vec![pages.sequence(1)]));
                assert_eq!(bits(alone), bits(found.clone().narrow(0, row, 1)), "row {row} on {device:?}");
            }
        }
    }
}
