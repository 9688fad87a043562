//! The graph of imports between the files of one crate, read from `use` declarations and paths.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// Files of a crate and which of them each one imports from. A module that puts its own children together imports nothing.
pub struct Graph {
    files: Vec<File>,
    arrows: Vec<BTreeSet<usize>>,
}

struct File {
    path: PathBuf,
    /// The module's path below the crate's root, empty for `lib.rs`.
    module: Vec<String>,
    /// Paths that the file names, each with the name's last segment.
    uses: Vec<Use>,
    /// Names that the file hands on, and the path that each stands for.
    exports: BTreeMap<String, Vec<String>>,
}

struct Use {
    path: Vec<String>,
    exported: bool,
}

impl Graph {
    /// Reads every file below a crate's `src`, tests of modules left out.
    pub fn of_crate(src: &Path) -> Self {
        let mut files: Vec<_> = super::sources(src)
            .into_iter()
            .filter(|path| !path.components().any(|part| part.as_os_str() == "tests"))
            .filter(|path| path.file_name().is_some_and(|name| name != "tests.rs"))
            .map(|path| File::read(src, path))
            .collect();
        let modules: BTreeSet<Vec<String>> = files.iter().map(|file| file.module.clone()).collect();
        for file in &mut files {
            for path in &mut file.uses {
                path.path = absolute(&file.module, &unaliased(&file.exports, &path.path), &modules);
            }
            let module = file.module.clone();
            for target in file.exports.values_mut() {
                *target = absolute(&module, target, &modules);
            }
        }
        let places: BTreeMap<_, _> =
            files.iter().enumerate().map(|(index, file)| (file.module.clone(), index)).collect();
        let arrows = files
            .iter()
            .map(|file| {
                file.uses
                    .iter()
                    .filter(|path| !path.exported)
                    .filter_map(|path| resolve(&files, &places, &path.path, 0))
                    .filter(|target| !files[*target].module.starts_with(&file.module))
                    .collect()
            })
            .collect();
        Self { files, arrows }
    }

    /// Returns the groups of two or more files that reach each other, the largest first.
    pub fn circles(&self) -> Vec<Vec<usize>> {
        let reach: Vec<BTreeSet<usize>> = (0..self.files.len()).map(|start| self.reachable(start)).collect();
        let mut seen = BTreeSet::new();
        let mut circles = Vec::new();
        for start in 0..self.files.len() {
            if !seen.insert(start) || !reach[start].contains(&start) {
                continue;
            }
            let circle: Vec<_> =
                reach[start].iter().copied().filter(|other| reach[*other].contains(&start)).collect();
            seen.extend(&circle);
            circles.push(circle);
        }
        circles.sort_by_key(|circle| std::cmp::Reverse(circle.len()));
        circles
    }

    /// Returns the imports between files of a circle, as text.
    pub fn arrows_within(&self, circle: &[usize]) -> Vec<String> {
        let name = |index: usize| self.files[index].module.join("::");
        circle
            .iter()
            .flat_map(|from| self.arrows[*from].iter().map(move |to| (*from, *to)))
            .filter(|(_, to)| circle.contains(to))
            .map(|(from, to)| format!("{} -> {}", name(from), name(to)))
            .collect()
    }

    fn reachable(&self, start: usize) -> BTreeSet<usize> {
        let mut found = BTreeSet::new();
        let mut todo = vec![start];
        while let Some(file) = todo.pop() {
            todo.extend(self.arrows[file].iter().filter(|next| found.insert(**next)));
        }
        found
    }
}

impl File {
    fn read(src: &Path, path: PathBuf) -> Self {
        let mut module: Vec<String> = path
            .strip_prefix(src)
            .unwrap_or(&path)
            .with_extension("")
            .components()
            .map(|part| part.as_os_str().to_string_lossy().into_owned())
            .collect();
        if module
            .last()
            .is_some_and(|name| name == "mod" || (module.len() == 1 && (name == "lib" || name == "main")))
        {
            module.pop();
        }
        let tokens = tokens(&fs::read_to_string(&path).unwrap());
        let (uses, exports) = paths(&tokens);
        Self { path, module, uses, exports }
    }
}

impl std::fmt::Debug for File {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}", self.path.display())
    }
}

/// Returns a path with the name that it begins with replaced by the path that an import gave that name, as in `use
/// super::budget;` and `budget::Account`.
fn unaliased(imports: &BTreeMap<String, Vec<String>>, path: &[String]) -> Vec<String> {
    match path {
        [first, rest @ ..] if !rest.is_empty() && imports.contains_key(first) => {
            imports[first].iter().chain(rest).cloned().collect()
        }
        _ => path.to_vec(),
    }
}

/// Returns the path from the crate's root, or an empty one where it leads out of the crate.
fn absolute(module: &[String], path: &[String], modules: &BTreeSet<Vec<String>>) -> Vec<String> {
    let Some(first) = path.first() else { return Vec::new() };
    let mut base = module.to_vec();
    let mut rest = path;
    match first.as_str() {
        "crate" => {
            base.clear();
            rest = &path[1..];
        }
        "self" => rest = &path[1..],
        "super" => {
            while rest.first().is_some_and(|part| part == "super") {
                base.pop();
                rest = &rest[1..];
            }
        }
        name => {
            let mut child = base.clone();
            child.push(name.to_owned());
            if !modules.contains(&child) {
                return Vec::new();
            }
        }
    }
    base.extend_from_slice(rest);
    base
}

/// Returns the file that a path leads to, through names that modules hand on.
fn resolve(
    files: &[File],
    places: &BTreeMap<Vec<String>, usize>,
    path: &[String],
    depth: usize,
) -> Option<usize> {
    if path.is_empty() || depth > 8 {
        return None;
    }
    let cut = (0..=path.len()).rev().find(|cut| places.contains_key(&path[..*cut]))?;
    let file = places[&path[..cut]];
    let Some(name) = path.get(cut) else {
        // A module named as a whole: what is taken from it is named elsewhere.
        return None;
    };
    match files[file].exports.get(name) {
        Some(target) if !target.is_empty() => {
            let mut target = target.clone();
            target.extend_from_slice(&path[cut + 1..]);
            resolve(files, places, &target, depth + 1)
        }
        _ => Some(file),
    }
}

/// Cuts a source text into names and signs, without comments, strings and test modules.
fn tokens(text: &str) -> Vec<String> {
    let bytes: Vec<char> = text.chars().collect();
    let mut tokens: Vec<String> = Vec::new();
    let mut at = 0;
    while at < bytes.len() {
        let next = bytes.get(at + 1).copied();
        match bytes[at] {
            '/' if next == Some('/') => {
                while at < bytes.len() && bytes[at] != '\n' {
                    at += 1;
                }
            }
            '"' => at = after_string(&bytes, at),
            'r' if matches!(next, Some('"' | '#')) && raw_string(&bytes, at).is_some() => {
                at = raw_string(&bytes, at).unwrap();
            }
            '\'' if bytes.get(at + 2) == Some(&'\'') || next == Some('\\') => {
                at += if next == Some('\\') { 2 } else { 1 };
                while at < bytes.len() && bytes[at] != '\'' {
                    at += 1;
                }
                at += 1;
            }
            c if c.is_alphanumeric() || c == '_' => {
                let start = at;
                while at < bytes.len() && (bytes[at].is_alphanumeric() || bytes[at] == '_') {
                    at += 1;
                }
                tokens.push(bytes[start..at].iter().collect());
            }
            ':' if next == Some(':') => {
                tokens.push("::".into());
                at += 2;
            }
            c => {
                if !c.is_whitespace() {
                    tokens.push(c.into());
                }
                at += 1;
            }
        }
    }
    without_tests(&tokens)
}

fn after_string(text: &[char], start: usize) -> usize {
    let mut at = start + 1;
    while at < text.len() && text[at] != '"' {
        at += if text[at] == '\\' { 2 } else { 1 };
    }
    at + 1
}

/// Returns where a raw string that begins at `start` ends, if one does.
fn raw_string(text: &[char], start: usize) -> Option<usize> {
    let hashes = text[start + 1..].iter().take_while(|c| **c == '#').count();
    if text.get(start + 1 + hashes) != Some(&'"') {
        return None;
    }
    let mut at = start + 2 + hashes;
    while at < text.len() {
        if text[at] == '"' && text[at + 1..].iter().take(hashes).filter(|c| **c == '#').count() == hashes {
            return Some(at + 1 + hashes);
        }
        at += 1;
    }
    Some(text.len())
}

/// Drops items behind `#[cfg(test)]`.
fn without_tests(tokens: &[String]) -> Vec<String> {
    let marker = ["#", "[", "cfg", "(", "test", ")", "]"];
    let mut kept = Vec::new();
    let mut at = 0;
    while at < tokens.len() {
        if tokens[at..].iter().take(marker.len()).map(String::as_str).eq(marker) {
            let mut depth = 0;
            at += marker.len();
            while at < tokens.len() {
                match tokens[at].as_str() {
                    "{" => depth += 1,
                    "}" => depth -= 1,
                    _ => {}
                }
                at += 1;
                if depth == 0 && matches!(tokens[at - 1].as_str(), ";" | "}") {
                    break;
                }
            }
        } else {
            kept.push(tokens[at].clone());
            at += 1;
        }
    }
    kept
}

/// Returns the paths that a file names, and the names that it hands on.
fn paths(tokens: &[String]) -> (Vec<Use>, BTreeMap<String, Vec<String>>) {
    let mut uses = Vec::new();
    let mut exports = BTreeMap::new();
    let mut at = 0;
    while at < tokens.len() {
        let token = tokens[at].as_str();
        if token == "use" {
            let exported = at > 0 && (tokens[at - 1] == "pub" || tokens[at - 1] == ")");
            let end = (at..tokens.len()).find(|end| tokens[*end] == ";").unwrap_or(tokens.len());
            let mut named = Vec::new();
            expand(&tokens[at + 1..end], &mut Vec::new(), &mut named);
            for (path, name) in named {
                // An import serves as an export to the modules below, which see private names of those above.
                exports.insert(name, path.clone());
                uses.push(Use { path, exported });
            }
            at = end;
        } else if tokens.get(at + 1).is_some_and(|next| next == "::")
            && token.chars().next().is_some_and(|c| c.is_alphabetic() || c == '_')
            && (at == 0 || tokens[at - 1] != "::")
        {
            let mut path = vec![token.to_owned()];
            while tokens.get(at + 1).is_some_and(|next| next == "::")
                && tokens
                    .get(at + 2)
                    .is_some_and(|next| next.chars().all(|c| c.is_alphanumeric() || c == '_'))
            {
                path.push(tokens[at + 2].clone());
                at += 2;
            }
            uses.push(Use { path, exported: false });
        }
        at += 1;
    }
    (uses, exports)
}

/// Expands the tree of a `use` declaration into paths and the names that they get.
fn expand(tokens: &[String], prefix: &mut Vec<String>, found: &mut Vec<(Vec<String>, String)>) {
    let depth = prefix.len();
    let mut at = 0;
    while at < tokens.len() {
        match tokens[at].as_str() {
            "{" => {
                let end = closing(tokens, at);
                let mut start = at + 1;
                let mut open = 0;
                for index in at + 1..=end {
                    match tokens[index].as_str() {
                        "{" => open += 1,
                        "}" if index < end => open -= 1,
                        _ => {}
                    }
                    if index == end || (open == 0 && tokens[index] == ",") {
                        if start < index {
                            expand(&tokens[start..index], prefix, found);
                        }
                        start = index + 1;
                    }
                }
                prefix.truncate(depth);
                return;
            }
            "::" => {}
            "as" => {
                let name = tokens.get(at + 1).cloned().unwrap_or_default();
                found.push((prefix.clone(), name));
                prefix.truncate(depth);
                return;
            }
            name => prefix.push(name.to_owned()),
        }
        at += 1;
    }
    let mut path = prefix.clone();
    if path.len() > 1 && path.last().is_some_and(|name| name == "self") {
        path.pop();
    }
    if let Some(name) = path.last().cloned() {
        found.push((path, name));
    }
    prefix.truncate(depth);
}

fn closing(tokens: &[String], open: usize) -> usize {
    let mut depth = 0;
    for (index, token) in tokens.iter().enumerate().skip(open) {
        match token.as_str() {
            "{" => depth += 1,
            "}" => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            return index;
        }
    }
    tokens.len() - 1
}
