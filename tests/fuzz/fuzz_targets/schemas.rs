//! libFuzzer entry point of the target `schemas`: `cargo fuzz run schemas`.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| skep_fuzz_targets::run("schemas", input));
