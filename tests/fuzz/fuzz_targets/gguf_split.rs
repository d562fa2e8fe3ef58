//! libFuzzer entry point of the target `gguf_split`: `cargo fuzz run gguf_split`.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| skep_fuzz_targets::run("gguf_split", input));
