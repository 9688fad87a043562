//! Products of activations with several weights, shared among the threads of the pool.

use super::activations::{Activations, IntegerWidth};
use super::multiplicand::{Input, Multiplicand, Part};
use super::panel::TILE_OUTPUTS;
use crate::thread_pool::parallel_for_each;

/// Multiplications below which a second thread costs more than it gains.
const SINGLE_THREAD_WORK: usize = 1 << 17;

/// Multiplications below which taking a piece costs more than waiting for the thread that took the last one.
const SMALLEST_PIECE: usize = 1 << 16;

/// Returns `x · weightᵀ` for several weights with their numbers of outputs, `[rows, outputs]` each. The
/// weights are processed together; each has at least one panel of rows in memory.
pub(super) fn multiply(x: &Activations<'_>, weights: &[(&dyn Multiplicand, usize)]) -> Vec<Vec<f32>> {
    let input = input(x, weights);
    shared([x.rows, x.padded], weights, |_| &input)
}

/// Returns the product of each of several activations, all of one shape, with a weight of its own, as [`multiply`] does.
pub(super) fn multiply_own(x: &[Activations<'_>], weights: &[(&dyn Multiplicand, usize)]) -> Vec<Vec<f32>> {
    let inputs: Vec<_> = x.iter().zip(weights).map(|(x, weight)| input(x, &[*weight])).collect();
    let shape = x.first().map_or([0, 0], |x| [x.rows, x.padded]);
    shared(shape, weights, |index| &inputs[index])
}

/// Returns activations in every form that a weight needs.
fn input<'a>(x: &'a Activations<'a>, weights: &[(&dyn Multiplicand, usize)]) -> Input<'a> {
    let rounded = |width| {
        let wanted = weights.iter().any(|(weight, _)| weight.integer_width() == Some(width));
        (wanted && !x.values.is_empty()).then(|| x.quantize(width))
    };
    Input { numbers: x, as_i16: rounded(IntegerWidth::I16), as_i8: rounded(IntegerWidth::I8) }
}

/// Multiplies activations of `rows` rows with several weights, each with those that `input_of` returns for its index.
fn shared<'a>(
    [rows, padded]: [usize; 2],
    weights: &[(&dyn Multiplicand, usize)],
    input_of: impl Fn(usize) -> &'a Input<'a> + Sync,
) -> Vec<Vec<f32>> {
    let mut results: Vec<Vec<f32>> = weights.iter().map(|(_, outputs)| vec![0.0; rows * outputs]).collect();
    let total: usize = weights.iter().map(|(_, outputs)| outputs).sum();
    if rows == 0 || padded == 0 || total == 0 {
        return results;
    }
    let single = rows * padded * total < SINGLE_THREAD_WORK;
    let threads = if single { 1 } else { rayon::current_num_threads() };
    let smallest = (SMALLEST_PIECE / (rows * padded)).next_multiple_of(TILE_OUTPUTS);
    let mut parts = Vec::new();
    let mut left = total;
    for (index, (&(weight, outputs), result)) in weights.iter().zip(&mut results).enumerate() {
        let mut rows: Vec<&mut [f32]> = result.chunks_mut(outputs.max(1)).collect();
        let mut first = 0;
        while first < outputs {
            let piece = piece(left, threads, smallest).min(outputs - first);
            let results = rows.iter_mut().map(|row| row.split_off_mut(..piece).unwrap_or_default()).collect();
            parts.push((index, weight, Part { first, weight_rows: weight.padded_rows(outputs), results }));
            first += piece;
            left -= piece;
        }
    }
    if single {
        for (index, weight, part) in parts {
            weight.multiply(input_of(index), part);
        }
    } else {
        parallel_for_each(parts, |(index, weight, part)| weight.multiply(input_of(index), part));
    }
    results
}

/// Returns the number of outputs of the next piece. Pieces shrink, so that all threads finish at almost the
/// same time even if one is interrupted.
fn piece(left: usize, threads: usize, smallest: usize) -> usize {
    let share = if threads > 1 { left.div_ceil(2 * threads) } else { left };
    share.next_multiple_of(TILE_OUTPUTS).max(smallest)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_shrink() {
        for (threads, smallest, total) in [(1, 32, 5000), (2, 64, 151_936), (2, 32, 1000), (7, 96, 40_961)] {
            let (mut left, mut pieces) = (total, Vec::new());
            while left > 0 {
                pieces.push(piece(left, threads, smallest).min(left));
                left -= pieces[pieces.len() - 1];
            }
            assert!(pieces.is_sorted_by(|a, b| a >= b), "{pieces:?}");
            assert!(pieces[0] <= total.div_ceil(threads).max(smallest), "{pieces:?}");
            assert!(threads == 1 || pieces[pieces.len() - 1] <= smallest, "{pieces:?}");
            assert!(pieces.len() <= 1 + total / smallest, "{pieces:?}");
        }
    }
}
