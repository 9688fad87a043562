//! The report's images.

use firebox_plot::{
    Anchor, Axis, BLUE, Chart, Curve, GRAY, LABEL_PIXELS, MARGIN, ORANGE, Svg, WIDTH, stacked,
};

use crate::claim::{Claim, Verdict};
use crate::figure::Figure;
use crate::measures::residency_sweep;
use crate::report::number;

const SWEEP_HEIGHT: u32 = 360;

/// A claim's row: its name, and the bar it has.
const ROW: i32 = 26;
const BAR: i32 = 12;
const NAMES: i32 = 400;

/// A name that is longer would run into the bars.
const LONGEST_NAME: usize = 62;

/// A factor beyond this is drawn as this one.
const MOST: f64 = 100.0;

/// Tokens per second by how much is kept, predicted and measured, as SVG. `None` if that was not measured.
pub fn swept(figures: &[Figure]) -> Option<String> {
    let steps = residency_sweep::STEPS.iter().enumerate().filter_map(|(quarter, (name, _))| {
        let figure = figures.iter().find(|figure| figure.name == *name)?;
        Some((25.0 * quarter as f64, figure))
    });
    let steps: Vec<(f64, &Figure)> = steps.collect();
    let line = |side: fn((f64, f64)) -> f64| -> Vec<(f64, f64)> {
        steps.iter().filter_map(|(kept, figure)| Some((*kept, side(figure.pair()?)))).collect()
    };
    let (measured, predicted) = (line(|pair| pair.0), line(|pair| pair.1));
    if measured.is_empty() {
        return None;
    }
    let rounds = steps.iter().flat_map(|(kept, figure)| {
        figure.rounds.iter().filter_map(move |round| Some((*kept, round.pair?.0)))
    });
    let rounds: Vec<(f64, f64)> = rounds.collect();
    let top = rounds.iter().chain(&predicted).map(|point| point.1).fold(0.0, f64::max) * 1.08;
    let chart = Chart {
        caption: "Tokens per second: measured (blue), predicted (orange)",
        x: Axis { label: "layers kept, %", span: 0.0..100.0, decimals: 0 },
        y: Axis { label: "", span: 0.0..top, decimals: 0 },
        curves: vec![
            Curve::line(predicted, ORANGE),
            Curve::line(measured, BLUE),
            Curve::dots(rounds, BLUE, 3),
        ],
    };
    Some(stacked(&[chart], SWEEP_HEIGHT))
}

/// Draws by how much every measured claim is cleared or missed, as SVG. Returns `None` if none was measured.
pub fn cleared(claims: &[Claim], figures: &[Figure]) -> Option<String> {
    let rows = claims.iter().filter_map(|claim| match claim.verdict(figures) {
        Verdict::Held(spread) | Verdict::Missed(spread) => Some((claim, claim.bar.cleared(spread.median))),
        Verdict::NotMeasured => None,
    });
    let rows: Vec<(&Claim, f64)> = rows.collect();
    if rows.is_empty() {
        return None;
    }
    let height = (rows.len() as i32 + 1) * ROW + 2 * MARGIN as i32;
    let mut image = Svg::new(height as u32);
    let bars = Bars::over(rows.iter().map(|row| row.1));
    let caption = "How many times the bar (the line): reached (blue), missed (orange)";
    let margin = f64::from(MARGIN);
    image.text((margin, margin + 12.0), 14, Anchor::Start, caption);
    for (at, (claim, factor)) in rows.iter().enumerate() {
        let top = MARGIN as i32 + (at as i32 + 1) * ROW;
        image.text((margin, f64::from(top + BAR - 1)), 12, Anchor::Start, &short(&claim.says));
        bars.draw(&mut image, top, *factor);
    }
    let middle = f64::from(bars.x(1.0));
    image.line(&[(middle, f64::from(ROW)), (middle, f64::from(height - MARGIN as i32))], GRAY, 1.0, 1);
    Some(image.finish())
}

/// Factors side by side, as far from 1 as their logarithms are.
struct Bars {
    lowest: f64,
    highest: f64,
}

impl Bars {
    fn over(factors: impl Iterator<Item = f64>) -> Self {
        let bounds = (0.5f64, 2.0f64);
        let (lowest, highest) =
            factors.map(bounded).fold(bounds, |(low, high), at| (low.min(at), high.max(at)));
        Self { lowest, highest }
    }

    fn x(&self, factor: f64) -> i32 {
        // The number stands behind the bar.
        let room = f64::from(WIDTH as i32 - NAMES - LABEL_PIXELS as i32);
        let share = (bounded(factor) / self.lowest).ln() / (self.highest / self.lowest).ln();
        NAMES + (room * share).round() as i32
    }

    fn draw(&self, image: &mut Svg, top: i32, factor: f64) {
        let (middle, end) = (self.x(1.0), self.x(factor));
        let color = if factor < 1.0 { ORANGE } else { BLUE };
        let (left, right) = (middle.min(end), middle.max(end));
        image.rectangle((left, top), (right - left, BAR), color);
        image.text((f64::from(right + 4), f64::from(top + BAR - 1)), 12, Anchor::Start, &number(factor));
    }
}

/// As much of a factor as is drawn.
fn bounded(factor: f64) -> f64 {
    factor.clamp(1.0 / MOST, MOST)
}

fn short(name: &str) -> String {
    if name.chars().count() <= LONGEST_NAME {
        return name.to_owned();
    }
    name.chars().take(LONGEST_NAME - 1).chain(['…']).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::claim::Bar;
    use crate::figure::Figures;

    #[test]
    fn a_sweep_plots_predicted_and_measured_speeds() {
        assert!(swept(&[]).is_none());
        let mut figures = Figures::new(residency_sweep::FIGURES);
        for (at, (name, _)) in residency_sweep::STEPS.iter().enumerate() {
            for measured in [2.0, 3.0] {
                figures.add_pair(name, 1.0, measured * (at + 1) as f64, 2.5).unwrap();
            }
        }
        let image = swept(&figures.into_measured().figures).unwrap();
        assert!(image.starts_with("<svg"), "{image}");
        assert_eq!(image.matches("<circle").count(), 10, "every round is a dot");
        assert!(image.contains("layers kept"));
    }

    #[test]
    fn claims_are_drawn_by_how_far_they_are_cleared() {
        let claim = |says: &str, bar| Claim {
            says: says.into(),
            published: None,
            figure: residency_sweep::STEPS[0].0.into(),
            bar,
            reason: None,
        };
        let claims = [claim("much faster", Bar::AtLeast(1.0)), claim("not so fast", Bar::AtLeast(1e6))];
        assert!(cleared(&claims, &[]).is_none());
        let mut figures = Figures::new(residency_sweep::FIGURES);
        figures.add_pair(residency_sweep::STEPS[0].0, 1000.0, 1.0, 1.0).unwrap();
        let image = cleared(&claims, &figures.into_measured().figures).unwrap();
        for drawn in ["much faster", "not so fast", "1000", "#3B82F6", "#D97706"] {
            assert!(image.contains(drawn), "{drawn}: {image}");
        }
        let bars = Bars::over([1000.0, 0.001].into_iter());
        assert!(bars.x(0.001) == NAMES && bars.x(0.5) < bars.x(1.0) && bars.x(1.0) < bars.x(2.0));
        assert!(bars.x(1000.0) <= WIDTH as i32);
        assert_eq!(short(&"x".repeat(100)).chars().count(), LONGEST_NAME);
    }
}
