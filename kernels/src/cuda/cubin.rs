//! Reads which kernels a cubin has. The compiler's log lists them as well, but not reliably: if many sources are compiled at once,
//! some logs are empty.

use object::read::elf::ElfFile64;
use object::{Object as _, ObjectSection as _};

/// The name of a kernel's section starts with this.
const CODE: &str = ".text.";

/// Returns the names of the kernels, or `None` if the bytes are not a cubin.
pub(super) fn kernels(cubin: &[u8]) -> Option<Vec<String>> {
    let file = ElfFile64::<object::Endianness>::parse(cubin).ok()?;
    let names =
        file.sections().filter_map(|section| Some(section.name().ok()?.strip_prefix(CODE)?.to_owned()));
    Some(names.collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::architecture::Architecture;
    use crate::cuda::on_device;
    use crate::cuda::source::SOURCES;

    #[test]
    fn the_kernels_of_a_cubin_are_those_that_the_compiler_reports() {
        for source in SOURCES {
            let module = on_device::compiler().module(*source, Architecture::Sm80).unwrap();
            let mut reported: Vec<String> = module.kernels.into_iter().map(|usage| usage.kernel).collect();
            let mut found = kernels(&module.cubin).unwrap();
            reported.sort_unstable();
            found.sort_unstable();
            assert_eq!(found, reported, "{}", source.name);
        }
    }

    #[test]
    fn other_bytes_are_not_a_cubin() {
        assert_eq!(kernels(b"no ELF file"), None);
        assert_eq!(kernels(&[]), None);
    }
}
