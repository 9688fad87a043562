//! The header of a GGUF file to be written.

use super::metadata::{List, Metadata, Value};
use super::reader::{DEFAULT_ALIGNMENT, Entry, MAGIC, encoding};
use crate::encoding::Encoding;

/// The format's version.
const VERSION: u32 = 3;

/// One past the largest number of a ggml type.
const TYPES: u32 = 64;

/// The alignment of tensors, and of the data behind the header.
pub(super) const ALIGNMENT: usize = DEFAULT_ALIGNMENT as usize;

/// Returns the bytes before the data. The tensors' `start` counts from the beginning of the data.
///
/// Numbers take 32 bits where they fit: that is what llama.cpp reads.
pub(super) fn head(metadata: &Metadata, tensors: &[Entry]) -> Result<Vec<u8>, String> {
    let mut keys: Vec<&str> = metadata.keys().collect();
    // Readers expect the architecture first.
    keys.sort_unstable_by_key(|key| (*key != "general.architecture", !key.starts_with("general."), *key));
    let mut head = MAGIC.to_vec();
    head.extend(VERSION.to_le_bytes());
    head.extend((tensors.len() as u64).to_le_bytes());
    head.extend((keys.len() as u64).to_le_bytes());
    for key in keys {
        push_text(&mut head, key);
        // The keys are those of the metadata.
        if let Some(value) = metadata.get(key) {
            push_value(&mut head, value);
        }
    }
    for Entry { name, shape, encoding, start, .. } in tensors {
        push_text(&mut head, name);
        head.extend((shape.len() as u32).to_le_bytes());
        shape.iter().rev().for_each(|dim| head.extend((*dim as u64).to_le_bytes()));
        let number =
            number_of(*encoding).ok_or_else(|| format!("tensor {name}: GGUF has no type for {encoding}"))?;
        head.extend(number.to_le_bytes());
        head.extend((*start as u64).to_le_bytes());
    }
    head.resize(head.len().next_multiple_of(ALIGNMENT), 0);
    Ok(head)
}

/// The ggml type number of an encoding.
pub(super) fn number_of(wanted: Encoding) -> Option<u32> {
    (0..TYPES).find(|number| encoding(*number) == Some(wanted))
}

fn push_text(to: &mut Vec<u8>, text: &str) {
    to.extend((text.len() as u64).to_le_bytes());
    to.extend(text.as_bytes());
}

fn push_value(to: &mut Vec<u8>, value: &Value) {
    let mut push = |kind: u32, bytes: &[u8]| {
        to.extend(kind.to_le_bytes());
        to.extend(bytes);
    };
    match value {
        Value::Unsigned(number) => match u32::try_from(*number) {
            Ok(narrow) => push(4, &narrow.to_le_bytes()),
            Err(_) => push(10, &number.to_le_bytes()),
        },
        Value::Signed(number) => match i32::try_from(*number) {
            Ok(narrow) => push(5, &narrow.to_le_bytes()),
            Err(_) => push(11, &number.to_le_bytes()),
        },
        Value::Float(number) => push(6, &(*number as f32).to_le_bytes()),
        Value::Bool(flag) => push(7, &[u8::from(*flag)]),
        Value::Text(text) => {
            push(8, &[]);
            push_text(to, text);
        }
        Value::List(list) => {
            push(9, &[]);
            push_list(to, list);
        }
    }
}

fn push_list(to: &mut Vec<u8>, list: &List) {
    fn numbers<const N: usize, T: Copy>(
        to: &mut Vec<u8>,
        kind: u32,
        values: &[T],
        bytes: impl Fn(T) -> [u8; N],
    ) {
        begin(to, kind, values.len());
        values.iter().for_each(|value| to.extend(bytes(*value)));
    }
    fn begin(to: &mut Vec<u8>, kind: u32, count: usize) {
        to.extend(kind.to_le_bytes());
        to.extend((count as u64).to_le_bytes());
    }
    match list {
        List::Bytes(values) => numbers(to, 0, values, |byte| [byte]),
        List::Bools(values) => numbers(to, 7, values, |flag| [u8::from(flag)]),
        List::I32(values) => numbers(to, 5, values, i32::to_le_bytes),
        List::I64(values) => numbers(to, 11, values, i64::to_le_bytes),
        List::F32(values) => numbers(to, 6, values, f32::to_le_bytes),
        List::F64(values) => numbers(to, 12, values, f64::to_le_bytes),
        List::Texts(texts) => {
            begin(to, 8, texts.len());
            texts.iter().for_each(|text| push_text(to, text));
        }
        List::Lists(lists) => {
            begin(to, 9, lists.len());
            lists.iter().for_each(|list| push_list(to, list));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::reader::Header;
    use super::*;
    use crate::encoding::{BlockType, Dtype};

    #[test]
    fn the_reader_finds_what_was_written() {
        let mut metadata = Metadata::default();
        for (key, value) in [
            ("a.count", Value::Unsigned(7)),
            ("a.huge", Value::Unsigned(1 << 40)),
            ("a.below", Value::Signed(-3)),
            ("a.factor", Value::Float(0.5)),
            ("a.flag", Value::Bool(true)),
            ("general.architecture", Value::Text("llama".into())),
            ("a.texts", Value::List(List::Texts(vec!["é".into(), String::new()]))),
            ("a.bytes", Value::List(List::Bytes(vec![0, 255]))),
            ("a.bools", Value::List(List::Bools(vec![true, false]))),
            ("a.ints", Value::List(List::I32(vec![-1, 2]))),
            ("a.floats", Value::List(List::F32(vec![0.25]))),
            ("a.lists", Value::List(List::Lists(vec![List::F64(vec![0.5])]))),
        ] {
            metadata.insert(key.into(), value).unwrap();
        }
        let entry = |name: &str, shape: &[usize], encoding: Encoding, start| Entry {
            name: name.into(),
            shape: shape.into(),
            encoding,
            start,
            len: encoding.data_bytes(shape).unwrap(),
        };
        let mut tensors = vec![
            entry("one", &[3, 32], Encoding::Block(BlockType::Q4_0), 0),
            entry("two", &[5], Encoding::Plain(Dtype::F32), 64),
        ];
        let mut file = head(&metadata, &tensors).unwrap();
        assert_eq!(file.len() % ALIGNMENT, 0);
        tensors.iter_mut().for_each(|tensor| tensor.start += file.len());
        file.resize(file.len() + 64 + 20, 0);
        let read = Header::parse(&file).unwrap();
        assert_eq!((read.version, &read.metadata, &read.entries), (VERSION, &metadata, &tensors));
    }

    #[test]
    fn every_block_type_has_its_number_and_unsigned_integers_have_none() {
        for block in BlockType::ALL {
            assert_eq!(BlockType::from_number(number_of(Encoding::Block(block)).unwrap()), Some(block));
        }
        assert_eq!(number_of(Encoding::Plain(Dtype::U8)), None);
    }
}
