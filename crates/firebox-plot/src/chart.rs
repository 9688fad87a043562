//! Curves over two axes.

use std::ops::Range;

use crate::svg::{Anchor, Color, GRAY, MARGIN, Svg, WIDTH};

/// Width of the labels of an axis in pixels.
pub const LABEL_PIXELS: u32 = 56;

/// Height of the caption in pixels.
const CAPTION_PIXELS: u32 = 24;

/// The most labels of an axis.
const MAX_LABELS: usize = 11;

/// Curves over the same two axes.
#[derive(Debug, Clone)]
pub struct Chart<'a> {
    /// The text above it.
    pub caption: &'a str,
    /// The horizontal axis.
    pub x: Axis<'a>,
    /// The vertical axis.
    pub y: Axis<'a>,
    /// The curves; later ones cover earlier ones.
    pub curves: Vec<Curve>,
}

/// An axis of a chart.
#[derive(Debug, Clone)]
pub struct Axis<'a> {
    /// The quantity; empty if the caption names it.
    pub label: &'a str,
    /// The first and the last visible value.
    pub span: Range<f64>,
    /// Decimals of the labels. Without any, only whole numbers are labelled.
    pub decimals: usize,
}

/// Points with a line through them, dots at them, or both.
#[derive(Debug, Clone)]
pub struct Curve {
    /// The points: x and y.
    pub points: Vec<(f64, f64)>,
    /// Colour of line and dots.
    pub color: Color,
    /// Opacity from 0 to 1.
    pub opacity: f64,
    /// Width of the line in pixels; 0 for no line.
    pub width: u32,
    /// Radius of the dots in pixels; 0 for no dots.
    pub radius: u32,
}

impl Curve {
    /// A line through points.
    pub fn line(points: Vec<(f64, f64)>, color: Color) -> Self {
        Self { points, color, opacity: 1.0, width: 2, radius: 0 }
    }

    /// A dot at every point.
    pub fn dots(points: Vec<(f64, f64)>, color: Color, radius: u32) -> Self {
        Self { points, color, opacity: 1.0, width: 0, radius }
    }
}

impl Axis<'_> {
    /// Returns the labelled values: multiples of 1, 2 or 5 times a power of ten, and of the last decimal.
    fn ticks(&self) -> Vec<f64> {
        let Range { start, end } = self.span;
        let least = 10f64.powi(-(self.decimals as i32));
        let rough = ((end - start) / (MAX_LABELS - 1) as f64).max(least);
        let power = 10f64.powf(rough.log10().floor());
        // Rounding must not skip a step that is exactly large enough.
        let step = [1.0, 2.0, 5.0, 10.0].map(|factor| factor * power);
        let step = step.into_iter().find(|step| *step >= rough * (1.0 - 1e-9)).unwrap_or(10.0 * power);
        let (first, last) = ((start / step).ceil() as i64, (end / step + 1e-9).floor() as i64);
        (first..=last).map(|at| at as f64 * step).collect()
    }

    /// Returns where a value is on the axis, from 0 to 1.
    fn share(&self, value: f64) -> f64 {
        (value - self.span.start) / (self.span.end - self.span.start)
    }
}

impl Chart<'_> {
    fn draw(&self, image: &mut Svg, top: f64, height: f64) {
        let margin = f64::from(MARGIN);
        let (left, right) = (margin + f64::from(LABEL_PIXELS), f64::from(WIDTH) - margin);
        let (high, low) = (top + margin + f64::from(CAPTION_PIXELS), top + height - f64::from(LABEL_PIXELS));
        let x = |value: f64| left + (right - left) * self.x.share(value);
        let y = |value: f64| low - (low - high) * self.y.share(value);
        image.text((f64::from(WIDTH) / 2.0, top + margin + 14.0), 16, Anchor::Middle, self.caption);
        for value in self.x.ticks() {
            image.line(&[(x(value), high), (x(value), low)], GRAY, 0.3, 1);
            let label = format!("{value:.*}", self.x.decimals);
            image.text((x(value), low + 18.0), 12, Anchor::Middle, &label);
        }
        for value in self.y.ticks() {
            image.line(&[(left, y(value)), (right, y(value))], GRAY, 0.3, 1);
            let label = format!("{value:.*}", self.y.decimals);
            image.text((left - 6.0, y(value) + 4.0), 12, Anchor::End, &label);
        }
        image.line(&[(left, high), (left, low), (right, low)], GRAY, 1.0, 1);
        image.text(((left + right) / 2.0, low + 38.0), 13, Anchor::Middle, self.x.label);
        image.upward_text((margin + 10.0, (high + low) / 2.0), 13, self.y.label);
        for Curve { points, color, opacity, width, radius } in &self.curves {
            let placed: Vec<(f64, f64)> = points.iter().map(|point| (x(point.0), y(point.1))).collect();
            if *width > 0 && !placed.is_empty() {
                image.line(&placed, *color, *opacity, *width);
            }
            if *radius > 0 {
                placed.iter().for_each(|point| image.dot(*point, *radius, *color, *opacity));
            }
        }
    }
}

/// Draws charts below each other, each of `height` pixels, as SVG.
pub fn stacked(charts: &[Chart<'_>], height: u32) -> String {
    let mut image = Svg::new(height * charts.len() as u32);
    for (at, chart) in charts.iter().enumerate() {
        chart.draw(&mut image, f64::from(height) * at as f64, f64::from(height));
    }
    image.finish()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::svg::{BLUE, ORANGE};

    fn chart(caption: &str, end: f64) -> Chart<'_> {
        let line = vec![(0.0, 0.0), (end / 2.0, 0.5), (end, 1.0)];
        Chart {
            caption,
            x: Axis { label: "layers", span: 0.0..end, decimals: 0 },
            y: Axis { label: "", span: 0.0..1.0, decimals: 2 },
            curves: vec![Curve::line(line, BLUE), Curve::dots(vec![(end, 1.0)], ORANGE, 5)],
        }
    }

    #[test]
    fn charts_are_stacked_in_order() {
        let image = stacked(&[chart("above", 8.0), chart("below", 8.0)], 300);
        assert!(image.starts_with("<svg") && image.contains(r#"height="600""#), "{image}");
        assert!(image.find("above").unwrap() < image.find("below").unwrap());
        assert_eq!(image.matches("<circle").count(), 2, "{image}");
        assert!(image.contains("#3B82F6") && image.contains("#D97706"), "{image}");
    }

    #[test]
    fn whole_numbers_are_labelled_once() {
        for layers in [1, 2, 4, 7, 28, 80] {
            let image = stacked(&[chart("", f64::from(layers))], 300);
            // The vertical axis has labels with two decimals.
            let mut labels: Vec<u32> =
                image.split(['<', '>']).filter_map(|text| text.trim().parse().ok()).collect();
            let count = labels.len();
            labels.sort_unstable();
            labels.dedup();
            assert!(labels.len() == count && count > 1 && count <= MAX_LABELS, "{layers}: {labels:?}");
        }
    }

    #[test]
    fn a_narrow_axis_is_labelled_by_its_last_decimal() {
        let axis = |span, decimals| Axis { label: "", span, decimals };
        assert_eq!(axis(0.0..1.0, 2).ticks().len(), 11);
        assert_eq!(axis(0.0..0.04, 2).ticks().len(), 5);
        assert_eq!(axis(-1.0..1.0, 1).ticks().first(), Some(&-1.0));
        assert!(axis(0.0..f64::MIN_POSITIVE, 0).ticks().len() == 1);
    }
}
