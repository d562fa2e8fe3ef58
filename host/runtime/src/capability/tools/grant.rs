//! Tool grants: an agent may call a tool if its developer asked for it and the operator allows it.

use crate::{
    Manifest,
    grant::{ToolGrant, ToolName},
};

/// Checks that an agent may call a tool. The error names the setting that would allow it.
pub(in crate::capability) fn check(
    manifest: &Manifest,
    ceiling: &[ToolGrant],
    name: &ToolName,
) -> Result<(), String> {
    if name.needs_no_grant() {
        return Ok(());
    }
    let covered = |grants: &[ToolGrant]| grants.iter().any(|grant| grant.covers(name));
    let lacks = |file| {
        format!(
            "agent {} may not call {name}; add \"{name}\" to `tools` under [grants] in {file}",
            manifest.name
        )
    };
    if !covered(&manifest.grants.tools) {
        return Err(lacks("agent.toml"));
    }
    if !covered(ceiling) {
        return Err(lacks("skep.toml, which is the operator's"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn developer_and_operator_must_allow_a_tool_and_a_denial_names_the_setting() {
        let manifest = |tools: &str| {
            Manifest::from_toml(&format!("name = \"a\"\n[grants]\ntools = [{tools}]")).expect("valid")
        };
        let name = "agent:orders/find".parse().expect("a name");
        let ceiling = |text: &str| [ToolGrant::try_from(text.to_owned()).expect("a grant")];
        let denied =
            check(&manifest(""), &ceiling("agent:*/*"), &name).expect_err("the developer did not ask for it");
        assert!(
            denied.contains("add \"agent:orders/find\" to `tools` under [grants] in agent.toml"),
            "{denied}"
        );
        let asked = manifest("\"agent:orders/*\"");
        assert_eq!(check(&asked, &ceiling("agent:*/*"), &name), Ok(()));
        assert_eq!(check(&asked, &ceiling("agent:orders/find"), &name), Ok(()));
        let denied =
            check(&asked, &ceiling("mcp:orders/*"), &name).expect_err("the operator does not allow it");
        assert!(denied.contains("in skep.toml"), "{denied}");
        check(&asked, &[], &name).expect_err("an operator who configures nothing allows nothing");
        let named = |name: &str| name.parse().expect("a name");
        assert_eq!(check(&manifest(""), &[], &named("client/progress")), Ok(()));
        for name in ["client/elicit", "client/sample"] {
            check(&manifest(""), &ceiling("client/elicit"), &named(name)).expect_err(name);
        }
        assert_eq!(
            check(&manifest("\"client/elicit\""), &ceiling("client/elicit"), &named("client/elicit")),
            Ok(())
        );
    }
}
