//! The cache of one layer: what attention reads and writes, and recurrent state.

use std::ops::Range;

use burn::tensor::Tensor;
use firebox_kernels::attention::{KvTensor, Span};

use super::SequenceCache;
use crate::kv_run::Source;
use crate::layer_kv::LayerKv;
use crate::layout::{KvType, LayerLayout};
use crate::page::Page;
use crate::recurrent_state::RecurrentState;

/// The part of a sequence's cache that belongs to one layer.
#[derive(Debug)]
pub enum LayerCache<'a> {
    /// Keys and values.
    Attention(AttentionCache<'a>),
    /// State of constant size.
    Recurrent(&'a mut RecurrentState),
}

/// Keys and values of one layer.
#[derive(Debug)]
pub struct AttentionCache<'a>(KvStorage<'a>);

#[derive(Debug)]
enum KvStorage<'a> {
    Paged { sequence: &'a SequenceCache, layer: usize },
    Transient(&'a mut TransientKv),
}

/// Keys and values of a single pass, which later layers may read.
#[derive(Debug, Default)]
pub struct TransientKv(Option<(Tensor<3>, Tensor<3>)>);

impl SequenceCache {
    /// The part of the cache that belongs to one layer. Where it is [shared](LayerLayout::Shared), that of the layer that stores it.
    ///
    /// # Panics
    /// If the model has no such layer.
    pub fn layer(&mut self, index: usize) -> LayerCache<'_> {
        let index = match self.pool.layout().layers[index] {
            LayerLayout::Shared { layer } => layer,
            _ => index,
        };
        if self.states[index].is_none() {
            return LayerCache::Attention(AttentionCache(KvStorage::Paged { sequence: self, layer: index }));
        }
        LayerCache::Recurrent(self.states[index].get_or_insert_default())
    }

    /// Writes the slots of the pass in one layer. `part` returns the tensors of a range of the pass's tokens.
    pub(super) fn write_pass(&self, layer: usize, part: impl Fn(Range<usize>) -> LayerKv) {
        self.for_each_pass_page(|tokens, page, at| page.write(layer, at, part(tokens)));
    }

    /// Calls `visit` for every page with slots of the pass: with a range of the pass's tokens, the page, and the slot of the
    /// first of them.
    pub(super) fn for_each_pass_page(&self, mut visit: impl FnMut(Range<usize>, &Page, usize)) {
        let Self { runs, len, pending, .. } = self;
        if *pending == 0 {
            return;
        }
        let mut at = 0;
        for run in runs.iter() {
            let (from, to) = (at.max(*len), at + run.len());
            if let (true, Source::Page(page)) = (from < to, &run.source) {
                visit(from - len..to - len, page, run.slots.start + from - at);
            }
            at = to;
        }
    }
}

impl<'a> AttentionCache<'a> {
    /// A cache of a single pass without anything before or after it. It returns the tensors that were held or that it was given,
    /// gradients included.
    pub fn transient(held: &'a mut TransientKv) -> Self {
        Self(KvStorage::Transient(held))
    }

    /// Writes the pass's keys and values, both `[kv_heads, tokens of the pass, head_dim]`.
    pub fn append(&mut self, keys: Tensor<3>, values: Tensor<3>) {
        match &mut self.0 {
            KvStorage::Paged { sequence, layer } => {
                let kv_dtype = sequence.pool.layout().kv_dtype;
                let added = LayerKv::Attention { keys: kv_dtype.store(keys), values: kv_dtype.store(values) };
                sequence.write_pass(*layer, |tokens| added.part(tokens));
            }
            KvStorage::Transient(held) => held.0 = Some((keys, values)),
        }
    }

    /// Writes the pass's latents, `[1, tokens of the pass, width]`, which are keys and values at once.
    pub fn append_latents(&mut self, rows: Tensor<3>) {
        match &mut self.0 {
            KvStorage::Paged { sequence, layer } => {
                let added = LayerKv::Latents(sequence.pool.layout().kv_dtype.store(rows));
                sequence.write_pass(*layer, |tokens| added.part(tokens));
            }
            KvStorage::Transient(held) => held.0 = Some((rows.clone(), rows)),
        }
    }

    /// Returns whether rows of [latents](Self::append_latents) are stored, or else keys and values; `None` if either may be.
    pub fn stores_latents(&self) -> Option<bool> {
        match &self.0 {
            KvStorage::Paged { sequence, layer } => {
                Some(matches!(sequence.pool.layout().layers[*layer], LayerLayout::Latents { .. }))
            }
            KvStorage::Transient(_) => None,
        }
    }

    /// Returns whether keys and values are stored in pages as floats, which [`append_with`](Self::append_with) requires.
    pub fn stores_floats(&self) -> bool {
        match &self.0 {
            KvStorage::Paged { sequence, .. } => sequence.pool.layout().kv_dtype != KvType::Int8,
            KvStorage::Transient(_) => false,
        }
    }

    /// Lets `write` write the pass's keys and values, page by page: it gets a range of the pass's tokens, the page's keys and
    /// values, and the slot of the first token. Writes nothing unless the cache [stores floats](Self::stores_floats) in pages.
    pub fn append_with(&mut self, mut write: impl FnMut(Range<usize>, [&mut KvTensor; 2], usize)) {
        if let KvStorage::Paged { sequence, layer } = &self.0 {
            sequence.for_each_pass_page(|tokens, page, at| {
                page.write_with(*layer, at, tokens.len(), |sides| write(tokens.clone(), sides, at));
            });
        }
    }

    /// The spans that queries from `position` on may attend to, with an attention window of `window` positions, if any.
    pub fn spans(&self, position: usize, window: Option<usize>) -> Vec<Span> {
        match &self.0 {
            KvStorage::Paged { sequence, layer } => {
                let first = window.map_or(0, |window| (position + 1).saturating_sub(window));
                let runs = sequence.runs.iter().filter(|run| !run.hidden && run.end() > first);
                let spans = runs.filter_map(|run| {
                    let (keys, values) = match run.read(*layer)? {
                        LayerKv::Attention { keys, values } => (keys, values),
                        LayerKv::Latents(rows) => (rows.clone(), rows),
                        LayerKv::HiddenStates(_) => return None,
                    };
                    Some(Span { keys, values, position: run.position, visible: run.visible.clone() })
                });
                spans.collect()
            }
            KvStorage::Transient(held) => {
                let span = held.0.iter().cloned().map(|(keys, values)| Span {
                    keys: KvTensor::Float(keys),
                    values: KvTensor::Float(values),
                    position,
                    visible: None,
                });
                span.collect()
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::Device;

    use super::*;
    use crate::{Layout, PagePool};

    /// Appends rows of one number; a layer of keys and values gets them as both.
    fn append(sequence: &mut SequenceCache, count: usize, number: f32) {
        sequence.reserve(count).unwrap();
        let latents = matches!(sequence.pool.layout().layers[0], LayerLayout::Latents { .. });
        if let LayerCache::Attention(mut cache) = sequence.layer(0) {
            let rows = || Tensor::full([1, count, 4], number, &Device::flex());
            if latents { cache.append_latents(rows()) } else { cache.append(rows(), rows()) }
        }
        sequence.advance();
    }

    fn keys(sequence: &mut SequenceCache, layer: usize) -> Vec<Vec<f32>> {
        let LayerCache::Attention(cache) = sequence.layer(layer) else { panic!("keys and values") };
        let keys = cache.spans(usize::MAX / 2, None).into_iter().map(|span| span.keys.dequantize(4));
        keys.map(|keys| keys.try_into_vec_as::<f32>().unwrap()).collect()
    }

    #[test]
    fn a_shared_layer_reads_what_another_stores_and_stores_nothing() {
        let stores = LayerLayout::Attention { kv_heads: 1, head_dim: 4 };
        let pool = |layers| PagePool::new(Layout { layers, kv_dtype: KvType::F32, device: Device::flex() });
        let alone = pool(vec![stores]).layout().bytes_per_position();
        let pool = pool(vec![stores, LayerLayout::Shared { layer: 0 }]);
        assert_eq!(pool.layout().bytes_per_position(), alone);
        let mut sequence = SequenceCache::new(&pool);
        append(&mut sequence, 130, 1.0);
        assert_eq!(keys(&mut sequence, 1), keys(&mut sequence, 0));
        assert_eq!(sequence.stored(1).map(|runs| runs.len()), None);
        sequence.evict(3..9);
        let mut branch = sequence.branch().unwrap();
        branch.compact_positions(|layer, keys, back| keys.add_scalar((100 * layer + back) as f32)).unwrap();
        append(&mut branch, 2, 1.0);
        append(&mut sequence, 1, 1.0);
        for changed in [&mut branch, &mut sequence] {
            assert_eq!(keys(changed, 1), keys(changed, 0));
        }
        let moved = keys(&mut branch, 0).concat();
        assert_eq!((moved[0], moved[12], moved[4 * 124]), (1.0, 7.0, 1.0), "keys are moved once");
        assert!(keys(&mut sequence, 1).concat().iter().all(|key| *key == 1.0));
    }

    /// The numbers of keys and of values, which have to be the same.
    fn numbers(sequence: &mut SequenceCache) -> Vec<f32> {
        let position = sequence.position();
        let LayerCache::Attention(cache) = sequence.layer(0) else { unreachable!("it has one layer") };
        let spans = cache.spans(position, None).into_iter().flat_map(|span| {
            let [keys, values] =
                [span.keys, span.values].map(|side| side.dequantize(4).try_into_vec_as::<f32>().unwrap());
            assert_eq!(keys, values);
            keys
        });
        spans.collect()
    }

    #[test]
    fn latents_are_keys_and_values_stored_once() {
        for kv_dtype in [KvType::F32, KvType::F16, KvType::Int8] {
            let bytes = |layer| {
                let layout = Layout { layers: vec![layer], kv_dtype, device: Device::flex() };
                (layout.bytes_per_position(), layout)
            };
            let (both, _) = bytes(LayerLayout::Attention { kv_heads: 1, head_dim: 4 });
            let (once, layout) = bytes(LayerLayout::Latents { width: 4 });
            assert_eq!(both, 2 * once);
            let mut sequence = SequenceCache::new(&PagePool::new(layout));
            append(&mut sequence, 7, 1.0);
            append(&mut sequence, 123, 2.0);
            assert_eq!(sequence.bytes(), (128 + 16) * once);
            let mut fork = sequence.clone();
            sequence.evict(0..7);
            sequence.compact_positions(|_, rows, back| rows.add_scalar(back as f32)).unwrap();
            append(&mut sequence, 1, 3.0);
            let near = |found: Vec<f32>, expected: Vec<f32>| {
                assert_eq!(found.len(), expected.len());
                let off = found.iter().zip(&expected).map(|(found, expected)| (found - expected).abs());
                assert!(off.fold(0.0, f32::max) < 1e-5, "{found:?}");
            };
            near(numbers(&mut sequence), [vec![9.0; 4 * 123], vec![3.0; 4]].concat());
            near(numbers(&mut fork), [vec![1.0; 4 * 7], vec![2.0; 4 * 123]].concat());
        }
    }
}
