//! Numbers of bytes as text.

use crate::MemoryError;

/// Formats a number of bytes for people: `1.50 GiB`.
pub fn human_bytes(bytes: u64) -> String {
    const UNITS: [&str; 6] = ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    let mut value = bytes as f64;
    let mut unit = None;
    for name in UNITS {
        if value < 1024.0 {
            break;
        }
        value /= 1024.0;
        unit = Some(name);
    }
    match unit {
        Some(unit) => format!("{value:.2} {unit}"),
        None => format!("{bytes} B"),
    }
}

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

    #[test]
    fn sizes_are_formatted_with_the_largest_unit_that_fits() {
        assert_eq!(human_bytes(1023), "1023 B");
        assert_eq!(human_bytes(3 << 29), "1.50 GiB");
        assert_eq!(human_bytes(u64::MAX), "16.00 EiB");
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
