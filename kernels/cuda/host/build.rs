//! Compiles the CUDA kernels as C++ for the CPU.

use std::path::Path;

fn main() {
    let kernels = Path::new("..");
    let mut machine = cc::Build::new();
    machine.cpp(true).std("c++20").include(kernels).opt_level(2).debug(false).cargo_metadata(false);
    // The sources control where a device may fuse a product with a sum; the CPU build never fuses.
    machine.flag("-ffp-contract=off");
    let mut programs = machine.clone();
    machine.file("block.cpp").compile("skep_cuda_host");
    // The machine reports accesses to misaligned addresses itself (`__ubsan_handle_type_mismatch_v1` in block.cpp), so that no
    // library of the compiler is linked.
    programs.file("faults.cpp").flag("-fsanitize=alignment");
    let mut sources: Vec<_> = std::fs::read_dir(kernels)
        .expect("the kernel folder can be read")
        .map(|entry| entry.expect("the kernel folder's entries can be read").path())
        .filter(|path| path.extension().is_some_and(|extension| extension == "cu"))
        .collect();
    sources.sort();
    // The C++ compiler does not recognize the extension `.cu`.
    programs.files(&sources).flag("-x").flag("c++").compile("skep_cuda_kernels");
    let out = std::env::var("OUT_DIR").expect("cargo sets OUT_DIR");
    println!("cargo::rustc-link-search=native={out}");
    // Kernels are found by name and no symbol refers to them, so the linker has to keep the whole archive.
    println!("cargo::rustc-link-lib=static:+whole-archive=skep_cuda_kernels");
    println!("cargo::rustc-link-lib=static=skep_cuda_host");
    println!("cargo::rustc-link-lib=stdc++");
    println!("cargo::rerun-if-changed={}", kernels.display());
}
