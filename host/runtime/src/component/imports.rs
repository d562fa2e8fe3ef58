//! Checks the imports of a component: the `skep:agent` interfaces, WASI without files and network, and granted interfaces
//! are allowed.
//!
//! Every other import is refused with an error that names it. If a grant would allow it, the error names the setting.

use crate::Grants;
use wasmtime::{Engine, component::Component};

/// The versions of the WIT package `skep:agent` that this host has, oldest first.
const VERSIONS: [&str; 2] = ["0.1.0", "0.1.1"];
/// Interfaces of `skep:agent` that every agent may import. Grants are checked on each call.
const OF_AGENTS: [&str; 10] =
    ["types", "inference", "inference-sync", "state", "tools", "http", "timer", "schedule", "events", "log"];

enum Verdict {
    Allowed,
    /// The import is allowed by this setting under `[grants]`.
    Needs(&'static str),
    Unknown,
}

pub(super) fn check(component: &Component, engine: &Engine, grants: &Grants) -> Result<(), String> {
    let kind = component.component_type();
    let names = kind.imports(engine).chain(kind.exports(engine)).map(|(name, _)| name);
    if let Some(version) = names.filter_map(version).find(|version| !is_served(version)) {
        return Err(other_version(version));
    }
    for (name, _) in kind.imports(engine) {
        match verdict(name, grants) {
            Verdict::Allowed => {}
            Verdict::Needs(grant) => {
                return Err(format!(
                    "it imports {name}, which is not granted; add `{grant} = true` under [grants] in agent.toml"
                ));
            }
            Verdict::Unknown => {
                return Err(format!(
                    "it imports {name}, which this host does not provide; it provides skep:agent/inference, state, tools, http, timer, \
                     schedule, events and log, WASI 0.2 without files and network, and whatever [grants] in agent.toml adds"
                ));
            }
        }
    }
    Ok(())
}

/// Explains why a component cannot be linked. If it was built for a version of `skep:agent` that is newer than this
/// host's, this is the cause, although the versions are compatible.
pub(super) fn unlinkable(component: &Component, engine: &Engine, error: &wasmtime::Error) -> String {
    let kind = component.component_type();
    let names = kind.imports(engine).chain(kind.exports(engine)).map(|(name, _)| name);
    match names.filter_map(version).find(|version| !VERSIONS.contains(version)) {
        Some(version) => format!("{}: {error:#}", other_version(version)),
        None => format!("{error:#}"),
    }
}

/// Returns the version of `skep:agent` that an import or an export belongs to.
fn version(name: &str) -> Option<&str> {
    name.strip_prefix("skep:agent/")?.split_once('@').map(|(_, version)| version)
}

/// Returns whether this host has the version, or one that may replace it by the rules of semantic versioning.
fn is_served(version: &str) -> bool {
    VERSIONS.iter().any(|known| series(known) == series(version))
}

/// Returns the part of a version that compatible versions share: the major number, or 0 with the minor one.
fn series(version: &str) -> (&str, &str) {
    let mut parts = version.split('.');
    let (major, minor) = (parts.next().unwrap_or_default(), parts.next().unwrap_or_default());
    if major == "0" { (major, minor) } else { (major, "") }
}

fn other_version(version: &str) -> String {
    let known = VERSIONS.join(", ");
    format!(
        "it was built for skep:agent {version}, and this host has {known}; upgrade Skep on the host, or build the component \
         for {known}, which `skep wit` prints"
    )
}

fn verdict(import: &str, grants: &Grants) -> Verdict {
    let Some((package, interface)) = import.split_once('/') else { return Verdict::Unknown };
    let (interface, version) = interface.split_once('@').unwrap_or((interface, ""));
    let granted = |granted: bool, line| if granted { Verdict::Allowed } else { Verdict::Needs(line) };
    let wasi_0_2 = version.starts_with("0.2.");
    match package {
        "skep:agent" if OF_AGENTS.contains(&interface) => Verdict::Allowed,
        "wasi:cli" | "wasi:io" | "wasi:filesystem" | "wasi:sockets" if wasi_0_2 => Verdict::Allowed,
        "wasi:clocks" if wasi_0_2 => granted(grants.clocks, "clocks"),
        "wasi:random" if wasi_0_2 => granted(grants.random, "random"),
        _ => Verdict::Unknown,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_versions_are_those_of_the_wit_package() {
        let wit = include_str!("../../../../wit/skep-agent/types.wit");
        let newest = VERSIONS.last().expect("there is one");
        assert!(wit.contains(&format!("package skep:agent@{newest};")), "{newest}");
    }

    #[test]
    fn only_compatible_versions_replace_each_other() {
        for (version, expected) in [
            ("0.1.0", true),
            ("0.1.7", true),
            ("0.2.0", false),
            ("1.0.0", false),
            ("9.9.0", false),
            ("", false),
        ] {
            assert_eq!(is_served(version), expected, "{version}");
        }
        assert_eq!(version("skep:agent/log@9.9.0"), Some("9.9.0"));
        assert_eq!((version("skep:agent/log"), version("wasi:cli/stdout@0.2.0")), (None, None));
    }

    #[test]
    fn only_harmless_and_granted_interfaces_may_be_imported() {
        let (clocks, none) = (Grants { clocks: true, ..Grants::default() }, Grants::default());
        let allowed = |name, grants: &Grants| matches!(verdict(name, grants), Verdict::Allowed);
        assert!(allowed("skep:agent/inference@0.1.0", &none) && allowed("skep:agent/inference@0.1.1", &none));
        assert!(allowed("wasi:cli/environment@0.2.3", &none));
        assert!(allowed("wasi:clocks/wall-clock@0.2.0", &clocks));
        assert!(matches!(verdict("wasi:clocks/wall-clock@0.2.0", &none), Verdict::Needs("clocks")));
        assert!(matches!(verdict("wasi:random/random@0.2.0", &clocks), Verdict::Needs("random")));
        for name in
            ["wasi:http/outgoing-handler@0.2.0", "skep:agent/files@0.1.0", "env", "wasi:cli/stdout@0.3.0"]
        {
            assert!(matches!(verdict(name, &clocks), Verdict::Unknown), "{name}");
        }
    }
}
