//! The gated delta rule of the replay.

use super::arithmetic::{Matrix, Norm, dot, sigmoid, silu, softplus, unit};

/// The gated delta rule: a matrix per head that decays by a gate and is corrected towards every token.
#[derive(Debug)]
pub struct Delta {
    pub mixed: Matrix,
    pub gate: Matrix,
    pub step: Matrix,
    pub decay: Matrix,
    pub output: Matrix,
    pub norm: Norm,
    /// The weights of a channel's last inputs, from the oldest to the token's own.
    pub taps: Matrix,
    pub decay_logarithm: Vec<f64>,
    pub decay_bias: Vec<f64>,
    pub key_heads: usize,
    pub value_heads: usize,
    pub key_dim: usize,
    pub value_dim: usize,
}

/// The state after a step.
#[derive(Debug, Clone)]
pub struct State {
    /// The last inputs of the convolution, the oldest first.
    recent: Vec<Vec<f64>>,
    /// `[value heads][key element][value element]`
    memory: Vec<Vec<Vec<f64>>>,
}

impl Delta {
    /// Returns the output for one token, and the state after it.
    pub fn step(&self, x: &[f64], before: Option<&State>) -> (Vec<f64>, State) {
        let State { mut recent, mut memory } = before.cloned().unwrap_or_else(|| self.nothing());
        recent.push(self.mixed.times(x));
        let convolve = |(channel, taps): (usize, &Vec<f64>)| {
            let inputs: Vec<f64> = recent.iter().map(|input| input[channel]).collect();
            silu(dot(&inputs, taps))
        };
        let mixed: Vec<f64> = self.taps.rows.iter().enumerate().map(convolve).collect();
        recent.remove(0);

        let (queries, rest) = mixed.split_at(self.key_heads * self.key_dim);
        let (keys, values) = rest.split_at(self.key_heads * self.key_dim);
        let (gate, step, decay) = (self.gate.times(x), self.step.times(x), self.decay.times(x));
        let mut read = Vec::new();
        for (head, memory) in memory.iter_mut().enumerate() {
            let key_head = head / (self.value_heads / self.key_heads);
            let query = unit(&queries[key_head * self.key_dim..][..self.key_dim]);
            let key = unit(&keys[key_head * self.key_dim..][..self.key_dim]);
            let value = &values[head * self.value_dim..][..self.value_dim];
            let gate = &gate[head * self.value_dim..][..self.value_dim];
            let kept =
                (-self.decay_logarithm[head].exp() * softplus(decay[head] + self.decay_bias[head])).exp();
            for element in memory.iter_mut().flatten() {
                *element *= kept;
            }
            for (column, value) in value.iter().enumerate() {
                let recalled: f64 = (0..self.key_dim).map(|row| key[row] * memory[row][column]).sum();
                let correction = sigmoid(step[head]) * (value - recalled);
                for row in 0..self.key_dim {
                    memory[row][column] += key[row] * correction;
                }
            }
            let scale = 1.0 / (self.key_dim as f64).sqrt();
            let found: Vec<f64> = (0..self.value_dim)
                .map(|column| (0..self.key_dim).map(|row| query[row] * scale * memory[row][column]).sum())
                .collect();
            read.extend(self.norm.of(&found).iter().zip(gate).map(|(found, &gate)| found * silu(gate)));
        }
        (self.output.times(&read), State { recent, memory })
    }

    fn nothing(&self) -> State {
        let channels = self.taps.rows.len();
        let kernel = self.taps.rows[0].len();
        State {
            recent: vec![vec![0.0; channels]; kernel - 1],
            memory: vec![vec![vec![0.0; self.value_dim]; self.key_dim]; self.value_heads],
        }
    }
}
