//! CPU affinity: which CPUs a thread may run on, and pinning a thread to one of them.
//!
//! Invariant: only CPUs in the process's affinity mask are chosen, and one CPU of every core comes before the second CPU
//! of any core.

use crate::KernelError;

/// Returns the CPUs of this process. CPUs that share a core with an earlier one come last.
#[cfg(target_os = "linux")]
pub fn cpus() -> Vec<usize> {
    let allowed = of_this_thread();
    let core_of = |cpu: usize| {
        let path = format!("/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list");
        std::fs::read_to_string(path).unwrap_or_else(|_| cpu.to_string())
    };
    let mut seen = std::collections::HashSet::new();
    let (first, second): (Vec<usize>, Vec<usize>) =
        allowed.into_iter().partition(|cpu| seen.insert(core_of(*cpu)));
    [first, second].concat()
}

/// Returns the CPUs that the calling thread may run on.
#[cfg(target_os = "linux")]
pub fn of_this_thread() -> Vec<usize> {
    // SAFETY: a zeroed set is an empty set, and the call writes no more than its size.
    unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        if libc::sched_getaffinity(0, size_of::<libc::cpu_set_t>(), &mut set) != 0 {
            return Vec::new();
        }
        (0..libc::CPU_SETSIZE as usize).filter(|cpu| libc::CPU_ISSET(*cpu, &set)).collect()
    }
}

/// Pins the calling thread to one CPU.
#[cfg(target_os = "linux")]
pub(crate) fn pin_this_thread(cpu: usize) -> Result<(), KernelError> {
    if cpu >= libc::CPU_SETSIZE as usize {
        return Err(KernelError::Pinning { cpu, reason: "no such CPU".to_owned() });
    }
    // SAFETY: a zeroed set is an empty set; `cpu` is below its size; the call only reads it.
    let failed = unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        libc::CPU_SET(cpu, &mut set);
        libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &set) != 0
    };
    match failed {
        true => Err(KernelError::Pinning { cpu, reason: std::io::Error::last_os_error().to_string() }),
        false => Ok(()),
    }
}

/// Returns no CPUs, because threads cannot be pinned on this operating system.
#[cfg(not(target_os = "linux"))]
pub fn cpus() -> Vec<usize> {
    Vec::new()
}

#[cfg(not(target_os = "linux"))]
pub(crate) fn pin_this_thread(cpu: usize) -> Result<(), KernelError> {
    Err(KernelError::Pinning {
        cpu,
        reason: "this operating system does not support pinning threads".to_owned(),
    })
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn cpus_lists_each_cpu_of_the_process_once() {
        let mut cpus = cpus();
        assert!(!cpus.is_empty());
        cpus.sort_unstable();
        assert_eq!(cpus, of_this_thread());
    }

    #[test]
    fn pinning_affects_only_the_calling_thread() {
        let all = of_this_thread();
        let last = *all.last().unwrap();
        std::thread::spawn(move || {
            pin_this_thread(last).unwrap();
            assert_eq!(of_this_thread(), [last]);
            assert!(pin_this_thread(usize::MAX).is_err());
        })
        .join()
        .unwrap();
        assert_eq!(of_this_thread(), all);
    }
}
