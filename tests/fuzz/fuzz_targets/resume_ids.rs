//! libFuzzer entry point of the target `resume_ids`: `cargo fuzz run resume_ids`.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| skep_fuzz_targets::run("resume_ids", input));
