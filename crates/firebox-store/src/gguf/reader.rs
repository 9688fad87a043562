//! The header of a GGUF file: metadata and tensor table.

use std::collections::HashSet;

use super::metadata::{List, Metadata, Value};
use crate::encoding::{BlockType, Dtype, Encoding};
use crate::error::Fault;
use crate::excerpt::Excerpt;

pub(super) const MAGIC: &[u8; 4] = b"GGUF";
pub(super) const DEFAULT_ALIGNMENT: u64 = 32;

/// The number of dimensions of a ggml tensor.
const MAX_DIMENSIONS: u32 = 4;

/// The deepest nesting of arrays. No known key nests them, and each level is a recursive call.
const MAX_DEPTH: usize = 4;

/// The longest name of a key or tensor in GGUF's specification.
const MAX_NAME: usize = 65_535;

/// One tensor of a GGUF file.
#[derive(Debug, Clone, PartialEq)]
pub struct Entry {
    /// The name in the file.
    pub name: String,
    /// The shape, outermost dimension first: the reverse of the file's order.
    pub shape: Vec<usize>,
    /// The number format.
    pub encoding: Encoding,
    /// Offset of the first byte in the file.
    pub start: usize,
    /// Bytes.
    pub len: usize,
}

/// A checked header: every tensor lies within the file, aligned, and overlaps no other.
#[derive(Debug, Clone, PartialEq)]
pub struct Header {
    /// The format's version, 2 or 3.
    pub version: u32,
    /// The metadata.
    pub metadata: Metadata,
    /// The tensors, in the order of the table.
    pub entries: Vec<Entry>,
}

impl Header {
    /// Reads and checks the header of a whole GGUF file.
    ///
    /// Touches only the header; the tensor table is checked against the length of the file.
    pub fn parse(file: &[u8]) -> Result<Self, Fault> {
        let mut cursor = Cursor { bytes: file, at: 0 };
        if cursor.take(4, "magic")? != MAGIC {
            return Err(Fault::new("magic", "the file does not begin with GGUF"));
        }
        let version = cursor.u32("version")?;
        match version {
            2 | 3 => {}
            1 => return Err(Fault::unsupported("version", "1, from 2023; convert the model again")),
            swapped if matches!(swapped.swap_bytes(), 1..=3) => {
                return Err(Fault::unsupported("version", "a big-endian file; convert it to little-endian"));
            }
            other => return Err(Fault::unsupported("version", format!("{other}; known are 2 and 3"))),
        }
        let tensor_count = cursor.u64("tensor_count")?;
        let key_count = cursor.u64("metadata_kv_count")?;
        // The smallest entry: length of a name, number of dimensions, type, offset.
        cursor.affordable(tensor_count, 24, "tensor_count")?;
        // The smallest entry: length of a key, type, one byte of value.
        cursor.affordable(key_count, 13, "metadata_kv_count")?;

        let mut metadata = Metadata::default();
        for _ in 0..key_count {
            let key = cursor.name("metadata key")?;
            let kind = cursor.u32(&key)?;
            let value = cursor.value(kind, &key)?;
            metadata.insert(key, value)?;
        }
        let alignment = metadata.unsigned("general.alignment")?.unwrap_or(DEFAULT_ALIGNMENT);
        if !alignment.is_power_of_two() {
            return Err(Fault::new("general.alignment", format!("{alignment} is not a power of two")));
        }

        let mut raw = Vec::new();
        for _ in 0..tensor_count {
            raw.push(cursor.tensor()?);
        }
        let data_start = (cursor.at as u64)
            .checked_next_multiple_of(alignment)
            .ok_or_else(|| Fault::new("general.alignment", format!("{alignment} leaves no room for data")))?;
        let mut entries = Vec::with_capacity(raw.len());
        for tensor in raw {
            entries.push(place(tensor, data_start, alignment, file.len())?);
        }
        check_names(&entries)?;
        check_overlaps(&entries)?;
        Ok(Self { version, metadata, entries })
    }
}

struct RawTensor {
    name: String,
    shape: Vec<usize>,
    encoding: Encoding,
    offset: u64,
}

fn place(tensor: RawTensor, data_start: u64, alignment: u64, file_len: usize) -> Result<Entry, Fault> {
    let RawTensor { name, shape, encoding, offset } = tensor;
    let field = |what: &str| format!("tensor {name:?}: {what}");
    let len = encoding.data_bytes(&shape).map_err(|reason| Fault::new(field("dimensions"), reason))?;
    if !offset.is_multiple_of(alignment) {
        return Err(Fault::new(
            field("offset"),
            format!("{offset} is not a multiple of the file's alignment, {alignment}"),
        ));
    }
    let start = data_start
        .checked_add(offset)
        .and_then(|start| usize::try_from(start).ok())
        .filter(|start| start.checked_add(len).is_some_and(|end| end <= file_len));
    let Some(start) = start else {
        return Err(Fault::new(
            field("offset"),
            format!(
                "{len} bytes at {offset} after byte {data_start} end beyond the file's {file_len}; the file is cut \
                 short: download it again"
            ),
        ));
    };
    Ok(Entry { name, shape, encoding, start, len })
}

fn check_names(entries: &[Entry]) -> Result<(), Fault> {
    let mut seen = HashSet::with_capacity(entries.len());
    match entries.iter().find(|entry| !seen.insert(entry.name.as_str())) {
        Some(entry) => Err(Fault::new(format!("tensor {:?}", entry.name), "listed twice")),
        None => Ok(()),
    }
}

fn check_overlaps(entries: &[Entry]) -> Result<(), Fault> {
    let mut order: Vec<&Entry> = entries.iter().collect();
    order.sort_by_key(|entry| entry.start);
    match order.windows(2).find(|pair| pair[0].start + pair[0].len > pair[1].start) {
        Some(pair) => Err(Fault::new(
            format!("tensor {:?}: offset", pair[1].name),
            format!("overlaps tensor {:?}", Excerpt(&pair[0].name)),
        )),
        None => Ok(()),
    }
}

/// The encoding of a ggml type number.
pub(super) fn encoding(kind: u32) -> Option<Encoding> {
    Some(match kind {
        0 => Encoding::Plain(Dtype::F32),
        1 => Encoding::Plain(Dtype::F16),
        24 => Encoding::Plain(Dtype::I8),
        25 => Encoding::Plain(Dtype::I16),
        26 => Encoding::Plain(Dtype::I32),
        27 => Encoding::Plain(Dtype::I64),
        28 => Encoding::Plain(Dtype::F64),
        30 => Encoding::Plain(Dtype::BF16),
        _ => return BlockType::from_number(kind).map(Encoding::Block),
    })
}

/// Names of types that exist but are not supported, so that the error can name the type of the file.
fn unread_type(kind: u32) -> &'static str {
    match kind {
        15 => "Q8_K",
        31..=33 | 36..=38 => "of blocks arranged for one processor",
        40 => "NVFP4",
        _ => "unknown",
    }
}

struct Cursor<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Cursor<'a> {
    fn remaining(&self) -> usize {
        self.bytes.len() - self.at
    }

    fn take(&mut self, count: usize, field: &str) -> Result<&'a [u8], Fault> {
        match self.bytes[self.at..].get(..count) {
            Some(bytes) => {
                self.at += count;
                Ok(bytes)
            }
            None => Err(Fault::new(
                field,
                format!(
                    "needs {count} bytes at {}, {} are left; the file is cut short",
                    self.at,
                    self.remaining()
                ),
            )),
        }
    }

    fn array<const N: usize>(&mut self, field: &str) -> Result<[u8; N], Fault> {
        let mut array = [0; N];
        array.copy_from_slice(self.take(N, field)?);
        Ok(array)
    }

    fn u32(&mut self, field: &str) -> Result<u32, Fault> {
        self.array(field).map(u32::from_le_bytes)
    }

    fn u64(&mut self, field: &str) -> Result<u64, Fault> {
        self.array(field).map(u64::from_le_bytes)
    }

    /// Refuses a count whose elements cannot fit into the rest of the file, before anything is allocated for it.
    fn affordable(&self, count: u64, least: u64, field: &str) -> Result<usize, Fault> {
        usize::try_from(count)
            .ok()
            .filter(|_| count.checked_mul(least).is_some_and(|bytes| bytes <= self.remaining() as u64))
            .ok_or_else(|| {
                Fault::new(
                    field,
                    format!("counts {count} elements, more than the {} bytes left hold", self.remaining()),
                )
            })
    }

    fn text(&mut self, field: &str) -> Result<String, Fault> {
        let length = self.u64(field)?;
        let length = self.affordable(length, 1, field)?;
        let bytes = self.take(length, field)?;
        std::str::from_utf8(bytes)
            .map(str::to_owned)
            .map_err(|error| Fault::new(field, format!("a string is not UTF-8: {error}")))
    }

    fn name(&mut self, field: &str) -> Result<String, Fault> {
        let at = self.at;
        let name = self.text(field)?;
        if name.is_empty() || name.len() > MAX_NAME {
            return Err(Fault::new(
                field,
                format!("a name of {} bytes at {at}; expected 1 to {MAX_NAME}", name.len()),
            ));
        }
        Ok(name)
    }

    fn value(&mut self, kind: u32, key: &str) -> Result<Value, Fault> {
        Ok(match kind {
            0 => Value::Unsigned(u64::from(self.array::<1>(key)?[0])),
            1 => Value::Signed(i64::from(i8::from_le_bytes(self.array(key)?))),
            2 => Value::Unsigned(u64::from(u16::from_le_bytes(self.array(key)?))),
            3 => Value::Signed(i64::from(i16::from_le_bytes(self.array(key)?))),
            4 => Value::Unsigned(u64::from(self.u32(key)?)),
            5 => Value::Signed(i64::from(i32::from_le_bytes(self.array(key)?))),
            6 => Value::Float(f64::from(f32::from_le_bytes(self.array(key)?))),
            7 => Value::Bool(truth(self.array::<1>(key)?[0], key)?),
            8 => Value::Text(self.text(key)?),
            9 => Value::List(self.list(key, 0)?),
            10 => Value::Unsigned(self.u64(key)?),
            11 => Value::Signed(i64::from_le_bytes(self.array(key)?)),
            12 => Value::Float(f64::from_le_bytes(self.array(key)?)),
            other => return Err(Fault::new(key, format!("value type {other} is not defined"))),
        })
    }

    fn list(&mut self, key: &str, depth: usize) -> Result<List, Fault> {
        if depth >= MAX_DEPTH {
            return Err(Fault::new(key, format!("arrays within arrays, more than {MAX_DEPTH} deep")));
        }
        let kind = self.u32(key)?;
        let count = self.u64(key)?;
        Ok(match kind {
            0 | 1 => {
                let count = self.affordable(count, 1, key)?;
                List::Bytes(self.take(count, key)?.to_vec())
            }
            2 => List::I64(self.numbers(count, key, |bytes| i64::from(u16::from_le_bytes(bytes)))?),
            3 => List::I64(self.numbers(count, key, |bytes| i64::from(i16::from_le_bytes(bytes)))?),
            4 => {
                let wide = self.numbers(count, key, |bytes| i64::from(u32::from_le_bytes(bytes)))?;
                match wide.iter().map(|value| i32::try_from(*value)).collect() {
                    Ok(narrow) => List::I32(narrow),
                    Err(_) => List::I64(wide),
                }
            }
            5 => List::I32(self.numbers(count, key, i32::from_le_bytes)?),
            6 => List::F32(self.numbers(count, key, f32::from_le_bytes)?),
            7 => {
                let count = self.affordable(count, 1, key)?;
                let bytes = self.take(count, key)?;
                List::Bools(bytes.iter().map(|byte| truth(*byte, key)).collect::<Result<_, _>>()?)
            }
            8 => {
                // A string takes at least the eight bytes of its length.
                let count = self.affordable(count, 8, key)?;
                let mut texts = Vec::new();
                for _ in 0..count {
                    texts.push(self.text(key)?);
                }
                List::Texts(texts)
            }
            9 => {
                // An array takes at least its type and its count.
                let count = self.affordable(count, 12, key)?;
                let mut lists = Vec::new();
                for _ in 0..count {
                    lists.push(self.list(key, depth + 1)?);
                }
                List::Lists(lists)
            }
            10 => {
                let values = self.numbers(count, key, |bytes| i64::try_from(u64::from_le_bytes(bytes)))?;
                let values = values.into_iter().collect::<Result<_, _>>();
                List::I64(values.map_err(|_| Fault::unsupported(key, "integers beyond 63 bits"))?)
            }
            11 => List::I64(self.numbers(count, key, i64::from_le_bytes)?),
            12 => List::F64(self.numbers(count, key, f64::from_le_bytes)?),
            other => return Err(Fault::new(key, format!("array type {other} is not defined"))),
        })
    }

    fn numbers<const N: usize, T>(
        &mut self,
        count: u64,
        key: &str,
        read: impl Fn([u8; N]) -> T,
    ) -> Result<Vec<T>, Fault> {
        let count = self.affordable(count, N as u64, key)?;
        // The product was checked against the rest of the file above.
        let bytes = self.take(count * N, key)?;
        Ok(bytes.as_chunks::<N>().0.iter().map(|bytes| read(*bytes)).collect())
    }

    fn tensor(&mut self) -> Result<RawTensor, Fault> {
        let name = self.name("tensor name")?;
        let field = |what: &str| format!("tensor {name:?}: {what}");
        let dimensions = self.u32(&field("dimensions"))?;
        if dimensions == 0 || dimensions > MAX_DIMENSIONS {
            return Err(Fault::new(
                field("dimensions"),
                format!("{dimensions}; expected 1 to {MAX_DIMENSIONS}"),
            ));
        }
        let mut shape = Vec::new();
        for _ in 0..dimensions {
            let dim = self.u64(&field("dimensions"))?;
            match usize::try_from(dim) {
                Ok(dim) if dim > 0 => shape.push(dim),
                _ => return Err(Fault::new(field("dimensions"), format!("one of {dim} elements"))),
            }
        }
        // GGUF lists the contiguous dimension first, all other formats list it last.
        shape.reverse();
        let kind = self.u32(&field("type"))?;
        let encoding = encoding(kind).ok_or_else(|| {
            Fault::unsupported(
                field("type"),
                format!(
                    "{kind} ({}); use a file of F32, F16, BF16, MXFP4, Q2_K to Q6_K, Q4_0 to Q8_0, IQ1 to IQ4 or TQ",
                    unread_type(kind)
                ),
            )
        })?;
        let offset = self.u64(&field("offset"))?;
        Ok(RawTensor { name, shape, encoding, offset })
    }
}

fn truth(byte: u8, key: &str) -> Result<bool, Fault> {
    match byte {
        0 => Ok(false),
        1 => Ok(true),
        other => Err(Fault::new(key, format!("a truth value of {other}; expected 0 or 1"))),
    }
}
