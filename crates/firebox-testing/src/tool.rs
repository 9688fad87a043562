//! Where a test finds a program or package that is not built here.

use std::ffi::OsString;

/// Returns what an environment variable that `.ci/tools` sets names. Tests that call it are ignored with a reason that begins
/// with `tool:`, and fail without their tool.
pub fn tool(variable: &str) -> OsString {
    std::env::var_os(variable).unwrap_or_else(|| {
        panic!("{variable} is not set: run `.ci/tools` and `. target/tools/environment`; docs/TESTING.md tells more")
    })
}
