//! The plan of low-rank adapters, and the names of their tensors.

/// What the name of an adapter's first matrix ends with, where the weight's own ends with `.weight`.
pub(crate) const INWARD: &str = ".lora_A.weight";
/// What that of its second one ends with.
pub(crate) const OUTWARD: &str = ".lora_B.weight";

/// Weights that a head's adapters change, and their rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AdapterPlan {
    /// Rank of the adapters.
    pub rank: usize,
    /// Names of weights within their layer, such as `q_proj`.
    pub targets: Vec<String>,
}
