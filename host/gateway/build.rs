//! Recompiles the crate when a file of the console or a guide is added.

fn main() {
    for folder in ["ui", "../guide", "../../guest-sdk/guide"] {
        println!("cargo:rerun-if-changed={folder}");
    }
}
