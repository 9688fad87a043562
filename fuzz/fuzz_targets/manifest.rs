//! A bundle's manifest: what is accepted is written and read back the same, and names only its own files.
#![no_main]

use firebox_store::Manifest;

libfuzzer_sys::fuzz_target!(|json: &[u8]| {
    let Ok(manifest) = Manifest::parse(json) else { return };
    for segment in &manifest.segments {
        let id = segment.segment().expect("checked");
        assert_eq!(segment.file, format!("segments/{id}.safetensors"));
    }
    let again = serde_json::to_vec(&manifest).expect("a manifest is plain data");
    assert_eq!(Manifest::parse(&again), Ok(manifest));
});
