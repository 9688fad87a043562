//! Plans and profiles as images.

use firebox_runtime::planner::{Plan, Prediction};
use plotters::coord::Shift;
use plotters::prelude::*;

const SIZE: (u32, u32) = (720, 600);

/// Seen on white and on black alike; the background stays as it is where the image is shown.
const INK: RGBColor = RGBColor(0x78, 0x78, 0x78);
const MEMORY: RGBColor = RGBColor(0xd9, 0x77, 0x06);
const SPEED: RGBColor = RGBColor(0x3b, 0x82, 0xf6);

const FONT: &str = "sans-serif";
const MARGIN: u32 = 12;
const LABELS: u32 = 56;
const MIB: f64 = (1 << 20) as f64;

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;

/// One curve over layers.
struct Curve {
    caption: &'static str,
    /// What is counted from left to right.
    counted: &'static str,
    color: RGBColor,
    values: Vec<f64>,
    /// A level that is marked across the whole width.
    limit: Option<f64>,
}

/// Memory and speed over the number of kept layers, as SVG.
pub fn plan(plan: &Plan, memory_bytes: u64) -> anyhow::Result<String> {
    let values = |value: fn(&Prediction) -> f64| plan.table.iter().map(value).collect();
    let speed = Curve {
        caption: "Tokens per second",
        counted: "kept layers",
        color: SPEED,
        values: values(|row| row.tokens_per_second),
        limit: None,
    };
    let memory = Curve {
        caption: "Memory in MiB, and how much is allowed",
        counted: "kept layers",
        color: MEMORY,
        values: values(|row| row.peak_bytes as f64 / MIB),
        limit: Some(memory_bytes as f64 / MIB),
    };
    let mut image = String::new();
    {
        let whole = SVGBackend::with_string(&mut image, SIZE).into_drawing_area();
        let (above, below) = whole.split_vertically(SIZE.1 / 2);
        speed.draw(&above, plan.kept_layers.len())?;
        memory.draw(&below, plan.kept_layers.len())?;
        whole.present()?;
    }
    Ok(image)
}

/// What the loss is more without each layer, with a dot where a head could begin, as SVG.
pub fn profile(without: &[f64], split: usize) -> anyhow::Result<String> {
    let curve = Curve {
        caption: "Loss without a layer, beyond that with all",
        counted: "layer",
        color: MEMORY,
        values: without.to_vec(),
        limit: None,
    };
    let mut image = String::new();
    {
        let whole = SVGBackend::with_string(&mut image, (SIZE.0, SIZE.1 / 2)).into_drawing_area();
        curve.draw(&whole, split)?;
        whole.present()?;
    }
    Ok(image)
}

impl Curve {
    /// Draws the curve, with a dot at what was chosen.
    fn draw(&self, area: &Area<'_>, chosen: usize) -> anyhow::Result<()> {
        let last = self.values.len().saturating_sub(1).max(1);
        let highest = self.values.iter().copied().fold(0.0, f64::max);
        // A limit far above all values would press them to the ground.
        let limit = self.limit.filter(|&limit| limit < 1.5 * highest);
        let top = limit.unwrap_or(0.0).max(highest) * 1.08;
        // Without some layers a model may do better.
        let bottom = self.values.iter().copied().fold(0.0, f64::min) * 1.08;
        let decimals = if top >= 10.0 { 0 } else { 2 };
        let text = |size: u32| (FONT, size).into_font().color(&INK);
        let mut chart = ChartBuilder::on(area)
            .caption(self.caption, text(16))
            .margin(MARGIN)
            .x_label_area_size(LABELS - MARGIN)
            .y_label_area_size(LABELS)
            .build_cartesian_2d(0..last, bottom..top.max(bottom + f64::MIN_POSITIVE))?;
        chart
            .configure_mesh()
            .axis_style(INK)
            .label_style(text(12))
            .axis_desc_style(text(13))
            .bold_line_style(INK.mix(0.3))
            .light_line_style(TRANSPARENT)
            .x_desc(self.counted)
            .y_label_formatter(&|value| format!("{value:.decimals$}"))
            .draw()?;
        if let Some(limit) = limit {
            chart.draw_series([PathElement::new(vec![(0, limit), (last, limit)], self.color.mix(0.6))])?;
        }
        let points = || self.values.iter().copied().enumerate();
        chart.draw_series(LineSeries::new(points(), self.color.stroke_width(2)))?;
        let dots = points().filter(|&(count, _)| count == chosen);
        chart.draw_series(dots.map(|point| Circle::new(point, 5, self.color.filled())))?;
        Ok(())
    }
}
