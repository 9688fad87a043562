//! The book says what is so: its links lead somewhere, its commands parse, its settings are those that there are.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use clap::{Command, CommandFactory as _};

use crate::args::Cli;
use crate::configuration;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().unwrap()
}

fn source() -> PathBuf {
    root().join("docs/book/src")
}

/// Every page, with its text.
fn pages() -> Vec<(PathBuf, String)> {
    fn below(folder: &Path, pages: &mut Vec<(PathBuf, String)>) {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                below(&path, pages);
            } else if path.extension().is_some_and(|extension| extension == "md") {
                pages.push((path.clone(), fs::read_to_string(&path).unwrap()));
            }
        }
    }
    let mut pages = Vec::new();
    below(&source(), &mut pages);
    assert!(pages.len() > 15, "{} pages", pages.len());
    pages
}

/// Returns the contents of the fenced code blocks of a language.
fn blocks(text: &str, language: &str) -> Vec<String> {
    let mut blocks = Vec::new();
    let mut lines = text.lines();
    while let Some(line) = lines.next() {
        if line.starts_with("```") {
            let block: Vec<&str> = lines.by_ref().take_while(|line| !line.starts_with("```")).collect();
            if line == format!("```{language}") {
                blocks.push(block.join("\n"));
            }
        }
    }
    blocks
}

/// Where links of a text lead, but for other sites.
fn links(text: &str) -> Vec<String> {
    let targets = text.split("](").skip(1).filter_map(|rest| rest.split_once(')')).map(|(target, _)| target);
    targets.filter(|target| !target.contains("://")).map(str::to_owned).collect()
}

/// The words of a line as a shell takes them, up to where output is sent elsewhere.
fn words(line: &str) -> Vec<String> {
    let mut words = vec![String::new()];
    let mut quoted = false;
    for letter in line.chars() {
        match letter {
            '"' => quoted = !quoted,
            ' ' if !quoted => words.push(String::new()),
            letter => words.last_mut().unwrap().push(letter),
        }
    }
    words
        .into_iter()
        .filter(|word| !word.is_empty())
        .take_while(|word| !matches!(word.as_str(), "<" | ">" | "|"))
        .collect()
}

#[test]
fn every_page_is_in_the_summary_and_every_link_leads_somewhere() {
    let mut linked = BTreeSet::from([source().join("SUMMARY.md")]);
    for (page, text) in pages() {
        for link in links(&text) {
            let target = page.parent().unwrap().join(link.split('#').next().unwrap());
            let target =
                target.canonicalize().unwrap_or_else(|_| panic!("{}: {link} leads nowhere", page.display()));
            if page.ends_with("SUMMARY.md") {
                linked.insert(target);
            }
        }
    }
    for (page, _) in pages() {
        assert!(linked.contains(&page), "{} is not in the summary", page.display());
    }
}

#[test]
fn every_command_that_is_shown_is_one() {
    let mut shown = BTreeSet::new();
    for (page, text) in pages() {
        for line in blocks(&text, "sh").iter().flat_map(|block| block.lines()) {
            let words = words(line);
            if words.first().map(String::as_str) != Some("firebox") {
                assert!(line.starts_with("cargo "), "{}: {line}", page.display());
                continue;
            }
            if let Err(error) = Cli::command().try_get_matches_from(&words) {
                panic!("{}: {line}\n{error}", page.display());
            }
            shown.insert(words[1].clone());
        }
    }
    for command in Cli::command().get_subcommands().map(Command::get_name) {
        assert!(shown.contains(command), "no page shows {command}");
    }
}

/// Code in Rust is that of an example, which is compiled and run.
#[test]
fn code_is_included_from_examples_and_every_example_is_somewhere() {
    let mut included = BTreeSet::new();
    for (page, text) in pages() {
        for block in blocks(&text, "rust") {
            let path = block.strip_prefix("{{#include ").and_then(|rest| rest.strip_suffix("}}"));
            let path =
                path.unwrap_or_else(|| panic!("{}: code that is not compiled:\n{block}", page.display()));
            let target = page.parent().unwrap().join(path).canonicalize();
            included.insert(target.unwrap_or_else(|_| panic!("{}: {path} is not there", page.display())));
        }
    }
    for example in fs::read_dir(root().join("examples")).unwrap() {
        let example = example.unwrap().path();
        let example = if example.is_dir() { example.join("src/main.rs") } else { example };
        assert!(included.contains(&example), "{} is on no page", example.display());
    }
}

#[test]
fn the_settings_are_those_that_there_are() {
    let text = fs::read_to_string(source().join("configuration.md")).unwrap();
    let rows: BTreeSet<[String; 2]> = text
        .lines()
        .filter(|line| line.starts_with("| `"))
        .filter_map(|line| {
            let mut cells = line.split('`').skip(1).step_by(2).map(str::to_owned);
            Some([cells.next()?, cells.next()?])
        })
        .filter(|row| row[1].starts_with("FIREBOX_"))
        .collect();
    assert_eq!(rows, configuration::settings(&Cli::command()));
    for block in blocks(&text, "toml") {
        configuration::read(&Cli::command(), Path::new("firebox.toml"), &block).unwrap();
    }
}
