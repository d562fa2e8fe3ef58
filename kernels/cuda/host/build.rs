//! Compiles the kernels as C++ for the processor.

use std::path::Path;

fn main() {
    let kernels = Path::new("..");
    let mut build = cc::Build::new();
    build.cpp(true).std("c++20").include(kernels).file("block.cpp").opt_level(2).debug(false);
    // A device is told where it may fuse a product with a sum; the processor never does.
    build.flag("-ffp-contract=off");
    // Its check of longjmp knows only one stack.
    build.flag("-U_FORTIFY_SOURCE");
    let mut sources: Vec<_> = std::fs::read_dir(kernels)
        .expect("the folder of the kernels")
        .map(|entry| entry.expect("an entry of that folder").path())
        .filter(|path| path.extension().is_some_and(|extension| extension == "cu"))
        .collect();
    sources.sort();
    for source in &sources {
        build.file(source);
    }
    // A compiler does not know what `.cu` is.
    build.flag("-x").flag("c++").cargo_metadata(false).compile("skep_cuda_host");
    let out = std::env::var("OUT_DIR").expect("cargo sets it");
    println!("cargo::rustc-link-search=native={out}");
    // Kernels are found by name: nothing refers to them.
    println!("cargo::rustc-link-lib=static:+whole-archive=skep_cuda_host");
    println!("cargo::rustc-link-lib=stdc++");
    println!("cargo::rerun-if-changed={}", kernels.display());
}
