//! Reads keys and values of pages from the memories that a launch binds.

use burn_cubecl::cubecl::{self, prelude::*};

/// Reads vectors of one memory, the same for all units of a cube: `count` of them, `apart` from each other from `from` on and none beyond
/// `last`, in steps of `step` vectors from `start`.
#[cube]
pub(super) fn read_ahead<K: Numeric, N: Size>(
    first: &[Vector<K, N>],
    second: &[Vector<K, N>],
    third: &[Vector<K, N>],
    fourth: &[Vector<K, N>],
    fifth: &[Vector<K, N>],
    sixth: &[Vector<K, N>],
    seventh: &[Vector<K, N>],
    eighth: &[Vector<K, N>],
    memory: u32,
    start: u32,
    from: u32,
    apart: u32,
    last: u32,
    step: u32,
    numbers: &mut Array<Vector<f32, N>>,
    #[comptime] count: usize,
) {
    if memory == 0 {
        read::<K, N>(first, start, from, apart, last, step, numbers, count);
    } else if memory == 1 {
        read::<K, N>(second, start, from, apart, last, step, numbers, count);
    } else if memory == 2 {
        read::<K, N>(third, start, from, apart, last, step, numbers, count);
    } else if memory == 3 {
        read::<K, N>(fourth, start, from, apart, last, step, numbers, count);
    } else if memory == 4 {
        read::<K, N>(fifth, start, from, apart, last, step, numbers, count);
    } else if memory == 5 {
        read::<K, N>(sixth, start, from, apart, last, step, numbers, count);
    } else if memory == 6 {
        read::<K, N>(seventh, start, from, apart, last, step, numbers, count);
    } else {
        read::<K, N>(eighth, start, from, apart, last, step, numbers, count);
    }
}

#[cube]
fn read<K: Numeric, N: Size>(
    stored: &[Vector<K, N>],
    start: u32,
    from: u32,
    apart: u32,
    last: u32,
    step: u32,
    numbers: &mut Array<Vector<f32, N>>,
    #[comptime] count: usize,
) {
    #[unroll]
    for ahead in 0..count {
        let at = start + min(from + ahead as u32 * apart, last) * step;
        let piece = stored[at as usize];
        let mut four = Vector::<f32, N>::new(0.0f32);
        #[unroll]
        for element in 0..4usize {
            four.insert(element, f32::cast_from(piece.extract(element)));
        }
        numbers[ahead] = four;
    }
}
