//! libFuzzer entry point of the target `gguf`: `cargo fuzz run gguf`.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| skep_fuzz_targets::run("gguf", input));
