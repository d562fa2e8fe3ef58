//! libFuzzer entry point of the target `tool_calls`: `cargo fuzz run tool_calls`.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| skep_fuzz_targets::run("tool_calls", input));
