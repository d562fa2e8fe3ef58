//! The resources of a multiprocessor that a kernel uses, as the assembler reports them.

use std::collections::{BTreeMap, BTreeSet};

use super::architecture::Architecture;

/// The resource usage of one kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Usage {
    pub kernel: String,
    /// Registers per thread.
    pub registers: u32,
    /// Bytes per thread that are written to memory because registers run out.
    pub spilled_bytes: u32,
    /// Bytes per thread in local memory: spilled registers, and arrays that a loop indexes without being unrolled.
    pub stack_bytes: u32,
    /// Static shared memory per block, in bytes.
    pub shared_bytes: u32,
}

/// Formats a table of each kernel's registers by architecture, followed by the bytes that are spilled and the bytes of the
/// stack frame if there are any.
pub fn table(usages: &[(Architecture, Usage)]) -> String {
    let architectures: BTreeSet<Architecture> =
        usages.iter().map(|(architecture, _)| *architecture).collect();
    let mut kernels: BTreeMap<&str, BTreeMap<Architecture, &Usage>> = BTreeMap::new();
    for (architecture, usage) in usages {
        kernels.entry(&usage.kernel).or_default().insert(*architecture, usage);
    }
    let mut text = format!("{:32}", "registers");
    architectures.iter().for_each(|architecture| text += &format!("{architecture:>13}"));
    for (kernel, by_architecture) in kernels {
        text += &format!("\n{kernel:32}");
        for architecture in &architectures {
            let cell = match by_architecture.get(architecture) {
                Some(Usage { registers, spilled_bytes: 0, stack_bytes: 0, .. }) => registers.to_string(),
                Some(Usage { registers, spilled_bytes, stack_bytes, .. }) => {
                    format!("{registers}+{spilled_bytes}/{stack_bytes}")
                }
                None => "-".to_owned(),
            };
            text += &format!("{cell:>13}");
        }
    }
    text
}

/// Parses a compiler log made with `--ptxas-options=-v`.
pub(super) fn of_log(log: &str) -> Vec<Usage> {
    let mut usages: Vec<Usage> = Vec::new();
    for line in log.lines() {
        if let Some((_, rest)) = line.split_once("Compiling entry function '") {
            let kernel = rest.split('\'').next().unwrap_or_default().to_owned();
            usages.push(Usage { kernel, registers: 0, spilled_bytes: 0, stack_bytes: 0, shared_bytes: 0 });
        }
        let Some(usage) = usages.last_mut() else { continue };
        if let Some(bytes) = number_before(line, " bytes stack frame") {
            usage.stack_bytes = bytes;
        }
        if let Some(bytes) = number_before(line, " bytes spill stores") {
            usage.spilled_bytes = bytes;
        }
        if let Some(registers) = number_before(line, " registers") {
            usage.registers = registers;
        }
        if let Some(bytes) = number_before(line, " bytes smem") {
            usage.shared_bytes = bytes;
        }
    }
    usages
}

fn number_before(line: &str, what: &str) -> Option<u32> {
    let before = &line[..line.find(what)?];
    before.rsplit(|letter: char| !letter.is_ascii_digit()).next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn usage(
        kernel: &str,
        registers: u32,
        [spilled_bytes, stack_bytes]: [u32; 2],
        shared_bytes: u32,
    ) -> Usage {
        Usage { kernel: kernel.to_owned(), registers, spilled_bytes, stack_bytes, shared_bytes }
    }

    #[test]
    fn a_table_has_a_column_for_each_architecture_and_marks_local_memory_and_gaps() {
        let usages = [
            (Architecture::Sm90a, usage("b", 64, [0, 32], 0)),
            (Architecture::Sm80, usage("a", 255, [12, 16], 0)),
            (Architecture::Sm90a, usage("a", 40, [0, 0], 0)),
        ];
        let table = table(&usages);
        let lines: Vec<Vec<_>> = table.lines().map(|line| line.split_whitespace().collect()).collect();
        assert_eq!(
            lines,
            [vec!["registers", "sm_80", "sm_90a"], vec!["a", "255+12/16", "40"], vec!["b", "-", "64+0/32"]]
        );
    }

    #[test]
    fn each_kernel_of_a_log_has_its_own_figures() {
        let log = "\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'a_bf16' for 'sm_80'
ptxas info    : Function properties for a_bf16
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 47 registers, used 1 barriers, 128 bytes smem, 400 bytes cmem[0]
ptxas info    : Compiling entry function 'b_f16' for 'sm_80'
ptxas info    : Function properties for b_f16
    16 bytes stack frame, 12 bytes spill stores, 16 bytes spill loads
ptxas info    : Used 255 registers, 400 bytes cmem[0]";
        assert_eq!(of_log(log), [usage("a_bf16", 47, [0, 0], 128), usage("b_f16", 255, [12, 16], 0)]);
    }
}
