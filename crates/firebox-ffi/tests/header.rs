//! The C header matches the library's exports and documentation. Generate it with cbindgen: `cd
//! crates/firebox-ffi && cbindgen --config cbindgen.toml src/c.rs -o include/firebox.h`.

#![allow(clippy::unwrap_used)]

use std::collections::BTreeSet;

const SOURCE: &str = include_str!("../src/c.rs");
const HEADER: &str = include_str!("../include/firebox.h");

/// Collapses whitespace.
fn collapse_whitespace(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// Returns the header without comments.
fn declarations() -> String {
    let mut rest = HEADER;
    let mut kept = String::new();
    while let Some((before, comment)) = rest.split_once("/*") {
        kept.push_str(before);
        rest = comment.split_once("*/").unwrap().1;
    }
    collapse_whitespace(&(kept + rest))
}

/// Returns the C declaration of a name with a Rust type.
fn declared(rust: &str, name: &str) -> String {
    if let Some(pointee) = rust.strip_prefix("*mut ") {
        return declared(pointee, &format!("*{name}"));
    }
    if let Some(pointee) = rust.strip_prefix("*const ") {
        return format!("const {}", declared(pointee, &format!("*{name}")));
    }
    let c = match rust {
        "c_char" => "char",
        "c_void" => "void",
        "f32" => "float",
        "u64" => "uint64_t",
        "usize" => "size_t",
        "FireboxListener" => "FireboxListener",
        "FireboxModel" => "struct FireboxModel",
        "FireboxSession" => "struct FireboxSession",
        "FireboxStatus" => "enum FireboxStatus",
        other => panic!("what {other} is in C is not known here"),
    };
    format!("{c} {name}")
}

/// Returns the exported functions: name and C declaration.
fn exported() -> Vec<(String, String)> {
    let functions = SOURCE.split("#[unsafe(no_mangle)]").skip(1);
    let functions = functions.map(|rest| {
        let (name, rest) = rest.split_once(r#"extern "C" fn "#).unwrap().1.split_once('(').unwrap();
        let (parameters, rest) = rest.split_once(')').unwrap();
        let parameters: Vec<String> = parameters
            .split(',')
            .filter_map(|parameter| parameter.trim().split_once(": "))
            .map(|(name, rust)| declared(rust, name))
            .collect();
        let parameters = if parameters.is_empty() { "void".into() } else { parameters.join(", ") };
        let returned = rest.split('{').next().unwrap().trim();
        let function = format!("{name}({parameters});");
        let declaration = match returned.strip_prefix("-> ") {
            Some(rust) => declared(rust, &function),
            None => format!("void {function}"),
        };
        (name.to_owned(), declaration)
    });
    functions.collect()
}

#[test]
fn the_header_declares_all_exports() {
    let (header, exported) = (declarations(), exported());
    assert!(exported.len() > 10, "{exported:?}");
    for (name, declaration) in &exported {
        assert!(header.contains(declaration), "{name} is not declared as\n{declaration}\nin\n{header}");
    }
    let calls = header.split("firebox_").skip(1).filter_map(|rest| rest.split_once('('));
    let declared: BTreeSet<String> = calls.map(|(name, _)| format!("firebox_{name}")).collect();
    let exported: BTreeSet<String> = exported.into_iter().map(|(name, _)| name).collect();
    assert_eq!(declared, exported);
}

#[test]
fn statuses_have_their_numbers() {
    let header = declarations();
    let variants = SOURCE.split_once("pub enum FireboxStatus {").unwrap().1.split_once('}').unwrap().0;
    let variants: Vec<&str> = variants.lines().filter(|line| line.contains(" = ")).collect();
    for variant in &variants {
        let (name, number) = variant.trim().trim_end_matches(',').split_once(" = ").unwrap();
        let words = name.char_indices().map(|(at, letter)| match letter {
            letter if at > 0 && letter.is_uppercase() => format!("_{letter}"),
            letter => letter.to_uppercase().to_string(),
        });
        let constant = format!("FIREBOX_STATUS_{} = {number},", words.collect::<String>());
        assert!(header.contains(&constant), "{constant} is not in\n{header}");
    }
    assert_eq!(header.matches("FIREBOX_STATUS_").count(), variants.len());
}

#[test]
fn the_header_has_the_documentation() {
    let header = collapse_whitespace(HEADER);
    let mut said = Vec::new();
    let mut blocks = 0;
    for line in SOURCE.lines() {
        match line.strip_prefix("///") {
            Some(words) => said.push(words),
            None if line.starts_with("#[") => {}
            None => {
                let words = collapse_whitespace(&said.join(" "));
                if line.starts_with("pub ") && !words.is_empty() {
                    blocks += 1;
                    assert!(header.contains(&words), "the header does not say: {words}");
                }
                said.clear();
            }
        }
    }
    assert!(blocks > 10, "{blocks}");
}
