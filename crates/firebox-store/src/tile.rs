//! Rows side by side, as quantized matrices have them, and back.

use crate::encoding::TILE_ROWS;

/// Bytes of a scale.
pub(crate) const SCALE: usize = 2;

/// Appends rows with their pieces side by side: the first pieces of all rows, then the second ones.
pub(crate) fn put_side_by_side<const PIECE: usize>(rows: &[u8], count: usize, tile: &mut Vec<u8>) {
    let (pieces, _) = rows.as_chunks::<PIECE>();
    let width = pieces.len() / count.max(1);
    for at in 0..width {
        for row in 0..count {
            tile.extend_from_slice(&pieces[row * width + at]);
        }
    }
}

/// The bytes of a matrix of so many rows, which lie one after the other, in tiles.
pub(crate) fn of_rows<const PIECE: usize>(rows: &[u8], count: usize) -> Vec<u8> {
    let mut matrix = Vec::with_capacity(rows.len());
    for (rows, count) in tiles(rows, rows.len() / count.max(1)) {
        put_side_by_side::<PIECE>(rows, count, &mut matrix);
    }
    matrix
}

/// Appends one of the rows of a tile, its pieces one after the other.
pub(crate) fn put_row<const PIECE: usize>(tile: &[u8], rows: usize, row: usize, to: &mut Vec<u8>) {
    let (pieces, _) = tile.as_chunks::<PIECE>();
    to.extend(pieces.iter().skip(row).step_by(rows.max(1)).flatten());
}

/// The tiles of a matrix, each with how many rows it has, from its bytes and the bytes that a row takes.
pub(crate) fn tiles(bytes: &[u8], row_bytes: usize) -> impl Iterator<Item = (&[u8], usize)> {
    let row_bytes = row_bytes.max(1);
    bytes.chunks(TILE_ROWS * row_bytes).map(move |tile| (tile, tile.len() / row_bytes))
}
