//! libFuzzer entry point of the target `safetensors`: `cargo fuzz run safetensors`.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| skep_fuzz_targets::run("safetensors", input));
