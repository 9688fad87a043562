//! The convolution on accelerators, in f32: a unit for every number of a token and of what is kept.

use burn::backend::tensor::FloatTensor;
use burn_cubecl::CubeBackend;
use burn_cubecl::cubecl::{self, prelude::*};

use super::{ConvolutionOps, ConvolutionParams};
use crate::cube::{cubes, dims, floats, room, sigmoid, zeroed};

/// Units of a cube.
const UNITS: u32 = 128;

impl ConvolutionOps for CubeBackend {
    fn convolve(
        x: FloatTensor<Self>,
        earlier: FloatTensor<Self>,
        taps: FloatTensor<Self>,
        params: ConvolutionParams,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let [x, earlier, taps] = [x, earlier, taps].map(floats);
        let ([count, channels], [before, _]) = (dims(&x), dims(&earlier));
        assert_eq!(dims(&taps), [channels, before + 1], "taps for other channels or another kernel");
        assert_eq!(dims(&earlier), [before, channels], "earlier tokens of other channels");
        if count * channels == 0 {
            return (zeroed(&x, [count, channels]), earlier);
        }
        let (client, sums) = (x.client.clone(), room(&x, [count, channels]));
        // There has to be something to bind, also where nothing came before.
        let kept = if before == 0 { earlier.clone() } else { room(&x, [before, channels]) };
        let [bound_earlier, bound_kept] = match before {
            0 => [x.clone(), sums.clone()],
            _ => [earlier, kept.clone()],
        };
        convolve::launch(
            &client,
            cubes(((count + before) * channels).div_ceil(UNITS as usize)),
            CubeDim::new_1d(UNITS),
            x.into_buffer_arg(),
            bound_earlier.into_buffer_arg(),
            taps.into_buffer_arg(),
            sums.clone().into_buffer_arg(),
            bound_kept.into_buffer_arg(),
            count as u32,
            channels as u32,
            before as u32,
            params.silu,
        );
        (sums, kept)
    }
}

#[cube(launch)]
fn convolve(
    x: &[f32],
    earlier: &[f32],
    taps: &[f32],
    sums: &mut [f32],
    kept: &mut [f32],
    count: u32,
    channels: u32,
    before: u32,
    #[comptime] silu: bool,
) {
    let at = CUBE_POS as u32 * UNITS + UNIT_POS;
    let (token, channel) = (at / channels, at % channels);
    if token < count {
        let mut sum = 0.0f32;
        for tap in 0..before + 1 {
            let weight = taps[(channel * (before + 1) + tap) as usize];
            sum += padded(x, earlier, token + tap, channel, channels, before) * weight;
        }
        if comptime!(silu) {
            sum *= sigmoid(sum);
        }
        sums[at as usize] = sum;
    } else if token < count + before {
        // The last tokens are those before the first that is to come.
        kept[(at - count * channels) as usize] = padded(x, earlier, token, channel, channels, before);
    }
}

/// A number of the earlier tokens and then the new ones.
#[cube]
fn padded(x: &[f32], earlier: &[f32], row: u32, channel: u32, channels: u32, before: u32) -> f32 {
    let mut number = 0.0f32;
    if row < before {
        number = earlier[(row * channels + channel) as usize];
    }
    if row >= before {
        number = x[((row - before) * channels + channel) as usize];
    }
    number
}
