//! Names of external tools, which the host calls for agents, and the grants for them.

use crate::text::excerpt;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::{fmt, str::FromStr};

const MAX_BYTES: usize = 256;
/// Maximum size of the name of a tool that a model sees.
const MAX_MODEL_NAME_BYTES: usize = 64;
const FORMS: &str = "`http/fetch`, `client/elicit`, `client/sample`, `agent:NAME/TOOL` or `mcp:SERVER/TOOL`";
/// The tools of the client that waits for the turn.
const OF_CLIENTS: [&str; 3] = ["elicit", "sample", "progress"];

/// The name of an external tool, which says where the tool is.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum ToolName {
    /// A tool of the host itself.
    Host { tool: String },
    /// A tool of the client that waits for the turn.
    Client { tool: String },
    /// A tool of another agent on this host.
    Agent { agent: String, tool: String },
    /// A tool of an MCP server.
    Server { server: String, tool: String },
}

/// An entry of `tools` under `[grants]`. It names one tool; `*` instead of the tool covers all tools of an agent or a
/// server, and `*` instead of the agent or the server covers all of them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct ToolGrant(ToolName);

impl ToolName {
    /// Returns the kind of tool, for metrics.
    pub(crate) fn source(&self) -> &'static str {
        match self {
            ToolName::Host { .. } => "host",
            ToolName::Client { .. } => "client",
            ToolName::Agent { .. } => "agent",
            ToolName::Server { .. } => "mcp",
        }
    }

    /// Returns the name of the tool that a model sees. It is the same in every turn, differs between tools, and is not
    /// `is_taken` by one of the agent's own tools.
    pub(crate) fn for_model(&self, is_taken: impl Fn(&str) -> bool) -> String {
        let (kind, owner, tool) = match self {
            ToolName::Host { tool } => ("host", None, tool),
            ToolName::Client { tool } => ("client", None, tool),
            ToolName::Agent { agent, tool } => ("agent", Some(agent), tool),
            ToolName::Server { server, tool } => ("mcp", Some(server), tool),
        };
        let owner = owner.map(|owner| format!("_{owner}")).unwrap_or_default();
        let plain = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '-';
        let readable = format!("{kind}{owner}_{tool}");
        // Names of agents and servers contain no `_`, so no other tool gets the same readable name.
        if readable.len() <= MAX_MODEL_NAME_BYTES && readable.chars().all(plain) && !is_taken(&readable) {
            return readable;
        }
        let digest = Sha256::digest(self.to_string());
        let suffix = crate::text::hex(&digest[..6]);
        let kept = readable.chars().map(|c| if plain(c) { c } else { '_' });
        let kept: String = kept.take(MAX_MODEL_NAME_BYTES - 1 - suffix.len()).collect();
        format!("{kept}_{suffix}")
    }

    pub(crate) fn tool(&self) -> &str {
        match self {
            ToolName::Host { tool }
            | ToolName::Client { tool }
            | ToolName::Agent { tool, .. }
            | ToolName::Server { tool, .. } => tool,
        }
    }

    /// Returns whether every agent may call the tool: one that only reports the progress of a turn to its caller, as what a
    /// model generates does anyway.
    pub(crate) fn needs_no_grant(&self) -> bool {
        matches!(self, ToolName::Client { tool } if tool == "progress")
    }
}

impl FromStr for ToolName {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let shown = excerpt(text);
        let invalid =
            |why: &str| format!("{shown:?} is not a valid tool name: {why}; valid forms are {FORMS}");
        if text.len() > MAX_BYTES {
            return Err(invalid(&format!("it has more than {MAX_BYTES} bytes")));
        }
        let (owner, tool) = text.split_once('/').ok_or_else(|| invalid("it has no `/`"))?;
        if tool.is_empty() || tool.chars().any(|c| c.is_control() || c.is_whitespace()) {
            return Err(invalid("the part after `/` is empty or contains white space"));
        }
        let tool = tool.to_owned();
        let named = |owner: &str| {
            let plain = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-';
            if owner == "*" || ((1..=64).contains(&owner.len()) && owner.bytes().all(plain)) {
                return Ok(owner.to_owned());
            }
            Err(invalid("the part between `:` and `/` must have 1 to 64 of the characters a-z, 0-9 and -"))
        };
        match owner.split_once(':') {
            None if owner == "http" && tool == "fetch" => Ok(ToolName::Host { tool }),
            None if owner == "client" && OF_CLIENTS.contains(&tool.as_str()) => Ok(ToolName::Client { tool }),
            Some(("agent", agent)) => Ok(ToolName::Agent { agent: named(agent)?, tool }),
            Some(("mcp", server)) => Ok(ToolName::Server { server: named(server)?, tool }),
            _ => Err(invalid("the part before `/` is unknown")),
        }
    }
}

impl fmt::Display for ToolName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ToolName::Host { tool } => write!(f, "http/{tool}"),
            ToolName::Client { tool } => write!(f, "client/{tool}"),
            ToolName::Agent { agent, tool } => write!(f, "agent:{agent}/{tool}"),
            ToolName::Server { server, tool } => write!(f, "mcp:{server}/{tool}"),
        }
    }
}

impl ToolGrant {
    /// Returns the name of the one MCP server whose tools are granted, if it is one.
    pub fn server(&self) -> Option<&str> {
        match &self.0 {
            ToolName::Server { server, .. } if server != "*" => Some(server),
            _ => None,
        }
    }

    /// Returns the name of the one agent whose tools are granted, if it is one.
    pub fn agent(&self) -> Option<&str> {
        match &self.0 {
            ToolName::Agent { agent, .. } if agent != "*" => Some(agent),
            _ => None,
        }
    }

    pub(crate) fn covers(&self, name: &ToolName) -> bool {
        self.covers_owner(name) && ["*", name.tool()].contains(&self.0.tool())
    }

    /// Returns whether the grant covers any tool of the same agent, server or host as `name`.
    pub(crate) fn covers_owner(&self, name: &ToolName) -> bool {
        let same = |granted: &str, owner: &str| granted == "*" || granted == owner;
        match (&self.0, name) {
            (ToolName::Host { .. }, ToolName::Host { .. })
            | (ToolName::Client { .. }, ToolName::Client { .. }) => true,
            (ToolName::Agent { agent: granted, .. }, ToolName::Agent { agent, .. }) => same(granted, agent),
            (ToolName::Server { server: granted, .. }, ToolName::Server { server, .. }) => {
                same(granted, server)
            }
            _ => false,
        }
    }
}

impl TryFrom<String> for ToolGrant {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse().map(ToolGrant)
    }
}

impl From<ToolGrant> for String {
    fn from(grant: ToolGrant) -> Self {
        grant.0.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(text: &str) -> ToolName {
        text.parse().expect(text)
    }

    #[test]
    fn valid_names_round_trip_and_others_are_refused() {
        for text in
            ["http/fetch", "client/elicit", "agent:orders/find_order", "mcp:files/read.file", "mcp:files/a/b"]
        {
            assert_eq!(name(text).to_string(), text);
        }
        for text in [
            "",
            "fetch",
            "http/get",
            "client/roots",
            "agent:/x",
            "agent:A/x",
            "agent:a/",
            "mcp:a_b/x",
            "web:a/x",
            "mcp:a/x y",
        ] {
            let why = text.parse::<ToolName>().expect_err(text);
            assert!(why.contains("agent:NAME/TOOL"), "{text}: {why}");
        }
    }

    #[test]
    fn a_grant_covers_its_tool_or_all_tools_of_one_owner() {
        let covers =
            |grant: &str, tool| ToolGrant::try_from(grant.to_owned()).expect(grant).covers(&name(tool));
        assert!(covers("agent:orders/find", "agent:orders/find"));
        assert!(!covers("agent:orders/find", "agent:orders/find_all"));
        assert!(covers("agent:orders/*", "agent:orders/find"));
        assert!(!covers("agent:orders/*", "agent:orders2/find"));
        assert!(!covers("agent:orders/*", "mcp:orders/find"));
        assert!(!covers("http/fetch", "mcp:http/fetch"));
        assert!(covers("client/sample", "client/sample") && !covers("client/elicit", "client/sample"));
        assert!(covers("agent:*/*", "agent:orders/find") && covers("agent:*/find", "agent:orders/find"));
        assert!(!covers("agent:*/*", "mcp:files/read") && !covers("agent:*/find", "agent:orders/lose"));
    }

    #[test]
    fn models_see_plain_and_distinct_names() {
        let free = |_: &str| false;
        assert_eq!(name("agent:orders/find_order").for_model(free), "agent_orders_find_order");
        assert_eq!(name("http/fetch").for_model(free), "host_fetch");
        let all = [
            "agent:orders/find",
            "mcp:orders/find",
            "mcp:files/read.file",
            "mcp:files/read_file",
            "mcp:files/read/file",
            &format!("mcp:files/{}a", "x".repeat(80)),
            &format!("mcp:files/{}b", "x".repeat(80)),
        ]
        .map(|text| name(text).for_model(free));
        for (index, minted) in all.iter().enumerate() {
            assert!(minted.len() <= 64 && !all[..index].contains(minted), "{minted}");
            assert!(minted.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_' || b == b'-'), "{minted}");
        }
        let taken = name("agent:orders/find").for_model(|minted| minted == "agent_orders_find");
        assert!(taken.starts_with("agent_orders_find_") && taken.len() <= 64);
    }
}
