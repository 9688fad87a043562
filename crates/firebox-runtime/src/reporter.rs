//! Reports passes, layers and reads of a decoder to its meters.

use std::sync::Arc;
use std::time::Instant;

use firebox_model::{Decoder, Observer, Passed};
use firebox_store::ReadObserver;

use crate::telemetry::{Counter, Gauge, Kind, Meters, ModelSnapshot, Telemetry};

/// Records what a decoder and its readers do.
#[derive(Debug)]
pub(crate) struct Reporter {
    meters: Arc<Meters>,
}

impl Reporter {
    /// Attaches a reporter to a decoder.
    pub fn attach(decoder: &Arc<Decoder>, meters: &Arc<Meters>, telemetry: &Telemetry) {
        telemetry.disregard_faults();
        decoder.set_observer(Arc::new(Self { meters: meters.clone() }));
        if let Some(streamed) = decoder.streamed() {
            let reads = |kinds| Arc::new(Reads { meters: meters.clone(), kinds });
            let experts = reads([Kind::ReadExpert, Kind::WaitExpert]);
            streamed.set_observers(reads([Kind::Read, Kind::Wait]), experts);
            let decoder = Arc::downgrade(decoder);
            telemetry.ask(meters, "weights", move |snapshot| match decoder.upgrade() {
                Some(decoder) => {
                    tell(&decoder, snapshot);
                    true
                }
                None => false,
            });
        }
    }
}

/// Adds the statistics of a streamed decoder to a snapshot.
fn tell(decoder: &Decoder, snapshot: &mut ModelSnapshot) {
    let Some(streamed) = decoder.streamed() else { return };
    let report = streamed.report();
    let time = |time: std::time::Duration| time.as_nanos() as u64;
    for (counter, amount) in [
        (Counter::StreamedParts, report.units),
        (Counter::StreamedBytes, report.bytes),
        (Counter::PrefetchHits, report.found),
        (Counter::PrefetchMisses, report.missed),
        (Counter::ReadTime, time(report.reading)),
        (Counter::ReadWait, time(report.waiting)),
    ] {
        snapshot.add(counter, amount);
    }
    let kept: Vec<bool> = (0..streamed.parts()).map(|part| streamed.is_resident(part)).collect();
    let bytes = |(part, kept): (usize, &bool)| if *kept { streamed.part_bytes(part) } else { 0 };
    snapshot.gauges.extend([
        (Gauge::Parts, kept.len() as u64),
        (Gauge::KeptParts, kept.iter().filter(|kept| **kept).count() as u64),
        (Gauge::KeptWeights, kept.iter().enumerate().map(bytes).sum()),
        (Gauge::KeptExperts, streamed.expert_bytes()),
        (Gauge::ReadBuffers, streamed.buffers() as u64),
    ]);
    snapshot.kept = kept;
}

impl Observer for Reporter {
    fn follows(&self) -> bool {
        self.meters.timeline().is_on()
    }

    fn layer(&self, layer: usize, rows: usize, began: Instant) {
        self.meters.drawn(Kind::Layer, [layer as u64, rows as u64], Some(began));
    }

    fn logits(&self, rows: usize, began: Instant) {
        self.meters.drawn(Kind::Logits, [rows as u64, 0], Some(began));
    }

    fn pass(&self, Passed { sequences, rows, logits }: Passed, began: Instant) {
        let kind = match logits {
            _ if rows == sequences => Kind::Decode,
            logits if logits > sequences => Kind::Verify,
            _ => Kind::Prefill,
        };
        self.meters.passed(kind, sequences, rows, began);
    }

    fn replay(&self, tokens: usize, began: Instant) {
        if self.follows() {
            self.meters.drawn(Kind::Replay, [tokens as u64, 0], Some(began));
        }
    }
}

/// Records reads and waits of one kind of reader on the timeline.
#[derive(Debug)]
struct Reads {
    meters: Arc<Meters>,
    /// The kinds of event for reading and for waiting.
    kinds: [Kind; 2],
}

impl ReadObserver for Reads {
    fn follows(&self) -> bool {
        self.meters.timeline().is_on()
    }

    fn read(&self, unit: usize, bytes: u64, began: Instant) {
        self.meters.drawn(self.kinds[0], [unit as u64, bytes], Some(began));
    }

    fn waited(&self, unit: usize, began: Instant) {
        self.meters.drawn(self.kinds[1], [unit as u64, 0], Some(began));
    }
}

#[cfg(test)]
mod tests;
