use crate::RuntimeError;
use crate::planner::{Rates, Shape, predict};

/// Some parts of a model that one token went through again and again.
#[derive(Debug)]
pub(super) struct Round {
    /// Which parts, and whether each was kept.
    pub parts: Vec<(usize, bool)>,
    /// How long a round has taken.
    pub seconds: f64,
}

/// What rounds say something about, but a single one only about the first.
const KNOBS: [fn(&mut Rates) -> &mut f64; 3] =
    [|rates| &mut rates.read_bytes_per_second, |rates| &mut rates.contention, |rates| &mut rates.hindrance];

/// How far the rate of reading is looked for from where it is thought to be, as a factor, and the most that reading and computing
/// are thought to hold each other up.
const FARTHEST: f64 = 8.0;
const MOST_DISTURBANCE: f64 = 8.0;

/// What it counts, beside rounds that are not foretold well, that reading is faster or slower than it was thought to be: where
/// computing takes longer than reading, rounds do not say.
const DOUBT: f64 = 0.01;

/// By what factor knobs are turned at first and at last, how much better rounds have to be foretold for knobs to be turned as far
/// again, and how often they are turned at most.
const FIRST_TURN: f64 = 1.25;
const LAST_TURN: f64 = 1.005;
const BETTER: f64 = 1e-3;
const MOST_TURNS: usize = 200;

/// The rates with which these rounds are best foretold, all of them alike.
pub(super) fn explained(
    rates: Rates,
    shape: &Shape,
    buffers: usize,
    rounds: &[Round],
) -> Result<Rates, RuntimeError> {
    let thought = rates.read_bytes_per_second;
    let is_possible = |rates: &Rates| {
        let (contention, hindrance) = (rates.contention, rates.hindrance);
        (thought / FARTHEST..=thought * FARTHEST).contains(&rates.read_bytes_per_second)
            && (1.0..=MOST_DISTURBANCE).contains(&contention)
            && (1.0..=MOST_DISTURBANCE).contains(&hindrance)
            // Both at once is never slower than one after the other.
            && 1.0 / contention + 1.0 / hindrance >= 1.0
    };
    let fault = |rates: &Rates| {
        let doubt = DOUBT * (rates.read_bytes_per_second / thought).ln().powi(2);
        rounds.iter().try_fold(doubt, |sum, round| {
            let foretold = round.foretold(shape, rates, buffers)?;
            Ok::<_, RuntimeError>(sum + (foretold / round.seconds).ln().powi(2))
        })
    };
    let knobs = if rounds.len() > 1 { &KNOBS[..] } else { &KNOBS[..rounds.len()] };
    let rates = Rates { contention: rates.contention.clamp(1.0, MOST_DISTURBANCE), ..rates };
    let mut best = (fault(&rates)?, rates);
    let mut turn = FIRST_TURN;
    for _ in 0..MOST_TURNS {
        if turn < LAST_TURN {
            break;
        }
        let before = best.0;
        for knob in knobs {
            for factor in [turn, 1.0 / turn] {
                let mut turned = best.1.clone();
                *knob(&mut turned) *= factor;
                // What is at its least stays there.
                turned.contention = turned.contention.max(1.0);
                turned.hindrance = turned.hindrance.max(1.0);
                if !is_possible(&turned) {
                    continue;
                }
                let found = fault(&turned)?;
                if found < best.0 {
                    best = (found, turned);
                }
            }
        }
        let is_better = best.0 < before * (1.0 - BETTER);
        if !is_better {
            turn = turn.sqrt();
        }
    }
    Ok(best.1)
}

impl Round {
    /// Seconds that it takes with such rates.
    fn foretold(&self, shape: &Shape, rates: &Rates, buffers: usize) -> Result<f64, RuntimeError> {
        let parts = || self.parts.iter().map(|&(part, _)| part);
        let shape = Shape { parts: parts().map(|part| shape.parts[part]).collect(), ..shape.clone() };
        let rates = Rates { compute: parts().map(|part| rates.compute[part]).collect(), ..rates.clone() };
        let kept: Vec<bool> = self.parts.iter().map(|&(_, kept)| kept).collect();
        Ok(predict(&shape, &rates, &kept, buffers)?.seconds_per_token)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::planner::Part;

    const BUFFERS: usize = 2;

    fn model() -> Shape {
        let part = |is_layer| Part { bytes: 10 << 20, kept_bytes: 10 << 20, is_layer };
        let mut parts = vec![part(true); 20];
        parts.extend([part(false); 8]);
        Shape { parts, kv_bytes_per_token: 0, activation_bytes_per_row: 0, fixed_bytes: 0 }
    }

    fn rounds(shape: &Shape, rates: &Rates) -> Vec<Round> {
        let all = (0..28).map(|part| (part, false)).collect();
        let half = (0..16).map(|part| (part, part % 2 == 0)).collect();
        let behind = (0..8).map(|part| (part, true)).chain((20..28).map(|part| (part, false))).collect();
        let seen = |parts| {
            let mut round = Round { parts, seconds: 0.0 };
            round.seconds = round.foretold(shape, rates, BUFFERS).unwrap();
            round
        };
        [all, half, behind].map(seen).into()
    }

    #[test]
    fn rates_are_found_that_foretell_every_number_of_kept_layers() {
        let shape = model();
        let compute = vec![1e-3; 28];
        let thought = Rates {
            read_bytes_per_second: 4e9,
            read_latency: 0.0,
            compute,
            overhead: 0.0,
            contention: 1.1,
            hindrance: 1.0,
        };
        for (rate, contention, hindrance) in
            [(5.5e9, 1.6, 1.0), (2e9, 1.0, 1.0), (8e9, 1.3, 1.5), (20e9, 1.9, 1.0)]
        {
            let so = Rates { read_bytes_per_second: rate, contention, hindrance, ..thought.clone() };
            let found = explained(thought.clone(), &shape, BUFFERS, &rounds(&shape, &so)).unwrap();
            for count in 0..=20 {
                let kept: Vec<bool> = (0..28).map(|part| part < 20 && (part * count) % 20 < count).collect();
                let [said, is] = [&found, &so]
                    .map(|rates| predict(&shape, rates, &kept, BUFFERS).unwrap().seconds_per_token);
                assert!(
                    (said / is - 1.0).abs() < 0.05,
                    "{rate} {contention} {hindrance}, {count} kept: {said} {is}"
                );
            }
        }
    }

    #[test]
    fn where_computing_takes_longer_rounds_say_nothing_of_reading() {
        let shape = model();
        let thought = Rates {
            read_bytes_per_second: 50e9,
            read_latency: 0.0,
            compute: vec![1e-3; 28],
            overhead: 0.0,
            contention: 40.0,
            hindrance: 1.0,
        };
        let so = Rates { contention: 1.2, ..thought.clone() };
        let found = explained(thought, &shape, BUFFERS, &rounds(&shape, &so)).unwrap();
        assert!((found.read_bytes_per_second / 50e9 - 1.0).abs() < 0.1, "{found:?}");
        assert!((found.contention / 1.2 - 1.0).abs() < 0.1, "{found:?}");
    }

    #[test]
    fn without_rounds_nothing_is_known_better() {
        let thought = Rates {
            read_bytes_per_second: 1e9,
            read_latency: 0.0,
            compute: vec![1e-3; 28],
            overhead: 0.0,
            contention: 1.5,
            hindrance: 1.0,
        };
        assert_eq!(explained(thought.clone(), &model(), BUFFERS, &[]).unwrap(), thought);
    }
}
