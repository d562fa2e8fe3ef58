//! libFuzzer entry point of the target `model_configs`: `cargo fuzz run model_configs`.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| skep_fuzz_targets::run("model_configs", input));
