//! A head's description and a model's table of heads: what is accepted is written and read back the same, names only
//! files and directories of its own, and has nothing of the trunk.
#![no_main]

use firebox_store::{HeadManifest, HeadTable, is_head_name};

libfuzzer_sys::fuzz_target!(|json: &[u8]| {
    if let Ok(head) = HeadManifest::parse(json) {
        for segment in &head.segments {
            let id = segment.segment().expect("checked");
            assert_eq!(segment.file, format!("{id}.safetensors"));
            assert!(!id.in_trunk(head.split));
        }
        let again = serde_json::to_vec(&head).expect("a description is plain data");
        assert_eq!(HeadManifest::parse(&again), Ok(head));
    }
    if let Ok(table) = HeadTable::parse(json) {
        assert!(table.heads.iter().all(|row| is_head_name(&row.name)));
        let again = serde_json::to_vec(&table).expect("a table is plain data");
        assert_eq!(HeadTable::parse(&again), Ok(table));
    }
});
