//! Attention to latents that all heads share, from which heads project keys and values.
//!
//! A row of the cache is the rotated part of the key, then the latent. Each query is multiplied by its head's factor of keys, so that its
//! product with a latent is its product with the key; weighted sums of latents are multiplied by the head's factor of values. Cached
//! rows are never projected: a row is the key of all heads, and but for its rotated part their value.

use std::cell::OnceCell;

use burn::module::{Module, Param};
use burn::tensor::{DType, Tensor};
use firebox_cache::AttentionCache;
use firebox_kernels::attention::{AttentionParams, batch_attention};
use firebox_kernels::linear::{self, PreparedWeight, Weight};

use crate::ModelError;
use crate::adapter::Adapter;
use crate::attention::sequences;
use crate::config::LatentAttentionConfig;
use crate::linear::Linear;
use crate::norm::RmsNorm;
use crate::prepared::LazyPreparedWeight;
use crate::rows::Rows;
use crate::weights::Weights;

/// Attention to latents that all heads share.
#[derive(Module, Debug)]
pub struct LatentAttention {
    query: QueryInput,
    latent: Linear,
    latent_norm: RmsNorm,
    factors: HeadFactors,
    output: Linear,
    #[module(skip)]
    config: LatentAttentionConfig,
}

#[derive(Module, Debug)]
enum QueryInput {
    Whole(Linear),
    Latent(LatentQuery),
}

/// A projection in two steps with a norm between them.
#[derive(Module, Debug)]
struct LatentQuery {
    inward: Linear,
    norm: RmsNorm,
    outward: Linear,
}

impl LatentAttention {
    pub(crate) fn load(config: &LatentAttentionConfig, weights: &Weights<'_>) -> Result<Self, ModelError> {
        let weights = &weights.within("self_attn.");
        let LatentAttentionConfig {
            hidden_size, heads, rank, plain_dim, rotated_dim, value_dim, bias, ..
        } = *config;
        let query_width = heads * (plain_dim + rotated_dim);
        let norm = |name, width| RmsNorm::load(&config.latent_norm.named(name, width), weights);
        let query = match config.query_rank {
            None => QueryInput::Whole(Linear::load(weights, "q_proj", hidden_size, query_width, false)?),
            Some(rank) => QueryInput::Latent(LatentQuery {
                inward: Linear::load(weights, "q_a_proj", hidden_size, rank, bias)?,
                norm: norm("q_a_layernorm", rank)?,
                outward: Linear::load(weights, "q_b_proj", rank, query_width, false)?,
            }),
        };
        Ok(Self {
            query,
            latent: Linear::load(weights, "kv_a_proj_with_mqa", hidden_size, config.width(), bias)?,
            latent_norm: norm("kv_a_layernorm", rank)?,
            factors: HeadFactors::load(config, weights)?,
            output: Linear::load(weights, "o_proj", heads * value_dim, hidden_size, bias)?,
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
        let LatentAttentionConfig { heads, rank, plain_dim, rotated_dim, value_dim, scale, .. } = self.config;
        let [count, _] = x.dims();
        let [query, latent] = match &self.query {
            QueryInput::Whole(query) => Linear::forward_each([query, &self.latent], x),
            QueryInput::Latent(LatentQuery { inward, norm, outward }) => {
                let [query, latent] = Linear::forward_each([inward, &self.latent], x);
                [outward.forward(norm.forward(query)), latent]
            }
        };
        let rope = rows.rope(self.config.rope);
        let query = query.reshape([count, heads, plain_dim + rotated_dim]);
        let rotated = rope.rotate(query.clone().narrow(2, plain_dim, rotated_dim));
        let query = Tensor::cat(vec![rotated, self.factors.to_latents(query.narrow(2, 0, plain_dim))], 2);
        let rotated = rope.rotate(latent.clone().narrow(1, rank, rotated_dim).unsqueeze_dim(1));
        let latent = self.latent_norm.forward(latent.narrow(1, 0, rank)).unsqueeze_dim(1);
        let stored: Tensor<3> = Tensor::cat(vec![rotated, latent], 2);
        let mut caches: Vec<_> = caches.collect();
        for (group, cache) in rows.groups.iter().zip(&mut caches) {
            let of_group = stored.clone().narrow(0, group.rows.start, group.rows.len());
            cache.append_latents(of_group.swap_dims(0, 1));
        }
        let params = AttentionParams { position: 0, window: None, scale, softcap: None };
        let attended = batch_attention(query, sequences(rows, caches.iter(), params));
        let attended = attended.reshape([count, heads, self.config.width()]).narrow(2, rotated_dim, rank);
        self.output.forward(self.factors.to_values(attended).reshape([count, heads * value_dim]))
    }
}

/// What heads multiply latents by to get keys and values.
#[derive(Module, Debug)]
struct HeadFactors {
    factors: Factors,
    adapter: Option<Adapter>,
    heads: usize,
    plain_dim: usize,
    value_dim: usize,
    /// The factors of keys of every head, ready to multiply queries with.
    prepared_keys: Vec<LazyPreparedWeight>,
    prepared_values: Vec<LazyPreparedWeight>,
}

#[derive(Module, Debug)]
enum Factors {
    /// `kv_b_proj`, `[heads * (plain_dim + value_dim), rank]`: of every head rows of keys, then rows of values.
    Joined(Param<Tensor<2>>),
    Separate(SeparateFactors),
}

/// Factors as queries and sums of latents are multiplied with them.
#[derive(Module, Debug)]
struct SeparateFactors {
    /// `k_b_proj`, `[heads * rank, plain_dim]`.
    keys: Param<Tensor<2>>,
    /// `v_b_proj`, `[heads * value_dim, rank]`.
    values: Param<Tensor<2>>,
}

impl HeadFactors {
    fn load(config: &LatentAttentionConfig, weights: &Weights<'_>) -> Result<Self, ModelError> {
        const NAME: &str = "kv_b_proj";
        let LatentAttentionConfig { heads, rank, plain_dim, value_dim, separate_factors, .. } = *config;
        let outputs = heads * (plain_dim + value_dim);
        Ok(Self {
            factors: match separate_factors {
                false => Factors::Joined(weights.unpacked(&format!("{NAME}.weight"), [outputs, rank])?),
                true => Factors::Separate(SeparateFactors {
                    keys: weights.unpacked("k_b_proj.weight", [heads * rank, plain_dim])?,
                    values: weights.unpacked("v_b_proj.weight", [heads * value_dim, rank])?,
                }),
            },
            adapter: Adapter::load(weights, NAME, rank, outputs)?,
            heads,
            plain_dim,
            value_dim,
            prepared_keys: vec![LazyPreparedWeight::default(); heads],
            prepared_values: vec![LazyPreparedWeight::default(); heads],
        })
    }

    /// Multiplies plain parts of queries, `[rows, heads, plain_dim]`, so that their products with latents are those with keys:
    /// `[rows, heads, rank]`.
    fn to_latents(&self, queries: Tensor<3>) -> Tensor<3> {
        self.multiply(queries, &self.prepared_keys, || self.keys())
    }

    /// Returns the values, `[rows, heads, value_dim]`, of sums of latents, `[rows, heads, rank]`.
    fn to_values(&self, latents: Tensor<3>) -> Tensor<3> {
        self.multiply(latents, &self.prepared_values, || self.values())
    }

    /// Multiplies `[rows, heads, inputs]` with the factors of heads, `[heads, outputs, inputs]`.
    fn multiply(
        &self,
        x: Tensor<3>,
        prepared: &[LazyPreparedWeight],
        factors: impl Fn() -> Tensor<3>,
    ) -> Tensor<3> {
        if linear::accepts_prepared(&x.device()) {
            let whole = OnceCell::new();
            let prepared: Option<Vec<&PreparedWeight>> = prepared
                .iter()
                .enumerate()
                .map(|(head, prepared)| {
                    let factor = || whole.get_or_init(&factors).clone().narrow(0, head, 1).squeeze_dim(0);
                    prepared.get_or_prepare(|| Weight::Dense(factor()))
                })
                .collect();
            if let Some(prepared) = prepared {
                return linear::multiply_heads(x, &prepared);
            }
        }
        let factors = factors().cast(DType::F32);
        x.swap_dims(0, 1).matmul(factors.swap_dims(1, 2)).swap_dims(0, 1)
    }

    /// The factors of keys with what an adapter adds, `[heads, rank, plain_dim]`.
    fn keys(&self) -> Tensor<3> {
        let of_joined = |joined: Tensor<3>| joined.narrow(1, 0, self.plain_dim).swap_dims(1, 2);
        self.part(|factors| &factors.keys, of_joined)
    }

    /// The factors of values with what an adapter adds, `[heads, value_dim, rank]`.
    fn values(&self) -> Tensor<3> {
        let of_joined = |joined: Tensor<3>| joined.narrow(1, self.plain_dim, self.value_dim);
        self.part(|factors| &factors.values, of_joined)
    }

    /// One of two separate factors, or what `of_joined` takes of joined ones, `[heads, plain_dim + value_dim, rank]`, with the same
    /// part of what an adapter adds.
    fn part(
        &self,
        separate: impl Fn(&SeparateFactors) -> &Param<Tensor<2>>,
        of_joined: impl Fn(Tensor<3>) -> Tensor<3>,
    ) -> Tensor<3> {
        let by_heads = |weight: Tensor<2>| {
            let [outputs, inputs] = weight.dims();
            weight.reshape([self.heads, outputs / self.heads, inputs])
        };
        let part = match &self.factors {
            Factors::Joined(weight) => of_joined(by_heads(weight.val())),
            Factors::Separate(factors) => by_heads(separate(factors).val()),
        };
        match &self.adapter {
            Some(adapter) => part.cast(DType::F32).add(of_joined(by_heads(adapter.product()))),
            None => part,
        }
    }
}
