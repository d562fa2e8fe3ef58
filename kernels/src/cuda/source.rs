//! The kernels' sources, carried in the binary: nothing of the folder they come from is needed where they run.

/// A file of kernels that is compiled by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Source {
    /// As it is included, and as compilers name it.
    pub name: &'static str,
    pub(super) text: &'static str,
}

macro_rules! sources {
    ($($name:literal),* $(,)?) => {
        &[$(Source { name: $name, text: include_str!(concat!("../../cuda/", $name)) }),*]
    };
}

/// What is compiled.
pub const SOURCES: &[Source] = sources![
    "embedding.cu",
    "rms_norm.cu",
    "qkv.cu",
    "attention_decode.cu",
    "attention_prefill.cu",
    "swiglu.cu",
    "gemv.cu",
    "gemm.cu",
    "all_reduce.cu",
    "sample.cu",
];

/// What they include, by these names.
pub(super) const HEADERS: &[Source] = sources![
    "device.cuh",
    "numbers.cuh",
    "formats/blocks.cuh",
    "formats/weights.cuh",
    "ptx/mma.cuh",
    "ptx/peer.cuh",
];

#[cfg(test)]
mod tests {
    use super::*;
    use std::{fs, path::Path};

    #[test]
    fn every_file_of_the_folder_is_carried() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("cuda");
        let mut files = Vec::new();
        for place in ["", "formats", "ptx"] {
            for entry in fs::read_dir(folder.join(place)).unwrap() {
                let path = entry.unwrap().path();
                if path.extension().is_some_and(|extension| extension == "cu" || extension == "cuh") {
                    files.push(path.strip_prefix(&folder).unwrap().to_str().unwrap().to_owned());
                }
            }
        }
        let mut carried: Vec<_> = SOURCES.iter().chain(HEADERS).map(|source| source.name).collect();
        carried.sort_unstable();
        files.sort_unstable();
        assert_eq!(carried, files);
    }
}
