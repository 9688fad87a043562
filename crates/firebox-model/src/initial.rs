/// The numbers that a network begins to learn with.
///
/// Matrices are normally distributed, those that write into the residual stream by so much less that a deep network
/// begins like a shallow one. Norms begin as what they do without a weight, adapters as nothing.
#[derive(Debug)]
pub struct Initial {
    state: u64,
    deviation: f32,
    layers: usize,
    /// What norms have added to their weights.
    norm_offset: f32,
}

/// Ends of names of matrices that write into the residual stream.
const RESIDUAL: [&str; 3] = ["o_proj.weight", "out_proj.weight", "down_proj.weight"];

impl Initial {
    /// Numbers by a seed, for a network of so many layers, with matrices of the given standard deviation.
    pub fn new(seed: u64, deviation: f32, layers: usize, norm_offset: f32) -> Self {
        Self { state: seed, deviation, layers, norm_offset }
    }

    /// The tensor of that name. Tensors have to be asked for in one order to be the same again.
    pub(crate) fn numbers(&mut self, name: &str, shape: &[usize]) -> Vec<f32> {
        let count = shape.iter().product();
        if shape.len() == 1 {
            let weight = if name.contains("norm") { 1.0 - self.norm_offset } else { 0.0 };
            return vec![weight; count];
        }
        if name.ends_with(crate::adapter::OUTWARD) || name.ends_with("bridge.outward.weight") {
            return vec![0.0; count];
        }
        if name.ends_with(crate::adapter::INWARD) {
            let inputs = shape[shape.len() - 1] as f32;
            return (0..count).map(|_| self.normal() / inputs.sqrt()).collect();
        }
        let residual = RESIDUAL.iter().any(|end| name.ends_with(end));
        let deviation =
            if residual { self.deviation / (2.0 * self.layers as f32).sqrt() } else { self.deviation };
        (0..count).map(|_| self.normal() * deviation).collect()
    }

    /// By the polar method.
    fn normal(&mut self) -> f32 {
        loop {
            let (x, y) = (self.uniform() * 2.0 - 1.0, self.uniform() * 2.0 - 1.0);
            let square = x * x + y * y;
            if square > 0.0 && square < 1.0 {
                return (x * (-2.0 * square.ln() / square).sqrt()) as f32;
            }
        }
    }

    /// From 0 to 1, by splitmix64.
    fn uniform(&mut self) -> f64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.state;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((mixed ^ (mixed >> 31)) >> 11) as f64 / (1u64 << 53) as f64
    }
}
