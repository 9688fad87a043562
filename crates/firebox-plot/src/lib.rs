//! How Firebox draws what it has measured: curves over two axes, as SVG.
//!
//! Colours are seen on white and on black alike; the background stays as it is where an image is shown.
//!
//! ```
//! use firebox_plot::{Axis, BLUE, Chart, Curve, stacked};
//!
//! let loss = Chart {
//!     caption: "Loss",
//!     across: Axis { says: "step", span: 0.0..3.0, decimals: 0 },
//!     up: Axis { says: "", span: 0.0..2.0, decimals: 1 },
//!     curves: vec![Curve::line(vec![(0.0, 1.9), (1.0, 1.2), (3.0, 0.8)], BLUE)],
//! };
//! assert!(stacked(&[loss], 400)?.starts_with("<svg"));
//! # Ok::<(), firebox_plot::PlotError>(())
//! ```

use std::io;
use std::ops::Range;

use plotters::coord::Shift;
use plotters::prelude::*;

pub use plotters::style::RGBColor;

/// Axes, words, and whatever is nobody's own.
pub const INK: RGBColor = RGBColor(0x78, 0x78, 0x78);
/// What the image is about.
pub const BLUE: RGBColor = RGBColor(0x3b, 0x82, 0xf6);
/// What it is beside.
pub const ORANGE: RGBColor = RGBColor(0xd9, 0x77, 0x06);

/// Pixels of every image from left to right.
pub const WIDTH: u32 = 720;
/// Pixels around what is on it.
pub const MARGIN: u32 = 12;
/// Pixels that the labels of an axis have.
pub const LABELS: u32 = 56;

/// Labels along an axis, where there is something between them.
const MOST_LABELS: usize = 11;

/// Where something is drawn.
pub type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;

/// Why nothing could be drawn.
pub type PlotError = DrawingAreaErrorKind<io::Error>;

/// Curves over the same two axes.
#[derive(Debug, Clone)]
pub struct Chart<'a> {
    /// What is above it.
    pub caption: &'a str,
    /// From left to right.
    pub across: Axis<'a>,
    /// From below.
    pub up: Axis<'a>,
    /// Later ones lie over those before.
    pub curves: Vec<Curve>,
}

/// What is counted in one direction.
#[derive(Debug, Clone)]
pub struct Axis<'a> {
    /// What that is; nothing where the caption says it.
    pub says: &'a str,
    /// The first and the last that is seen.
    pub span: Range<f64>,
    /// Digits behind the point. Where there are none, numbers between whole ones are not labelled.
    pub decimals: usize,
}

/// Points, and what is drawn through and at them.
#[derive(Debug, Clone)]
pub struct Curve {
    /// Across and up.
    pub points: Vec<(f64, f64)>,
    /// Of lines and dots.
    pub color: RGBColor,
    /// From 0, which is not seen, to 1.
    pub opacity: f64,
    /// Pixels of the line from one point to the next; none if there is no line.
    pub width: u32,
    /// Pixels from the middle to the edge of the dot at every point; none if there is no dot.
    pub radius: i32,
}

impl Curve {
    /// A line through points.
    pub fn line(points: Vec<(f64, f64)>, color: RGBColor) -> Self {
        Self { points, color, opacity: 1.0, width: 2, radius: 0 }
    }

    /// A dot at every point.
    pub fn dots(points: Vec<(f64, f64)>, color: RGBColor, radius: i32) -> Self {
        Self { points, color, opacity: 1.0, width: 0, radius }
    }
}

impl Axis<'_> {
    fn labels(&self) -> usize {
        let whole = (self.span.end - self.span.start) as usize + 1;
        if self.decimals == 0 { whole.min(MOST_LABELS) } else { MOST_LABELS }
    }
}

impl Chart<'_> {
    fn draw(&self, area: &Area<'_>) -> Result<(), PlotError> {
        let Self { across, up, .. } = self;
        let label = |decimals: usize| move |value: &f64| format!("{value:.decimals$}");
        let mut chart = ChartBuilder::on(area)
            .caption(self.caption, words(16))
            .margin(MARGIN)
            .x_label_area_size(LABELS - MARGIN)
            .y_label_area_size(LABELS)
            .build_cartesian_2d(across.span.clone(), up.span.clone())?;
        chart
            .configure_mesh()
            .axis_style(INK)
            .label_style(words(12))
            .axis_desc_style(words(13))
            .bold_line_style(INK.mix(0.3))
            .light_line_style(TRANSPARENT)
            .x_desc(across.says)
            .y_desc(up.says)
            .x_labels(across.labels())
            .y_labels(up.labels())
            .x_label_formatter(&label(across.decimals))
            .y_label_formatter(&label(up.decimals))
            .draw()?;
        for Curve { points, color, opacity, width, radius } in &self.curves {
            let color = color.mix(*opacity);
            if *width > 0 {
                chart.draw_series(LineSeries::new(points.clone(), color.stroke_width(*width)))?;
            }
            if *radius > 0 {
                chart.draw_series(points.iter().map(|point| Circle::new(*point, *radius, color.filled())))?;
            }
        }
        Ok(())
    }
}

/// Words of so many pixels.
pub fn words(pixels: u32) -> TextStyle<'static> {
    ("sans-serif", pixels).into_font().color(&INK)
}

/// An image of so many pixels in height, as SVG.
pub fn image(
    height: u32,
    draw: impl FnOnce(&Area<'_>) -> Result<(), PlotError>,
) -> Result<String, PlotError> {
    let mut image = String::new();
    {
        let area = SVGBackend::with_string(&mut image, (WIDTH, height)).into_drawing_area();
        draw(&area)?;
        area.present()?;
    }
    Ok(image)
}

/// Charts one below the other, each of so many pixels in height, as SVG.
pub fn stacked(charts: &[Chart<'_>], height: u32) -> Result<String, PlotError> {
    image(height * charts.len() as u32, |area| {
        let areas = area.split_evenly((charts.len(), 1));
        charts.iter().zip(&areas).try_for_each(|(chart, area)| chart.draw(area))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chart(caption: &str, end: f64) -> Chart<'_> {
        let line = vec![(0.0, 0.0), (end / 2.0, 0.5), (end, 1.0)];
        Chart {
            caption,
            across: Axis { says: "layers", span: 0.0..end, decimals: 0 },
            up: Axis { says: "", span: 0.0..1.0, decimals: 2 },
            curves: vec![Curve::line(line, BLUE), Curve::dots(vec![(end, 1.0)], ORANGE, 5)],
        }
    }

    #[test]
    fn charts_lie_below_each_other() {
        let image = stacked(&[chart("above", 8.0), chart("below", 8.0)], 300).unwrap();
        assert!(image.starts_with("<svg") && image.contains(r#"height="600""#), "{image}");
        assert!(image.find("above").unwrap() < image.find("below").unwrap());
        assert_eq!(image.matches("<circle").count(), 2, "{image}");
        assert!(image.contains("#3B82F6") && image.contains("#D97706"), "{image}");
    }

    #[test]
    fn whole_numbers_are_labelled_once() {
        for layers in [1, 2, 4, 7, 28, 80] {
            let image = stacked(&[chart("", f64::from(layers))], 300).unwrap();
            // The axis upward has two digits behind the point.
            let mut labels: Vec<u32> =
                image.split(['<', '>']).filter_map(|text| text.trim().parse().ok()).collect();
            let count = labels.len();
            labels.sort_unstable();
            labels.dedup();
            assert!(labels.len() == count && count > 1, "{layers}: {labels:?}");
        }
    }
}
