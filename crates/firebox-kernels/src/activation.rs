//! Nonlinearities of feed-forward networks.

use burn::tensor::{Tensor, activation};
use serde::Serialize;

#[cfg(feature = "autodiff")]
use crate::simd::exp;
use crate::simd::{Lanes, normal_cdf, sigmoid, tanh};

/// Nonlinearity of a feed-forward network.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Activation {
    /// `x * sigmoid(x)`
    Silu,
    /// With the error function.
    Gelu,
    /// With the tanh approximation.
    GeluTanh,
    /// `x * sigmoid(1.702 * x)`
    GeluQuick,
    /// `max(x, 0)`
    Relu,
    /// `max(x, 0)^2`
    ReluSquared,
    /// Hyperbolic tangent.
    Tanh,
}

impl Activation {
    /// Applies the function to every element, in Burn's operations.
    pub fn forward<const D: usize>(self, x: Tensor<D>) -> Tensor<D> {
        match self {
            Self::Silu => activation::silu(x),
            Self::Gelu => activation::gelu(x),
            // Burn's approximation cubes with a float power, which shader languages leave undefined for
            // negative numbers.
            Self::GeluTanh => {
                let cube = x.clone().square().mul(x.clone());
                let inner = cube.mul_scalar(0.044_715).add(x.clone());
                let tanh = inner.mul_scalar((2.0 / std::f64::consts::PI).sqrt()).tanh();
                x.mul(tanh.add_scalar(1.0)).mul_scalar(0.5)
            }
            Self::GeluQuick => activation::sigmoid(x.clone().mul_scalar(1.702)).mul(x),
            Self::Relu => activation::relu(x),
            Self::ReluSquared => activation::relu(x).square(),
            Self::Tanh => x.tanh(),
        }
    }
}

/// `2 * sqrt(2 / π)`, a factor of the tanh approximation.
const TWICE_ROOT_2_OVER_PI: f32 = 1.595_769;

/// A lane-wise function that is known at compile time.
pub(crate) trait Curve {
    fn value<L: Lanes>(x: L) -> L;

    /// The derivative.
    #[cfg(feature = "autodiff")]
    fn derivative<L: Lanes>(x: L) -> L;
}

/// See [`Activation::Silu`].
pub(crate) struct Silu;
/// See [`Activation::Gelu`].
pub(crate) struct Gelu;
/// See [`Activation::GeluTanh`].
pub(crate) struct GeluTanh;
/// See [`Activation::GeluQuick`].
pub(crate) struct GeluQuick;
/// See [`Activation::Relu`].
pub(crate) struct Relu;
/// See [`Activation::ReluSquared`].
pub(crate) struct ReluSquared;
/// See [`Activation::Tanh`].
pub(crate) struct Tanh;

impl Curve for Silu {
    #[inline(always)]
    fn value<L: Lanes>(x: L) -> L {
        x.mul(sigmoid(x))
    }

    #[cfg(feature = "autodiff")]
    #[inline(always)]
    fn derivative<L: Lanes>(x: L) -> L {
        let share = sigmoid(x);
        share.add(x.mul(share).mul(L::splat(1.0).sub(share)))
    }
}

impl Curve for Gelu {
    #[inline(always)]
    fn value<L: Lanes>(x: L) -> L {
        x.mul(normal_cdf(x))
    }

    #[cfg(feature = "autodiff")]
    #[inline(always)]
    fn derivative<L: Lanes>(x: L) -> L {
        const ROOT_OF_2_PI: f32 = 2.506_628_3;
        let density = exp(x.mul(x).mul(L::splat(-0.5))).div(L::splat(ROOT_OF_2_PI));
        normal_cdf(x).mul_add(x, density)
    }
}

impl Curve for GeluTanh {
    #[inline(always)]
    fn value<L: Lanes>(x: L) -> L {
        // `(1 + tanh(u)) / 2` equals `sigmoid(2 u)`, which does not cancel where tanh is near -1.
        let cube = x.mul(x).mul(x);
        let inner = L::splat(TWICE_ROOT_2_OVER_PI).mul(x.mul_add(cube, L::splat(0.044_715)));
        x.mul(sigmoid(inner))
    }

    #[cfg(feature = "autodiff")]
    #[inline(always)]
    fn derivative<L: Lanes>(x: L) -> L {
        let square = x.mul(x);
        let cubic = L::splat(1.0).mul_add(square, L::splat(0.044715));
        let share = sigmoid(L::splat(TWICE_ROOT_2_OVER_PI).mul(x).mul(cubic));
        let steepness =
            L::splat(TWICE_ROOT_2_OVER_PI).mul_add(square, L::splat(3.0 * 0.044715 * TWICE_ROOT_2_OVER_PI));
        share.add(x.mul(steepness).mul(share).mul(L::splat(1.0).sub(share)))
    }
}

impl Curve for GeluQuick {
    #[inline(always)]
    fn value<L: Lanes>(x: L) -> L {
        x.mul(sigmoid(x.mul(L::splat(1.702))))
    }

    #[cfg(feature = "autodiff")]
    #[inline(always)]
    fn derivative<L: Lanes>(x: L) -> L {
        let steepness = L::splat(1.702);
        let share = sigmoid(x.mul(steepness));
        share.add(x.mul(steepness).mul(share).mul(L::splat(1.0).sub(share)))
    }
}

impl Curve for Relu {
    #[inline(always)]
    fn value<L: Lanes>(x: L) -> L {
        // Passes NaN through, as Burn does.
        L::where_less(x, L::zero(), L::zero(), x)
    }

    #[cfg(feature = "autodiff")]
    #[inline(always)]
    fn derivative<L: Lanes>(x: L) -> L {
        L::where_less(L::zero(), x, L::splat(1.0), L::zero())
    }
}

impl Curve for ReluSquared {
    #[inline(always)]
    fn value<L: Lanes>(x: L) -> L {
        let positive = Relu::value(x);
        positive.mul(positive)
    }

    #[cfg(feature = "autodiff")]
    #[inline(always)]
    fn derivative<L: Lanes>(x: L) -> L {
        let positive = Relu::value(x);
        positive.add(positive)
    }
}

impl Curve for Tanh {
    #[inline(always)]
    fn value<L: Lanes>(x: L) -> L {
        tanh(x)
    }

    #[cfg(feature = "autodiff")]
    #[inline(always)]
    fn derivative<L: Lanes>(x: L) -> L {
        let value = tanh(x);
        L::splat(1.0).sub(value.mul(value))
    }
}
