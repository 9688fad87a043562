//! The safetensors header.
//!
//! The `safetensors` crate is not used because it silently keeps the last of two tensors of the same name, names no field in
//! its errors, and does not expose the data offset, which 64-byte alignment depends on.

use std::collections::BTreeMap;
use std::fmt;

use serde::Deserialize;
use serde::de::{self, Deserializer, MapAccess, Visitor};

use crate::encoding::{Dtype, Encoding};
use crate::error::Fault;
use crate::excerpt::{Excerpt, Shape};
use crate::json::{Json, Texts};

/// The longest header, as in the `safetensors` crate: 100 MB of JSON describe about a million tensors.
pub const MAX_HEADER: usize = 100_000_000;

/// Every safetensors file begins with the header's length in eight bytes.
pub const LENGTH_BYTES: usize = 8;

/// The only entry of the header that is not a tensor.
pub(crate) const METADATA: &str = "__metadata__";

/// One tensor of a safetensors file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// The name.
    pub name: String,
    /// The element type.
    pub dtype: Dtype,
    /// The shape, outermost dimension first.
    pub shape: Vec<usize>,
    /// Offset of the first byte in the file.
    pub start: usize,
    /// Bytes.
    pub len: usize,
}

/// A checked header: the entries tile the rest of the file in order, without overlap or hole.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Header {
    /// The tensors, in the order of their data.
    pub entries: Vec<Entry>,
    /// The metadata texts.
    pub metadata: BTreeMap<String, String>,
}

#[derive(Deserialize)]
struct RawEntry {
    dtype: String,
    shape: Vec<u64>,
    data_offsets: (u64, u64),
}

/// The entries of the header object in file order, duplicates included.
#[derive(Default)]
struct RawHeader {
    entries: Vec<(String, RawEntry)>,
    metadata: BTreeMap<String, String>,
}

impl<'de> Deserialize<'de> for RawHeader {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Entries;

        impl<'de> Visitor<'de> for Entries {
            type Value = RawHeader;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of tensors")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<RawHeader, A::Error> {
                let mut header = RawHeader::default();
                while let Some(name) = map.next_key::<String>()? {
                    if name == METADATA {
                        // A non-text value was not written by this crate, and is no reason to refuse a model.
                        if let Json::Object(Texts(texts)) = map.next_value()? {
                            header.metadata.extend(texts);
                        }
                        continue;
                    }
                    let entry = map.next_value::<RawEntry>().map_err(|error| {
                        de::Error::custom(format_args!("tensor {:?}: {error}", Excerpt(&name)))
                    })?;
                    header.entries.push((name, entry));
                }
                Ok(header)
            }
        }

        deserializer.deserialize_map(Entries)
    }
}

impl Header {
    /// Reads and checks the header of a whole safetensors file.
    ///
    /// Touches only the header; its entries are checked against the length of the data.
    pub fn parse(file: &[u8]) -> Result<Self, Fault> {
        let Some((length, rest)) = file.split_first_chunk::<LENGTH_BYTES>() else {
            return Err(Fault::new(
                "header length",
                format!("the file has {} bytes; a safetensors file has at least {LENGTH_BYTES}", file.len()),
            ));
        };
        let length = u64::from_le_bytes(*length);
        let header_len =
            usize::try_from(length).ok().filter(|length| *length <= MAX_HEADER).ok_or_else(|| {
                Fault::new("header length", format!("{length} bytes is more than the {MAX_HEADER} allowed"))
            })?;
        let Some((header, data)) = rest.split_at_checked(header_len) else {
            return Err(Fault::new(
                "header length",
                format!("{length} bytes, but only {} follow; the file is cut short", rest.len()),
            ));
        };
        let header = std::str::from_utf8(header)
            .map_err(|error| Fault::new("header", format!("not UTF-8: {error}")))?;
        let RawHeader { entries: raw, metadata } =
            serde_json::from_str(header).map_err(|error| Fault::json("header", &error))?;

        let data_start = LENGTH_BYTES + header_len;
        let mut entries = Vec::with_capacity(raw.len());
        for (name, raw) in raw {
            entries.push(check_entry(name, raw, data_start, data.len())?);
        }
        // Sorted by end as well, so that an empty tensor precedes the one that begins at the same byte.
        entries.sort_by_key(|entry| (entry.start, entry.len));
        check_tiling(&entries, data_start, data.len())?;
        check_names(&entries)?;
        Ok(Self { entries, metadata })
    }
}

fn check_entry(name: String, raw: RawEntry, data_start: usize, data_len: usize) -> Result<Entry, Fault> {
    let field = |what: &str| format!("tensor {name:?}: {what}");
    let Some(dtype) = Dtype::from_name(&raw.dtype) else {
        return Err(Fault::unsupported(
            field("dtype"),
            format!("{:?}; known are {}", Excerpt(&raw.dtype), Dtype::ALL.map(Dtype::name).join(", ")),
        ));
    };
    let shape =
        raw.shape.iter().map(|&dim| usize::try_from(dim)).collect::<Result<Vec<_>, _>>().map_err(|_| {
            Fault::new(field("shape"), format!("{:?} does not fit the address space", Shape(&raw.shape)))
        })?;
    let (begin, end) = raw.data_offsets;
    let range = usize::try_from(begin).ok().zip(usize::try_from(end).ok());
    let Some((begin, end)) = range.filter(|(begin, end)| begin <= end && *end <= data_len) else {
        return Err(Fault::new(
            field("data_offsets"),
            format!("[{begin}, {end}] is not a range within the {data_len} bytes of data"),
        ));
    };
    let expected =
        Encoding::Plain(dtype).data_bytes(&shape).map_err(|reason| Fault::new(field("shape"), reason))?;
    if end - begin != expected {
        return Err(Fault::new(
            field("data_offsets"),
            format!("{} bytes, but {dtype} of shape {:?} takes {expected}", end - begin, Shape(&shape)),
        ));
    }
    Ok(Entry { name, dtype, shape, start: data_start + begin, len: expected })
}

fn check_tiling(entries: &[Entry], data_start: usize, data_len: usize) -> Result<(), Fault> {
    let mut expected = data_start;
    for entry in entries {
        if entry.start != expected {
            let what = if entry.start < expected { "overlaps the tensor before it" } else { "leaves a hole" };
            return Err(Fault::new(
                format!("tensor {:?}: data_offsets", entry.name),
                format!("begins at byte {}, expected {}: {what}", entry.start, expected),
            ));
        }
        expected += entry.len;
    }
    if expected != data_start + data_len {
        return Err(Fault::new(
            "data",
            format!("{} bytes at the end belong to no tensor", data_start + data_len - expected),
        ));
    }
    Ok(())
}

fn check_names(entries: &[Entry]) -> Result<(), Fault> {
    let mut names: Vec<&str> = entries.iter().map(|entry| entry.name.as_str()).collect();
    names.sort_unstable();
    match names.windows(2).find(|pair| pair[0] == pair[1]) {
        Some(pair) => Err(Fault::new(format!("tensor {:?}", pair[0]), "listed twice")),
        None => Ok(()),
    }
}
