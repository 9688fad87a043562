//! Estimates of the speed and memory use of common model sizes on the measured machine.

use firebox_runtime::human_bytes;
use firebox_runtime::planner::{DeviceProfile, Mode, Part, Shape, plan};
use serde::Serialize;

use super::machine::Machine;

/// Tokens of context that are planned for.
pub const CONTEXT: usize = 4096;

/// Bytes of a weight of four bits, with its part of a scale of 16 bits for 32 of them.
const BYTES_PER_WEIGHT: f64 = 4.5 / 8.0;

/// Of what memory gives, decoding was measured to read as much: 38 GB/s of q4 where the same threads read 33 to 57.
const READ_WELL: f64 = 0.8;

/// The factor by which computing slows down while weights are read.
const CONTENTION: f64 = 1.1;

/// The vocabulary of most models of the day.
const VOCABULARY: u64 = 151_936;

/// A model of a usual size.
struct Size {
    name: &'static str,
    parameters: f64,
    layers: u64,
    hidden: u64,
    /// True if the unembedding is the embedding.
    is_tied: bool,
    /// Keys of one layer and token.
    keys: u64,
}

const SIZES: [Size; 7] = [
    Size { name: "0.6B", parameters: 0.6e9, layers: 28, hidden: 1024, is_tied: true, keys: 1024 },
    Size { name: "1.7B", parameters: 1.7e9, layers: 28, hidden: 2048, is_tied: true, keys: 1024 },
    Size { name: "4B", parameters: 4.0e9, layers: 36, hidden: 2560, is_tied: true, keys: 1024 },
    Size { name: "8B", parameters: 8.2e9, layers: 36, hidden: 4096, is_tied: false, keys: 1024 },
    Size { name: "14B", parameters: 14.8e9, layers: 40, hidden: 5120, is_tied: false, keys: 1024 },
    Size { name: "32B", parameters: 32.8e9, layers: 64, hidden: 5120, is_tied: false, keys: 1024 },
    Size { name: "70B", parameters: 70.6e9, layers: 80, hidden: 8192, is_tied: false, keys: 1024 },
];

/// The estimate for a model of a common size.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Outlook {
    pub model: &'static str,
    /// The bytes of its weights.
    pub bytes: u64,
    pub layers: usize,
    /// Layers that stay in memory; nothing where it does not run at all.
    pub kept_layers: Option<usize>,
    pub tokens_per_second: Option<f64>,
}

impl Outlook {
    pub fn row(&self) -> [String; 4] {
        let kept = match self.kept_layers {
            None => "does not run: too little memory".into(),
            Some(0) => format!("nothing, all {} layers stream", self.layers),
            Some(all) if all == self.layers => "all of it".into(),
            Some(some) => format!("{some} of {} layers, the others stream", self.layers),
        };
        let pace = self.tokens_per_second.map_or("-".into(), speed);
        [self.model.into(), human_bytes(self.bytes), kept, pace]
    }
}

/// Tokens a second, in as many digits as are worth reading.
pub fn speed(pace: f64) -> String {
    match pace {
        ..1.0 => format!("{pace:.2}"),
        1.0..10.0 => format!("{pace:.1}"),
        _ => format!("{pace:.0}"),
    }
}

/// Estimates how models of common sizes would run on a machine, with the planner.
pub fn outlook(machine: &Machine) -> Vec<Outlook> {
    let profile = DeviceProfile {
        name: "this machine".into(),
        read_bytes_per_second: machine.disk.as_ref().map_or(1e9, |disk| disk.read_bytes_per_second),
        weight_bytes_per_second: machine.memory.read_bytes_per_second * READ_WELL,
        contention: CONTENTION,
        ..DeviceProfile::conservative()
    };
    let memory = machine.memory.available_bytes.unwrap_or(u64::MAX / 2);
    SIZES.iter().map(|size| size.outlook(&profile, memory)).collect()
}

impl Size {
    fn outlook(&self, profile: &DeviceProfile, memory: u64) -> Outlook {
        let shape = self.shape();
        let rates = profile.rates(&shape).ok();
        // There is no plan only if the model does not fit at all.
        let plan = rates.and_then(|rates| plan(&shape, &rates, memory, Mode::Context, CONTEXT).ok());
        Outlook {
            model: self.name,
            bytes: (self.parameters * BYTES_PER_WEIGHT) as u64,
            layers: shape.layers(),
            kept_layers: plan.as_ref().map(|plan| plan.kept_layers.len()),
            tokens_per_second: plan.map(|plan| plan.prediction.tokens_per_second),
        }
    }

    fn shape(&self) -> Shape {
        let stored = |weights: f64| (weights * BYTES_PER_WEIGHT) as u64;
        let embedding = (VOCABULARY * self.hidden) as f64;
        let others = self.parameters - embedding * if self.is_tied { 1.0 } else { 2.0 };
        let part = |bytes, is_layer| Part { bytes, kept_bytes: bytes, is_layer };
        let layer = part(stored(others / self.layers as f64), true);
        let mut parts = vec![layer; self.layers as usize];
        // An unembedding is read in blocks of about the size of a layer.
        let blocks = (stored(embedding) / layer.bytes.max(1)).max(1);
        parts.extend((0..blocks).map(|_| part(stored(embedding) / blocks, false)));
        Shape {
            parts,
            kv_bytes_per_token: self.layers * 2 * self.keys * 2,
            activation_bytes_per_row: 32 * self.hidden * 4,
            fixed_bytes: (32 << 20) + VOCABULARY * 640,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all(memory: u64, weights: f64, disk: f64) -> Vec<Outlook> {
        let profile = DeviceProfile {
            read_bytes_per_second: disk,
            weight_bytes_per_second: weights,
            ..DeviceProfile::conservative()
        };
        SIZES.iter().map(|size| size.outlook(&profile, memory)).collect()
    }

    #[test]
    fn a_better_machine_is_never_worse_and_a_larger_model_never_faster() {
        let machines = [
            (4 << 30, 1e10, 1e9),
            (8 << 30, 1e10, 1e9),
            (8 << 30, 4e10, 1e9),
            (8 << 30, 4e10, 3e9),
            (64 << 30, 4e10, 3e9),
        ];
        let mut before: Option<Vec<Outlook>> = None;
        for (memory, weights, disk) in machines {
            let now = all(memory, weights, disk);
            for pair in now.windows(2) {
                assert!(pair[1].tokens_per_second <= pair[0].tokens_per_second, "{pair:?}");
            }
            for (now, before) in now.iter().zip(before.iter().flatten()) {
                let (now, before) = (now.tokens_per_second, before.tokens_per_second);
                assert!(now >= before.map(|pace| 0.98 * pace), "{now:?} after {before:?}");
            }
            before = Some(now);
        }
    }

    /// The shape that benchmarks are made on decodes 93 to 110 tokens a second where memory is read at 33 to 57 GB/s.
    #[test]
    fn predictions_repeat_measurements() {
        let pace = all(16 << 30, 45e9 * READ_WELL, 1.2e9)[0].tokens_per_second.unwrap();
        assert!((70.0..130.0).contains(&pace), "{pace}");
    }

    #[test]
    fn what_does_not_fit_streams_and_what_has_no_room_is_refused() {
        let large = all(8 << 30, 4e10, 3e9);
        let of = |name: &str| large.iter().find(|outlook| outlook.model == name).unwrap();
        assert_eq!(of("4B").kept_layers, Some(36));
        assert!(of("32B").kept_layers.unwrap() < 64 && of("32B").tokens_per_second.unwrap() > 0.05);
        let small = all(300 << 20, 4e10, 3e9);
        assert_eq!(small.last().unwrap().kept_layers, None);
        assert!(small.last().unwrap().row()[2].contains("does not run"));
    }
}
