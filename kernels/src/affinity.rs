//! Which CPUs a thread may run on.
//!
//! Invariant: only CPUs that the process was given are ever chosen, one of each core before the second of any.

use crate::KernelError;

/// CPUs of this process, those first that share their core with no earlier one.
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

/// CPUs that the calling thread may run on.
#[cfg(target_os = "linux")]
pub fn of_this_thread() -> Vec<usize> {
    // SAFETY: a zeroed set is an empty one, and the call writes no more than its size.
    unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        if libc::sched_getaffinity(0, size_of::<libc::cpu_set_t>(), &mut set) != 0 {
            return Vec::new();
        }
        (0..libc::CPU_SETSIZE as usize).filter(|cpu| libc::CPU_ISSET(*cpu, &set)).collect()
    }
}

/// Keeps the calling thread on one CPU.
#[cfg(target_os = "linux")]
pub(crate) fn pin_this_thread(cpu: usize) -> Result<(), KernelError> {
    if cpu >= libc::CPU_SETSIZE as usize {
        return Err(KernelError::Pinning { cpu, reason: "no such CPU".to_owned() });
    }
    // SAFETY: a zeroed set is an empty one; `cpu` is below its size; the call only reads it.
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

/// Threads cannot be pinned here.
#[cfg(not(target_os = "linux"))]
pub fn cpus() -> Vec<usize> {
    Vec::new()
}

#[cfg(not(target_os = "linux"))]
pub(crate) fn pin_this_thread(cpu: usize) -> Result<(), KernelError> {
    Err(KernelError::Pinning { cpu, reason: "this system has no way to pin threads".to_owned() })
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn cpus_are_those_of_the_process_each_once() {
        let mut cpus = cpus();
        assert!(!cpus.is_empty());
        cpus.sort_unstable();
        assert_eq!(cpus, of_this_thread());
    }

    #[test]
    fn a_pinned_thread_stays_on_its_cpu_and_others_are_free() {
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
