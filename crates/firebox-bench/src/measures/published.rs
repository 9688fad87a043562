//! Predicts measurements that others have published from the ends of their own tables.

use firebox_runtime::RuntimeError;
use firebox_runtime::planner::{Part, Placement, Rates, Shape, place};

use crate::figure::{Declared, Figures, compared};
use crate::setup::Setup;

pub const FIGURES: &[Declared] = &[
    compared("published.ipad", "%", "%", "interpolating"),
    compared("published.iphone", "%", "%", "interpolating"),
    compared("published.mac", "%", "%", "interpolating"),
];

/// Every model has so many layers.
const LAYERS: usize = 32;

/// Of two structures, reading on demand explains what was measured better: a mapped file's pages come when they are
/// touched, and computing stands still. That is the only thing the middle rows were looked at for.
const ON_DEMAND: usize = 0;

/// Tokens per second by the number of layers in memory.
struct Sweep {
    figure: &'static str,
    measured: &'static [(usize, f64)],
}

const SWEEPS: [Sweep; 3] = [
    // iPad M3, 4B in 4 bits.
    Sweep {
        figure: "published.ipad",
        measured: &[(0, 2.3), (8, 3.9), (16, 5.2), (24, 6.5), (28, 10.3), (32, 22.7)],
    },
    // iPhone A17, 4B in 4 bits.
    Sweep {
        figure: "published.iphone",
        measured: &[(0, 1.8), (8, 3.0), (16, 3.8), (24, 4.7), (28, 6.0), (32, 5.9)],
    },
    // Mac Studio, 9B in 8 bits.
    Sweep { figure: "published.mac", measured: &[(0, 1.7), (8, 2.2), (16, 3.2), (24, 5.9), (32, 68.3)] },
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

    /// Returns the planner's prediction with rates from the two ends of the sweep.
    ///
    /// Reading on demand, what computing does not explain at the lower end is reading. Reading ahead, all of it is.
    fn predicted(&self, layers: usize, buffers: usize) -> Result<f64, RuntimeError> {
        const BYTES: u64 = 1 << 20;
        let part = Part { bytes: BYTES, kept_bytes: BYTES, is_layer: true };
        let shape = Shape {
            parts: vec![part; LAYERS],
            kv_bytes_per_token: 0,
            activation_bytes_per_row: 0,
            fixed_bytes: 0,
        };
        let per_layer = |seconds: f64| seconds / LAYERS as f64;
        let computing = if buffers == ON_DEMAND { 1.0 / self.kept() } else { 0.0 };
        let reading = per_layer(1.0 / self.streamed() - computing);
        let rates = Rates {
            read_bytes_per_second: BYTES as f64 / reading,
            read_latency: 0.0,
            compute: vec![per_layer(1.0 / self.kept()); LAYERS],
            overhead: 0.0,
            contention: 1.0,
            hindrance: 1.0,
        };
        let placed = place(&Placement::Auto, &shape, &rates, layers, true, buffers)?;
        Ok(placed.prediction.tokens_per_second)
    }

    fn mean_error(
        &self,
        predicted: impl Fn(usize) -> Result<f64, RuntimeError>,
    ) -> Result<f64, RuntimeError> {
        let errors =
            self.middle().iter().map(|&(layers, measured)| Ok((predicted(layers)? / measured - 1.0).abs()));
        Ok(errors.sum::<Result<f64, RuntimeError>>()? / self.middle().len() as f64)
    }
}

pub fn measure(_: &Setup, figures: &mut Figures) -> anyhow::Result<()> {
    for sweep in &SWEEPS {
        let ours = 100.0 * sweep.mean_error(|layers| sweep.predicted(layers, ON_DEMAND))?;
        let naive = 100.0 * sweep.mean_error(|layers| Ok(sweep.naive(layers)))?;
        figures.add_pair(sweep.figure, ours, ours, naive)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns whether interpolation is expected to be much worse. On the iPhone it is closer: there a quarter of the layers
    /// in memory saves 40 % of the time, and all layers are slower than seven eighths. Reads do not have the same speed in
    /// every row, and the two ends cannot show that.
    fn interpolating_is_beaten(sweep: &Sweep) -> bool {
        sweep.figure != "published.iphone"
    }

    /// The least error that is left to whatever reads a layer at the same speed in every row: to stream a part of the
    /// layers then takes at least that part of the time for all.
    fn least_error(sweep: &Sweep) -> f64 {
        let measured = |layers| sweep.measured.iter().find(|row| row.0 == layers).unwrap().1;
        let bound = |layers| sweep.streamed() * LAYERS as f64 / (LAYERS - layers) as f64;
        sweep.mean_error(|layers| Ok(f64::min(measured(layers), bound(layers)))).unwrap()
    }

    #[test]
    fn published_sweeps() {
        for sweep in &SWEEPS {
            println!("\n{}", sweep.figure);
            println!("kept  measured   on demand        ahead            naive            reads hidden");
            let predicted = |layers, buffers| sweep.predicted(layers, buffers);
            for &(layers, measured) in sweep.middle() {
                let [on_demand, ahead] = [ON_DEMAND, 2].map(|buffers| predicted(layers, buffers).unwrap());
                let cells = [on_demand, ahead, sweep.naive(layers), sweep.kept()]
                    .map(|speed| format!("{speed:6.2} {:+7.0} %", (speed / measured - 1.0) * 100.0));
                println!("{layers:4}  {measured:8.1}   {}", cells.join("  "));
            }
            let on_demand = sweep.mean_error(|layers| predicted(layers, ON_DEMAND)).unwrap();
            let ahead = sweep.mean_error(|layers| predicted(layers, 2)).unwrap();
            let naive = sweep.mean_error(|layers| Ok(sweep.naive(layers))).unwrap();
            let hidden = sweep.mean_error(|_| Ok(sweep.kept())).unwrap();
            let errors = [on_demand, ahead, naive, hidden].map(|error| format!("{:14.1} %", error * 100.0));
            println!("mean error      {}", errors.join(" "));
            println!("least error at constant speed of reading {:.1} %", least_error(sweep) * 100.0);
            assert!(on_demand < 0.25, "{}: {on_demand}", sweep.figure);
            assert!(least_error(sweep) <= on_demand.min(ahead));
            if interpolating_is_beaten(sweep) {
                assert!(on_demand < naive / 4.0, "{}: {on_demand}, naive {naive}", sweep.figure);
            } else {
                assert!(least_error(sweep) > naive, "{} could be beaten", sweep.figure);
            }
        }
    }

    #[test]
    fn the_ends_are_what_they_were_calibrated_to() {
        for sweep in &SWEEPS {
            for buffers in [ON_DEMAND, 2] {
                let close = |layers, expected: f64| {
                    (sweep.predicted(layers, buffers).unwrap() / expected - 1.0).abs() < 1e-6
                };
                assert!(close(0, sweep.streamed()), "{} {buffers}", sweep.figure);
                assert!(close(LAYERS, sweep.kept()), "{} {buffers}", sweep.figure);
            }
        }
    }
}
