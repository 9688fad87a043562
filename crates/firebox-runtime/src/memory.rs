/// The most memory this process has had resident, in bytes; absent where the system does not say.
pub fn peak_resident_bytes() -> Option<u64> {
    status_field("VmHWM:")
}

/// Memory of this process that is resident now, whatever backs it, in bytes.
pub fn resident_bytes() -> Option<u64> {
    status_field("VmRSS:")
}

/// Memory of this process that no file backs, in bytes.
pub fn anonymous_bytes() -> Option<u64> {
    status_field("RssAnon:")
}

/// Resident pages of mapped files, in bytes.
pub fn mapped_file_bytes() -> Option<u64> {
    status_field("RssFile:")
}

/// The memory of the whole machine, in bytes; absent where the system does not say.
pub fn physical_bytes() -> Option<u64> {
    kib_field(&std::fs::read_to_string("/proc/meminfo").ok()?, "MemTotal:")
}

fn status_field(name: &str) -> Option<u64> {
    kib_field(&std::fs::read_to_string("/proc/self/status").ok()?, name)
}

/// The bytes behind `name` in a text of lines such as `MemTotal:  24684092 kB`.
pub(crate) fn kib_field(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1024)
}
