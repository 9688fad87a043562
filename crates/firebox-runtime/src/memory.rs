/// The most memory this process has had resident, in bytes; absent where the system does not say.
pub fn peak_resident_bytes() -> Option<u64> {
    status_field("VmHWM:")
}

/// Memory of this process that no file backs, in bytes.
pub fn anonymous_bytes() -> Option<u64> {
    status_field("RssAnon:")
}

/// Resident pages of mapped files, in bytes.
pub fn mapped_file_bytes() -> Option<u64> {
    status_field("RssFile:")
}

fn status_field(name: &str) -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix(name))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib * 1024)
}
