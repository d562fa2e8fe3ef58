//! Compiles the CUDA kernels as C++ for the CPU.

use std::path::Path;

fn main() {
    let kernels = Path::new("..");
    let mut build = cc::Build::new();
    build
        .cpp(true)
        .std("c++20")
        .include(kernels)
        .file("block.cpp")
        .file("faults.cpp")
        .opt_level(2)
        .debug(false);
    // The sources control where a device may fuse a product with a sum; the CPU build never fuses.
    build.flag("-ffp-contract=off");
    // The machine reports accesses to misaligned addresses itself (`__ubsan_handle_type_mismatch_v1` in block.cpp), so that no
    // library of the compiler is linked.
    build.flag("-fsanitize=alignment");
    // The fortified longjmp supports only one stack.
    build.flag("-U_FORTIFY_SOURCE");
    let mut sources: Vec<_> = std::fs::read_dir(kernels)
        .expect("the kernel folder can be read")
        .map(|entry| entry.expect("the kernel folder's entries can be read").path())
        .filter(|path| path.extension().is_some_and(|extension| extension == "cu"))
        .collect();
    sources.sort();
    for source in &sources {
        build.file(source);
    }
    // The C++ compiler does not recognize the extension `.cu`.
    build.flag("-x").flag("c++").cargo_metadata(false).compile("skep_cuda_host");
    let out = std::env::var("OUT_DIR").expect("cargo sets OUT_DIR");
    println!("cargo::rustc-link-search=native={out}");
    // Kernels are found by name and no symbol refers to them, so the linker has to keep the whole archive.
    println!("cargo::rustc-link-lib=static:+whole-archive=skep_cuda_host");
    println!("cargo::rustc-link-lib=stdc++");
    println!("cargo::rerun-if-changed={}", kernels.display());
}
