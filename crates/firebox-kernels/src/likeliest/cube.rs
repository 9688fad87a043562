//! The likeliest tokens on accelerators: those of every chunk of a row, then those of the row.
//!
//! All comparisons are of integers, so that every device finds the same.

use burn::tensor::{DType, Device, Shape, Tensor};
use burn_cubecl::cubecl::{self, prelude::*};
use burn_cubecl::ops::numeric::empty_device_contiguous_dtype;
use burn_cubecl::tensor::CubeTensor;

use super::{LikeliestError, NONE, POSITIVE};
use crate::cube::{INFINITE, MOST_CUBES, cubes, dims, floats, is_cube, primitive};

/// Units of a cube, and chunks of a row at most.
const UNITS: u32 = 256;
/// Logits of a chunk at least: eight a unit, and enough chunks for the processors of a large device.
const CHUNK: usize = 2048;
/// The bits of negative infinity.
const IMPOSSIBLE: u32 = f32::NEG_INFINITY.to_bits();

/// Pairs of a token and its rank.
pub(super) type Buffer = CubeTensor;

pub(super) fn supports(device: &Device) -> bool {
    is_cube(device)
}

/// Finds the likeliest `most` tokens of every row: `[most, rows, 2]`.
pub(super) fn likeliest(logits: Tensor<2>, most: usize) -> Buffer {
    let logits = floats(primitive(logits));
    let [rows, vocab] = dims(&logits);
    assert!(rows <= MOST_CUBES as usize, "more rows than cubes in one direction");
    let chunk = vocab.div_ceil(UNITS as usize).max(CHUNK);
    let chunks = vocab.div_ceil(chunk).max(1);
    let (client, device) = (logits.client.clone(), logits.device.clone());
    let room = |shape: [usize; 3]| {
        empty_device_contiguous_dtype(client.clone(), device.clone(), Shape::new(shape), DType::U32)
    };
    let (of_chunks, out) = (room([rows * chunks, most, 2]), room([most, rows, 2]));
    if rows == 0 {
        return out;
    }
    likeliest_of_chunks::launch(
        &client,
        cubes(rows * chunks),
        CubeDim::new_1d(UNITS),
        logits.into_buffer_arg(),
        of_chunks.clone().into_buffer_arg(),
        (rows * chunks) as u32,
        chunks as u32,
        chunk as u32,
        vocab as u32,
        most as u32,
    );
    likeliest_of_rows::launch(
        &client,
        cubes(rows),
        CubeDim::new_1d(UNITS),
        of_chunks.into_buffer_arg(),
        out.clone().into_buffer_arg(),
        rows as u32,
        chunks as u32,
        most as u32,
    );
    out
}

/// Reads the first `words` of a buffer.
pub(super) fn read(buffer: &Buffer, words: usize) -> Result<Vec<u32>, LikeliestError> {
    let all = buffer.meta.shape().num_elements();
    let rest = ((all - words) * size_of::<u32>()) as u64;
    let bytes = buffer
        .client
        .read_one(buffer.handle.clone().offset_end(rest))
        .map_err(|error| LikeliestError { reason: error.to_string() })?;
    Ok(bytes.as_chunks().0.iter().map(|word| u32::from_ne_bytes(*word)).collect())
}

/// See [`rank`](super::rank).
#[cube]
fn rank_of(logit: f32) -> u32 {
    let bits = u32::reinterpret(logit);
    let magnitude = bits & 0x7FFF_FFFFu32;
    let mut rank = 0u32;
    if magnitude <= INFINITE && bits != IMPOSSIBLE {
        rank = bits ^ 0xFFFF_FFFFu32;
        if bits == magnitude || magnitude == 0u32 {
            rank = magnitude | POSITIVE;
        }
    }
    rank
}

/// Finds the pair that comes first of those that the units of a cube hold, and leaves it in the first place of `ranks` and
/// `tokens`. All units have to come here together, and again before the next call.
#[cube]
fn first_of_cube(rank: u32, token: u32, ranks: &mut Shared<[u32]>, tokens: &mut Shared<[u32]>) {
    ranks[UNIT_POS as usize] = rank;
    tokens[UNIT_POS as usize] = token;
    sync_cube();
    let mut half = comptime!(UNITS / 2).runtime();
    while half > 0 {
        if UNIT_POS < half {
            let (other_rank, other_token) =
                (ranks[(UNIT_POS + half) as usize], tokens[(UNIT_POS + half) as usize]);
            let (own_rank, own_token) = (ranks[UNIT_POS as usize], tokens[UNIT_POS as usize]);
            if other_rank > own_rank || (other_rank == own_rank && other_token < own_token) {
                ranks[UNIT_POS as usize] = other_rank;
                tokens[UNIT_POS as usize] = other_token;
            }
        }
        sync_cube();
        half /= 2;
    }
}

/// A cube for each chunk of each row. Units hold the first of their own logits, and after it was found the next.
#[cube(launch)]
fn likeliest_of_chunks(
    logits: &[f32],
    out: &mut [u32],
    all: u32,
    chunks: u32,
    chunk: u32,
    vocab: u32,
    most: u32,
) {
    let mut ranks = Shared::<[u32]>::new_slice(comptime!(UNITS as usize));
    let mut tokens = Shared::<[u32]>::new_slice(comptime!(UNITS as usize));
    // Cubes beyond the chunks go through the last one again and write nothing.
    let cube = min(CUBE_POS as u32, all - 1);
    let row = cube / chunks * vocab;
    let start = cube % chunks * chunk;
    let end = min(start + chunk, vocab);
    let mut own_rank = 0u32;
    let mut own_token = NONE.runtime();
    let mut at = start + UNIT_POS;
    while at < end {
        let rank = rank_of(logits[(row + at) as usize]);
        if rank > own_rank {
            own_rank = rank;
            own_token = at;
        }
        at += UNITS;
    }
    let mut found = 0u32;
    while found < most {
        first_of_cube(own_rank, own_token, &mut ranks, &mut tokens);
        let first_rank = ranks[0];
        let first_token = tokens[0];
        sync_cube();
        if UNIT_POS == 0 && (CUBE_POS as u32) < all {
            let place = 2 * (cube * most + found);
            out[place as usize] = first_token;
            out[(place + 1) as usize] = first_rank;
        }
        found += 1;
        if own_rank > 0 && own_token == first_token && found < most {
            own_rank = 0u32;
            own_token = NONE.runtime();
            let mut next = start + UNIT_POS;
            while next < end {
                let rank = rank_of(logits[(row + next) as usize]);
                let is_behind = rank < first_rank || (rank == first_rank && next > first_token);
                if is_behind && rank > own_rank {
                    own_rank = rank;
                    own_token = next;
                }
                next += UNITS;
            }
        }
    }
}

/// A cube for each row, whose units hold the first token of a chunk that was not found yet.
#[cube(launch)]
fn likeliest_of_rows(of_chunks: &[u32], out: &mut [u32], rows: u32, chunks: u32, most: u32) {
    let mut ranks = Shared::<[u32]>::new_slice(comptime!(UNITS as usize));
    let mut tokens = Shared::<[u32]>::new_slice(comptime!(UNITS as usize));
    let row = min(CUBE_POS as u32, rows - 1);
    let own = 2 * (row * chunks + UNIT_POS) * most;
    let mut taken = 0u32;
    let mut own_rank = 0u32;
    let mut own_token = NONE.runtime();
    if UNIT_POS < chunks {
        own_token = of_chunks[own as usize];
        own_rank = of_chunks[(own + 1) as usize];
    }
    let mut found = 0u32;
    while found < most {
        first_of_cube(own_rank, own_token, &mut ranks, &mut tokens);
        let first_rank = ranks[0];
        let first_token = tokens[0];
        sync_cube();
        if UNIT_POS == 0 && (CUBE_POS as u32) < rows {
            let place = 2 * (found * rows + row);
            out[place as usize] = first_token;
            out[(place + 1) as usize] = first_rank;
        }
        found += 1;
        if own_rank > 0 && own_token == first_token {
            taken += 1;
            own_rank = 0u32;
            own_token = NONE.runtime();
            if taken < most {
                own_token = of_chunks[(own + 2 * taken) as usize];
                own_rank = of_chunks[(own + 2 * taken + 1) as usize];
            }
        }
    }
}
