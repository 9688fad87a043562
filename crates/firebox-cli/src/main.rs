//! The program `firebox`.

use std::process::ExitCode;

#[global_allocator]
static ALLOCATOR: firebox_allocator::Allocator = firebox_allocator::Allocator;

fn main() -> ExitCode {
    firebox_runtime::set_release_to_os(firebox_allocator::release_to_os);
    firebox_cli::run()
}
