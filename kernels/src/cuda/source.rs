//! The kernels' CUDA sources, embedded in the binary, so that the source folder is not needed at run time.

/// A source file that is compiled on its own, or a header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Source {
    /// The name by which other sources include it and compilers report it.
    pub name: &'static str,
    pub(super) text: &'static str,
}

macro_rules! sources {
    ($($name:literal),* $(,)?) => {
        &[$(Source { name: $name, text: include_str!(concat!("../../cuda/", $name)) }),*]
    };
}

/// The sources that are compiled.
pub const SOURCES: &[Source] = sources![
    "embedding.cu",
    "rms_norm.cu",
    "qkv.cu",
    "attention_decode.cu",
    "attention_decode_f8.cu",
    "attention_prefill.cu",
    "attention_prefill_f8.cu",
    "attention_hopper.cu",
    "swiglu.cu",
    "gemv.cu",
    "gemv_fused.cu",
    "gemm.cu",
    "products.cu",
    "expand.cu",
    "all_reduce.cu",
    "all_reduce_norm.cu",
    "sample.cu",
];

/// The headers that sources include by these names.
const HEADERS: &[Source] = sources![
    "device.cuh",
    "numbers.cuh",
    "all_reduce.cuh",
    "rms_norm.cuh",
    "qkv.cuh",
    "kv_pages.cuh",
    "attention_decode.cuh",
    "attention_prefill.cuh",
    "attention_splits.cuh",
    "attention_tiles.cuh",
    "matmul.cuh",
    "gemv.cuh",
    "sample.cuh",
    "sample_candidates.cuh",
    "formats/tiles.cuh",
    "ptx/barrier.cuh",
    "ptx/mma.cuh",
    "ptx/pairs.cuh",
    "ptx/peer.cuh",
    "ptx/wgmma.cuh",
];

impl Source {
    /// Returns the headers that the source includes directly or indirectly, each once.
    pub(super) fn headers(self) -> Vec<Source> {
        let mut found: Vec<Source> = Vec::new();
        let mut left = vec![self];
        while let Some(source) = left.pop() {
            for header in HEADERS {
                let line = format!("#include \"{}\"\n", header.name);
                if source.text.contains(&line) && !found.contains(header) {
                    found.push(*header);
                    left.push(*header);
                }
            }
        }
        found
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{fs, path::Path};

    #[test]
    fn every_file_of_the_folder_is_embedded() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("cuda");
        let mut files = Vec::new();
        for subfolder in ["", "formats", "ptx"] {
            for entry in fs::read_dir(folder.join(subfolder)).unwrap() {
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
    #[test]
    fn a_source_has_exactly_the_headers_that_it_includes() {
        let names = |source: &str| {
            let source = SOURCES.iter().find(|of| of.name == source).unwrap();
            let mut names: Vec<_> = source.headers().iter().map(|header| header.name).collect();
            names.sort_unstable();
            names
        };
        assert_eq!(names("swiglu.cu"), ["device.cuh", "numbers.cuh"]);
        assert_eq!(names("expand.cu"), ["device.cuh", "formats/tiles.cuh", "numbers.cuh", "ptx/pairs.cuh"]);
        assert_eq!(names("gemv.cu"), ["device.cuh", "gemv.cuh", "matmul.cuh", "numbers.cuh"]);
    }
}
