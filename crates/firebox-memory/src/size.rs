//! Sizes in bytes that people write.

use crate::MemoryError;

/// Parses a number of bytes: `600M`, `1.5G`, `1 GiB`, `4096`.
///
/// K, M, G and T are powers of 1024, with or without `B` or `iB`.
pub fn parse_bytes(text: &str) -> Result<u64, MemoryError> {
    parse_size(text.trim()).ok_or_else(|| MemoryError::Size { text: text.to_owned() })
}

fn parse_size(text: &str) -> Option<u64> {
    let end = text.find(|letter: char| !letter.is_ascii_digit() && letter != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(end);
    let unit = unit_bytes(unit.trim_start())?;
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    if whole.is_empty() && fraction.is_empty() || fraction.contains('.') {
        return None;
    }
    let whole: u64 = if whole.is_empty() { 0 } else { whole.parse().ok()? };
    let fraction: f64 = format!("0.{fraction}").parse().ok()?;
    whole.checked_mul(unit)?.checked_add((fraction * unit as f64) as u64)
}

fn unit_bytes(unit: &str) -> Option<u64> {
    match unit.to_ascii_lowercase().as_str() {
        "" | "b" => Some(1),
        "k" | "kb" | "kib" => Some(1 << 10),
        "m" | "mb" | "mib" => Some(1 << 20),
        "g" | "gb" | "gib" => Some(1 << 30),
        "t" | "tb" | "tib" => Some(1 << 40),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::human_bytes;

    #[test]
    fn sizes_are_parsed() {
        let sizes = [
            ("0", 0),
            ("4096", 4096),
            ("17B", 17),
            ("600M", 600 << 20),
            ("1.5G", 3 << 29),
            (" 1 GiB ", 1 << 30),
            ("2gb", 2 << 30),
            (".5k", 512),
            ("3.t", 3 << 40),
            ("18446744073709551615", u64::MAX),
        ];
        for (text, bytes) in sizes {
            assert_eq!(parse_bytes(text).unwrap(), bytes, "{text}");
        }
    }

    #[test]
    fn invalid_sizes_are_errors_that_quote_the_text() {
        let wrong =
            ["", "G", ".", "-1", "+1", "1e3", "1.2.3", "1 X", "1 G B", "inf", "16777216T", "0x10", "٣"];
        for text in wrong {
            let error = parse_bytes(text).unwrap_err().to_string();
            assert!(error.contains(text) && error.contains("600M"), "{error}");
        }
    }

    proptest! {
        #[test]
        fn formatted_sizes_can_be_parsed(bytes in 0u64..1 << 50) {
            let read = parse_bytes(&human_bytes(bytes)).unwrap();
            prop_assert!(read.abs_diff(bytes) as f64 <= bytes as f64 / 100.0);
        }

        #[test]
        fn no_text_panics(text in ".*") {
            let _ = parse_bytes(&text);
        }
    }
}
