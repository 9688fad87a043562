//! Reading position schemes from a configuration.

use crate::ModelError;
use crate::config::{RopeConfig, RopeLayout, RopeScaling};
use crate::fields::Fields;

/// Shape of the heads that a position scheme rotates.
#[derive(Debug, Clone, Copy)]
pub(super) struct Head {
    pub head_dim: usize,
    pub max_positions: usize,
    pub layout: RopeLayout,
    /// Rotated fraction of a head if the configuration gives none. `None` in families that ignore the
    /// configured fraction unless frequencies are scaled.
    pub default_fraction: Option<f64>,
}

/// Reads a model's position scheme: `rope_parameters`, or `rope_scaling` with `rope_theta`.
pub(super) fn read(fields: &Fields<'_>, head: Head, default_theta: f64) -> Result<RopeConfig, ModelError> {
    let scaling = match fields.object("rope_parameters")? {
        Some(parameters) => Some(parameters),
        None => fields.object("rope_scaling")?,
    };
    read_scheme(fields, scaling.as_ref(), head, default_theta)
}

/// Returns the factor of attention scores that the families of deepseek derive from a model's position scheme.
pub(super) fn score_factor(fields: &Fields<'_>) -> Result<f64, ModelError> {
    let scheme = match fields.object("rope_parameters")? {
        Some(parameters) => Some(parameters),
        None => fields.object("rope_scaling")?,
    };
    let Some(scheme) = scheme else { return Ok(1.0) };
    let (weight, factor) = (scheme.number("mscale_all_dim")?.unwrap_or(0.0), scheme.positive("factor")?);
    match (kind(&scheme)?, factor) {
        ("default", _) => Ok(1.0),
        _ if weight == 0.0 => Ok(1.0),
        (_, Some(factor)) => Ok(magnitude(weight, factor).powi(2)),
        (_, None) => Err(scheme.error("factor", "is missing beside mscale_all_dim")),
    }
}

/// Reads one scheme. Fields that `scheme` lacks are taken from the model's own.
pub(super) fn read_scheme(
    fields: &Fields<'_>,
    scheme: Option<&Fields<'_>>,
    head: Head,
    default_theta: f64,
) -> Result<RopeConfig, ModelError> {
    let from_either = |name: &str| match scheme.map(|scheme| scheme.positive(name)).transpose()?.flatten() {
        Some(value) => Ok(Some(value)),
        None => fields.positive(name),
    };
    let theta = from_either("rope_theta")?.unwrap_or(default_theta);
    let scaled = match scheme {
        Some(scheme) => !matches!(kind(scheme)?, "default" | "mrope"),
        None => false,
    };
    let part = match (head.default_fraction, scaled) {
        (None, false) => 1.0,
        (default_fraction, _) => from_either("partial_rotary_factor")?.or(default_fraction).unwrap_or(1.0),
    };
    let width = rotated(fields, head, part)?;
    let scaling = match scheme {
        Some(scheme) => read_scaling(fields, scheme, head, width, theta)?,
        None => RopeScaling::None,
    };
    Ok(RopeConfig { width, theta, scaling, layout: head.layout })
}

/// Returns the number of rotated elements of a head, given the fraction.
fn rotated(fields: &Fields<'_>, head: Head, part: f64) -> Result<usize, ModelError> {
    let width = (head.head_dim as f64 * part) as usize;
    if part > 1.0 || width < 2 || width.next_multiple_of(2) > head.head_dim {
        return Err(fields.error(
            "head_dim",
            format!("a part of {part} of {} leaves {width} elements, which do not pair", head.head_dim),
        ));
    }
    Ok(width)
}

fn kind<'a>(scheme: &Fields<'a>) -> Result<&'a str, ModelError> {
    Ok(match scheme.text("rope_type")? {
        Some(kind) => kind,
        None => scheme.text("type")?.unwrap_or("default"),
    })
}

fn read_scaling(
    fields: &Fields<'_>,
    scheme: &Fields<'_>,
    head: Head,
    width: usize,
    theta: f64,
) -> Result<RopeScaling, ModelError> {
    let kind = kind(scheme)?;
    let trained_length = || -> Result<usize, ModelError> {
        let outside = fields.count("original_max_position_embeddings")?;
        let inside = scheme.count("original_max_position_embeddings")?;
        Ok(outside.or(inside).unwrap_or(head.max_positions))
    };
    let positive_factor = || match scheme.positive("factor")? {
        Some(factor) => Ok(factor),
        None => Err(scheme.error("factor", format!("is missing for rope_type {kind:?}"))),
    };
    Ok(match kind {
        "default" | "mrope" => RopeScaling::None,
        "linear" => RopeScaling::Linear { factor: positive_factor()? as f32 },
        "dynamic" => {
            if width <= 2 {
                return Err(scheme.error("rope_type", "dynamic needs more than two rotated elements"));
            }
            RopeScaling::Dynamic { factor: positive_factor()?, original: head.max_positions }
        }
        // Early phi3 configurations call longrope "yarn".
        "yarn" if scheme.get("long_factor").is_some() => long_rope(scheme, head, width, trained_length()?)?,
        "yarn" => {
            let original = trained_length()?;
            let factor = match scheme.positive("factor")? {
                Some(factor) => factor,
                None => head.max_positions as f64 / original as f64,
            };
            RopeScaling::Yarn {
                factor,
                original,
                beta_fast: scheme.positive("beta_fast")?.unwrap_or(32.0),
                beta_slow: scheme.positive("beta_slow")?.unwrap_or(1.0),
                truncate: scheme.flag("truncate")?.unwrap_or(true),
                attention_factor: yarn_attention_factor(scheme, factor)?,
            }
        }
        "llama3" => {
            let high_frequency = scheme.required_number("high_freq_factor")? as f32;
            let low_frequency = scheme.required_number("low_freq_factor")? as f32;
            if high_frequency == low_frequency || low_frequency <= 0.0 {
                return Err(
                    scheme.error("low_freq_factor", "should be above zero and other than high_freq_factor")
                );
            }
            RopeScaling::Llama3 {
                factor: positive_factor()? as f32,
                low_frequency,
                high_frequency,
                original: trained_length()?,
            }
        }
        "longrope" | "su" => long_rope(scheme, head, width, trained_length()?)?,
        "firebox_factors" => RopeScaling::Factors { factors: pair_factors(scheme, "factors", width)? },
        _ => {
            return Err(scheme.error(
                "rope_type",
                format!("{kind:?} with theta {theta} is not a position scheme that is known"),
            ));
        }
    })
}

fn long_rope(
    scheme: &Fields<'_>,
    head: Head,
    width: usize,
    original: usize,
) -> Result<RopeScaling, ModelError> {
    let stretch = match scheme.positive("factor")? {
        Some(factor) => factor,
        None => head.max_positions as f64 / original as f64,
    };
    let attention_factor = match scheme.positive("attention_factor")? {
        Some(attention_factor) => attention_factor,
        None if stretch <= 1.0 => 1.0,
        None => (1.0 + stretch.ln() / (original as f64).ln()).sqrt(),
    };
    Ok(RopeScaling::LongRope {
        short: pair_factors(scheme, "short_factor", width)?,
        long: pair_factors(scheme, "long_factor", width)?,
        original,
        attention_factor: attention_factor as f32,
    })
}

fn yarn_attention_factor(scheme: &Fields<'_>, factor: f64) -> Result<f32, ModelError> {
    if let Some(attention_factor) = scheme.positive("attention_factor")? {
        return Ok(attention_factor as f32);
    }
    let nonzero = |name: &str| scheme.number(name).map(|value| value.filter(|&value| value != 0.0));
    Ok(match (nonzero("mscale")?, nonzero("mscale_all_dim")?) {
        (Some(numerator), Some(denominator)) => {
            (magnitude(numerator, factor) / magnitude(denominator, factor)) as f32
        }
        _ => magnitude(1.0, factor) as f32,
    })
}

/// Returns what yarn multiplies by where positions are divided by a factor.
fn magnitude(weight: f64, factor: f64) -> f64 {
    if factor <= 1.0 { 1.0 } else { 0.1 * weight * factor.ln() + 1.0 }
}

fn pair_factors(scheme: &Fields<'_>, field: &str, width: usize) -> Result<Vec<f32>, ModelError> {
    let factors = scheme.numbers(field)?.ok_or_else(|| scheme.error(field, "is missing"))?;
    let pairs = width.div_ceil(2);
    if factors.len() != pairs {
        return Err(scheme.error(field, format!("has {} factors for {pairs} rotated pairs", factors.len())));
    }
    if factors.contains(&0.0) {
        return Err(scheme.error(field, "holds a zero"));
    }
    Ok(factors)
}

/// Returns a scheme without scaling that rotates whole heads.
pub(super) fn plain(fields: &Fields<'_>, head: Head, theta: f64) -> Result<RopeConfig, ModelError> {
    let width = rotated(fields, head, 1.0)?;
    Ok(RopeConfig { width, theta, scaling: RopeScaling::None, layout: head.layout })
}
