//! Plans how much of a model stays in memory, and predicts its speed.
//!
//! Layers that are not resident are streamed: read from disk before they are needed, into buffers that are reused. A
//! [`Shape`] describes a model and [`Rates`] a machine. [`predict`] simulates some tokens with both, and [`plan`] finds the
//! fastest plan within a number of bytes.
//!
//! ```
//! use firebox_memory::planner::{DeviceProfile, Mode, Part, Shape, plan};
//!
//! # fn main() -> Result<(), firebox_memory::MemoryError> {
//! let layer = Part { bytes: 50 << 20, kept_bytes: 50 << 20, is_layer: true };
//! let unembedding = Part { is_layer: false, ..layer };
//! let mut parts = vec![layer; 32];
//! parts.push(unembedding);
//! let shape = Shape { parts, kv_bytes_per_token: 1 << 16, activation_bytes_per_row: 1 << 18, fixed_bytes: 64 << 20 };
//! let rates = DeviceProfile::conservative().rates(&shape)?;
//! let plan = plan(&shape, &rates, 1 << 30, Mode::Balanced, 4096)?;
//! assert!(plan.kept_layers.len() > 8 && plan.kept_layers.len() < 32);
//! # Ok(()) }
//! ```

mod pipeline;
mod placement;
mod plan;
mod prediction;
mod profile;
mod rates;
mod shape;

pub use placement::{Compared, Explanation, Placement, place, spread};
pub use plan::{FEWEST_BUFFERS, KV_PAGE_TOKENS, Mode, Plan, plan};
pub use prediction::{Prediction, predict};
pub use profile::DeviceProfile;
pub use rates::Rates;
pub use shape::{Part, Shape};
