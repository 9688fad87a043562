//! Writes the elements of an SVG image.

use std::fmt::{self, Write as _};

/// A colour: red, green and blue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Color(pub u8, pub u8, pub u8);

/// Colour of axes and texts.
pub const GRAY: Color = Color(0x78, 0x78, 0x78);
/// Colour of the main values.
pub const BLUE: Color = Color(0x3b, 0x82, 0xf6);
/// Colour of the values to compare with.
pub const ORANGE: Color = Color(0xd9, 0x77, 0x06);

/// Width of every image in pixels.
pub const WIDTH: u32 = 720;
/// Margin around the content in pixels.
pub const MARGIN: u32 = 12;

/// The point of a text that its position refers to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Anchor {
    /// The left end.
    Start,
    /// The middle.
    Middle,
    /// The right end.
    End,
}

impl fmt::Display for Color {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "#{:02X}{:02X}{:02X}", self.0, self.1, self.2)
    }
}

impl fmt::Display for Anchor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Start => "start",
            Self::Middle => "middle",
            Self::End => "end",
        })
    }
}

/// An image that is being drawn. Positions are in pixels from its upper left corner.
#[derive(Debug)]
pub struct Svg(String);

impl Svg {
    /// Creates an empty image.
    pub fn new(height: u32) -> Self {
        Self(format!(
            "<svg width=\"{WIDTH}\" height=\"{height}\" viewBox=\"0 0 {WIDTH} {height}\" \
             xmlns=\"http://www.w3.org/2000/svg\" font-family=\"sans-serif\">\n"
        ))
    }

    /// Returns the whole image.
    pub fn finish(self) -> String {
        self.0 + "</svg>\n"
    }

    /// Draws a line through points.
    pub fn line(&mut self, points: &[(f64, f64)], color: Color, opacity: f64, width: u32) {
        let points: Vec<String> = points.iter().map(|(x, y)| format!("{x:.1},{y:.1}")).collect();
        self.element(format_args!(
            "<polyline fill=\"none\" opacity=\"{opacity}\" stroke=\"{color}\" stroke-width=\"{width}\" points=\"{}\"/>",
            points.join(" ")
        ));
    }

    /// Draws a dot.
    pub fn dot(&mut self, (x, y): (f64, f64), radius: u32, color: Color, opacity: f64) {
        self.element(format_args!(
            "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"{radius}\" opacity=\"{opacity}\" fill=\"{color}\"/>"
        ));
    }

    /// Draws a filled rectangle.
    pub fn rectangle(&mut self, (x, y): (i32, i32), (width, height): (i32, i32), color: Color) {
        self.element(format_args!(
            "<rect x=\"{x}\" y=\"{y}\" width=\"{width}\" height=\"{height}\" fill=\"{color}\"/>"
        ));
    }

    /// Writes a text on a baseline.
    pub fn text(&mut self, (x, y): (f64, f64), pixels: u32, anchor: Anchor, text: &str) {
        let text = escaped(text);
        self.element(format_args!(
            "<text x=\"{x:.1}\" y=\"{y:.1}\" font-size=\"{pixels}\" text-anchor=\"{anchor}\" fill=\"{GRAY}\">{text}</text>"
        ));
    }

    /// Writes a text upward, centred at a point.
    pub fn upward_text(&mut self, (x, y): (f64, f64), pixels: u32, text: &str) {
        let text = escaped(text);
        self.element(format_args!(
            "<text transform=\"translate({x:.1} {y:.1}) rotate(-90)\" font-size=\"{pixels}\" text-anchor=\"middle\" \
             fill=\"{GRAY}\">{text}</text>"
        ));
    }

    fn element(&mut self, element: fmt::Arguments<'_>) {
        // Writing to a string cannot fail.
        let _ = writeln!(self.0, "{element}");
    }
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_are_escaped() {
        let mut image = Svg::new(10);
        image.text((0.0, 0.0), 12, Anchor::Start, "a < b & c");
        assert!(image.finish().contains(">a &lt; b &amp; c</text>"));
    }
}
