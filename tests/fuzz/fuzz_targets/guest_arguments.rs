//! libFuzzer entry point of the target `guest_arguments`: `cargo fuzz run guest_arguments`.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| skep_fuzz_targets::run("guest_arguments", input));
