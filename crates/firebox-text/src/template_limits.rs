//! Limits on the values that a template may build.

use minijinja::value::{Value, ValueKind};
use minijinja::{Error, ErrorKind, functions};
use std::cell::Cell;

/// Far more text than any context holds.
pub(crate) const MAX_VALUE_BYTES: usize = 64 << 20;
/// Includes copies, so that templates may append to one string many times.
const MAX_TOTAL_BYTES: usize = 2 << 30;
/// The least size counted for an item of a list.
const ITEM_BYTES: usize = 16;
const MAX_DEPTH: usize = 256;

thread_local! {
    /// Bytes built so far by the template that this thread renders.
    static BYTES_BUILT: Cell<usize> = const { Cell::new(0) };
}

/// The limit that a template exceeded.
#[derive(Debug, thiserror::Error)]
#[error("the template exceeded its {0}")]
pub(crate) struct TooLarge(pub &'static str);

fn too_large(limit: &'static str) -> Error {
    Error::new(ErrorKind::InvalidOperation, "the value is too large").with_source(TooLarge(limit))
}

/// Begins a rendering on this thread.
pub(crate) fn begin() {
    BYTES_BUILT.set(0);
}

/// Refuses values larger than [`MAX_VALUE_BYTES`].
pub(crate) fn check(size: usize) -> Result<(), Error> {
    if size > MAX_VALUE_BYTES { Err(too_large("64 MiB for one value")) } else { Ok(()) }
}

pub(crate) fn charge(size: usize) -> Result<(), Error> {
    check(size)?;
    let built = BYTES_BUILT.get().saturating_add(size);
    BYTES_BUILT.set(built);
    if built > MAX_TOTAL_BYTES { Err(too_large("2 GiB for all values")) } else { Ok(()) }
}

/// The approximate length of a value as text.
pub(crate) fn check_size(value: &Value) -> Result<usize, Error> {
    let mut size = 0;
    add(value, &mut size, 0)?;
    Ok(size)
}

fn add(value: &Value, size: &mut usize, depth: usize) -> Result<(), Error> {
    if depth > MAX_DEPTH {
        return Err(Error::new(ErrorKind::InvalidOperation, "the value is nested too deeply"));
    }
    *size = size.saturating_add(value.as_str().map_or(ITEM_BYTES, str::len));
    check(*size)?;
    let kind = value.kind();
    if matches!(kind, ValueKind::Seq | ValueKind::Iterable | ValueKind::Map) {
        check(value.len().unwrap_or(0).saturating_mul(ITEM_BYTES))?;
        for item in value.try_iter()? {
            add(&item, size, depth + 1)?;
            if kind == ValueKind::Map {
                add(&value.get_item(&item)?, size, depth + 1)?;
            }
        }
    }
    Ok(())
}

/// The filter around operands and results: fails for values that are too large.
pub(crate) fn fit(value: &Value) -> Result<Value, Error> {
    match value.as_str() {
        Some(text) => charge(text.len())?,
        None if matches!(value.kind(), ValueKind::Seq | ValueKind::Iterable | ValueKind::Map) => {
            check_size(value)?;
            charge(ITEM_BYTES * value.len().unwrap_or(1))?;
        }
        None => {}
    }
    Ok(value.clone())
}

/// The filter around assigned values. Refuses values deeper than [`MAX_DEPTH`], because dropping one recurses once per level, and
/// evaluates lazy values, whose depth cannot be seen.
pub(crate) fn kept(value: &Value) -> Result<Value, Error> {
    check_size(value)?;
    Ok(materialized(value, false)?.unwrap_or_else(|| value.clone()))
}

/// The filter around values assigned to an attribute of a namespace. A loop can nest namespaces, each of them shallow when it
/// is checked, and the contents of `loop` cannot be seen.
pub(crate) fn stored(value: &Value) -> Result<Value, Error> {
    check_size(value)?;
    Ok(materialized(value, true)?.unwrap_or_else(|| value.clone()))
}

/// A copy in which lazy sequences are lists; `None` if there are none. The value's size has been checked.
fn materialized(value: &Value, is_stored: bool) -> Result<Option<Value>, Error> {
    let kind = value.kind();
    if kind == ValueKind::Map {
        return materialized_map(value, is_stored);
    }
    if !matches!(kind, ValueKind::Seq | ValueKind::Iterable) {
        return Ok(None);
    }
    let mut changes = kind == ValueKind::Iterable;
    let mut items = Vec::new();
    for item in value.try_iter()?.checked() {
        let item = item?;
        let new = materialized(&item, is_stored)?;
        changes |= new.is_some();
        items.push(new.unwrap_or(item));
    }
    if !changes {
        return Ok(None);
    }
    charge(ITEM_BYTES * items.len())?;
    Ok(Some(items.into()))
}

/// A copy of a dictionary without lazy values. Objects that only resemble dictionaries, such as `loop`, are more than their items.
fn materialized_map(value: &Value, is_stored: bool) -> Result<Option<Value>, Error> {
    let kind = value.as_object().map_or("", |object| object.type_name());
    if is_stored && ["::Namespace", "::Loop"].iter().any(|name| kind.ends_with(name)) {
        let reason = "neither a namespace nor `loop` can be put into a namespace";
        return Err(Error::new(ErrorKind::InvalidOperation, reason));
    }
    if !kind.starts_with("indexmap::") {
        return Ok(None);
    }
    let mut changed = Vec::new();
    for key in value.try_iter()? {
        if let (Some(name), Some(new)) = (key.as_str(), materialized(&value.get_item(&key)?, is_stored)?) {
            changed.push((name.to_owned(), new));
        }
    }
    if changed.is_empty() {
        return Ok(None);
    }
    charge(ITEM_BYTES * value.len().unwrap_or(0))?;
    functions::dict(Some(value.clone()), changed.into_iter().collect()).map(Some)
}

/// Checks a call before it is made, by an upper bound of the result's size. The first argument is the value that the filter or
/// method is called on.
pub(crate) fn before(name: &str, args: &[Value], is_method: bool) -> Result<(), Error> {
    let mut all = 0_usize;
    for arg in args {
        all = all.saturating_add(check_size(arg)?);
    }
    check(all)?;
    let text = |index: usize| args.get(index).map(Value::to_string).unwrap_or_default();
    let numbers = || args.iter().skip(1).flat_map(whole_numbers).max().unwrap_or(0);
    let size = match name {
        "replace" => {
            let (old, new) = (text(1), text(2));
            text(0).matches(&old).count().saturating_mul(new.len())
        }
        "indent" => text(0).lines().count().saturating_add(1).saturating_mul(numbers()),
        "join" => {
            let (items, joiner) = if is_method { (1, 0) } else { (0, 1) };
            let count = args.get(items).map_or(0, |items| items.len().unwrap_or(all));
            // The joiner, named or not, is no longer than all arguments together.
            count.saturating_mul(text(joiner).len())
        }
        "batch" | "slice" => numbers().saturating_mul(ITEM_BYTES),
        "format" => {
            let pattern = text(0);
            let widths = pattern.split(|c: char| !c.is_ascii_digit()).filter(|digits| !digits.is_empty());
            let written =
                widths.fold(0_usize, |sum, digits| sum.saturating_add(digits.parse().unwrap_or(usize::MAX)));
            // A width may be an argument, and every argument may be used many times.
            let given = if pattern.contains('*') || pattern.contains(":{") { numbers() } else { 0 };
            let uses = pattern.matches(['%', '{']).count();
            written.saturating_add(given.saturating_mul(uses)).saturating_add(all.saturating_mul(uses))
        }
        _ => 0,
    };
    check(size.saturating_add(all))
}

/// The number of an argument, or the largest one among named arguments.
fn whole_numbers(value: &Value) -> Vec<usize> {
    let number = |value: &Value| value.is_integer().then(|| value.as_usize().unwrap_or(0));
    if value.kind() != ValueKind::Map {
        return number(value).into_iter().collect();
    }
    let Ok(keys) = value.try_iter() else { return Vec::new() };
    keys.filter_map(|key| number(&value.get_item(&key).ok()?)).collect()
}
