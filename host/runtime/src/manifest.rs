//! `agent.toml`: the manifest in which the author of an agent asks for grants, limits and triggers.
//!
//! Everything that is not granted is denied. An unknown field is an error that names the most similar field, so that a
//! misspelled grant or limit is never silently ignored.

use crate::{
    AgentName, EventTrigger, LimitsToml, ManifestSchedule, McpToml, ModelGrant, RuntimeError, SecretGrant,
    SessionsToml, ToolGrant, TopicPattern, route::Route, schedule, toml_text::parse_toml,
};
use serde::{Deserialize, Serialize};
use skep_outbound::Origins;
use std::collections::BTreeMap;

/// Maximum size of a manifest. It is larger than any legitimate manifest.
const MAX_BYTES: usize = 256 << 10;
const MAX_ROUTES: usize = 64;
const MAX_MODEL_GRANTS: usize = 64;
const MAX_TOOL_GRANTS: usize = 256;
const MAX_SECRET_GRANTS: usize = 32;
const MAX_EVENT_TRIGGERS: usize = 64;
const MAX_EVENT_GRANTS: usize = 64;

/// A validated `agent.toml`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    pub name: AgentName,
    /// The agent's own model. `None`: the host's default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub model: Option<String>,
    /// Path of the component, relative to the manifest. Only the command line uses it; the host receives the bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub component: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub build: Option<Build>,
    #[serde(default)]
    pub trigger: Triggers,
    /// Schedules that wake the agent.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub schedule: Vec<ManifestSchedule>,
    #[serde(default)]
    pub grants: Grants,
    #[serde(default)]
    pub limits: LimitsToml,
    /// Settings by tool, either one of the agent's own or one that it calls: `[tools.refund]`, `[tools."agent:bank/pay"]`.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub tools: BTreeMap<String, ToolToml>,
    #[serde(default, skip_serializing_if = "SessionsToml::is_default")]
    pub sessions: SessionsToml,
    #[serde(default, skip_serializing_if = "InferenceToml::is_default")]
    pub inference: InferenceToml,
    #[serde(default, skip_serializing_if = "McpToml::is_empty")]
    pub mcp: McpToml,
}

/// `[inference]` in `agent.toml`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct InferenceToml {
    /// The fate of an answer of another server that was cut off, by a crash of this host or by the server itself. An
    /// answer of a model of this host always continues where it was.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cut_off: Option<CutOffMode>,
    /// Whether a conversation continues with the model that the agent names now, instead of the one that it began
    /// with. Its messages are then tokenized again.
    #[serde(default)]
    pub follow_model: bool,
}

/// The fate of an answer that was cut off.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum CutOffMode {
    /// The same request is repeated, and costs again. A server that keeps breaking its answer off is asked three times at
    /// most for one generation.
    #[default]
    Again,
    /// The generation fails as interrupted.
    Fail,
}

impl InferenceToml {
    fn is_default(&self) -> bool {
        *self == InferenceToml::default()
    }
}

/// The settings of a tool in `agent.toml`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ToolToml {
    /// Whether a person must approve each call, even if the tool itself does not require it.
    #[serde(default)]
    pub approval: bool,
}

/// The build command of the component. Only the command line uses it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Build {
    pub command: String,
}

/// Routes and events that invoke the agent, in addition to the host's own API.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Triggers {
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub http: Vec<HttpTrigger>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub event: Vec<EventTrigger>,
}

/// An HTTP route of the agent.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HttpTrigger {
    /// The route's pattern, such as `/concierge/{session}`.
    pub route: Route,
    /// The HTTP method, in capitals.
    #[serde(default = "post")]
    pub method: String,
}

/// Permissions of the agent beyond the `skep:agent` interfaces.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Grants {
    /// Access to `wasi:clocks`.
    #[serde(default)]
    pub clocks: bool,
    /// Access to `wasi:random`.
    #[serde(default)]
    pub random: bool,
    /// Models in addition to the agent's own, which is `model` or the host's default. `*` stands for all models.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub models: Vec<ModelGrant>,
    /// Tools of other agents, MCP servers and the host, such as `agent:orders/find_order` or `mcp:files/*`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tools: Vec<ToolGrant>,
    /// Topics of events that the agent may emit.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub events: Vec<TopicPattern>,
    /// Origins to which the agent may send HTTP requests, if the operator allows them too.
    #[serde(default, skip_serializing_if = "Origins::is_empty")]
    pub hosts: Origins,
    /// Secrets that the agent may send in those requests without seeing their values.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub secrets: Vec<SecretGrant>,
}

impl Manifest {
    /// Parses and validates the text of an `agent.toml`.
    pub fn from_toml(text: &str) -> Result<Self, RuntimeError> {
        let invalid = |message: String| RuntimeError::Manifest { message };
        if text.len() > MAX_BYTES {
            return Err(invalid(format!("{} bytes; at most {MAX_BYTES} are allowed", text.len())));
        }
        let manifest: Manifest = parse_toml(text).map_err(invalid)?;
        manifest.check()?;
        Ok(manifest)
    }

    /// Serializes the manifest as TOML.
    pub fn to_toml(&self) -> String {
        toml::to_string(self).expect("names, numbers and flags are always TOML")
    }

    pub(crate) fn check(&self) -> Result<(), RuntimeError> {
        self.limits.check().map_err(|message| RuntimeError::Manifest { message })?;
        self.sessions.check()?;
        self.mcp.check().map_err(|message| RuntimeError::Manifest { message })?;
        let invalid = |message: String| Err(RuntimeError::Manifest { message });
        schedule::manifest::check(&self.schedule)?;
        for (what, count, most) in [
            ("event triggers", self.trigger.event.len(), MAX_EVENT_TRIGGERS),
            ("topics under [grants] events", self.grants.events.len(), MAX_EVENT_GRANTS),
            ("models under [grants]", self.grants.models.len(), MAX_MODEL_GRANTS),
        ] {
            if count > most {
                return invalid(format!("{count} {what}; at most {most} are allowed"));
            }
        }
        let routes = &self.trigger.http;
        if routes.len() > MAX_ROUTES {
            return invalid(format!("{} routes; at most {MAX_ROUTES} are allowed", routes.len()));
        }
        for (index, trigger) in routes.iter().enumerate() {
            if !METHODS.contains(&trigger.method.as_str()) {
                return invalid(format!(
                    "method {:?} of route {}; it must be one of {}",
                    trigger.method,
                    trigger.route,
                    METHODS.join(", ")
                ));
            }
            if let Some(other) = routes[..index].iter().find(|other| other.conflicts(trigger)) {
                return invalid(format!(
                    "routes {} and {} match the same {} requests; remove one",
                    other.route, trigger.route, trigger.method
                ));
            }
        }
        let tools = self.grants.tools.len();
        if tools > MAX_TOOL_GRANTS {
            return invalid(format!("{tools} tools under [grants]; at most {MAX_TOOL_GRANTS} are allowed"));
        }
        let secrets = &self.grants.secrets;
        if secrets.len() > MAX_SECRET_GRANTS {
            let count = secrets.len();
            return invalid(format!(
                "{count} secrets under [grants]; at most {MAX_SECRET_GRANTS} are allowed"
            ));
        }
        for (index, grant) in secrets.iter().enumerate() {
            if secrets[..index].iter().any(|other| other.name == grant.name) {
                return invalid(format!(
                    "secret {} is listed twice under [grants]; list all its hosts in one entry",
                    grant.name
                ));
            }
        }
        match &self.model {
            Some(model) if model.is_empty() || model.len() > 256 => {
                invalid("model must have 1 to 256 characters; omit it to use the host's default".into())
            }
            _ => Ok(()),
        }
    }
}

impl Manifest {
    /// Returns whether `agent.toml` requires a person's approval for calls of a tool.
    pub(crate) fn asks_approval(&self, tool: &str) -> bool {
        self.tools.get(tool).is_some_and(|tool| tool.approval)
    }
}

const METHODS: [&str; 5] = ["GET", "POST", "PUT", "PATCH", "DELETE"];

impl HttpTrigger {
    pub(crate) fn conflicts(&self, other: &HttpTrigger) -> bool {
        self.method == other.method && self.route.overlaps(&other.route)
    }
}

fn post() -> String {
    "POST".to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    const FULL: &str = r#"
name = "concierge"
component = "target/concierge.wasm"
model = "smollm2-135m"
[build]
command = "make"
[[trigger.http]]
route = "/concierge/{session}"
[[trigger.http]]
route = "/concierge/{session}"
method = "GET"
[[trigger.event]]
topic = "order.*"
session = "{data.order_id}"
[[schedule]]
name = "digest"
cron = "0 7 * * 1-5"
time_zone = "Europe/Berlin"
session = "daily"
data = { kind = "short", lines = 3 }
[[schedule]]
name = "look"
every = "15m"
session = "daily"
[grants]
clocks = true
models = ["qwen3-0.6b"]
tools = ["agent:orders/*", "http/fetch"]
events = ["order.*"]
hosts = ["https://api.example.com", "http://*.example.com:8080"]
secrets = [{ name = "KEY", hosts = ["https://api.example.com"] }]
[limits]
memory_mb = 32
tokens_per_turn = 512
[sessions]
ttl_h = 720
[mcp.prompts.review]
tool = "write_review"
[mcp.resources.note]
uri = "notes://{id}"
tool = "read_note"
mime_type = "text/plain"
"#;

    #[test]
    fn a_full_manifest_round_trips() {
        let manifest = Manifest::from_toml(FULL).expect("valid");
        assert_eq!(manifest.name.as_str(), "concierge");
        assert_eq!(manifest.trigger.http[0].method, "POST");
        assert!(manifest.grants.clocks && !manifest.grants.random);
        assert_eq!(manifest.limits.memory_mb, Some(32));
        assert_eq!(manifest.schedule[0].data, Some(serde_json::json!({"kind": "short", "lines": 3})));
        assert_eq!(manifest.trigger.event[0].session.to_string(), "{data.order_id}");
        assert_eq!(Manifest::from_toml(&manifest.to_toml()).expect("its own text"), manifest);
    }

    #[test]
    fn a_manifest_with_only_a_name_grants_nothing() {
        let manifest = Manifest::from_toml("name = \"a\"").expect("valid");
        assert_eq!(manifest.grants, Grants::default());
        assert!(manifest.trigger.http.is_empty());
    }

    #[test]
    fn an_error_names_the_line_and_suggests_the_nearest_field() {
        for (text, expected) in [
            ("name = \"a\"\n[grants]\nclock = true", "line 3: unknown field `clock`"),
            ("name = \"a\"\n[grants]\nclock = true", "did you mean `clocks`?"),
            ("name = \"a\"\n[limit]\ncpu_ms = 1", "did you mean `limits`?"),
            ("name = \"a\"\n[limits]\nmemory_mib = 1", "did you mean `memory_mb`?"),
            (
                "name = \"a\"\n[limits]\ncpu_ms = -1",
                "line 3: [limits] cpu_ms: -1 is out of range; it must be between 1 and",
            ),
            ("name = \"a\"\n[limits]\nmemory_mb = 5000", "it must be between 1 and 4096"),
            ("name = \"a\"\n[sessions]\nttl_h = 0", "it may be 1 to"),
            ("name = \"a\"\n[session]\nttl_h = 1", "did you mean `sessions`?"),
            ("name = \"A b\"", "an agent's name has"),
            ("model = \"x\"", "name"),
            ("name = \"a\"\nmodel = \"\"", "omit it to use"),
            ("name = \"a\"\n[[trigger.http]]\nroute = \"/v1/x\"", "would shadow the host's own /v1"),
            (
                "name = \"a\"\n[[trigger.http]]\nroute = \"/x\"\nmethod = \"get\"",
                "it must be one of GET, POST",
            ),
            (
                "name = \"a\"\n[[trigger.http]]\nroute = \"/x/{a}\"\n[[trigger.http]]\nroute = \"/x/{b}\"",
                "match the same POST requests",
            ),
            ("name = \"a\"\n[grants]\nmodels = [\"\"]", "a model's name has 1 to 256"),
            ("name = \"a\"\n[grants]\ntools = [\"orders\"]", "\"orders\" is not a valid tool name"),
            (
                "name = \"a\"\n[grants]\nhosts = [\"api.example.com\"]",
                "line 3: [grants] hosts: \"api.example.com\" is not a valid origin",
            ),
            ("name = \"a\"\n[grants]\nsecrets = [{ name = \"key\", hosts = [] }]", "A-Z, 0-9 and _"),
            (
                "name = \"a\"\n[grants]\nsecrets = [{ name = \"K\", hosts = [] }, { name = \"K\", hosts = [] }]",
                "secret K is listed twice",
            ),
            ("name = ", "line 1"),
            ("name = \"a\"\n[grants]\nevents = [\"or*\"]", "such as order.*"),
            (
                "name = \"a\"\n[[trigger.event]]\ntopic = \"a\"\nsession = \"{x}\"",
                "which is not a field of events",
            ),
            ("name = \"a\"\n[[schedule]]\nname = \"d\"\nsession = \"s\"", "exactly one of cron and every"),
            (
                "name = \"a\"\n[[schedule]]\nname = \"d\"\nsession = \"s\"\nevery = \"1s\"\ntime_zone = \"UTC\"",
                "time_zone applies only to cron",
            ),
            (
                "name = \"a\"\n[[schedule]]\nname = \"d\"\nsession = \"a b\"\nevery = \"9s\"",
                "a session's id has",
            ),
            (
                "name = \"a\"\n[[schedule]]\nname = \"d\"\nsession = \"s\"\nevery = \"0s\"",
                "it may be 1000 to",
            ),
        ] {
            let message = Manifest::from_toml(text).expect_err(text).to_string();
            assert!(message.contains(expected), "{text}\n→ {message}");
        }
    }

    #[test]
    fn an_unrelated_field_name_gets_no_suggestion() {
        let message =
            Manifest::from_toml("name = \"a\"\nxylophones_everywhere = 1").expect_err("unknown").to_string();
        assert!(!message.contains("did you mean"), "{message}");
    }
}
