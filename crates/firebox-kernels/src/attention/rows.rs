//! Rows of stored keys or values, converted to f32 while they are read or before.

use std::ops::Range;

use burn::backend::Flex;
use burn::backend::flex::FlexTensor;
use burn::tensor::DType;

use super::kv_tensor::KvPrimitive;
use crate::flex::{contiguous, dims};
use crate::simd::{LANES, Lanes, f16_to_f32};

/// Rows of keys or values, by index into a list of positions.
///
/// A trait instead of closures: a closure is a function of its own and would not be compiled for the
/// instruction set of the function that calls it.
pub(super) trait Rows {
    type Row<'a>: Row
    where
        Self: 'a;

    /// Returns the first `chunks` vectors of a row.
    fn row(&self, index: usize, chunks: usize) -> Self::Row<'_>;
}

/// A row that is read vector by vector.
pub(super) trait Row: Copy {
    fn chunk<L: Lanes>(self, chunk: usize) -> L;

    /// Prefetches what is stored [`PREFETCH_DISTANCE`] behind a vector.
    fn prefetch<L: Lanes>(self, chunk: usize);
}

/// Bytes between a read and its prefetch: about what arrives during the latency of the memory.
const PREFETCH_DISTANCE: usize = 4096;

#[inline(always)]
fn prefetch<L: Lanes, T>(vector: &[T; LANES]) {
    L::prefetch(vector.as_ptr().cast::<u8>().wrapping_add(PREFETCH_DISTANCE));
}

/// Bytes of a cache line.
const CACHE_LINE: usize = 64;

/// Prefetches some bytes.
#[inline(always)]
pub(super) fn prefetch_bytes<L: Lanes>(bytes: &[u8]) {
    for line in bytes.chunks(CACHE_LINE) {
        L::prefetch(line.as_ptr());
    }
}

/// Rows of a head that are converted next.
pub(super) struct PrefetchRows<'a> {
    pub stored: &'a StoredRows,
    pub head: usize,
    pub positions: Range<usize>,
    pub head_dim: usize,
}

impl PrefetchRows<'_> {
    /// Prefetches the share of the rows that `queries` are of `all` queries: prefetching everything at once
    /// would stall.
    #[inline(always)]
    pub fn issue<L: Lanes>(&self, queries: Range<usize>, all: usize) {
        let Self { stored, head, positions, head_dim } = self;
        let share = |query: usize| positions.start + positions.len() * query / all;
        for position in share(queries.start)..share(queries.end) {
            stored.prefetch::<L>(*head, position, *head_dim);
        }
    }
}

/// Stored keys or values, read in place.
pub(super) enum StoredRows {
    F32(Strided),
    F16(Strided),
    Bytes { bytes: Strided, scales: Strided },
}

impl StoredRows {
    /// # Panics
    /// If the dtype is none that [`KvTensor`](super::KvTensor) names.
    pub fn new(held: KvPrimitive<Flex>) -> Self {
        match held {
            KvPrimitive::Float(values) => match values.dtype() {
                DType::F32 => Self::F32(Strided::rows(values)),
                DType::F16 => Self::F16(Strided::rows(values)),
                other => panic!("keys and values are f32, f16 or bytes, not {other:?}"),
            },
            KvPrimitive::Bytes { words, scales } => {
                assert!(matches!(words.dtype(), DType::I32 | DType::U32), "words are 32-bit integers");
                assert_eq!(scales.dtype(), DType::F32, "scales of stored words");
                let mut bytes = Strided::rows(words);
                (bytes.start, bytes.head, bytes.position) =
                    (4 * bytes.start, 4 * bytes.head, 4 * bytes.position);
                Self::Bytes { bytes, scales: Strided::elements(scales) }
            }
        }
    }

    /// Returns the number of heads.
    pub fn heads(&self) -> usize {
        let (Self::F32(rows) | Self::F16(rows) | Self::Bytes { bytes: rows, .. }) = self;
        rows.tensor.layout().shape().dims::<3>()[0]
    }

    /// Returns the number of rows within [`PREFETCH_DISTANCE`].
    #[inline(always)]
    pub fn rows_within_prefetch(&self, width: usize) -> usize {
        let bytes = match self {
            Self::F32(_) => 4 * width,
            Self::F16(_) => 2 * width,
            Self::Bytes { .. } => width,
        };
        PREFETCH_DISTANCE / bytes.max(1)
    }

    /// Prefetches a row.
    #[inline(always)]
    fn prefetch<L: Lanes>(&self, head: usize, position: usize, width: usize) {
        let (row, bytes): (&[u8], usize) = match self {
            Self::F32(rows) => (bytemuck::cast_slice(rows.starting_at::<f32>(head, position)), 4 * width),
            Self::F16(rows) => (bytemuck::cast_slice(rows.starting_at::<u16>(head, position)), 2 * width),
            Self::Bytes { bytes, .. } => (bytes.starting_at(head, position), width),
        };
        prefetch_bytes::<L>(&row[..bytes]);
    }

    /// Converts the first elements of a row into `row`.
    #[inline(always)]
    pub fn convert<L: Lanes>(&self, head: usize, position: usize, row: &mut [f32]) {
        let width = row.len();
        match self {
            Self::F32(rows) => row.copy_from_slice(&rows.starting_at(head, position)[..width]),
            Self::F16(rows) => {
                let stored: &[u16] = &rows.starting_at(head, position)[..width];
                let ((row, row_rest), (stored, stored_rest)) =
                    (row.as_chunks_mut::<LANES>(), stored.as_chunks::<LANES>());
                for (row, stored) in row.iter_mut().zip(stored) {
                    *row = L::from_f16(stored).store();
                }
                for (row, stored) in row_rest.iter_mut().zip(stored_rest) {
                    *row = f16_to_f32(*stored);
                }
            }
            Self::Bytes { bytes, scales } => {
                let stored: &[i8] = &bytes.starting_at(head, position)[..width];
                let scales: &[f32] = scales.starting_at(head, position);
                let scale = scales[0];
                let ((row, row_rest), (stored, stored_rest)) =
                    (row.as_chunks_mut::<LANES>(), stored.as_chunks::<LANES>());
                for (row, stored) in row.iter_mut().zip(stored) {
                    *row = L::from_i8(stored).mul(L::splat(scale)).store();
                }
                for (row, stored) in row_rest.iter_mut().zip(stored_rest) {
                    *row = f32::from(*stored) * scale;
                }
            }
        }
    }
}

/// A tensor whose first dimensions are heads and positions, with their strides in elements.
pub(super) struct Strided {
    tensor: FlexTensor,
    start: usize,
    head: usize,
    position: usize,
}

impl Strided {
    /// Takes `[heads, positions, width]`; copies it unless its rows are contiguous.
    pub fn rows(tensor: FlexTensor) -> Self {
        let strides = tensor.layout().strides();
        if strides[2] == 1 && strides[0] >= 0 && strides[1] >= 0 {
            let (head, position) = (strides[0] as usize, strides[1] as usize);
            return Self { start: tensor.layout().start_offset(), head, position, tensor };
        }
        let [_, positions, width] = dims(&tensor);
        Self::contiguous(tensor, positions * width, width)
    }

    /// Takes `[heads, positions]`.
    fn elements(tensor: FlexTensor) -> Self {
        let strides = tensor.layout().strides();
        if strides[0] >= 0 && strides[1] >= 0 {
            let (head, position) = (strides[0] as usize, strides[1] as usize);
            return Self { start: tensor.layout().start_offset(), head, position, tensor };
        }
        let [_, positions] = dims(&tensor);
        Self::contiguous(tensor, positions, 1)
    }

    fn contiguous(tensor: FlexTensor, head: usize, position: usize) -> Self {
        let tensor = contiguous(tensor);
        Self { start: tensor.layout().start_offset(), head, position, tensor }
    }

    /// Returns all elements from the given head and position on.
    #[inline(always)]
    pub fn starting_at<T: bytemuck::Pod>(&self, head: usize, position: usize) -> &[T] {
        let elements: &[T] = bytemuck::cast_slice(self.tensor.bytes());
        &elements[self.start + head * self.head + position * self.position..]
    }
}

/// Converted rows of f32, one after the other.
pub(super) struct ConvertedRows<'a> {
    pub values: &'a [f32],
    pub width: usize,
}

impl Rows for ConvertedRows<'_> {
    type Row<'a>
        = &'a [[f32; LANES]]
    where
        Self: 'a;

    #[inline(always)]
    fn row(&self, index: usize, chunks: usize) -> &[[f32; LANES]] {
        &self.values[index * self.width..].as_chunks().0[..chunks]
    }
}

/// Rows in their stored form.
pub(super) struct RowsInPlace<'a, T> {
    /// Elements of one head, from its first position on.
    elements: &'a [T],
    stride: usize,
    positions: &'a [usize],
}

impl<T> RowsInPlace<'_, T> {
    #[inline(always)]
    fn chunks(&self, index: usize, chunks: usize) -> &[[T; LANES]] {
        &self.elements[self.positions[index] * self.stride..].as_chunks().0[..chunks]
    }
}

/// A stored number that is converted to f32 on its own, without a scale.
pub(super) trait Element: bytemuck::Pod {
    fn convert<L: Lanes>(vector: &[Self; LANES]) -> L;
}

impl Element for f32 {
    #[inline(always)]
    fn convert<L: Lanes>(vector: &[Self; LANES]) -> L {
        L::load(vector)
    }
}

/// f16 as bits.
impl Element for u16 {
    #[inline(always)]
    fn convert<L: Lanes>(vector: &[Self; LANES]) -> L {
        L::from_f16(vector)
    }
}

impl<T: Element> Rows for RowsInPlace<'_, T> {
    type Row<'a>
        = &'a [[T; LANES]]
    where
        Self: 'a;

    #[inline(always)]
    fn row(&self, index: usize, chunks: usize) -> &[[T; LANES]] {
        self.chunks(index, chunks)
    }
}

impl<T: Element> Row for &[[T; LANES]] {
    #[inline(always)]
    fn chunk<L: Lanes>(self, chunk: usize) -> L {
        T::convert(&self[chunk])
    }

    #[inline(always)]
    fn prefetch<L: Lanes>(self, chunk: usize) {
        prefetch::<L, _>(&self[chunk]);
    }
}

/// Rows of bytes with one scale each.
pub(super) struct BytesInPlace<'a> {
    bytes: RowsInPlace<'a, i8>,
    scales: &'a [f32],
    stride: usize,
}

impl Rows for BytesInPlace<'_> {
    type Row<'a>
        = ScaledBytes<'a>
    where
        Self: 'a;

    #[inline(always)]
    fn row(&self, index: usize, chunks: usize) -> ScaledBytes<'_> {
        let scale = self.scales[self.bytes.positions[index] * self.stride];
        ScaledBytes { bytes: self.bytes.chunks(index, chunks), scale }
    }
}

#[derive(Clone, Copy)]
pub(super) struct ScaledBytes<'a> {
    bytes: &'a [[i8; LANES]],
    scale: f32,
}

impl Row for ScaledBytes<'_> {
    #[inline(always)]
    fn chunk<L: Lanes>(self, chunk: usize) -> L {
        L::from_i8(&self.bytes[chunk]).mul(L::splat(self.scale))
    }

    #[inline(always)]
    fn prefetch<L: Lanes>(self, chunk: usize) {
        prefetch::<L, _>(&self.bytes[chunk]);
    }
}

impl Strided {
    /// Returns the rows of a head at some positions.
    #[inline(always)]
    pub fn in_place<'a, T: bytemuck::Pod>(
        &'a self,
        head: usize,
        positions: &'a [usize],
    ) -> RowsInPlace<'a, T> {
        RowsInPlace { elements: self.starting_at(head, 0), stride: self.position, positions }
    }

    /// Returns the rows of bytes of a head at some positions, with their scales.
    #[inline(always)]
    pub fn bytes_in_place<'a>(
        &'a self,
        scales: &'a Self,
        head: usize,
        positions: &'a [usize],
    ) -> BytesInPlace<'a> {
        BytesInPlace {
            bytes: self.in_place(head, positions),
            scales: scales.starting_at(head, 0),
            stride: scales.position,
        }
    }
}
