//! The weight cache while parts are being read, and while memory is short.

use std::path::Path;
use std::sync::atomic::AtomicBool;
use std::thread;

use firebox_model::{StreamedConfig, StreamedDecoder};
use firebox_store::{Checkpoint, ReadAt, ReadMethod, StoreError, StreamConfig};

use super::*;
use crate::device;
use crate::residency::entitlement::Urgency;
use crate::schedule::Priority;

/// A disk that reads nothing while it is held.
#[derive(Debug)]
struct HeldDisk {
    files: Arc<dyn ReadAt>,
    is_held: AtomicBool,
    /// Whether a read waits.
    is_asked: AtomicBool,
}

impl HeldDisk {
    fn hold(&self, is_held: bool) {
        self.is_held.store(is_held, Ordering::Relaxed);
    }

    fn wait_until_asked(&self) {
        for _ in (0..6000).take_while(|_| !self.is_asked.load(Ordering::Relaxed)) {
            thread::sleep(Duration::from_millis(10));
        }
    }
}

impl ReadAt for HeldDisk {
    fn read_at(&self, file: usize, buffer: &mut [u8], start: u64) -> Result<usize, StoreError> {
        // Released after a minute in any case.
        for _ in (0..6000).take_while(|_| self.is_held.load(Ordering::Relaxed)) {
            self.is_asked.store(true, Ordering::Relaxed);
            thread::sleep(Duration::from_millis(10));
        }
        self.files.read_at(file, buffer, start)
    }
}

fn open() -> (StreamedDecoder, Arc<HeldDisk>) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/reference/llama");
    let checkpoint = Checkpoint::open(path).unwrap();
    let disk = Arc::new(HeldDisk {
        files: checkpoint.disk(ReadMethod::Buffered),
        is_held: AtomicBool::new(false),
        is_asked: AtomicBool::new(false),
    });
    let config = StreamedConfig {
        stream: StreamConfig { buffers: 0, ..StreamConfig::default() },
        method: Some(ReadMethod::Buffered),
        source: Some(disk.clone()),
        rate: Some(1e9),
        ..StreamedConfig::default()
    };
    (StreamedDecoder::open(&checkpoint, &device("cpu").unwrap(), &config).unwrap(), disk)
}

fn add(budget: &Budget, weights: &Arc<StreamedWeights>) -> Arc<CachedModel> {
    let cache = WeightCache::new(budget, None, 0).unwrap();
    let bytes = (0..weights.parts()).map(|part| weights.part_bytes(part)).sum();
    let share = ModelShare::entitled(budget, weights, Entitlement::new(false, bytes, 0)).unwrap();
    let cached = cache.add(share);
    cached.set_open();
    cached
}

#[test]
fn residency_may_change_while_a_part_is_loaded() {
    let (decoder, disk) = open();
    let (weights, budget) = (decoder.weights(), Budget::new(1 << 30));
    let cached = add(&budget, weights);
    disk.hold(true);
    thread::scope(|scope| {
        let loading = scope.spawn(|| cached.preload(weights, true));
        disk.wait_until_asked();
        let is_free = cached.cache.state.try_lock().is_ok();
        disk.hold(false);
        loading.join().unwrap().unwrap();
        assert!(is_free, "the state is locked while the disk is waited for");
    });
    assert!((0..weights.parts()).all(|part| weights.is_resident(part)));
    let bytes: u64 = (0..weights.parts()).map(|part| weights.part_bytes(part)).sum();
    assert_eq!(budget.held(Account::Weights), bytes);
    drop(cached);
    assert_eq!(budget.held(Account::Weights), 0, "the handle owns the share");
}

/// A model that has become idle, with one buffer that a held disk reads into.
fn reading_model(budget: &Budget) -> (StreamedDecoder, Arc<HeldDisk>, Arc<CachedModel>) {
    let (decoder, disk) = open();
    disk.hold(true);
    let weights = decoder.weights();
    let cached = add(budget, weights);
    cached.set_urgency(weights, Some(Urgency { priority: Priority::Normal, awaits_first_token: true }));
    disk.wait_until_asked();
    cached.set_urgency(weights, None);
    assert_eq!(budget.held(Account::Scratch), weights.buffer_bytes() as u64);
    (decoder, disk, cached)
}

#[test]
fn a_buffer_that_is_read_into_is_waited_for() {
    let budget = Budget::new(100 << 20);
    let (_decoder, disk, cached) = reading_model(&budget);
    thread::scope(|scope| {
        scope.spawn(|| {
            thread::sleep(Duration::from_millis(300));
            disk.hold(false);
        });
        let charge = cached.charge(Account::Streams, budget.total(), Duration::from_secs(30));
        assert_eq!(charge.unwrap().bytes(), budget.total());
    });
}

#[test]
fn a_buffer_that_is_not_released_is_not_waited_for_any_longer() {
    let budget = Budget::new(100 << 20);
    let (_decoder, disk, cached) = reading_model(&budget);
    let began = Instant::now();
    let charge = cached.charge(Account::Streams, budget.total(), Duration::from_millis(100));
    assert!(matches!(charge, Err(MemoryError::OverBudget { .. })));
    assert!(began.elapsed() < Duration::from_secs(20));
    disk.hold(false);
}

#[test]
fn no_part_is_added_while_memory_is_short() {
    let cache = WeightCache::new(&Budget::unlimited(), None, 0).unwrap();
    let has_room = |bytes| cache.lock().state.has_room(bytes);
    assert!(has_room(1 << 30), "nothing is known");
    cache.note_pressure(Pressure { level: Level::None, available: Some(100 << 20) });
    assert!(has_room(30 << 20) && !has_room(90 << 20));
    cache.note_pressure(Pressure { level: Level::Critical, available: Some(100 << 30) });
    assert!(!has_room(1));
}
