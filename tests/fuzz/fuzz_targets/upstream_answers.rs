//! libFuzzer entry point of the target `upstream_answers`: `cargo fuzz run upstream_answers`.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| skep_fuzz_targets::run("upstream_answers", input));
