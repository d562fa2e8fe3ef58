//! libFuzzer entry point of the target `safetensors_index`: `cargo fuzz run safetensors_index`.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| skep_fuzz_targets::run("safetensors_index", input));
