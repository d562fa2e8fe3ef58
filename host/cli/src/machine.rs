//! The memory that is available to a process on this machine.

use std::path::Path;

/// Returns the memory that a new process can use, if the system says it: what is available, and at most what is left of
/// the limit of this process's control group.
pub fn available_memory_bytes() -> Option<u64> {
    let meminfo = std::fs::read_to_string("/proc/meminfo").ok()?;
    let available = available_bytes(&meminfo)?;
    Some(left_of_limit(Path::new("/sys/fs/cgroup")).map_or(available, |left| left.min(available)))
}

/// Returns `MemAvailable` of /proc/meminfo.
fn available_bytes(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kib: u64 = line.split_whitespace().next()?.parse().ok()?;
    Some(kib * 1024)
}

/// Returns what a control group has left below its limit. `None` means that there is no limit.
fn left_of_limit(group: &Path) -> Option<u64> {
    let number = |file: &str| std::fs::read_to_string(group.join(file)).ok()?.trim().parse::<u64>().ok();
    let (limit, used) = (number("memory.max")?, number("memory.current")?);
    // Cached files are given up when memory is needed.
    let statistics = std::fs::read_to_string(group.join("memory.stat")).unwrap_or_default();
    let cached = statistics.lines().find_map(|line| line.strip_prefix("inactive_file ")?.parse().ok());
    Some(limit.saturating_sub(used.saturating_sub(cached.unwrap_or(0))))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn available_memory_is_read_from_meminfo() {
        assert_eq!(available_bytes("MemTotal: 99 kB\nMemAvailable:    2097152 kB\n"), Some(2 << 30));
        assert_eq!(available_bytes("MemTotal: 99 kB\n"), None);
    }

    #[test]
    fn a_limit_of_the_control_group_counts_without_cached_files() {
        let group = tempfile::tempdir().expect("temporary folder");
        let write = |file: &str, text: &str| std::fs::write(group.path().join(file), text).expect("file");
        assert_eq!(left_of_limit(group.path()), None);
        write("memory.max", "1000\n");
        write("memory.current", "700\n");
        write("memory.stat", "anon 500\ninactive_file 200\n");
        assert_eq!(left_of_limit(group.path()), Some(500));
        write("memory.max", "max\n");
        assert_eq!(left_of_limit(group.path()), None);
    }
}
