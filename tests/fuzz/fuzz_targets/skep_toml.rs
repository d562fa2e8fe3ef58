//! libFuzzer entry point of the target `skep_toml`: `cargo fuzz run skep_toml`.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| skep_fuzz_targets::run("skep_toml", input));
