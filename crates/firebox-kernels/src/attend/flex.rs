use burn::backend::Flex;
use burn::backend::flex::FlexTensor;
use rayon::prelude::*;

use super::{AttendOps, Attending};
use crate::flex::{dims, elements, tensor};
use crate::simd::{Kernel, LANES, Lanes, dispatch};

/// Multiplications below which a second thread costs more than it gains.
const SINGLE_THREAD_WORK: usize = 1 << 16;

impl AttendOps for Flex {
    fn attend(query: FlexTensor, keys: FlexTensor, values: FlexTensor, attending: Attending) -> FlexTensor {
        let query = query.to_contiguous();
        let [rows, heads, head_dim] = dims(&query);
        let [kv_heads, positions, _] = dims(&keys);
        let (keys, values) = (HeadRows::new(&keys), HeadRows::new(&values));
        let queries: &[f32] = elements(&query);
        let mut gathered = vec![0.0; rows * heads * head_dim];
        let sharing = heads / kv_heads;
        let compute = |(index, gathered): (usize, &mut [f32])| {
            let (row, head) = (index / heads, index % heads);
            let kv_head = head / sharing;
            dispatch(Query {
                query: &queries[index * head_dim..][..head_dim],
                keys: &keys,
                values: &values,
                kv_head,
                visible: attending.visible(row),
                attending,
                gathered,
            });
        };
        let queries = gathered.par_chunks_mut(head_dim).enumerate();
        if rows * heads * head_dim * positions < SINGLE_THREAD_WORK {
            queries.with_min_len(usize::MAX).for_each(compute);
        } else {
            // Later rows see more: small pieces even that out between threads.
            queries.with_min_len(heads.max(1)).for_each(compute);
        }
        tensor(gathered, [rows, heads * head_dim])
    }
}

/// `[kv_heads, positions, head_dim]` whose rows are contiguous, wherever the heads and positions lie.
struct HeadRows<'a> {
    elements: &'a [f32],
    start: usize,
    head_stride: usize,
    position_stride: usize,
    head_dim: usize,
    copied: Vec<f32>,
}

impl<'a> HeadRows<'a> {
    fn new(tensor: &'a FlexTensor) -> Self {
        let [_, positions, head_dim] = dims(tensor);
        let strides = tensor.layout().strides();
        let strided = strides[2] == 1 && strides[0] >= 0 && strides[1] >= 0;
        if strided {
            return Self {
                elements: tensor.storage::<f32>(),
                start: tensor.layout().start_offset(),
                head_stride: strides[0] as usize,
                position_stride: strides[1] as usize,
                head_dim,
                copied: Vec::new(),
            };
        }
        let copied = elements::<f32>(&tensor.to_contiguous()).to_vec();
        Self {
            elements: &[],
            start: 0,
            head_stride: positions * head_dim,
            position_stride: head_dim,
            head_dim,
            copied,
        }
    }

    #[inline(always)]
    fn row(&self, head: usize, position: usize) -> &[f32] {
        let elements = if self.copied.is_empty() { self.elements } else { &self.copied };
        &elements[self.start + head * self.head_stride + position * self.position_stride..][..self.head_dim]
    }
}

/// One query of one head.
struct Query<'a> {
    query: &'a [f32],
    keys: &'a HeadRows<'a>,
    values: &'a HeadRows<'a>,
    kv_head: usize,
    visible: std::ops::Range<usize>,
    attending: Attending,
    gathered: &'a mut [f32],
}

impl Kernel for Query<'_> {
    #[inline(always)]
    fn run<L: Lanes>(self) {
        let Attending { scale, softcap, .. } = self.attending;
        let mut weights = Vec::with_capacity(self.visible.len());
        for position in self.visible.clone() {
            let score = dot::<L>(self.query, self.keys.row(self.kv_head, position)) * scale;
            weights.push(match softcap {
                Some(cap) => cap * (score / cap).tanh(),
                None => score,
            });
        }
        let highest = weights.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let mut total = 0.0;
        for weight in &mut weights {
            *weight = (*weight - highest).exp();
            total += *weight;
        }
        for (position, weight) in self.visible.zip(&weights) {
            add_scaled::<L>(self.gathered, self.values.row(self.kv_head, position), *weight);
        }
        for value in self.gathered {
            *value /= total;
        }
    }
}

#[inline(always)]
fn dot<L: Lanes>(a: &[f32], b: &[f32]) -> f32 {
    let ((a, a_rest), (b, b_rest)) = (a.as_chunks::<LANES>(), b.as_chunks::<LANES>());
    let mut sum = L::zero();
    for (a, b) in a.iter().zip(b) {
        sum = sum.mul_add(L::load(a), L::load(b));
    }
    let mut rest = 0.0;
    for (a, b) in a_rest.iter().zip(b_rest) {
        rest += a * b;
    }
    sum.sum() + rest
}

#[inline(always)]
fn add_scaled<L: Lanes>(sum: &mut [f32], values: &[f32], scale: f32) {
    let (sum, sum_rest) = sum.as_chunks_mut::<LANES>();
    let (values, values_rest) = values.as_chunks::<LANES>();
    for (sum, values) in sum.iter_mut().zip(values) {
        *sum = L::load(sum).mul_add(L::load(values), L::splat(scale)).store();
    }
    for (sum, value) in sum_rest.iter_mut().zip(values_rest) {
        *sum += value * scale;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simd::on_each_kind;

    struct Check(&'static str);

    impl Kernel for Check {
        #[inline(always)]
        fn run<L: Lanes>(self) {
            // A width that is no multiple of the lanes, so that the rest is looked at too.
            let a: Vec<f32> = (0..37).map(|i| i as f32 / 8.0 - 2.0).collect();
            let b: Vec<f32> = (0..37).map(|i| (i % 5) as f32 - 1.5).collect();
            let expected: f32 = a.iter().zip(&b).map(|(a, b)| a * b).sum();
            assert!((dot::<L>(&a, &b) - expected).abs() < 1e-4, "{}", self.0);
            let mut sum = a.clone();
            add_scaled::<L>(&mut sum, &b, 0.5);
            for ((sum, a), b) in sum.iter().zip(&a).zip(&b) {
                assert!((sum - (a + 0.5 * b)).abs() < 1e-6, "{}", self.0);
            }
        }
    }

    #[test]
    fn every_kind_of_lanes_attends() {
        on_each_kind(Check);
    }
}
