//! What others have measured, predicted from the ends of their own tables.

use super::{Part, Placement, Rates, Shape, place};

/// Every model has so many layers.
const LAYERS: usize = 32;

/// Tokens per second by the number of layers in memory, and whether naive interpolation is to be beaten.
struct Sweep {
    device: &'static str,
    measured: &'static [(usize, f64)],
    is_beaten: bool,
}

const SWEEPS: [Sweep; 3] = [
    Sweep {
        device: "iPad M3, 4B in 4 bits",
        measured: &[(0, 2.3), (8, 3.9), (16, 5.2), (24, 6.5), (28, 10.3), (32, 22.7)],
        is_beaten: true,
    },
    Sweep {
        device: "iPhone A17, 4B in 4 bits",
        measured: &[(0, 1.8), (8, 3.0), (16, 3.8), (24, 4.7), (28, 6.0), (32, 5.9)],
        is_beaten: false,
    },
    Sweep {
        device: "Mac Studio, 9B in 8 bits",
        measured: &[(0, 1.7), (8, 2.2), (16, 3.2), (24, 5.9), (32, 68.3)],
        is_beaten: true,
    },
];

impl Sweep {
    fn streamed(&self) -> f64 {
        self.measured[0].1
    }

    fn kept(&self) -> f64 {
        self.measured[self.measured.len() - 1].1
    }

    fn middle(&self) -> &[(usize, f64)] {
        &self.measured[1..self.measured.len() - 1]
    }

    /// Speed grows by as much with every layer.
    fn naive(&self, layers: usize) -> f64 {
        self.streamed() + (self.kept() - self.streamed()) * layers as f64 / LAYERS as f64
    }

    /// The model of [`predict`](super::predict) with rates from the two ends of the sweep.
    ///
    /// Reading on demand, what computing does not explain at the lower end is reading. Reading ahead, all of it is.
    fn predicted(&self, layers: usize, buffers: usize) -> f64 {
        const BYTES: u64 = 1 << 20;
        let part = Part { bytes: BYTES, kept_bytes: BYTES, is_layer: true };
        let shape = Shape {
            parts: vec![part; LAYERS],
            kv_bytes_per_token: 0,
            activation_bytes_per_row: 0,
            fixed_bytes: 0,
        };
        let per_layer = |seconds: f64| seconds / LAYERS as f64;
        let computing = if buffers == 0 { 1.0 / self.kept() } else { 0.0 };
        let reading = per_layer(1.0 / self.streamed() - computing);
        let rates = Rates {
            read_bytes_per_second: BYTES as f64 / reading,
            read_latency: 0.0,
            compute: vec![per_layer(1.0 / self.kept()); LAYERS],
            overhead: 0.0,
            contention: 1.0,
        };
        let placed = place(&Placement::Auto, &shape, &rates, layers, true, buffers).unwrap();
        placed.prediction.tokens_per_second
    }

    /// The least error that is left to whatever reads a layer at the same speed in every row: to stream a part of the
    /// layers then takes at least that part of the time for all.
    fn least_error(&self) -> f64 {
        self.mean_error(|layers, measured| {
            measured.min(self.streamed() * LAYERS as f64 / (LAYERS - layers) as f64)
        })
    }

    fn mean_error(&self, predicted: impl Fn(usize, f64) -> f64) -> f64 {
        let error = |&(layers, measured): &(usize, f64)| (predicted(layers, measured) / measured - 1.0).abs();
        self.middle().iter().map(error).sum::<f64>() / self.middle().len() as f64
    }
}

/// Of two structures, reading on demand explains what was measured better: a mapped file's pages come when they are
/// touched, and computing stands still. That is the only thing the middle rows were looked at for.
///
/// On the iPhone naive interpolation is closer. There a quarter of the layers in memory saves 40 % of the time, and all
/// layers are slower than seven eighths: reads do not have the same speed in every row, and the two ends cannot say so.
#[test]
fn published_sweeps() {
    for sweep in &SWEEPS {
        println!("\n{}", sweep.device);
        println!("kept  measured   on demand        ahead            naive            reads hidden");
        for &(layers, measured) in sweep.middle() {
            let predicted =
                [sweep.predicted(layers, 0), sweep.predicted(layers, 2), sweep.naive(layers), sweep.kept()];
            let cells =
                predicted.map(|speed| format!("{speed:6.2} {:+7.0} %", (speed / measured - 1.0) * 100.0));
            println!("{layers:4}  {measured:8.1}   {}", cells.join("  "));
        }
        let on_demand = sweep.mean_error(|layers, _| sweep.predicted(layers, 0));
        let ahead = sweep.mean_error(|layers, _| sweep.predicted(layers, 2));
        let naive = sweep.mean_error(|layers, _| sweep.naive(layers));
        let hidden = sweep.mean_error(|_, _| sweep.kept());
        let errors = [on_demand, ahead, naive, hidden].map(|error| format!("{:14.1} %", error * 100.0));
        println!("mean error      {}", errors.join(" "));
        println!("least error at constant speed of reading {:.1} %", sweep.least_error() * 100.0);
        assert!(on_demand < 0.25, "{}: {on_demand}", sweep.device);
        assert!(sweep.least_error() <= on_demand.min(ahead));
        if sweep.is_beaten {
            assert!(on_demand < naive / 4.0, "{}: {on_demand}, naive {naive}", sweep.device);
        } else {
            assert!(sweep.least_error() > naive, "{} could be beaten", sweep.device);
        }
    }
}

#[test]
fn the_ends_are_what_they_were_calibrated_to() {
    for sweep in &SWEEPS {
        for buffers in [0, 2] {
            let close = |found: f64, expected: f64| (found / expected - 1.0).abs() < 1e-6;
            assert!(close(sweep.predicted(0, buffers), sweep.streamed()), "{} {buffers}", sweep.device);
            assert!(close(sweep.predicted(LAYERS, buffers), sweep.kept()), "{} {buffers}", sweep.device);
        }
    }
}
