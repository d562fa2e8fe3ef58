//! libFuzzer entry point of the target `tiktoken`: `cargo fuzz run tiktoken`.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| skep_fuzz_targets::run("tiktoken", input));
