//! The operations that backends with kernels of their own implement.

use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{Backend, backend_extension};

use super::kv_tensor::KvPrimitive;
use super::params::AttentionParams;
use super::visibility::Visibility;

/// Operations that a backend implements natively.
#[backend_extension(Flex, Cube: cfg(any(feature = "wgpu", feature = "cuda")))]
pub(crate) trait AttentionOps: Backend {
    fn span_attention(
        query: FloatTensor<Self>,
        #[extension_type] keys: KvPrimitive<Self>,
        #[extension_type] values: KvPrimitive<Self>,
        position: usize,
        visible: Option<Visibility>,
        params: AttentionParams,
    ) -> (FloatTensor<Self>, FloatTensor<Self>);

    /// Merges outputs of `rows` rows each, one after the other. Entries of `log_sum_exps` beyond those of the
    /// outputs are sinks.
    fn merge(
        outputs: FloatTensor<Self>,
        log_sum_exps: FloatTensor<Self>,
        rows: usize,
    ) -> (FloatTensor<Self>, FloatTensor<Self>);

    fn quantize(values: FloatTensor<Self>) -> (IntTensor<Self>, FloatTensor<Self>);
}
