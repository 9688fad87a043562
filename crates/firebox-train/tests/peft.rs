//! Adapters as the `peft` package writes them: see `make_peft.py`.

#![allow(clippy::unwrap_used, reason = "a test that fails here should say so")]

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use firebox_train::Adapter;

/// Returns the product that an adapter adds to each module's weight.
fn products(adapter: &Adapter) -> BTreeMap<String, Vec<Vec<f32>>> {
    let rank = adapter.rank;
    let product = |a: &[f32], b: &[f32], inputs: usize| -> Vec<Vec<f32>> {
        let row = |row: &[f32]| {
            let column = |at: usize| (0..rank).map(|part| row[part] * a[part * inputs + at]).sum::<f32>();
            (0..inputs).map(|at| adapter.scale * column(at)).collect()
        };
        b.chunks(rank).map(row).collect()
    };
    let pairs = adapter.pairs.iter();
    pairs.map(|pair| (pair.module.clone(), product(&pair.a, &pair.b, pair.inputs(rank)))).collect()
}

fn close(one: &BTreeMap<String, Vec<Vec<f32>>>, other: &BTreeMap<String, Vec<Vec<f32>>>) {
    assert_eq!(one.keys().collect::<Vec<_>>(), other.keys().collect::<Vec<_>>());
    for (module, expected) in one {
        let found = &other[module];
        assert_eq!(found.len(), expected.len(), "{module}");
        for (found, expected) in found.concat().iter().zip(expected.concat()) {
            assert!((found - expected).abs() < 1e-5, "{module}: {found} instead of {expected}");
        }
    }
}

#[test]
fn adapters_of_peft_add_what_peft_adds() {
    for (name, rank, modules) in [("peft", 2, 4), ("peft-rslora", 3, 2)] {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name);
        let adapter = Adapter::read(&folder).unwrap();
        assert_eq!((adapter.rank, adapter.pairs.len()), (rank, modules));
        let expected = fs::read_to_string(folder.join("product.json")).unwrap();
        let expected = serde_json::from_str(&expected).unwrap();
        close(&expected, &products(&adapter));

        // And what is written again adds the same, by our reading; by peft's with FIREBOX_PEFT_OUT and make_peft.py.
        let out = tempfile::tempdir().unwrap();
        let out = match std::env::var_os("FIREBOX_PEFT_OUT") {
            Some(folder) => Path::new(&folder).join(name),
            None => out.path().to_owned(),
        };
        adapter.write(&out).unwrap();
        close(&expected, &products(&Adapter::read(&out).unwrap()));
    }
}
