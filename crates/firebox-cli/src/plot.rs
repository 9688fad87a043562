//! Plans and profiles as images.

use firebox_plot::{Axis, BLUE, Chart, Color, Curve, ORANGE, stacked};
use firebox_runtime::planner::{Plan, Prediction};

const HEIGHT: u32 = 300;
const MIB: f64 = (1 << 20) as f64;

/// One value over layers.
struct OverLayers {
    caption: &'static str,
    /// The label of the horizontal axis.
    counted: &'static str,
    color: Color,
    values: Vec<f64>,
    /// A level that is marked across the whole width.
    limit: Option<f64>,
    /// Where there is a dot.
    chosen: usize,
}

/// Memory and speed over the number of kept layers, as SVG.
pub fn plan(plan: &Plan, memory_bytes: u64) -> String {
    let values = |value: fn(&Prediction) -> f64| plan.table.iter().map(value).collect();
    let chosen = plan.kept_layers.len();
    let speed = OverLayers {
        caption: "Tokens per second",
        counted: "kept layers",
        color: BLUE,
        values: values(|row| row.tokens_per_second),
        limit: None,
        chosen,
    };
    let memory = OverLayers {
        caption: "Memory in MiB, and how much is allowed",
        counted: "kept layers",
        color: ORANGE,
        values: values(|row| row.peak_bytes as f64 / MIB),
        limit: Some(memory_bytes as f64 / MIB),
        chosen,
    };
    stacked(&[speed.chart(), memory.chart()], HEIGHT)
}

/// Draws the increase of the loss without each layer as SVG, with a dot where a head could begin.
pub fn profile(without: &[f64], split: usize) -> String {
    let losses = OverLayers {
        caption: "Loss without a layer, beyond that with all",
        counted: "layer",
        color: ORANGE,
        values: without.to_vec(),
        limit: None,
        chosen: split,
    };
    stacked(&[losses.chart()], HEIGHT)
}

impl OverLayers {
    fn chart(&self) -> Chart<'static> {
        let last = self.values.len().saturating_sub(1).max(1) as f64;
        let highest = self.values.iter().copied().fold(0.0, f64::max);
        // A limit far above all values would press them to the ground.
        let limit = self.limit.filter(|&limit| limit < 1.5 * highest);
        let top = limit.unwrap_or(0.0).max(highest) * 1.08;
        // Without some layers a model may do better.
        let bottom = self.values.iter().copied().fold(0.0, f64::min) * 1.08;
        let points: Vec<_> = (0..).map(f64::from).zip(self.values.iter().copied()).collect();
        let dot = points.get(self.chosen).copied().into_iter().collect();
        let mut curves = vec![Curve::line(points, self.color), Curve::dots(dot, self.color, 5)];
        if let Some(limit) = limit {
            let line = Curve::line(vec![(0.0, limit), (last, limit)], self.color);
            curves.push(Curve { width: 1, opacity: 0.6, ..line });
        }
        let (span, decimals) = (bottom..top.max(bottom + f64::MIN_POSITIVE), if top >= 10.0 { 0 } else { 2 });
        Chart {
            caption: self.caption,
            x: Axis { label: self.counted, span: 0.0..last, decimals: 0 },
            y: Axis { label: "", span, decimals },
            curves,
        }
    }
}
