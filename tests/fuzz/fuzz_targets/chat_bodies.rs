//! libFuzzer entry point of the target `chat_bodies`: `cargo fuzz run chat_bodies`.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| skep_fuzz_targets::run("chat_bodies", input));
