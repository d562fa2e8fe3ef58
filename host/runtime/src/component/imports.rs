//! Checks the imports of a component: the `skep:agent` interfaces, WASI without files and network, and granted interfaces
//! are allowed.
//!
//! Every other import is refused with an error that names it. If a grant would allow it, the error names the setting.

use crate::Grants;
use wasmtime::{Engine, component::Component};

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
    fn only_harmless_and_granted_interfaces_may_be_imported() {
        let (clocks, none) = (Grants { clocks: true, ..Grants::default() }, Grants::default());
        let allowed = |name, grants: &Grants| matches!(verdict(name, grants), Verdict::Allowed);
        assert!(allowed("skep:agent/inference@0.1.0", &none));
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
