//! Grouped-query attention.

use burn::module::{Module, Param};
use burn::tensor::{Tensor, TensorData, activation};
use firebox_cache::AttentionCache;
use firebox_kernels::attention::{
    AttentionParams, AttentionSequence, HeadTransform, RopeAndCache, attention, batch_attention, can_record,
};
use firebox_kernels::linear::Weight;
use firebox_kernels::transfers;

use crate::ModelError;
use crate::both_ways;
use crate::config::{AttentionConfig, AttentionProjections, HeadNormPlace};
use crate::linear::Linear;
use crate::norm::{RmsNorm, without_weight};
use crate::rows::{Rows, joined};
use crate::weights::Weights;

/// Grouped-query attention.
#[derive(Module, Debug)]
pub struct Attention {
    input: AttentionInput,
    output: Linear,
    query_norm: Option<RmsNorm>,
    key_norm: Option<RmsNorm>,
    /// `[heads]`
    sinks: Option<Param<Tensor<1>>>,
    #[module(skip)]
    config: AttentionConfig,
}

#[derive(Module, Debug)]
enum AttentionInput {
    Separate(SeparateInput),
    Fused(Linear),
    /// Values are the keys before their norm and rotation.
    KeysAsValues(KeyInput),
    /// Keys and values are those of an earlier layer.
    QueryOnly(Linear),
}

#[derive(Module, Debug)]
struct SeparateInput {
    query: Linear,
    key: Linear,
    value: Linear,
}

#[derive(Module, Debug)]
struct KeyInput {
    query: Linear,
    key: Linear,
}

/// Queries of some rows, `[rows, heads, head_dim]`, their keys and values, if the layer has its own, and the gate of the output.
struct Projections {
    query: Tensor<3>,
    stored: Option<[Tensor<3>; 2]>,
    gate: Option<Tensor<2>>,
}

impl Attention {
    pub(crate) fn load(config: &AttentionConfig, weights: &Weights<'_>) -> Result<Self, ModelError> {
        let weights = weights.within("self_attn.");
        let AttentionConfig { hidden_size, heads, kv_heads, head_dim, input_bias, .. } = *config;
        let query_width = heads * head_dim * if config.gated { 2 } else { 1 };
        let kv_width = kv_heads * head_dim;
        let inward = |name, width| Linear::load(&weights, name, hidden_size, width, input_bias);
        let input = match config.projections {
            _ if config.kv_layer.is_some() => AttentionInput::QueryOnly(inward("q_proj", query_width)?),
            _ if config.keys_as_values => AttentionInput::KeysAsValues(KeyInput {
                query: inward("q_proj", query_width)?,
                key: inward("k_proj", kv_width)?,
            }),
            AttentionProjections::Separate => AttentionInput::Separate(SeparateInput {
                query: inward("q_proj", query_width)?,
                key: inward("k_proj", kv_width)?,
                value: inward("v_proj", kv_width)?,
            }),
            AttentionProjections::Fused => {
                AttentionInput::Fused(inward("qkv_proj", query_width + 2 * kv_width)?)
            }
        };
        let head_norm = |name, heads| {
            let width = match config.head_norm_place {
                HeadNormPlace::Projection => heads * head_dim,
                HeadNormPlace::Heads | HeadNormPlace::RotatedHeads => head_dim,
            };
            let norm = config.head_norm.as_ref().map(|norm| norm.named(name, width));
            norm.map(|norm| RmsNorm::load(&norm, &weights)).transpose()
        };
        Ok(Self {
            input,
            output: Linear::load(&weights, "o_proj", heads * head_dim, hidden_size, config.output_bias)?,
            query_norm: head_norm("q_norm", heads)?,
            key_norm: if config.kv_layer.is_none() { head_norm("k_norm", kv_heads)? } else { None },
            sinks: if config.sinks { Some(weights.vector("sinks", heads)?) } else { None },
            config: config.clone(),
        })
    }

    /// Maps `[rows, hidden_size]` to `[rows, hidden_size]`. `caches` are those of the rows' groups, in order.
    pub(crate) fn forward<'c>(
        &self,
        x: Tensor<2>,
        rows: &Rows,
        caches: impl Iterator<Item = AttentionCache<'c>>,
    ) -> Tensor<2> {
        let Projections { query, stored, gate } = self.project(x, rows);
        let mut caches: Vec<_> = caches.collect();
        if let Some([key, value]) = stored {
            for (group, cache) in rows.groups.iter().zip(&mut caches) {
                let of_group = |tensor: &Tensor<3>| {
                    tensor.clone().narrow(0, group.rows.start, group.rows.len()).swap_dims(0, 1)
                };
                cache.append(of_group(&key), of_group(&value));
            }
        }
        // After all writes: where sequences share a page, reading it for one would make the write of the next a copy.
        let sequences = sequences(rows, caches.iter(), self.params());
        let attended = match &self.sinks {
            Some(sinks) if !sequences.is_empty() => with_sinks(query, sequences, &sinks.val()),
            _ => batch_attention(query, sequences),
        };
        self.gated_output(attended, gate)
    }

    /// Maps `[rows, hidden_size]` to `[rows, hidden_size]`, where every token of a text attends to those behind it as well. All
    /// of each text has to be there. Returns `None` if the layer has no keys and values of its own.
    pub(crate) fn forward_both_ways(&self, x: Tensor<2>, rows: &Rows) -> Option<Tensor<2>> {
        let Projections { query, stored, gate } = self.project(x, rows);
        let [key, value] = stored?;
        Some(self.gated_output(both_ways::attend([query, key, value], rows, &self.config), gate))
    }

    fn gated_output(&self, attended: Tensor<2>, gate: Option<Tensor<2>>) -> Tensor<2> {
        let attended = match gate {
            Some(gate) => attended.mul(activation::sigmoid(gate)),
            None => attended,
        };
        self.output.forward(attended)
    }

    /// Returns the weights of queries, keys and values and of the output, if they have no biases or adapters, no gate, no sinks
    /// and no norms but those of query and key heads before their rotation.
    pub(crate) fn plain_weights(&self) -> Option<([Weight; 3], Weight)> {
        let normed_elsewhere = self.config.value_norm.is_some()
            || (self.config.head_norm.is_some() && self.config.head_norm_place != HeadNormPlace::Heads);
        if normed_elsewhere || self.config.sinks {
            return None;
        }
        match &self.input {
            AttentionInput::Separate(SeparateInput { query, key, value }) if !self.config.gated => Some((
                [query.plain_weights()?, key.plain_weights()?, value.plain_weights()?],
                self.output.plain_weights()?,
            )),
            _ => None,
        }
    }

    /// Returns whether queries of these rows are larger than those of early positions, or become so while a recorded step runs.
    pub(crate) fn grows(&self, rows: &Rows) -> bool {
        self.config.query_growth.is_some_and(|growth| {
            rows.steps.is_some()
                || rows.groups.iter().any(|group| group.position + group.rows.len() > growth.original)
        })
    }

    /// Multiplies queries, `[rows, heads, head_dim]`, by the factors of their positions.
    fn grown(&self, query: Tensor<3>, rows: &Rows) -> Tensor<3> {
        let Some(growth) = self.config.query_growth.filter(|_| self.grows(rows)) else { return query };
        let positions =
            rows.groups.iter().flat_map(|group| group.position..group.position + group.rows.len());
        let factors: Vec<f32> = positions
            .map(|position| 1.0 + growth.rate * ((position / growth.original) as f32).ln_1p())
            .collect();
        transfers::count_upload();
        let factors = TensorData::new(factors, [query.dims()[0], 1, 1]);
        let device = query.device();
        query.mul(Tensor::from_data(factors, &device))
    }

    /// Returns whether it can be part of a recorded step of these rows.
    pub(crate) fn can_record(&self, rows: &Tensor<2>) -> bool {
        can_record(rows, self.config.head_dim)
    }

    /// Computes attention from projected queries, keys and values, `[rows, heads * head_dim]`. All caches have to
    /// [store floats](AttentionCache::stores_floats).
    pub(crate) fn gather(
        &self,
        [query, key, value]: [Tensor<2>; 3],
        rows: &Rows,
        caches: &mut [&mut AttentionCache<'_>],
    ) -> Tensor<2> {
        let AttentionConfig { heads, kv_heads, head_dim, .. } = self.config;
        let [count, _] = query.dims();
        let in_heads = [
            query.reshape([count, heads, head_dim]),
            key.reshape([count, kv_heads, head_dim]),
            value.reshape([count, kv_heads, head_dim]),
        ];
        let norm = |norm: &Option<RmsNorm>| norm.as_ref().map(RmsNorm::row_norm);
        let (angles, interleaved) = match self.config.rope {
            Some(index) => {
                let (angles, interleaved) = rows.rope(index).angles();
                (Some(angles), interleaved)
            }
            None => (None, false),
        };
        let transform = HeadTransform {
            query_norm: norm(&self.query_norm),
            key_norm: norm(&self.key_norm),
            angles,
            interleaved,
            steps: rows.steps.clone(),
        };
        let heads_cache = RopeAndCache::new(in_heads, transform);
        for (group, cache) in rows.groups.iter().zip(&mut *caches) {
            cache.append_with(|tokens, sides, at| {
                let first = group.rows.start;
                heads_cache.write(first + tokens.start..first + tokens.end, sides, at);
            });
        }
        heads_cache.attend(sequences(rows, caches.iter().map(|cache| &**cache), self.params()))
    }

    /// Mask and scaling of the scores of a sequence that begins at position 0.
    fn params(&self) -> AttentionParams {
        let AttentionConfig { scale, softcap, window, .. } = self.config;
        AttentionParams { position: 0, window, scale, softcap }
    }

    fn project(&self, x: Tensor<2>, rows: &Rows) -> Projections {
        let AttentionConfig { heads, kv_heads, head_dim, .. } = self.config;
        let [count, _] = x.dims();
        let kv_width = kv_heads * head_dim;
        let (query, stored) = match &self.input {
            AttentionInput::Separate(SeparateInput { query, key, value }) => {
                let [query, key, value] = Linear::forward_each([query, key, value], x);
                (query, Some([key, value]))
            }
            AttentionInput::KeysAsValues(KeyInput { query, key }) => {
                let [query, key] = Linear::forward_each([query, key], x);
                (query, Some([key.clone(), key]))
            }
            AttentionInput::QueryOnly(query) => (query.forward(x), None),
            AttentionInput::Fused(input) => {
                let all = input.forward(x);
                let query_width = all.dims()[1] - 2 * kv_width;
                let part = |from, width| all.clone().narrow(1, from, width);
                let stored = [part(query_width, kv_width), part(query_width + kv_width, kv_width)];
                (part(0, query_width), Some(stored))
            }
        };
        let (query, gate) = if self.config.gated {
            let both = query.reshape([count, heads, 2 * head_dim]);
            let gate = both.clone().narrow(2, head_dim, head_dim).reshape([count, heads * head_dim]);
            (both.narrow(2, 0, head_dim), Some(gate))
        } else {
            (query.reshape([count, heads, head_dim]), None)
        };
        let rope = self.config.rope.map(|index| rows.rope(index));
        let rotated = |heads: Tensor<3>| match rope {
            Some(rope) => rope.rotate(heads),
            None => heads,
        };
        let placed = |norm: &Option<RmsNorm>, heads: Tensor<3>| match (norm, self.config.head_norm_place) {
            (Some(norm), HeadNormPlace::Heads) => match rope {
                Some(rope) => rope.rotate_normed(heads, norm),
                None => norm.forward(heads),
            },
            (Some(norm), HeadNormPlace::Projection) => {
                let [rows, heads_count, width] = heads.dims();
                let all = norm.forward(heads.reshape([rows, heads_count * width]));
                rotated(all.reshape([rows, heads_count, width]))
            }
            (Some(norm), HeadNormPlace::RotatedHeads) => norm.forward(rotated(heads)),
            (None, _) => rotated(heads),
        };
        let query = self.grown(placed(&self.query_norm, query), rows);
        let stored = stored.map(|sides| {
            let [key, value] = sides.map(|side| side.reshape([count, kv_heads, head_dim]));
            let value = match self.config.value_norm {
                Some(epsilon) => without_weight(value, epsilon),
                None => value,
            };
            [placed(&self.key_norm, key), value]
        });
        Projections { query, stored, gate }
    }
}

/// Attention of sequences with sinks, one after the other, `[rows, heads * head_dim]`.
fn with_sinks(query: Tensor<3>, sequences: Vec<AttentionSequence>, sinks: &Tensor<1>) -> Tensor<2> {
    let mut first = 0;
    let attended = sequences.into_iter().map(|AttentionSequence { rows, spans, params, .. }| {
        let own = query.clone().narrow(0, first, rows);
        first += rows;
        attention(own, &spans, Some(sinks.clone()), params)
    });
    joined(attended.collect())
}

/// The rows' sequences with the spans that they attend to. `params` are those of a sequence whatever its position is.
pub(crate) fn sequences<'a, 'c: 'a>(
    rows: &Rows,
    caches: impl Iterator<Item = &'a AttentionCache<'c>>,
    params: AttentionParams,
) -> Vec<AttentionSequence> {
    rows.groups
        .iter()
        .zip(caches)
        .map(|(group, cache)| AttentionSequence {
            rows: group.rows.len(),
            spans: cache.spans(group.position, params.window),
            params: AttentionParams { position: group.position, ..params },
            steps: rows.steps.clone(),
        })
        .collect()
}
