use std::fs;
use std::path::{Path, PathBuf};

/// Major page faults of this process: pages that were missing and had to come from the disk.
#[derive(Debug)]
pub struct MajorFaults {
    stat: PathBuf,
    seen: u64,
}

impl MajorFaults {
    /// Counts from now on; absent where the system does not say.
    pub fn counter() -> Option<Self> {
        Self::below(Path::new("/"))
    }

    fn below(root: &Path) -> Option<Self> {
        let stat = root.join("proc/self/stat");
        let seen = read(&stat)?;
        Some(Self { stat, seen })
    }

    /// How many there were since this was last asked, or since the beginning.
    pub fn since_last(&mut self) -> u64 {
        let Some(now) = read(&self.stat) else { return 0 };
        let before = std::mem::replace(&mut self.seen, now);
        now.saturating_sub(before)
    }
}

fn read(stat: &Path) -> Option<u64> {
    let stat = fs::read_to_string(stat).ok()?;
    // The second field is the name of the program in parentheses, which may itself have spaces and parentheses.
    let (_, behind_name) = stat.rsplit_once(')')?;
    behind_name.split_ascii_whitespace().nth(9)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(root: &Path, name: &str, faults: &str) {
        fs::create_dir_all(root.join("proc/self")).unwrap();
        let stat = format!("7920 ({name}) R 7912 7912 6738 0 -1 4194304 102 0 {faults} 0 1 2 3 4\n");
        fs::write(root.join("proc/self/stat"), stat).unwrap();
    }

    #[test]
    fn faults_are_counted_whatever_the_program_is_called() {
        let root = tempfile::tempdir().unwrap();
        write(root.path(), "fire) R 1 (box 2", "5");
        let mut faults = MajorFaults::below(root.path()).unwrap();
        assert_eq!(faults.since_last(), 0);
        write(root.path(), "fire) R 1 (box 2", "12");
        assert_eq!(faults.since_last(), 7);
        assert_eq!(faults.since_last(), 0);
    }

    #[test]
    fn what_cannot_be_read_is_no_fault() {
        let root = tempfile::tempdir().unwrap();
        assert!(MajorFaults::below(root.path()).is_none());
        write(root.path(), "firebox", "5");
        let mut faults = MajorFaults::below(root.path()).unwrap();
        write(root.path(), "firebox", "many");
        assert_eq!(faults.since_last(), 0);
        fs::remove_file(root.path().join("proc/self/stat")).unwrap();
        assert_eq!(faults.since_last(), 0);
    }
}
