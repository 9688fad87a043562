//! Tests that read units arrive as requested, for any order of requests and any number of buffers.

#![allow(clippy::unwrap_used)]

use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use firebox_store::{Checkpoint, ReadAt, ReadMethod, ReadUnit, StoreError, Stream, StreamConfig, Tensors};
use proptest::prelude::*;

fn checkpoint() -> Checkpoint {
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures");
    Checkpoint::open(fixtures.join("gguf/qwen3_moe/hf")).unwrap()
}

/// One unit for each of some tensors.
fn units(checkpoint: &Checkpoint) -> Vec<Arc<ReadUnit>> {
    let names = checkpoint.tensors().take(12).map(|info| info.name.as_str());
    names.map(|name| Arc::new(checkpoint.read_unit([name]).unwrap())).collect()
}

fn stream(checkpoint: &Checkpoint, buffers: usize, readers: usize) -> Stream {
    let disk = checkpoint.disk(ReadMethod::Buffered);
    Stream::new(disk, units(checkpoint), StreamConfig { buffers, readers }).unwrap()
}

fn check(checkpoint: &Checkpoint, loaded: &impl Tensors) {
    let name = loaded.names().next().unwrap().to_owned();
    assert_eq!(loaded.weight(&name).unwrap().data, checkpoint.weight(&name).unwrap().data, "{name}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn orders_of_several_threads_are_all_served(
        buffers in 0usize..4,
        readers in 1usize..3,
        orders in prop::collection::vec(
            prop::collection::vec((prop::collection::vec(0usize..12, 1..6), 0usize..6), 1..6),
            1..4,
        ),
        changes in prop::collection::vec((0usize..12, any::<bool>(), 0usize..4), 0..12),
    ) {
        let checkpoint = checkpoint();
        let stream = stream(&checkpoint, buffers, readers);
        std::thread::scope(|scope| {
            for orders in &orders {
                let (checkpoint, stream) = (&checkpoint, &stream);
                scope.spawn(move || {
                    for (units, taken) in orders {
                        // Some are not taken after all.
                        let order = stream.request(units.iter().copied());
                        order.take(*taken).for_each(|loaded| check(checkpoint, &loaded.unwrap()));
                    }
                });
            }
            for (unit, skipped, buffers) in &changes {
                stream.skip(*unit, *skipped);
                stream.read_ahead(0..*unit);
                stream.set_buffers(*buffers);
            }
        });
    }
}

/// Waits for units by polling, as a caller does that has other work to do meanwhile.
fn until_there(stream: &Stream, units: Range<usize>) {
    let began = std::time::Instant::now();
    while !stream.prioritize(units.clone()) {
        assert!(began.elapsed().as_secs() < 60, "units {units:?} never come");
        std::thread::sleep(std::time::Duration::from_micros(100));
    }
}

/// What is aimed at comes, whatever is in the buffers and however few there are.
#[test]
fn prioritized_units_are_read_before_they_are_taken() {
    let checkpoint = checkpoint();
    for buffers in 0..3 {
        let stream = stream(&checkpoint, buffers, 1);
        for unit in [3, 4, 11, 0, 7, 7, 2] {
            until_there(&stream, unit..unit + 1);
            let before = stream.report().missed;
            check(&checkpoint, &stream.take(unit).unwrap());
            assert_eq!(stream.report().missed, before, "it was there");
        }
        stream.prioritize(5..6);
        stream.skip(5, true);
        stream.clear_priority();
        stream.set_buffers(0);
        let began = std::time::Instant::now();
        while stream.made_buffers() > 0 {
            assert!(began.elapsed().as_secs() < 60, "buffers are not released although no request is left");
        }
    }
}

/// Read units that are needed at once come together, whatever is in the buffers and however few there are.
#[test]
fn units_requested_together_arrive_together() {
    let checkpoint = checkpoint();
    for buffers in 0..5 {
        let stream = stream(&checkpoint, buffers, 1);
        for (units, skipped) in [(3..6, None), (4..8, Some(5)), (0..1, None), (9..12, Some(9))] {
            if let Some(skipped) = skipped {
                stream.skip(skipped, true);
            }
            until_there(&stream, units.clone());
            let before = stream.report().missed;
            let wanted: Vec<usize> = units.filter(|unit| Some(*unit) != skipped).collect();
            let loaded = stream.take_all(&wanted).unwrap();
            assert_eq!(stream.report().missed, before, "they were there");
            let given: Vec<_> = loaded.iter().map(|loaded| loaded.names().next().unwrap()).collect();
            let names: Vec<_> = checkpoint.tensors().map(|info| info.name.as_str()).collect();
            assert!(wanted.iter().map(|unit| names[*unit]).eq(given));
            loaded.iter().for_each(|loaded| check(&checkpoint, loaded));
        }
        // Nor do they have to be aimed at.
        for loaded in stream.take_all(&[7, 6, 10, 11]).unwrap() {
            check(&checkpoint, &loaded);
        }
    }
}

/// What was read stays where it is for as long as it is needed, and the stream goes on with other buffers.
#[test]
fn what_is_detached_stays() {
    let checkpoint = checkpoint();
    let stream = stream(&checkpoint, 1, 1);
    let kept: Vec<_> = (0..12)
        .map(|unit| {
            let loaded = stream.take(unit).unwrap();
            stream.detach(&loaded);
            stream.detach(&loaded);
            stream.skip(unit, true);
            loaded
        })
        .collect();
    assert!(stream.made_buffers() <= 1);
    for unit in (0..12).rev() {
        check(&checkpoint, &stream.take(unit).unwrap());
    }
    kept.iter().for_each(|loaded| check(&checkpoint, loaded));
    drop(kept);
    assert!(stream.made_buffers() <= 1);
}

/// A failing source of bytes. Its failures are reported to the requests concerned, and only while it fails.
#[derive(Debug)]
struct Bad(Arc<dyn ReadAt>, std::sync::atomic::AtomicUsize);

impl ReadAt for Bad {
    fn read_at(&self, file: usize, buffer: &mut [u8], start: u64) -> Result<usize, StoreError> {
        match self.1.load(std::sync::atomic::Ordering::Relaxed) {
            0 => panic!("on purpose"),
            1 => Ok(buffer.len() + 1),
            _ => self.0.read_at(file, buffer, start),
        }
    }
}

#[test]
fn a_source_that_panics_or_lies_is_an_error() {
    let checkpoint = checkpoint();
    let bad = Arc::new(Bad(checkpoint.disk(ReadMethod::Buffered), 0.into()));
    let config = StreamConfig { buffers: 2, readers: 1 };
    let stream = Stream::new(bad.clone(), units(&checkpoint), config).unwrap();
    // What was being read ahead while the source was still another would be told of that.
    stream.read_ahead(0..0);
    assert!(matches!(stream.take(3), Err(StoreError::ReaderPanicked)));
    bad.1.store(1, std::sync::atomic::Ordering::Relaxed);
    assert!(matches!(stream.take(4), Err(StoreError::Overread { .. })));
    bad.1.store(2, std::sync::atomic::Ordering::Relaxed);
    for unit in 0..12 {
        check(&checkpoint, &stream.take(unit).unwrap());
    }
}
