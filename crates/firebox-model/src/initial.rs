//! Random initial weights for a network that is trained from scratch.

/// The numbers that a network begins to learn with.
///
/// Matrices are normally distributed, and what they are given leaves them as large as it was; those that write into the
/// residual stream by so much less that a deep network begins like a shallow one. Norms begin as what they do without a
/// weight, adapters as nothing.
#[derive(Debug)]
pub(crate) struct Initial {
    state: u64,
    seeded: Seeded,
    layers: usize,
}

/// What is chosen about the beginning.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Seeded {
    /// Decides all random numbers.
    pub seed: u64,
    /// Standard deviation of embeddings, and of what scores tokens and labels.
    pub embedding: f32,
    /// What norms of query and key heads multiply by. More than one lets attention choose sooner.
    pub head_norms: f32,
}

impl Seeded {
    /// What most networks begin with.
    pub fn new(seed: u64) -> Self {
        Self { seed, embedding: 0.02, head_norms: 1.0 }
    }
}

/// Ends of names of matrices that write into the residual stream.
const RESIDUAL: [&str; 3] = ["o_proj.weight", "out_proj.weight", "down_proj.weight"];

/// Parts of names of matrices that have a row for every token or label.
const TOKENS: [&str; 3] = ["embed_tokens", "lm_head", "classifier"];

/// Parts of names of norms of query and key heads.
const HEAD_NORMS: [&str; 2] = ["q_norm", "k_norm"];

/// Parts of names of vectors that something is multiplied by.
const FACTORS: [&str; 3] = ["norm", "ln_", "scal"];

impl Initial {
    /// For a network of so many layers.
    pub fn new(seeded: Seeded, layers: usize) -> Self {
        Self { state: seeded.seed, seeded, layers }
    }

    /// The tensor of that name. Tensors have to be asked for in one order to be the same again.
    pub fn numbers(&mut self, name: &str, shape: &[usize]) -> Vec<f32> {
        let count = shape.iter().product();
        let is = |parts: &[&str]| parts.iter().any(|part| name.contains(part));
        if shape.len() == 1 {
            let scale = if is(&HEAD_NORMS) { self.seeded.head_norms } else { 1.0 };
            let multiplies = is(&FACTORS) && !name.ends_with("bias");
            return vec![if multiplies { scale } else { 0.0 }; count];
        }
        if name.ends_with(crate::adapter_plan::OUTWARD) || name.ends_with("bridge.outward.weight") {
            return vec![0.0; count];
        }
        let inputs = shape[1..].iter().product::<usize>() as f32;
        let deviation = if is(&TOKENS) {
            self.seeded.embedding
        } else if RESIDUAL.iter().any(|end| name.ends_with(end)) {
            (2.0 * self.layers as f32 * inputs).sqrt().recip()
        } else {
            inputs.sqrt().recip()
        };
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_as_large_as_they_should_be_and_the_same_for_a_seed() {
        let seeded = Seeded { head_norms: 1.6, ..Seeded::new(3) };
        let mut initial = Initial::new(seeded, 8);
        let mut deviation = |name: &str, shape: [usize; 2]| {
            let values = initial.numbers(name, &shape);
            let mean = values.iter().sum::<f32>() / values.len() as f32;
            assert!(mean.abs() < 0.01, "{name}: {mean}");
            (values.iter().map(|value| value * value).sum::<f32>() / values.len() as f32).sqrt()
        };
        let near = |found: f32, wanted: f32| assert!((found / wanted - 1.0).abs() < 0.03, "{found}");
        near(deviation("model.embed_tokens.weight", [300, 64]), 0.02);
        near(deviation("model.layers.0.self_attn.q_proj.weight", [256, 64]), 1.0 / 8.0);
        near(deviation("model.layers.0.mlp.down_proj.weight", [64, 256]), 1.0 / 64.0);
        assert_eq!(deviation("model.layers.0.mlp.up_proj.lora_B.weight", [64, 4]), 0.0);
        assert_eq!(initial.numbers("model.layers.0.self_attn.q_norm.weight", &[2]), [1.6, 1.6]);
        assert_eq!(initial.numbers("model.norm.weight", &[2]), [1.0, 1.0]);
        assert_eq!(initial.numbers("model.layers.0.self_attn.q_proj.bias", &[2]), [0.0, 0.0]);
        let again = |seed| Initial::new(Seeded::new(seed), 8).numbers("x.weight", &[3, 3]);
        assert_eq!(again(5), again(5));
        assert_ne!(again(5), again(6));
    }
}
