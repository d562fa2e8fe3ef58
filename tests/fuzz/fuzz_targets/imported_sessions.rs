//! libFuzzer entry point of the target `imported_sessions`: `cargo fuzz run imported_sessions`.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| skep_fuzz_targets::run("imported_sessions", input));
