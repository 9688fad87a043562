//! Interleaving of the rows of quantized matrices in tiles, and back.

use crate::encoding::TILE_ROWS;

/// Bytes of a scale.
pub(crate) const SCALE: usize = 2;

/// Appends rows interleaved by piece: the first pieces of all rows, then the second ones, and so on.
pub(crate) fn interleave_rows<const PIECE: usize>(rows: &[u8], count: usize, tile: &mut Vec<u8>) {
    let (pieces, _) = rows.as_chunks::<PIECE>();
    let width = pieces.len() / count.max(1);
    for at in 0..width {
        for row in 0..count {
            tile.extend_from_slice(&pieces[row * width + at]);
        }
    }
}

/// Rearranges a matrix of `count` contiguous rows into tiles.
pub(crate) fn tile_rows<const PIECE: usize>(rows: &[u8], count: usize) -> Vec<u8> {
    let mut matrix = Vec::with_capacity(rows.len());
    for (rows, count) in tiles(rows, rows.len() / count.max(1)) {
        interleave_rows::<PIECE>(rows, count, &mut matrix);
    }
    matrix
}

/// Appends one row of a tile with its pieces contiguous.
pub(crate) fn append_row<const PIECE: usize>(tile: &[u8], rows: usize, row: usize, to: &mut Vec<u8>) {
    let (pieces, _) = tile.as_chunks::<PIECE>();
    to.extend(pieces.iter().skip(row).step_by(rows.max(1)).flatten());
}

/// The tiles of a matrix of rows of `row_bytes`, each with its number of rows.
pub(crate) fn tiles(bytes: &[u8], row_bytes: usize) -> impl Iterator<Item = (&[u8], usize)> {
    let row_bytes = row_bytes.max(1);
    bytes.chunks(TILE_ROWS * row_bytes).map(move |tile| (tile, tile.len() / row_bytes))
}
