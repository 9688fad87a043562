//! Loss curves as images.

use std::error::Error;

use plotters::prelude::*;

use crate::metrics::Record;

const SIZE: (u32, u32) = (720, 400);

/// Seen on white and on black alike; the background stays as it is where the image is shown.
const INK: RGBColor = RGBColor(0x78, 0x78, 0x78);
const TRAINING: RGBColor = RGBColor(0x3b, 0x82, 0xf6);
const HELD_OUT: RGBColor = RGBColor(0xd9, 0x77, 0x06);

const FONT: &str = "sans-serif";
const MARGIN: u32 = 12;
const LABELS: u32 = 56;

/// More points than this tell the eye nothing; what lies between is averaged.
const POINTS: usize = 400;

/// The losses of a run over its steps, as SVG. `None` if there is nothing to show yet.
pub(crate) fn losses(records: &[Record]) -> Result<Option<String>, Box<dyn Error>> {
    let training = averaged(records);
    let held_out: Vec<(f64, f64)> = records
        .iter()
        .filter_map(|record| Some((record.step as f64, record.held_out_loss?)))
        .filter(|(_, loss)| loss.is_finite())
        .collect();
    let (Some(first), Some(last)) = (records.first(), records.last()) else { return Ok(None) };
    let all = || training.iter().chain(&held_out).map(|&(_, loss)| loss);
    let lowest = all().fold(f64::INFINITY, f64::min);
    let highest = all().fold(f64::NEG_INFINITY, f64::max);
    if !lowest.is_finite() || !highest.is_finite() {
        return Ok(None);
    }
    let room = ((highest - lowest) * 0.05).max(1e-6);
    let span = first.step as f64..last.step.max(first.step + 1) as f64;

    let mut image = String::new();
    {
        let area = SVGBackend::with_string(&mut image, SIZE).into_drawing_area();
        let text = |size: u32| (FONT, size).into_font().color(&INK);
        let caption = if held_out.is_empty() { "Loss" } else { "Loss: training (blue), held out (orange)" };
        let mut chart = ChartBuilder::on(&area)
            .caption(caption, text(16))
            .margin(MARGIN)
            .x_label_area_size(LABELS - MARGIN)
            .y_label_area_size(LABELS)
            .build_cartesian_2d(span, lowest - room..highest + room)?;
        let decimals = if highest - lowest > 1.0 { 1 } else { 3 };
        chart
            .configure_mesh()
            .axis_style(INK)
            .label_style(text(12))
            .axis_desc_style(text(13))
            .bold_line_style(INK.mix(0.3))
            .light_line_style(TRANSPARENT)
            .x_desc("step")
            .x_label_formatter(&|step| format!("{step:.0}"))
            .y_label_formatter(&|loss| format!("{loss:.decimals$}"))
            .draw()?;
        chart.draw_series(LineSeries::new(training, TRAINING.stroke_width(1)))?;
        chart.draw_series(held_out.iter().map(|&point| Circle::new(point, 3, HELD_OUT.filled())))?;
        chart.draw_series(LineSeries::new(held_out, HELD_OUT.stroke_width(2)))?;
        area.present()?;
    }
    Ok(Some(image))
}

fn averaged(records: &[Record]) -> Vec<(f64, f64)> {
    let chunk = records.len().div_ceil(POINTS).max(1);
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
    fn curves_have_so_many_points_at_most() {
        assert!(losses(&[]).unwrap().is_none());
        assert!(losses(&[record(1, f64::NAN)]).unwrap().is_none());
        for count in [1, 2, 400, 401, 5000] {
            let records: Vec<Record> = (1..=count).map(|step| record(step, 1.0 / step as f64)).collect();
            assert!(averaged(&records).len() <= POINTS);
            let image = losses(&records).unwrap().unwrap();
            assert!(image.starts_with("<svg") && image.contains("polyline"), "{count}");
            assert_eq!(image.contains("held out"), count >= 10, "{count}");
        }
    }
}
