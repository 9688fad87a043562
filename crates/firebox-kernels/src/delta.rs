//! The gated delta rule: a matrix per head that forgets by a gate and is corrected towards every token.

use burn::backend::flex::FlexTensor;
use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, Flex, backend_extension};
use burn::tensor::{DType, Shape, Tensor, TensorData};
use rayon::prelude::*;

use crate::flex::{Dispatched, dims, elements, is_flex};
use crate::simd::{Kernel, Lanes, dispatch};

/// What the rule reads for some tokens, in f64.
#[derive(Debug, Clone)]
pub struct Tokens {
    /// `[heads, tokens, key width]`
    pub query: Tensor<3>,
    /// `[heads, tokens, key width]`
    pub key: Tensor<3>,
    /// `[heads, tokens, value width]`
    pub value: Tensor<3>,
    /// How much is kept, `[heads, tokens, 1]`
    pub decay: Tensor<3>,
    /// How far to correct, `[heads, tokens, 1]`
    pub step: Tensor<3>,
}

/// Takes the memory `[heads, key width, value width]` through the tokens: forget, correct, read. Returns what
/// was read, `[heads, tokens, value width]`, and the memory after the last token.
///
/// A token's result does not depend on how many come with it.
pub fn delta_rule(tokens: Tokens, memory: Tensor<3>) -> (Tensor<3>, Tensor<3>) {
    let on_cpu = is_flex(&memory.device());
    if !on_cpu || memory.dtype() != DType::F64 {
        return reference(tokens, memory);
    }
    let Tokens { query, key, value, decay, step } = tokens;
    let (read, memory) = <Dispatched as DeltaOps>::delta_rule(
        query.into_dispatch(),
        key.into_dispatch(),
        value.into_dispatch(),
        decay.into_dispatch(),
        step.into_dispatch(),
        memory.into_dispatch(),
    );
    (Tensor::from_dispatch(read), Tensor::from_dispatch(memory))
}

/// The same in Burn's operations, in any float.
pub fn reference(tokens: Tokens, mut memory: Tensor<3>) -> (Tensor<3>, Tensor<3>) {
    let count = tokens.value.dims()[1];
    let mut read = Vec::with_capacity(count);
    for token in 0..count {
        let at = |tensor: &Tensor<3>| tensor.clone().narrow(1, token, 1);
        let key = at(&tokens.key);
        memory = memory.mul(at(&tokens.decay));
        let recalled = key.clone().matmul(memory.clone());
        let correction = at(&tokens.value).sub(recalled).mul(at(&tokens.step));
        memory = memory.add(key.transpose().mul(correction));
        read.push(at(&tokens.query).matmul(memory.clone()));
    }
    (Tensor::cat(read, 1), memory)
}

#[backend_extension(Flex)]
pub(crate) trait DeltaOps: Backend {
    fn delta_rule(
        query: FloatTensor<Self>,
        key: FloatTensor<Self>,
        value: FloatTensor<Self>,
        decay: FloatTensor<Self>,
        step: FloatTensor<Self>,
        memory: FloatTensor<Self>,
    ) -> (FloatTensor<Self>, FloatTensor<Self>);
}

impl DeltaOps for Flex {
    fn delta_rule(
        query: FlexTensor,
        key: FlexTensor,
        value: FlexTensor,
        decay: FlexTensor,
        step: FlexTensor,
        memory: FlexTensor,
    ) -> (FlexTensor, FlexTensor) {
        let [query, key, value, decay, step, memory] =
            [query, key, value, decay, step, memory].map(|tensor| tensor.to_contiguous());
        let [heads, count, key_width] = dims(&query);
        let [_, _, value_width] = dims(&value);
        let (query, key, value): (&[f64], &[f64], &[f64]) =
            (elements(&query), elements(&key), elements(&value));
        let (decay, step): (&[f64], &[f64]) = (elements(&decay), elements(&step));
        let mut state = elements::<f64>(&memory).to_vec();
        let mut read = vec![0.0; heads * count * value_width];
        let compute = |(head, (state, read)): (usize, (&mut [f64], &mut [f64]))| {
            dispatch(Head {
                query: &query[head * count * key_width..][..count * key_width],
                key: &key[head * count * key_width..][..count * key_width],
                value: &value[head * count * value_width..][..count * value_width],
                decay: &decay[head * count..][..count],
                step: &step[head * count..][..count],
                key_width,
                value_width,
                state,
                read,
            });
        };
        if count > 0 && key_width > 0 && value_width > 0 {
            let states = state.par_chunks_mut(key_width * value_width);
            states.zip(read.par_chunks_mut(count * value_width)).enumerate().for_each(compute);
        }
        let tensor = |values: Vec<f64>, shape: [usize; 3]| {
            FlexTensor::from_data(TensorData::new(values, Shape::new(shape)))
        };
        (tensor(read, [heads, count, value_width]), tensor(state, [heads, key_width, value_width]))
    }
}

/// One head's tokens and memory.
struct Head<'a> {
    query: &'a [f64],
    key: &'a [f64],
    value: &'a [f64],
    decay: &'a [f64],
    step: &'a [f64],
    key_width: usize,
    value_width: usize,
    /// `[key width, value width]`
    state: &'a mut [f64],
    /// `[tokens, value width]`
    read: &'a mut [f64],
}

impl Kernel for Head<'_> {
    #[inline(always)]
    fn run<L: Lanes>(self) {
        let Head { key_width, value_width, state, .. } = self;
        let mut correction = vec![0.0; value_width];
        for (token, read) in self.read.chunks_exact_mut(value_width).enumerate() {
            let key = &self.key[token * key_width..][..key_width];
            let query = &self.query[token * key_width..][..key_width];
            let value = &self.value[token * value_width..][..value_width];
            let (decay, step) = (self.decay[token], self.step[token]);
            correction.fill(0.0);
            for (key, row) in key.iter().zip(state.chunks_exact_mut(value_width)) {
                for (recalled, element) in correction.iter_mut().zip(row) {
                    *element *= decay;
                    *recalled += key * *element;
                }
            }
            for (correction, value) in correction.iter_mut().zip(value) {
                *correction = (value - *correction) * step;
            }
            for ((key, query), row) in key.iter().zip(query).zip(state.chunks_exact_mut(value_width)) {
                for ((element, correction), read) in row.iter_mut().zip(&correction).zip(read.iter_mut()) {
                    *element += key * correction;
                    *read += query * *element;
                }
            }
        }
    }
}
