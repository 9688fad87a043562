//! Compares gradients with central differences and with the gradients of a reference.

use burn::tensor::{Device, Tensor, TensorData};

use crate::support::{numbers, values};

/// A function of tensors, with every input and the output as one row.
pub type Function<'a> = &'a dyn Fn(&[Tensor<1>]) -> Tensor<1>;

pub fn device() -> Device {
    Device::flex().autodiff()
}

pub fn row(numbers: &[f32], device: &Device) -> Tensor<1> {
    Tensor::from_data(TensorData::new(numbers.to_vec(), [numbers.len()]), device)
}

/// Returns the results and the gradients of their sum weighted with `slopes`.
fn with_gradients(inputs: &[Vec<f32>], function: Function<'_>, slopes: &[f32]) -> (Vec<f32>, Vec<Vec<f32>>) {
    let leaves: Vec<_> = inputs.iter().map(|input| row(input, &device()).require_grad()).collect();
    let results = function(&leaves);
    let gradients = results.clone().mul(row(slopes, &device())).sum().backward();
    let of = |leaf: &Tensor<1>| values(leaf.grad(&gradients).unwrap());
    (values(results), leaves.iter().map(of).collect())
}

fn dot(a: &[f32], b: &[f32]) -> f64 {
    a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum()
}

/// Compares with the reference if there is one, and with central differences along random directions, within
/// `tolerance` relative to the compared values.
pub fn check(inputs: &[Vec<f32>], own: Function<'_>, reference: Option<Function<'_>>, tolerance: f64) {
    // Without the rounding of activations, which gradients ignore.
    let smooth = reference.unwrap_or(own);
    let plain = |inputs: &[Vec<f32>]| {
        let inputs: Vec<_> = inputs.iter().map(|input| row(input, &device())).collect();
        values(smooth(&inputs))
    };
    let slopes = numbers(plain(inputs).len(), 77);
    let (results, gradients) = with_gradients(inputs, own, &slopes);
    if let Some(reference) = reference {
        let (expected_results, expected) = with_gradients(inputs, reference, &slopes);
        near(&results, &expected_results, tolerance, "results");
        for (index, (found, expected)) in gradients.iter().zip(&expected).enumerate() {
            near(found, expected, tolerance, &format!("input {index}"));
        }
    }
    for (index, input) in inputs.iter().enumerate() {
        for seed in 0..3 {
            let direction = numbers(input.len(), 1000 + seed);
            const STEP: f32 = 4e-3;
            let moved = |step: f32| {
                let mut inputs = inputs.to_vec();
                for (number, direction) in inputs[index].iter_mut().zip(&direction) {
                    *number += step * direction;
                }
                dot(&plain(&inputs), &slopes)
            };
            let difference = (moved(STEP) - moved(-STEP)) / (2.0 * f64::from(STEP));
            let found = dot(&gradients[index], &direction);
            // Along a direction that changes little, the dot product cancels.
            let size = dot(&gradients[index], &gradients[index]).sqrt() + 1.0;
            assert!(
                (found - difference).abs() <= 10.0 * tolerance * size,
                "input {index}: {found} instead of {difference}"
            );
        }
    }
}

pub fn near(found: &[f32], expected: &[f32], tolerance: f64, name: &str) {
    assert_eq!(found.len(), expected.len());
    let largest = expected.iter().fold(1.0, |largest: f64, number| largest.max(f64::from(number.abs())));
    for (index, (found, expected)) in found.iter().zip(expected).enumerate() {
        let off = f64::from((found - expected).abs());
        assert!(off <= tolerance * largest, "{name}, element {index}: {found} instead of {expected}");
    }
}

pub fn flat<const D: usize>(tensor: Tensor<D>) -> Tensor<1> {
    let count = tensor.shape().num_elements();
    tensor.reshape([count])
}
