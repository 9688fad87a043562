//! The command as it is used, with models that take no time.

#![allow(clippy::unwrap_used)]

use std::path::Path;
use std::process::{Command, Output};

const BEGIN: &str = "<!-- firebox-report: begin -->";
const END: &str = "<!-- firebox-report: end -->";

fn report(out: &Path, args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_firebox-report"));
    command.arg("--quick").arg("--out").arg(out).args(args).output().unwrap()
}

fn figures(out: &Path) -> Vec<String> {
    let figures = std::fs::read_to_string(out.join("figures.json")).unwrap();
    let figures: Vec<serde_json::Value> = serde_json::from_str(&figures).unwrap();
    figures.iter().map(|figure| figure["name"].as_str().unwrap().to_owned()).collect()
}

/// Every row of the table has a figure, but for those that this machine may have no means to measure.
#[test]
fn a_quick_run_measures_every_claim_and_writes_between_the_markers() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("out");
    let file = folder.path().join("FIGURES.md");
    std::fs::write(&file, format!("# Before\n{BEGIN}\nold\n{END}\n# After\n")).unwrap();
    let ran = report(&out, &["--write", file.to_str().unwrap()]);
    let said = String::from_utf8_lossy(&ran.stderr);
    assert!(ran.status.success(), "{said}");

    let text = std::fs::read_to_string(&file).unwrap();
    assert!(
        text.starts_with(&format!("# Before\n{BEGIN}\n")) && text.ends_with(&format!("{END}\n# After\n"))
    );
    assert!(!text.contains("\nold\n"), "{text}");
    let table: toml::Table = toml::from_str(include_str!("../published.toml")).unwrap();
    let measured = figures(&out);
    let claims = ["claim", "prediction"].into_iter().flat_map(|kind| table[kind].as_array().unwrap());
    for claim in claims {
        let (says, figure) = (claim["says"].as_str().unwrap(), claim["figure"].as_str().unwrap());
        let is_measured = measured.iter().any(|name| name == figure);
        let may_lack = figure.starts_with("foreign.") || figure.starts_with("short_memory.");
        assert!(is_measured || may_lack, "{figure}: {measured:?}");
        assert_eq!(text.contains(&format!("| {says} |")), is_measured, "{says}: {text}");
    }
    for image in ["cleared.svg", "sweep.svg"] {
        assert!(text.contains(&format!("(docs/report/{image})")), "{text}");
        let drawn = std::fs::read_to_string(folder.path().join("docs/report").join(image)).unwrap();
        assert!(drawn.starts_with("<svg"), "{drawn}");
    }
    for why in ["candle", "llama.cpp"] {
        assert!(text.lines().any(|line| line.starts_with(&format!("- {why}:"))), "{text}");
    }
    for expected in
        ["models.first_cold", "requests.switch", "heads.fallback", "streaming.disk", "sweep.spread"]
    {
        assert!(measured.iter().any(|name| name == expected), "{expected}: {measured:?}");
    }

    // The models exist already, and some measures run alone.
    let ran = report(&out, &["--only", "published,heads"]);
    assert!(ran.status.success(), "{}", String::from_utf8_lossy(&ran.stderr));
    let figures = figures(&out);
    assert!(figures.iter().all(|name| name.starts_with("published.") || name.starts_with("heads.")));
    assert!(figures.len() > 3, "{figures:?}");
}

#[test]
fn errors_are_reported_before_anything_is_measured() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("FIGURES.md");
    std::fs::write(&file, "no markers").unwrap();
    let ran = report(folder.path(), &["--write", file.to_str().unwrap()]);
    assert!(!ran.status.success());
    assert!(String::from_utf8_lossy(&ran.stderr).contains(BEGIN));
    assert_eq!(std::fs::read_to_string(&file).unwrap(), "no markers");
    assert!(!folder.path().join("models").exists());
    assert!(!report(folder.path(), &["--only", "nothing"]).status.success());
}
