//! Causal depthwise convolution.

#[cfg(any(feature = "wgpu", feature = "cuda"))]
mod cube;
mod flex;

use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, backend_extension};
use burn::tensor::{DType, Tensor, activation};

use crate::flex::{DispatchBackend, has_native_ops, is_flex};

/// Precision and activation of a convolution.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ConvolutionParams {
    /// Whether sums of f32 inputs are computed and returned in f64.
    pub exact: bool,
    /// Whether SiLU is applied to the sums.
    pub silu: bool,
}

/// Causal depthwise convolution of `[tokens, channels]`.
///
/// `taps` is `[channels, kernel]`, from the oldest token to the token itself. `earlier`, `[kernel - 1,
/// channels]`, holds the tokens before the first; absent means zeros. Returns the sums, and the last `kernel
/// - 1` tokens as `earlier` for the next call.
///
/// A token's result does not depend on the number of tokens in the call.
pub fn convolve(
    x: Tensor<2>,
    earlier: Option<Tensor<2>>,
    taps: Tensor<2>,
    params: ConvolutionParams,
) -> (Tensor<2>, Tensor<2>) {
    let (device, dtype) = (x.device(), x.dtype());
    let [channels, kernel] = taps.dims();
    let earlier = match earlier {
        Some(earlier) => earlier.cast(dtype),
        None => Tensor::zeros([kernel - 1, channels], (&device, dtype)),
    };
    // The accelerator version computes in f32.
    let own = match dtype {
        DType::F32 => {
            let all_have =
                [&device, &earlier.device(), &taps.device()].iter().all(|device| has_native_ops(device));
            is_flex(&device) || all_have && !params.exact
        }
        DType::F64 => is_flex(&device),
        _ => false,
    };
    if !own {
        return reference(x, earlier, taps, params);
    }
    let (sums, kept) = <DispatchBackend as ConvolutionOps>::convolve(
        x.into_dispatch(),
        earlier.into_dispatch(),
        taps.cast(dtype).into_dispatch(),
        params,
    );
    (Tensor::from_dispatch(sums), Tensor::from_dispatch(kept))
}

/// Reference implementation in Burn's operations.
pub fn reference(
    x: Tensor<2>,
    earlier: Tensor<2>,
    taps: Tensor<2>,
    params: ConvolutionParams,
) -> (Tensor<2>, Tensor<2>) {
    let [count, channels] = x.dims();
    let [before, _] = earlier.dims();
    // Burn cannot concatenate or slice zero rows.
    let (padded, kept) = if before == 0 {
        (x, earlier)
    } else {
        let padded = if count == 0 { earlier } else { Tensor::cat(vec![earlier, x], 0) };
        (padded.clone(), padded.narrow(0, count, before))
    };
    let dtype = if params.exact { DType::F64 } else { padded.dtype() };
    let (padded, taps) = (padded.cast(dtype), taps.cast(dtype));
    let mut sums = Tensor::zeros([count, channels], (&padded.device(), dtype));
    if count == 0 {
        return (sums, kept);
    }
    for tap in 0..=before {
        let weight = taps.clone().narrow(1, tap, 1).reshape([1, channels]);
        sums = sums.add(padded.clone().narrow(0, tap, count).mul(weight));
    }
    (if params.silu { activation::silu(sums) } else { sums }, kept)
}

#[backend_extension(Flex, Cube: cfg(any(feature = "wgpu", feature = "cuda")))]
pub(crate) trait ConvolutionOps: Backend {
    fn convolve(
        x: FloatTensor<Self>,
        earlier: FloatTensor<Self>,
        taps: FloatTensor<Self>,
        params: ConvolutionParams,
    ) -> (FloatTensor<Self>, FloatTensor<Self>);
}
