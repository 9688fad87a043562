//! Draws the loss curves of a run.

use firebox_plot::{Axis, BLUE, Chart, Curve, ORANGE, stacked};

use crate::metrics::Record;

const HEIGHT: u32 = 400;

/// The most points of a curve; groups of records are averaged to stay below.
const MAX_POINTS: usize = 400;

/// Draws the losses of a run by step as SVG. `None` without any finite loss.
pub(crate) fn losses(records: &[Record]) -> Option<String> {
    let training = averaged(records);
    let held_out: Vec<(f64, f64)> = records
        .iter()
        .filter_map(|record| Some((record.step as f64, record.held_out_loss?)))
        .filter(|(_, loss)| loss.is_finite())
        .collect();
    let (Some(first), Some(last)) = (records.first(), records.last()) else { return None };
    let all = || training.iter().chain(&held_out).map(|&(_, loss)| loss);
    let lowest = all().fold(f64::INFINITY, f64::min);
    let highest = all().fold(f64::NEG_INFINITY, f64::max);
    if !lowest.is_finite() || !highest.is_finite() {
        return None;
    }
    let room = ((highest - lowest) * 0.05).max(1e-6);
    let decimals = if highest - lowest > 1.0 { 1 } else { 3 };
    let caption = if held_out.is_empty() { "Loss" } else { "Loss: training (blue), held out (orange)" };
    let chart = Chart {
        caption,
        x: Axis { label: "step", span: first.step as f64..last.step.max(first.step + 1) as f64, decimals: 0 },
        y: Axis { label: "", span: lowest - room..highest + room, decimals },
        curves: vec![
            Curve { width: 1, ..Curve::line(training, BLUE) },
            Curve { radius: 3, ..Curve::line(held_out, ORANGE) },
        ],
    };
    Some(stacked(&[chart], HEIGHT))
}

fn averaged(records: &[Record]) -> Vec<(f64, f64)> {
    let chunk = records.len().div_ceil(MAX_POINTS).max(1);
    let mean = |values: &mut dyn Iterator<Item = f64>, count: usize| values.sum::<f64>() / count as f64;
    records
        .chunks(chunk)
        .map(|chunk| {
            let step = mean(&mut chunk.iter().map(|record| record.step as f64), chunk.len());
            (step, mean(&mut chunk.iter().map(|record| record.loss), chunk.len()))
        })
        .filter(|(_, loss)| loss.is_finite())
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(step: u64, loss: f64) -> Record {
        Record {
            step,
            loss,
            learning_rate: 0.0,
            gradient_norm: 0.0,
            tokens_per_second: 0.0,
            held_out_loss: step.is_multiple_of(10).then_some(loss + 1.0),
        }
    }

    #[test]
    fn curves_have_a_limited_number_of_points() {
        assert!(losses(&[]).is_none());
        assert!(losses(&[record(1, f64::NAN)]).is_none());
        for count in [1, 2, 400, 401, 5000] {
            let records: Vec<Record> = (1..=count).map(|step| record(step, 1.0 / step as f64)).collect();
            assert!(averaged(&records).len() <= MAX_POINTS);
            let image = losses(&records).unwrap();
            assert!(image.starts_with("<svg") && image.contains("polyline"), "{count}");
            assert_eq!(image.contains("held out"), count >= 10, "{count}");
        }
    }
}
