//! Names of tools that all families of models can write.

/// The longest name of a tool, in bytes.
pub(super) const MAX_TOOL_NAME: usize = 256;

/// Returns whether a tool's name can be recognized in the answers of all families: it consists of letters, digits, `_`, `-`, `.`,
/// `:` and `/`.
pub fn is_valid_tool_name(name: &str) -> bool {
    let fits = |c: char| c.is_alphanumeric() || matches!(c, '_' | '-' | '.' | ':' | '/');
    !name.is_empty() && name.len() <= MAX_TOOL_NAME && name.chars().all(fits)
}
