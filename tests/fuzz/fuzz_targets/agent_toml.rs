//! libFuzzer entry point of the target `agent_toml`: `cargo fuzz run agent_toml`.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| skep_fuzz_targets::run("agent_toml", input));
