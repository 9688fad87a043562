//! How hot the machine is, and what is done less for it.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::Serialize;

/// How long work goes on before something more urgent may come between.
const QUANTUM: Duration = Duration::from_millis(50);
/// A machine that slows down to cool takes longer over a layer; what is urgent should not wait longer for it.
const HOT_QUANTUM: Duration = Duration::from_millis(30);
/// Below freezing or above what silicon survives, a sensor is not there or broken.
const SENSIBLE: std::ops::RangeInclusive<f32> = 0.5..=150.0;

/// How hot the machine is, in the words of phones.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Heat {
    /// Cool enough for anything.
    #[default]
    Nominal,
    /// Warm: what is not needed at once can wait.
    Fair,
    /// Hot: the machine is about to slow itself down.
    Serious,
    /// So hot that it slows itself down, or will switch itself off.
    Critical,
}

impl Heat {
    /// How many layers to read ahead, where `most` would be possible: less is in flight when it is hot, and never
    /// nothing, because waiting for the disk makes a step longer and no cooler.
    pub fn prefetch_depth(self, most: usize) -> usize {
        let depth = match self {
            Self::Nominal => most,
            Self::Fair => most / 2,
            Self::Serious | Self::Critical => 1,
        };
        depth.max(1).min(most)
    }

    /// How many sequences to take through the layers together, where `most` are waiting.
    pub fn batch(self, most: usize) -> usize {
        let batch = match self {
            Self::Nominal | Self::Fair => most,
            Self::Serious => most / 2,
            Self::Critical => most / 4,
        };
        batch.max(1).min(most)
    }

    /// How long work goes on before something more urgent may come between.
    pub fn quantum(self) -> Duration {
        if self < Self::Serious { QUANTUM } else { HOT_QUANTUM }
    }
}

/// From which temperature on it is how hot, in degrees Celsius.
///
/// The usual marks are for sensors on the processor. Those of a battery or a case are much lower.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct HeatMarks {
    /// A processor at work without a strong fan is rarely below.
    pub fair: f32,
    /// Phones and thin laptops begin to lower their clocks.
    pub serious: f32,
    /// The maker's limit of most processors is 95 to 105.
    pub critical: f32,
    /// How far below a mark it has to cool to be below it: sensors on a processor jump by a few degrees from one reading
    /// to the next.
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

/// Somebody who knows how hot it is. Closures are sources too.
pub trait ThermalSource: Send {
    /// Degrees Celsius; absent where this cannot be told.
    fn celsius(&mut self) -> Option<f32>;
}

impl<F: FnMut() -> Option<f32> + Send> ThermalSource for F {
    fn celsius(&mut self) -> Option<f32> {
        self()
    }
}

/// Linux's thermal zones: the hottest of them.
#[derive(Debug)]
pub struct ThermalZones {
    zones: Vec<TemperatureFile>,
}

impl ThermalZones {
    /// Of a system whose files lie in `root`, usually `/`; absent where there are none.
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

/// What one means by a number in a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unit {
    /// Degrees Celsius.
    Degrees,
    /// Thousandths, as Linux has them.
    Millidegrees,
}

/// A file with a temperature, and nothing else, in it.
#[derive(Debug)]
pub struct TemperatureFile {
    path: PathBuf,
    unit: Unit,
}

impl TemperatureFile {
    /// The file need not be there yet.
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

/// What this system offers; absent where it does not say how hot it is.
pub fn system() -> Option<ThermalZones> {
    ThermalZones::below(Path::new("/"))
}

/// Says how hot it is, and does not change its mind for a wobble.
pub struct Thermometer {
    source: Box<dyn ThermalSource>,
    marks: HeatMarks,
    heat: Heat,
    celsius: Option<f32>,
}

impl Thermometer {
    /// With the usual marks.
    pub fn new(source: impl ThermalSource + 'static) -> Self {
        Self { source: Box::new(source), marks: HeatMarks::default(), heat: Heat::Nominal, celsius: None }
    }

    /// With other marks.
    pub fn with_marks(mut self, marks: HeatMarks) -> Self {
        self.marks = marks;
        self
    }

    /// Takes the temperature. While the source says nothing, or nonsense, it is as hot as it was.
    pub fn read(&mut self) -> Heat {
        self.celsius = self.source.celsius().filter(|celsius| SENSIBLE.contains(celsius));
        if let Some(celsius) = self.celsius {
            // Rising counts at once; falling only as far as a temperature a little higher would fall.
            let at_most = self.marks.heat(celsius + self.marks.cooling);
            self.heat = self.heat.min(at_most).max(self.marks.heat(celsius));
        }
        self.heat
    }

    /// How hot it was when it was last read.
    pub fn heat(&self) -> Heat {
        self.heat
    }

    /// The temperature when it was last read, where there was one.
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

    /// A thermometer on a series of temperatures, and how hot it says it is at each.
    fn heats(series: &[f32]) -> Vec<Heat> {
        let mut readings = VecDeque::from(series.to_vec());
        let mut thermometer = Thermometer::new(move || readings.pop_front());
        series.iter().map(|_| thermometer.read()).collect()
    }

    fn changes(heats: &[Heat]) -> usize {
        heats.windows(2).filter(|pair| pair[0] != pair[1]).count()
    }

    #[test]
    fn a_ramp_goes_through_every_state_and_comes_back_a_little_lower() {
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
    fn what_is_no_temperature_changes_nothing() {
        let readings = [90.0, f32::NAN, -3.0, 0.0, 999.0];
        assert!(heats(&readings).iter().all(|&heat| heat == Heat::Serious));
        let mut thermometer = Thermometer::new(|| None);
        assert_eq!((thermometer.read(), thermometer.celsius()), (Heat::Nominal, None));
    }

    #[test]
    fn the_hottest_sensible_zone_counts() {
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
    fn a_file_says_degrees_or_thousandths() {
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
    fn less_is_done_the_hotter_it_is_and_never_nothing() {
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
        fn a_wobble_does_not_flap(
            around in 40f32..110.0,
            wobble in prop::collection::vec(-2.4f32..2.4, 2..200),
        ) {
            let series: Vec<f32> = wobble.iter().map(|wobble| around + wobble).collect();
            let heats = heats(&series);
            prop_assert!(changes(&heats) <= 1, "{:?}", heats);
        }

        #[test]
        fn it_is_never_said_to_be_cooler_than_it_is(series in prop::collection::vec(20f32..120.0, 1..100)) {
            let marks = HeatMarks::default();
            for (celsius, heat) in series.iter().zip(heats(&series)) {
                prop_assert!(heat >= marks.heat(*celsius));
                prop_assert!(heat <= marks.heat(celsius + marks.cooling));
            }
        }
    }
}
