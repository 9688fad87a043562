//! Matrices, norms and activations of the replay.

/// A weight matrix with a row per output.
#[derive(Debug)]
pub struct Matrix {
    pub rows: Vec<Vec<f64>>,
}

impl Matrix {
    pub fn times(&self, x: &[f64]) -> Vec<f64> {
        self.rows.iter().map(|row| dot(row, x)).collect()
    }
}

/// RMS normalization: division by the root mean square, and multiplication by a weight.
#[derive(Debug)]
pub struct Norm {
    pub weight: Vec<f64>,
    pub epsilon: f64,
}

impl Norm {
    pub fn of(&self, x: &[f64]) -> Vec<f64> {
        assert_eq!(x.len(), self.weight.len(), "a norm of another width");
        let root = (dot(x, x) / x.len() as f64 + self.epsilon).sqrt();
        x.iter().zip(&self.weight).map(|(x, weight)| x / root * weight).collect()
    }

    /// Normalizes every head of a row separately.
    pub fn of_heads(&self, x: &[f64]) -> Vec<f64> {
        x.chunks(self.weight.len()).flat_map(|head| self.of(head)).collect()
    }
}

/// `down(silu(gate(x)) * up(x))`
#[derive(Debug)]
pub struct FeedForward {
    pub gate: Matrix,
    pub up: Matrix,
    pub down: Matrix,
}

impl FeedForward {
    pub fn of(&self, x: &[f64]) -> Vec<f64> {
        let (gate, up) = (self.gate.times(x), self.up.times(x));
        let inner: Vec<f64> = gate.iter().zip(up).map(|(&gate, up)| silu(gate) * up).collect();
        self.down.times(&inner)
    }
}

pub fn dot(a: &[f64], b: &[f64]) -> f64 {
    assert_eq!(a.len(), b.len(), "vectors of different widths");
    // Additions that wait for one another take most of a replay's time.
    const SUMS: usize = 8;
    let ((a, a_rest), (b, b_rest)) = (a.as_chunks::<SUMS>(), b.as_chunks::<SUMS>());
    let mut sums = [0.0; SUMS];
    for (a, b) in a.iter().zip(b) {
        for (sum, (a, b)) in sums.iter_mut().zip(a.iter().zip(b)) {
            *sum += a * b;
        }
    }
    let rest: f64 = a_rest.iter().zip(b_rest).map(|(a, b)| a * b).sum();
    sums.iter().sum::<f64>() + rest
}

pub fn add(to: &mut [f64], x: &[f64]) {
    for (to, x) in to.iter_mut().zip(x) {
        *to += x;
    }
}

pub fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

pub fn silu(x: f64) -> f64 {
    x * sigmoid(x)
}

pub fn softplus(x: f64) -> f64 {
    x.max(0.0) + (-x.abs()).exp().ln_1p()
}

/// Returns `x` scaled to length one.
pub fn unit(x: &[f64]) -> Vec<f64> {
    // The reference's constant, which keeps a zero vector zero.
    const EPSILON: f64 = 1e-6;
    let length = (dot(x, x) + EPSILON).sqrt();
    x.iter().map(|x| x / length).collect()
}
