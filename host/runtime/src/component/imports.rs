//! What a component may import: the `skep:agent` interfaces, WASI's empty world, and what it was granted.
//!
//! Everything else is refused by name, and a denial names the line that would allow it.

use crate::Grants;
use wasmtime::{Engine, component::Component};

/// Those of `skep:agent` that every agent may import. What they do is granted call by call.
const OF_AGENTS: [&str; 10] =
    ["types", "inference", "inference-sync", "state", "tools", "http", "timer", "schedule", "events", "log"];

enum Verdict {
    Allowed,
    /// By this line under `[grants]`.
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
                    "it imports {name}, which this host does not have; it has skep:agent/inference, state, tools, http, timer, \
                     schedule, events and log, WASI 0.2 without files and network, and what [grants] in agent.toml adds"
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
    fn only_what_is_granted_or_empty_may_be_imported() {
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
