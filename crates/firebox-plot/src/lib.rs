//! Draws measurements as SVG: curves over two axes, and bars.
//!
//! The colours are legible on white and on black; the background is transparent.
//!
//! ```
//! use firebox_plot::{Axis, BLUE, Chart, Curve, stacked};
//!
//! let loss = Chart {
//!     caption: "Loss",
//!     x: Axis { label: "step", span: 0.0..3.0, decimals: 0 },
//!     y: Axis { label: "", span: 0.0..2.0, decimals: 1 },
//!     curves: vec![Curve::line(vec![(0.0, 1.9), (1.0, 1.2), (3.0, 0.8)], BLUE)],
//! };
//! assert!(stacked(&[loss], 400).starts_with("<svg"));
//! ```

mod chart;
mod svg;

pub use chart::{Axis, Chart, Curve, LABEL_PIXELS, stacked};
pub use svg::{Anchor, BLUE, Color, GRAY, MARGIN, ORANGE, Svg, WIDTH};
