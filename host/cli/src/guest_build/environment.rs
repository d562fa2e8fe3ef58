//! The environment in which a guest is compiled: the user's, without what an outer cargo set for its own
//! build.
//!
//! Under `cargo run` and `cargo test`, the process inherits dozens of variables about the host's build. A
//! nested cargo that saw them would build the guest with the host's flags, or lock up on the host's target
//! folder.

use std::process::Command;

/// Returns a command for `program` with the cleaned environment.
pub fn command(program: impl AsRef<std::ffi::OsStr>) -> Command {
    let mut command = Command::new(program);
    for (name, _) in std::env::vars_os() {
        if name.to_str().is_some_and(belongs_to_outer_build) {
            command.env_remove(name);
        }
    }
    command.stdin(std::process::Stdio::null());
    command
}

fn belongs_to_outer_build(name: &str) -> bool {
    const CARGO_KEPT: [&str; 5] =
        ["CARGO_HOME", "CARGO_TARGET_DIR", "CARGO_BUILD_JOBS", "CARGO_TERM_COLOR", "CARGO_INSTALL_ROOT"];
    const CARGO_KEPT_PREFIXES: [&str; 4] = ["CARGO_HTTP_", "CARGO_NET_", "CARGO_REGISTR", "CARGO_SOURCE_"];
    if name == "CARGO" || name.starts_with("CARGO_") {
        return !CARGO_KEPT.contains(&name)
            && !CARGO_KEPT_PREFIXES.iter().any(|prefix| name.starts_with(prefix));
    }
    name.starts_with("RUSTC")
        || name.starts_with("RUSTDOC")
        || name == "RUSTFLAGS"
        || name == "RUSTUP_TOOLCHAIN"
        || matches!(name, "OUT_DIR" | "TARGET" | "HOST" | "NUM_JOBS" | "OPT_LEVEL" | "PROFILE" | "DEBUG")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn outer_build_is_dropped_and_the_users_settings_stay() {
        for name in
            ["CARGO", "CARGO_MANIFEST_DIR", "CARGO_PKG_NAME", "RUSTC", "RUSTFLAGS", "RUSTUP_TOOLCHAIN"]
        {
            assert!(belongs_to_outer_build(name), "{name}");
        }
        for name in
            ["CARGO_HOME", "CARGO_HTTP_CAINFO", "CARGO_REGISTRIES_X_INDEX", "PATH", "RUSTUP_HOME", "HOME"]
        {
            assert!(!belongs_to_outer_build(name), "{name}");
        }
    }
}
