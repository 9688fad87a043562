//! The temperature of the machine, and how much work it allows.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::Serialize;

/// The time for which a model runs before a more urgent one may take over.
const QUANTUM: Duration = Duration::from_millis(50);
/// The quantum of a hot machine, whose layers take longer while it throttles: urgent work should not wait longer for it.
const HOT_QUANTUM: Duration = Duration::from_millis(30);
/// Celsius outside of which a sensor is taken to be absent or broken.
const SENSIBLE: std::ops::RangeInclusive<f32> = 0.5..=150.0;

/// The thermal state of the machine, in the terms of phone systems.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Heat {
    /// Cool.
    #[default]
    Nominal,
    /// Warm: work that is not urgent can wait.
    Fair,
    /// Hot: the machine is about to throttle.
    Serious,
    /// The machine throttles, or will shut down.
    Critical,
}

impl Heat {
    /// Returns how many layers to read ahead, at most `most`. Fewer reads are in flight on a hot machine, but at least one:
    /// waiting for the disk only prolongs a step.
    pub fn prefetch_depth(self, most: usize) -> usize {
        let depth = match self {
            Self::Nominal => most,
            Self::Fair => most / 2,
            Self::Serious | Self::Critical => 1,
        };
        depth.max(1).min(most)
    }

    /// Returns how many sequences to batch, at most `most`.
    pub fn batch(self, most: usize) -> usize {
        let batch = match self {
            Self::Nominal | Self::Fair => most,
            Self::Serious => most / 2,
            Self::Critical => most / 4,
        };
        batch.max(1).min(most)
    }

    /// Returns the time for which a model runs before a more urgent one may take over.
    pub fn quantum(self) -> Duration {
        if self < Self::Serious { QUANTUM } else { HOT_QUANTUM }
    }
}

/// The temperatures in degrees Celsius at which each state begins.
///
/// The defaults are for sensors on the processor. Those of a battery or a case are much lower.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct HeatMarks {
    /// A busy processor without a strong fan is rarely below.
    pub fair: f32,
    /// Phones and thin laptops begin to lower their clocks.
    pub serious: f32,
    /// Most makers allow 95 to 105.
    pub critical: f32,
    /// How far below a mark the temperature has to fall to leave a state: processor sensors jump by a few degrees between
    /// readings.
    pub cooling: f32,
}

impl Default for HeatMarks {
    fn default() -> Self {
        Self { fair: 75.0, serious: 85.0, critical: 95.0, cooling: 5.0 }
    }
}

impl HeatMarks {
    fn heat(&self, celsius: f32) -> Heat {
        if celsius >= self.critical {
            Heat::Critical
        } else if celsius >= self.serious {
            Heat::Serious
        } else if celsius >= self.fair {
            Heat::Fair
        } else {
            Heat::Nominal
        }
    }
}

/// A source of temperatures. Closures are sources too.
pub trait ThermalSource: Send {
    /// Returns degrees Celsius, or `None` if the temperature is unknown.
    fn celsius(&mut self) -> Option<f32>;
}

impl<F: FnMut() -> Option<f32> + Send> ThermalSource for F {
    fn celsius(&mut self) -> Option<f32> {
        self()
    }
}

/// The thermal zones of Linux, of which the hottest counts.
#[derive(Debug)]
pub struct ThermalZones {
    zones: Vec<TemperatureFile>,
}

impl ThermalZones {
    /// Finds the zones of a system whose root directory is `root`, usually `/`. Returns `None` if there are none.
    pub fn below(root: &Path) -> Option<Self> {
        let entries = fs::read_dir(root.join("sys/class/thermal")).ok()?;
        let zones: Vec<_> = entries
            .flatten()
            .filter(|entry| entry.file_name().to_string_lossy().starts_with("thermal_zone"))
            .map(|entry| TemperatureFile::new(entry.path().join("temp"), Unit::Millidegrees))
            .collect();
        (!zones.is_empty()).then_some(Self { zones })
    }
}

impl ThermalSource for ThermalZones {
    fn celsius(&mut self) -> Option<f32> {
        self.zones.iter_mut().filter_map(TemperatureFile::celsius).reduce(f32::max)
    }
}

/// The unit of a number in a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unit {
    /// Degrees Celsius.
    Degrees,
    /// Thousandths of a degree Celsius, as Linux writes them.
    Millidegrees,
}

/// A file that contains a temperature and nothing else.
#[derive(Debug)]
pub struct TemperatureFile {
    path: PathBuf,
    unit: Unit,
}

impl TemperatureFile {
    /// Creates a source from a file, which need not exist yet.
    pub fn new(path: impl Into<PathBuf>, unit: Unit) -> Self {
        Self { path: path.into(), unit }
    }
}

impl ThermalSource for TemperatureFile {
    fn celsius(&mut self) -> Option<f32> {
        let number: f32 = fs::read_to_string(&self.path).ok()?.trim().parse().ok()?;
        let celsius = match self.unit {
            Unit::Degrees => number,
            Unit::Millidegrees => number / 1000.0,
        };
        SENSIBLE.contains(&celsius).then_some(celsius)
    }
}

/// Returns the thermal zones of this system; `None` if it has none.
pub fn system() -> Option<ThermalZones> {
    ThermalZones::below(Path::new("/"))
}

/// Turns temperatures into thermal states, with hysteresis.
pub struct Thermometer {
    source: Box<dyn ThermalSource>,
    marks: HeatMarks,
    heat: Heat,
    celsius: Option<f32>,
}

impl Thermometer {
    /// Creates a thermometer with the default marks.
    pub fn new(source: impl ThermalSource + 'static) -> Self {
        Self { source: Box::new(source), marks: HeatMarks::default(), heat: Heat::Nominal, celsius: None }
    }

    /// Replaces the marks.
    pub fn with_marks(mut self, marks: HeatMarks) -> Self {
        self.marks = marks;
        self
    }

    /// Reads the temperature. The state stays the same while the source returns nothing or nonsense.
    pub fn read(&mut self) -> Heat {
        self.celsius = self.source.celsius().filter(|celsius| SENSIBLE.contains(celsius));
        if let Some(celsius) = self.celsius {
            // A rise counts at once; a fall counts as if the temperature were `cooling` degrees higher.
            let at_most = self.marks.heat(celsius + self.marks.cooling);
            self.heat = self.heat.min(at_most).max(self.marks.heat(celsius));
        }
        self.heat
    }

    /// Returns the state at the last reading.
    pub fn heat(&self) -> Heat {
        self.heat
    }

    /// Returns the temperature at the last reading.
    pub fn celsius(&self) -> Option<f32> {
        self.celsius
    }
}

impl std::fmt::Debug for Thermometer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { marks, heat, celsius, .. } = self;
        f.debug_struct("Thermometer")
            .field("marks", marks)
            .field("heat", heat)
            .field("celsius", celsius)
            .finish()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use proptest::prelude::*;

    use super::*;

    /// Returns the state of a thermometer after each temperature of a series.
    fn heats(series: &[f32]) -> Vec<Heat> {
        let mut readings = VecDeque::from(series.to_vec());
        let mut thermometer = Thermometer::new(move || readings.pop_front());
        series.iter().map(|_| thermometer.read()).collect()
    }

    fn changes(heats: &[Heat]) -> usize {
        heats.windows(2).filter(|pair| pair[0] != pair[1]).count()
    }

    #[test]
    fn a_ramp_passes_every_state_and_returns_with_hysteresis() {
        let up: Vec<f32> = (40..=110).map(|celsius| celsius as f32).collect();
        let down = up.iter().rev().copied();
        let series: Vec<f32> = up.iter().copied().chain(down).collect();
        let found = heats(&series);
        assert_eq!(changes(&found), 6);
        let at = |celsius: usize| (found[celsius - 40], found[series.len() - 1 - (celsius - 40)]);
        assert_eq!(at(74), (Heat::Nominal, Heat::Fair));
        assert_eq!(at(75), (Heat::Fair, Heat::Fair));
        assert_eq!(at(92), (Heat::Serious, Heat::Critical));
        assert_eq!(at(95), (Heat::Critical, Heat::Critical));
        assert_eq!(at(69), (Heat::Nominal, Heat::Nominal));
    }

    #[test]
    fn a_state_may_be_skipped_both_ways() {
        assert_eq!(heats(&[50.0, 97.0, 50.0]), [Heat::Nominal, Heat::Critical, Heat::Nominal]);
    }

    #[test]
    fn invalid_readings_change_nothing() {
        let readings = [90.0, f32::NAN, -3.0, 0.0, 999.0];
        assert!(heats(&readings).iter().all(|&heat| heat == Heat::Serious));
        let mut thermometer = Thermometer::new(|| None);
        assert_eq!((thermometer.read(), thermometer.celsius()), (Heat::Nominal, None));
    }

    #[test]
    fn the_hottest_valid_zone_counts() {
        let root = tempfile::tempdir().unwrap();
        assert!(ThermalZones::below(root.path()).is_none());
        let zones = ["45000", "61500\n", "-273200", "0", "255000", "hot", ""];
        for (index, text) in zones.iter().enumerate() {
            let zone = root.path().join(format!("sys/class/thermal/thermal_zone{index}"));
            fs::create_dir_all(&zone).unwrap();
            fs::write(zone.join("temp"), text).unwrap();
        }
        fs::create_dir_all(root.path().join("sys/class/thermal/cooling_device0")).unwrap();
        assert_eq!(ThermalZones::below(root.path()).unwrap().celsius(), Some(61.5));
    }

    #[test]
    fn a_file_holds_degrees_or_thousandths() {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("temperature");
        let mut degrees = TemperatureFile::new(&path, Unit::Degrees);
        assert_eq!(degrees.celsius(), None);
        fs::write(&path, "42.5\n").unwrap();
        assert_eq!(degrees.celsius(), Some(42.5));
        fs::write(&path, "42500").unwrap();
        assert_eq!(degrees.celsius(), None);
        assert_eq!(TemperatureFile::new(&path, Unit::Millidegrees).celsius(), Some(42.5));
    }

    #[test]
    fn hotter_machines_do_less_but_never_nothing() {
        let all = [Heat::Nominal, Heat::Fair, Heat::Serious, Heat::Critical];
        assert_eq!(all.map(|heat| heat.prefetch_depth(4)), [4, 2, 1, 1]);
        assert_eq!(all.map(|heat| heat.batch(8)), [8, 8, 4, 2]);
        assert_eq!(all.map(|heat| heat.batch(1)), [1; 4]);
        assert_eq!(all.map(|heat| heat.prefetch_depth(0)), [0; 4]);
        assert_eq!(all.map(|heat| heat.quantum().as_millis()), [50, 50, 30, 30]);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn small_fluctuations_do_not_change_the_state(
            around in 40f32..110.0,
            wobble in prop::collection::vec(-2.4f32..2.4, 2..200),
        ) {
            let series: Vec<f32> = wobble.iter().map(|wobble| around + wobble).collect();
            let heats = heats(&series);
            prop_assert!(changes(&heats) <= 1, "{:?}", heats);
        }

        #[test]
        fn the_state_is_never_below_the_temperature(series in prop::collection::vec(20f32..120.0, 1..100)) {
            let marks = HeatMarks::default();
            for (celsius, heat) in series.iter().zip(heats(&series)) {
                prop_assert!(heat >= marks.heat(*celsius));
                prop_assert!(heat <= marks.heat(celsius + marks.cooling));
            }
        }
    }
}
