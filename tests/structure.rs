//! Checks the shape of the source tree: file headers, lengths, import circles, words and document lengths.

#![allow(clippy::unwrap_used)]

#[path = "structure/imports.rs"]
mod imports;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Lines that a source file may have.
const LINES: usize = 600;

/// Names that the facade may have at its root, modules included.
const FACADE_NAMES: usize = 60;

/// Words that a document may have outside its generated part.
const DOCUMENTS: [(&str, usize); 7] = [
    ("README.md", 450),
    ("ARCHITECTURE.md", 2500),
    ("BENCHMARKS.md", 1500),
    ("CHANGELOG.md", 250),
    ("CONTRIBUTING.md", 500),
    ("STYLE.md", 500),
    ("docs/ROADMAP.md", 400),
];

/// Words that the vocabulary in `STYLE.md` replaces, outside string literals.
const DIALECT: [&str; 13] = [
    "nobody",
    "somebody",
    "whoever",
    "is going to",
    "worn",
    "wear",
    "wears",
    "wearing",
    "hang",
    "hangs",
    "hanging",
    "tenant",
    "tenants",
];

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

/// Returns the files below `folder` whose names end in `.rs`, without build outputs.
fn sources(folder: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut folders = vec![folder.to_path_buf()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                let name = path.file_name().unwrap().to_string_lossy().into_owned();
                if name != "target" && !name.starts_with('.') {
                    folders.push(path);
                }
            } else if path.extension().is_some_and(|end| end == "rs") {
                found.push(path);
            }
        }
    }
    found.sort();
    found
}

/// Returns a path relative to the repository.
fn relative(path: &Path) -> String {
    path.strip_prefix(root()).unwrap_or(path).display().to_string()
}

fn crates() -> Vec<PathBuf> {
    let mut found: Vec<_> =
        fs::read_dir(root().join("crates")).unwrap().map(|entry| entry.unwrap().path()).collect();
    found.retain(|path| path.join("Cargo.toml").exists());
    found.sort();
    found
}

#[test]
fn every_source_file_says_what_it_holds() {
    let silent: Vec<_> = sources(&root())
        .into_iter()
        .filter(|path| !fs::read_to_string(path).unwrap().trim_start().starts_with("//!"))
        .map(|path| relative(&path))
        .collect();
    assert!(silent.is_empty(), "files that do not begin with `//!`: {silent:#?}");
}

#[test]
fn no_source_file_is_too_long() {
    let long: Vec<_> = sources(&root())
        .into_iter()
        .map(|path| (fs::read_to_string(&path).unwrap().lines().count(), relative(&path)))
        .filter(|(lines, _)| *lines > LINES)
        .collect();
    assert!(long.is_empty(), "files over {LINES} lines: {long:#?}");
}

#[test]
fn files_of_a_crate_do_not_import_each_other_in_circles() {
    let mut found = Vec::new();
    for folder in crates() {
        let graph = imports::Graph::of_crate(&folder.join("src"));
        for circle in graph.circles() {
            found.push((relative(&folder), graph.arrows_within(&circle)));
        }
    }
    assert!(found.is_empty(), "files that import each other: {found:#?}");
}

/// Returns the names that a source file exports at its root: items that it re-exports, and modules.
fn exported_names(text: &str) -> Vec<String> {
    let mut names = Vec::new();
    let mut statement = String::new();
    for line in text.lines() {
        // Statements at the root begin in the first column; what a module holds is indented.
        if let Some(module) = line.strip_prefix("pub mod ") {
            names.push(module.trim_end_matches([' ', '{', ';']).to_owned());
        } else if line.starts_with("pub use ") || !statement.is_empty() {
            statement.push_str(line.trim());
            if line.ends_with(';') {
                names.extend(used_names(&std::mem::take(&mut statement)));
            }
        } else {
            assert!(!line.starts_with("pub "), "the facade has an item of its own: {line}");
        }
    }
    names
}

/// Returns the names that a `use` statement introduces.
fn used_names(statement: &str) -> Vec<String> {
    assert!(!statement.contains('*'), "the facade names what it re-exports: {statement}");
    let items = statement.trim_end_matches(['}', ';']).rsplit('{').next().unwrap();
    let name = |item: &str| item.rsplit([':', ' ']).next().unwrap().to_owned();
    items.split(',').map(str::trim).filter(|item| !item.is_empty()).map(name).collect()
}

#[test]
fn the_facade_has_few_names() {
    let source = "pub use a::b;\npub use c::d as e;\npub use f::{\n    g,\n    h as i,\n};\npub mod j {\n    pub use k;\n}\n";
    assert_eq!(exported_names(source), ["b", "e", "g", "i", "j"]);
    let names = exported_names(&fs::read_to_string(root().join("src/lib.rs")).unwrap());
    assert!(names.iter().any(|name| name == "internals") && names.iter().any(|name| name == "Model"));
    assert!(names.len() <= FACADE_NAMES, "{} names at the root of the facade: {names:?}", names.len());
}

#[test]
fn only_the_sanitizer_workspace_includes_files_by_path() {
    let mut found = Vec::new();
    for path in sources(&root()) {
        let name = relative(&path);
        if name.starts_with("sanitize/") {
            continue;
        }
        let text = fs::read_to_string(&path).unwrap();
        for line in text.lines().filter(|line| line.trim_start().starts_with("#[path")) {
            if line.contains("../..") || line.contains("crates/") {
                found.push(format!("{name}: {}", line.trim()));
            }
        }
    }
    assert!(found.is_empty(), "modules included across crates: {found:#?}");
}

#[test]
fn sources_keep_to_the_vocabulary() {
    let mut found = Vec::new();
    for folder in crates() {
        for path in sources(&folder.join("src")) {
            if path.ends_with("relevance/examples.rs") {
                // Sentences of everyday language that the scorer is calibrated with.
                continue;
            }
            let text = fs::read_to_string(&path).unwrap();
            for (number, line) in text.lines().enumerate() {
                let lower = without_strings(&line.to_lowercase());
                if let Some(word) = DIALECT.iter().find(|word| contains_word(&lower, word)) {
                    found.push(format!("{}:{}: {word}", relative(&path), number + 1));
                }
            }
        }
    }
    assert!(found.is_empty(), "words that STYLE.md replaces: {found:#?}");
}

/// Returns a line without what stands between double quotes. A line that begins or ends within a string keeps its rest.
fn without_strings(line: &str) -> String {
    line.split('"').step_by(2).collect::<Vec<_>>().join("\"\"")
}

/// Returns whether `text` has `word` with no letter, digit or underscore beside it.
fn contains_word(text: &str, word: &str) -> bool {
    let inner = |c: Option<char>| c.is_some_and(|c| c.is_alphanumeric() || c == '_');
    text.match_indices(word).any(|(at, _)| {
        !inner(text[..at].chars().next_back()) && !inner(text[at + word.len()..].chars().next())
    })
}

#[test]
fn documents_stay_within_their_words() {
    let mut counts = BTreeMap::new();
    for (name, most) in DOCUMENTS {
        let path = root().join(name);
        let text = fs::read_to_string(&path).unwrap_or_else(|error| panic!("{name}: {error}"));
        let mut generated = false;
        let words = text
            .lines()
            .filter(|line| {
                generated = (generated || line.contains("report: begin")) && !line.contains("report: end");
                !generated
            })
            .map(|line| line.split_whitespace().count())
            .sum::<usize>();
        if words > most {
            counts.insert(name, (words, most));
        }
    }
    assert!(counts.is_empty(), "documents with more words than they may have: {counts:#?}");
}

/// Returns the dependencies that the tests of the selected packages need, along some kinds of edges, each with its features.
fn dependencies(edges: &str, selected: &[&str]) -> BTreeSet<String> {
    let cargo = std::env::var("CARGO").unwrap_or_else(|_| "cargo".into());
    let mut tree = Command::new(cargo);
    tree.current_dir(root()).args(["tree", "--prefix", "none", "--format", "{p} {f}"]);
    tree.args(["--edges", edges]).args(selected);
    let listed = tree.output().unwrap();
    assert!(listed.status.success(), "{}", String::from_utf8_lossy(&listed.stderr));
    let listed = String::from_utf8(listed.stdout).unwrap();
    let lines = listed.lines().map(|line| line.trim_end_matches(" (*)").to_owned());
    // Packages of the workspace have a path.
    lines.filter(|line| !line.is_empty() && !line.contains(" (/")).collect()
}

#[test]
fn testing_one_crate_rebuilds_no_dependency() {
    // What build scripts and procedural macros need is built apart.
    const EDGES: &str = "normal,dev,no-proc-macro";
    let workspace = dependencies(EDGES, &[]);
    for package in ["kernels", "cache", "model", "runtime", "engine", "server"] {
        let package = format!("firebox-{package}");
        let others: Vec<String> =
            dependencies(EDGES, &["--package", &package]).difference(&workspace).cloned().collect();
        assert!(others.is_empty(), "firebox-features lacks features, for {package}: {others:?}");
    }
}

#[test]
fn tests_on_an_accelerator_rebuild_burn_alone() {
    const EDGES: &str = "normal,build,dev";
    let with = dependencies(EDGES, &["--features", "ndarray,wgpu"]);
    let of_burn = |name: &String| name.starts_with("burn") || name.starts_with("cubecl");
    let others: Vec<String> =
        dependencies(EDGES, &[]).difference(&with).filter(|name| !of_burn(name)).cloned().collect();
    assert!(others.is_empty(), "firebox-features lacks what accelerators add to: {others:?}");
}

/// What the reason of an ignored test begins with: `.ci/run` runs `tool`, and `docs/TESTING.md` lists the others.
const IGNORED: [&str; 4] = ["tool: ", "soak: ", "measure: ", "helper: "];

/// Returns the lines that ignore a test for a reason that is not one of [`IGNORED`], or say that it was skipped.
fn unrun_tests(text: &str) -> Vec<&str> {
    let is_unrun = |line: &&str| {
        let line = line.trim();
        let reason = line.strip_prefix("#[ignore").map(|rest| rest.trim_start_matches([' ', '=', '"']));
        reason.is_some_and(|reason| !IGNORED.iter().any(|kind| reason.starts_with(kind)))
            || ["println!(\"skipped", "println!(\"passed over"].iter().any(|said| line.contains(said))
    };
    text.lines().filter(is_unrun).collect()
}

#[test]
fn tests_are_ignored_for_a_reason_and_skipped_for_none() {
    assert_eq!(unrun_tests("#[ignore = \"tool: bash\"]\nprintln!(\"{skipped}\");"), [""; 0]);
    assert_eq!(unrun_tests("#[ignore]\n").len(), 1);
    assert_eq!(unrun_tests("#[ignore = \"slow\"]\n").len(), 1);
    let mut found = Vec::new();
    for path in sources(&root()).iter().filter(|path| !path.ends_with("tests/structure.rs")) {
        let text = fs::read_to_string(path).unwrap();
        found.extend(unrun_tests(&text).iter().map(|line| format!("{}: {}", relative(path), line.trim())));
    }
    assert!(found.is_empty(), "tests that are not run: {found:#?}");
}
