//! Tensors that are read from disk together, and what was read.

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use bytes::Bytes;

use crate::buffer::{BufferGuard, DetachFlag};
use crate::checkpoint::Checkpoint;
use crate::encoding::{Encoding, TILE_ROWS, TILE_WORD};
use crate::error::StoreError;
use crate::mapping::aligned_copy;
use crate::memory::{allocate, resident_size};
use crate::read_at::{BLOCK, ReadAt};
use crate::tensor_index::{Span, TensorInfo};
use crate::tile::{self, SCALE};
use crate::weight::Weight;

/// Spans that lie nearer to each other are read as one: what lies between costs less than another request.
const GAP: usize = 64 << 10;

/// Where tensors are looked up: a checkpoint, or the part of it that was read.
pub trait Tensors: std::fmt::Debug {
    /// The path of the model.
    fn path(&self) -> &Path;
    /// The tensor of that name.
    fn info(&self, name: &str) -> Option<&TensorInfo>;
    /// A tensor's bytes, as they are stored.
    fn weight(&self, name: &str) -> Result<Weight, StoreError>;
    /// The names of all tensors.
    fn names(&self) -> Box<dyn Iterator<Item = &str> + '_>;
}

/// Tensors, or rows of one, that are read from disk together.
#[derive(Debug, Clone)]
pub struct ReadUnit {
    path: PathBuf,
    /// By name.
    tensors: Vec<Placed>,
    reads: Vec<Read>,
    buffer_bytes: usize,
}

/// A tensor, and where its bytes come to lie in the buffer.
#[derive(Debug, Clone)]
struct Placed {
    info: TensorInfo,
    data: Range<usize>,
    scales: Option<Range<usize>>,
}

/// One request to the disk. Start, place in the buffer and length are whole blocks, as reading past the page cache asks
/// for; what is needed may end before, where the file does.
#[derive(Debug, Clone)]
struct Read {
    file: usize,
    start: usize,
    len: usize,
    needed: usize,
    at: usize,
}

impl ReadUnit {
    /// Bytes of its tensors, scales included.
    pub fn bytes(&self) -> u64 {
        self.tensors.iter().map(|placed| placed.info.bytes).sum()
    }

    /// Bytes of memory that it takes while it is there.
    pub fn buffer_bytes(&self) -> usize {
        self.buffer_bytes
    }

    /// `tensors` with the spans of their data and scales.
    pub(crate) fn new(path: &Path, tensors: Vec<(TensorInfo, Span, Option<Span>)>) -> Self {
        let mut spans: Vec<Span> =
            tensors.iter().flat_map(|(_, data, scales)| [Some(*data), *scales]).flatten().collect();
        spans.sort_by_key(|span| (span.file, span.start));
        let mut reads: Vec<Read> = Vec::new();
        for span in spans {
            let end = span.start + span.len;
            match reads.last_mut() {
                Some(read) if read.file == span.file && span.start <= read.start + read.needed + GAP => {
                    read.needed = read.needed.max(end - read.start);
                }
                _ => {
                    let start = span.start / BLOCK * BLOCK;
                    reads.push(Read { file: span.file, start, len: 0, needed: end - start, at: 0 });
                }
            }
        }
        let mut buffer_bytes = 0;
        for read in &mut reads {
            read.len = read.needed.next_multiple_of(BLOCK);
            read.at = buffer_bytes;
            buffer_bytes += read.len;
        }
        let place = |span: Span| {
            // Reads are sorted, and the one that covers a span is the last that begins before its end.
            let index = reads.partition_point(|read| (read.file, read.start) <= (span.file, span.start));
            let read = &reads[index.saturating_sub(1)];
            let at = read.at + span.start - read.start;
            at..at + span.len
        };
        let mut placed: Vec<Placed> = tensors
            .into_iter()
            .map(|(info, data, scales)| Placed { info, data: place(data), scales: scales.map(place) })
            .collect();
        placed.sort_by(|a, b| a.info.name.cmp(&b.info.name));
        Self { path: path.to_owned(), tensors: placed, reads, buffer_bytes: resident_size(buffer_bytes) }
    }

    fn tensor(&self, name: &str) -> Option<&Placed> {
        let at = self.tensors.binary_search_by(|placed| placed.info.name.as_str().cmp(name)).ok()?;
        Some(&self.tensors[at])
    }

    /// Fills a buffer of at least [`buffer_bytes`](Self::buffer_bytes).
    pub(crate) fn read(&self, disk: &dyn ReadAt, buffer: &mut [u8]) -> Result<(), StoreError> {
        for read in &self.reads {
            let target = &mut buffer[read.at..read.at + read.len];
            let mut done = 0;
            while done < read.needed {
                let count = disk.read_at(read.file, &mut target[done..], (read.start + done) as u64)?;
                if count > target.len() - done {
                    let (path, most) = (self.path.clone(), target.len() - done);
                    return Err(StoreError::Overread { path, count, most });
                }
                done += count;
                if count == 0 {
                    let missing = std::io::ErrorKind::UnexpectedEof.into();
                    let action = format!("read {} bytes at {}", read.needed, read.start);
                    return Err(StoreError::io(&self.path, action, missing));
                }
            }
        }
        Ok(())
    }
}

/// A unit in memory. Clones share the memory, which is released with the last of them and of the tensors made from it.
#[derive(Debug, Clone)]
pub struct LoadedTensors {
    unit: Arc<ReadUnit>,
    bytes: Bytes,
    /// The owner of the bytes, where they return to a pool or a stream.
    guard: Option<Arc<BufferGuard>>,
}

/// Lets `Bytes` own a share of a buffer.
struct Shared(Arc<BufferGuard>);

impl AsRef<[u8]> for Shared {
    fn as_ref(&self) -> &[u8] {
        (*self.0).as_ref()
    }
}

impl LoadedTensors {
    /// A unit that was read into a buffer.
    pub(crate) fn new(unit: Arc<ReadUnit>, guard: BufferGuard) -> Self {
        let guard = Arc::new(guard);
        Self { unit, bytes: Bytes::from_owner(Shared(guard.clone())), guard: Some(guard) }
    }

    /// The flag that detaches its buffer, where that returns to a pool or a stream.
    pub fn detach_flag(&self) -> Option<&DetachFlag> {
        self.guard.as_ref().map(|guard| guard.detach_flag())
    }

    #[cfg(test)]
    pub(crate) fn bytes(&self) -> &Bytes {
        &self.bytes
    }

    /// Returns the unused end of its buffer to the system.
    pub(crate) fn trim(&self) {
        self.guard.iter().for_each(|guard| guard.trim());
    }

    /// Copies it to memory of its own, so that the buffer can be reused.
    pub fn copied(&self) -> Result<Self, StoreError> {
        let bytes = self.unit.buffer_bytes;
        let mut copy = allocate(bytes)?;
        copy.as_mut()[..bytes].copy_from_slice(&self.bytes[..bytes]);
        Ok(Self { unit: self.unit.clone(), bytes: Bytes::from_owner(copy), guard: None })
    }
}

impl Tensors for LoadedTensors {
    fn path(&self) -> &Path {
        &self.unit.path
    }

    fn info(&self, name: &str) -> Option<&TensorInfo> {
        self.unit.tensor(name).map(|placed| &placed.info)
    }

    fn weight(&self, name: &str) -> Result<Weight, StoreError> {
        let placed = self.unit.tensor(name).ok_or_else(|| StoreError::MissingTensor {
            model: self.unit.path.clone(),
            tensor: name.to_owned(),
        })?;
        let slice = |range: &Range<usize>, align: usize| {
            let slice = self.bytes.slice(range.clone());
            if (slice.as_ptr() as usize).is_multiple_of(align) { slice } else { aligned_copy(&slice) }
        };
        let info = &placed.info;
        Ok(Weight {
            name: info.name.clone(),
            shape: info.shape.clone(),
            encoding: info.encoding,
            data: slice(&placed.data, info.encoding.align()),
            scales: placed.scales.as_ref().map(|range| slice(range, 2)),
            mapped: false,
        })
    }

    fn names(&self) -> Box<dyn Iterator<Item = &str> + '_> {
        Box::new(self.unit.tensors.iter().map(|placed| placed.info.name.as_str()))
    }
}

impl Tensors for Checkpoint {
    fn path(&self) -> &Path {
        Checkpoint::path(self)
    }

    fn info(&self, name: &str) -> Option<&TensorInfo> {
        Checkpoint::info(self, name)
    }

    fn weight(&self, name: &str) -> Result<Weight, StoreError> {
        Checkpoint::weight(self, name)
    }

    fn names(&self) -> Box<dyn Iterator<Item = &str> + '_> {
        Box::new(self.tensors().map(|info| info.name.as_str()))
    }
}

/// A checkpoint whose small tensors are read by position, so that building a module over it touches no page of a mapping:
/// building does not look at the contents of larger tensors.
#[derive(Debug, Clone, Copy)]
pub struct Unmapped<'a>(pub &'a Checkpoint);

/// Norms and biases are smaller, whatever is multiplied with is larger.
const SMALL: u64 = 1 << 18;

impl Tensors for Unmapped<'_> {
    fn path(&self) -> &Path {
        self.0.path()
    }

    fn info(&self, name: &str) -> Option<&TensorInfo> {
        self.0.info(name)
    }

    fn weight(&self, name: &str) -> Result<Weight, StoreError> {
        let (info, place) = self.0.entry(name)?;
        if info.bytes > SMALL {
            return self.0.weight(name);
        }
        let read = |span: Span| -> Result<Bytes, StoreError> {
            let mut bytes = vec![0; span.len];
            self.0.file(span).read_at(&mut bytes, span.start)?;
            Ok(aligned_copy(&bytes))
        };
        Ok(Weight {
            name: info.name.clone(),
            shape: info.shape.clone(),
            encoding: info.encoding,
            data: read(place.data)?,
            scales: place.scales.map(read).transpose()?,
            mapped: false,
        })
    }

    fn names(&self) -> Box<dyn Iterator<Item = &str> + '_> {
        Tensors::names(self.0)
    }
}

impl Checkpoint {
    /// Tensors that are to be read together.
    pub fn read_unit<'a>(&self, names: impl IntoIterator<Item = &'a str>) -> Result<ReadUnit, StoreError> {
        let tensors = names
            .into_iter()
            .map(|name| self.entry(name).map(|(info, place)| (info.clone(), place.data, place.scales)))
            .collect::<Result<_, _>>()?;
        Ok(ReadUnit::new(self.path(), tensors))
    }

    /// Tensors in so many units at most, of about the same size, each of tensors that lie one after the other.
    pub fn divided<'a>(
        &self,
        names: impl IntoIterator<Item = &'a str>,
        most: usize,
    ) -> Result<Vec<ReadUnit>, StoreError> {
        let mut tensors = names
            .into_iter()
            .map(|name| {
                self.entry(name).map(|(info, place)| (info.bytes, (place.data.file, place.data.start), name))
            })
            .collect::<Result<Vec<_>, _>>()?;
        tensors.sort_by_key(|(_, place, _)| *place);
        let each = tensors.iter().map(|(bytes, ..)| bytes).sum::<u64>().div_ceil(most.max(1) as u64).max(1);
        let mut units: Vec<Vec<&str>> = Vec::new();
        let (mut before, mut at) = (0, None);
        for (bytes, _, name) in tensors {
            // By where its middle lies.
            let belongs = (before + bytes / 2) / each;
            before += bytes;
            match units.last_mut() {
                Some(last) if at == Some(belongs) => last.push(name),
                _ => units.push(vec![name]),
            }
            at = Some(belongs);
        }
        units.into_iter().map(|names| self.read_unit(names)).collect()
    }

    /// Some rows of a matrix, as a matrix of the same name. Of a quantized one whole tiles.
    pub fn rows(&self, name: &str, rows: Range<usize>) -> Result<ReadUnit, StoreError> {
        Ok(ReadUnit::new(self.path(), vec![self.rows_of(name, rows)?]))
    }

    /// Single rows of a matrix, in the order asked for.
    pub fn gather(&self, name: &str, rows: &[usize], disk: &dyn ReadAt) -> Result<Weight, StoreError> {
        let (mut info, ..) = self.rows_of(name, 0..0)?;
        let height = self.entry(name)?.0.shape[0];
        let tiled = matches!(info.encoding, Encoding::Grouped(_));
        let (mut data, mut scales) = (Vec::new(), Vec::new());
        for &row in rows {
            let first = if tiled { row - row % TILE_ROWS } else { row };
            let last = if tiled { height.min(first + TILE_ROWS).max(row + 1) } else { row + 1 };
            let (_, span, scale_span) = self.rows_of(name, first..last)?;
            let (lanes, lane) = (last - first, row - first);
            let bytes = self.near(&info, span, disk)?;
            if tiled {
                tile::append_row::<TILE_WORD>(&bytes, lanes, lane, &mut data);
            } else {
                data.extend(bytes);
            }
            if let Some(span) = scale_span {
                tile::append_row::<SCALE>(&self.near(&info, span, disk)?, lanes, lane, &mut scales);
            }
        }
        if tiled && !rows.is_empty() {
            data = tile::tile_rows::<TILE_WORD>(&data, rows.len());
            scales = tile::tile_rows::<SCALE>(&scales, rows.len());
        }
        let has_scales = !scales.is_empty();
        info.shape[0] = rows.len();
        Ok(Weight {
            shape: info.shape,
            name: info.name,
            encoding: info.encoding,
            data: aligned_copy(&data),
            scales: has_scales.then(|| aligned_copy(&scales)),
            mapped: false,
        })
    }

    /// A few bytes of a tensor. They are far shorter than a block, and neighbours come with them.
    fn near(&self, info: &TensorInfo, span: Span, disk: &dyn ReadAt) -> Result<Vec<u8>, StoreError> {
        let unit = ReadUnit::new(self.path(), vec![(info.clone(), span, None)]);
        let mut buffer = vec![0u8; unit.buffer_bytes];
        unit.read(disk, &mut buffer)?;
        let Range { start, end } = unit.tensors[0].data;
        buffer.truncate(end);
        buffer.drain(..start);
        Ok(buffer)
    }

    fn rows_of(
        &self,
        name: &str,
        rows: Range<usize>,
    ) -> Result<(TensorInfo, Span, Option<Span>), StoreError> {
        let (info, place) = self.entry(name)?;
        let fault = |reason: String| StoreError::Decode { tensor: name.to_owned(), reason };
        let [height, _] = info.shape[..] else {
            return Err(fault(format!("{} dimensions; only a matrix has rows", info.shape.len())));
        };
        if rows.end > height || rows.start > rows.end {
            return Err(fault(format!("rows {} to {} of {height}", rows.start, rows.end)));
        }
        let whole = |row: usize| row == height || row.is_multiple_of(TILE_ROWS);
        if matches!(info.encoding, Encoding::Grouped(_)) && !(whole(rows.start) && whole(rows.end)) {
            let reason = format!("rows {} to {} are not whole tiles of {TILE_ROWS}", rows.start, rows.end);
            return Err(fault(reason));
        }
        let part = |span: Span| {
            let row = span.len / height.max(1);
            Span { file: span.file, start: span.start + rows.start * row, len: rows.len() * row }
        };
        let (data, scales) = (part(place.data), place.scales.map(part));
        let mut info = info.clone();
        info.shape[0] = rows.len();
        info.bytes = (data.len + scales.map_or(0, |span| span.len)) as u64;
        Ok((info, data, scales))
    }
}
