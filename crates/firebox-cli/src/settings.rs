//! The settings that `/set` changes during a conversation.

use std::str::FromStr;

use anyhow::bail;
use firebox_runtime::GenerationConfig;

/// The settings there are, for people.
pub const KNOWN: &str = "temp, top-k, top-p, min-p, typical, repeat-penalty, repeat-last-n, presence-penalty, \
frequency-penalty, seed, predict, think";

/// Changes one setting.
pub fn set(
    config: &mut GenerationConfig,
    thinking: &mut Option<bool>,
    name: &str,
    value: &str,
) -> anyhow::Result<()> {
    let sampler = &mut config.sampler;
    match name.trim_start_matches('-').replace('_', "-").as_str() {
        "temp" | "temperature" => sampler.temperature = at_least_zero(name, value)?,
        "top-k" => sampler.top_k = parsed(name, value)?,
        "top-p" => sampler.top_p = share(name, value)?,
        "min-p" => sampler.min_p = share(name, value)?,
        "typical" | "typical-p" => sampler.typical_p = share(name, value)?,
        "repeat-penalty" | "repetition-penalty" => {
            sampler.repetition_penalty = at_least_zero(name, value)?;
            if sampler.repetition_penalty == 0.0 {
                sampler.repetition_penalty = 1.0;
                bail!("{name}: should be above 0; 1 is off");
            }
        }
        "repeat-last-n" => sampler.penalty_window = parsed(name, value)?,
        "presence-penalty" => sampler.presence_penalty = finite(name, value)?,
        "frequency-penalty" => sampler.frequency_penalty = finite(name, value)?,
        "seed" => sampler.seed = parsed(name, value)?,
        "predict" | "n" => {
            let most: i64 = parsed(name, value)?;
            config.max_tokens = usize::try_from(most).ok();
        }
        "think" => {
            *thinking = match value {
                "on" | "true" | "yes" => Some(true),
                "off" | "false" | "no" => Some(false),
                "auto" => None,
                _ => bail!("think: on, off or auto"),
            }
        }
        _ => bail!("there is no setting {name:?}; there are {KNOWN}"),
    }
    Ok(())
}

/// The settings as they are.
pub fn listed(config: &GenerationConfig, thinking: Option<bool>) -> String {
    let sampler = &config.sampler;
    let think = match thinking {
        Some(true) => "on",
        Some(false) => "off",
        None => "auto",
    };
    format!(
        "temp {}  top-k {}  top-p {}  min-p {}  typical {}\nrepeat-penalty {}  repeat-last-n {}  \
         presence-penalty {}  frequency-penalty {}\nseed {}  predict {}  think {think}",
        sampler.temperature,
        sampler.top_k,
        sampler.top_p,
        sampler.min_p,
        sampler.typical_p,
        sampler.repetition_penalty,
        sampler.penalty_window,
        sampler.presence_penalty,
        sampler.frequency_penalty,
        sampler.seed,
        config.max_tokens.map_or(-1, |most| most as i64),
    )
}

fn parsed<T: FromStr>(name: &str, value: &str) -> anyhow::Result<T> {
    value.parse().map_err(|_| anyhow::anyhow!("{name}: {value:?} is not a number it can be"))
}

fn finite(name: &str, value: &str) -> anyhow::Result<f32> {
    let number: f32 = parsed(name, value)?;
    if !number.is_finite() {
        bail!("{name}: should be finite");
    }
    Ok(number)
}

fn at_least_zero(name: &str, value: &str) -> anyhow::Result<f32> {
    let number = finite(name, value)?;
    if number < 0.0 {
        bail!("{name}: should be 0 or more");
    }
    Ok(number)
}

fn share(name: &str, value: &str) -> anyhow::Result<f32> {
    let number = finite(name, value)?;
    if !(0.0..=1.0).contains(&number) {
        bail!("{name}: should be between 0 and 1");
    }
    Ok(number)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_change_or_say_why_not() {
        let (mut config, mut thinking) = (GenerationConfig::default(), None);
        for (name, value) in
            [("temp", "0.5"), ("--top-k", "7"), ("top_p", "0.9"), ("think", "off"), ("n", "-1")]
        {
            set(&mut config, &mut thinking, name, value).unwrap();
        }
        assert_eq!((config.sampler.temperature, config.sampler.top_k, thinking), (0.5, 7, Some(false)));
        assert_eq!(config.max_tokens, None);
        let before = config.sampler.clone();
        for (name, value) in
            [("temp", "-1"), ("top-p", "2"), ("repeat-penalty", "0"), ("colour", "red"), ("temp", "nan")]
        {
            assert!(set(&mut config, &mut thinking, name, value).is_err(), "{name} {value}");
        }
        assert_eq!(config.sampler, before);
    }
}
