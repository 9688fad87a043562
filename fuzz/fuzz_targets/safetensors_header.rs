//! A whole safetensors file: what is accepted tiles its data.
#![no_main]

use firebox_store::safetensors::Header;

libfuzzer_sys::fuzz_target!(|file: &[u8]| {
    let Ok(header) = Header::parse(file) else { return };
    let mut end = None;
    for entry in &header.entries {
        assert!(end.is_none_or(|end| end == entry.start));
        assert!(entry.start + entry.len <= file.len());
        end = Some(entry.start + entry.len);
    }
    assert!(end.is_none_or(|end| end == file.len()));
});
