//! Asks the connected client about a call that needs approval, before people are waited for.

use super::link;
use crate::{access, caller::Caller};
use rmcp::{Peer, RoleServer};
use serde_json::json;
use skep_runtime::{AgentHost, ClientQuestion, Json};

/// Maximum length of the arguments that the question shows.
const MAX_SHOWN: usize = 2_000;

/// A client whose key may decide about calls.
pub(super) struct Approver<'a> {
    pub(super) host: &'a AgentHost,
    pub(super) caller: &'a Caller,
    pub(super) peer: &'a Peer<RoleServer>,
}

impl Approver<'_> {
    /// Asks the person at the client about a call, and records the decision. Without a decision, the call keeps waiting.
    pub(super) async fn ask(&self, id: &str, tool: &str, arguments: &Json) {
        let text = arguments.get();
        let end = text.floor_char_boundary(MAX_SHOWN);
        let cut = if end < text.len() { " …" } else { "" };
        let message = format!("May {tool} be called with {}{cut}?", &text[..end]);
        let form = json!({
            "type": "object",
            "properties": {
                "decision": {"type": "string", "enum": ["approve", "deny"], "description": "Whether the call is made."},
                "reason": {"type": "string", "description": "Reason for a refusal, shown to the agent."},
            },
            "required": ["decision"],
        });
        let question = ClientQuestion::Elicit(json!({"message": message, "requestedSchema": form}));
        let answer = match link::ask(self.peer, question).await {
            Ok(answer) => answer,
            Err(error) => return tracing::debug!("a client was not asked about approval {id}: {error}"),
        };
        let content = &answer["content"];
        let approve = match content["decision"].as_str() {
            Some("approve") if answer["action"] == "accept" => true,
            Some("deny") if answer["action"] == "accept" => false,
            _ => return,
        };
        let reason = content["reason"].as_str().filter(|reason| !approve && !reason.is_empty());
        let decided = self.host.decide(id, approve, reason.map(str::to_owned), &self.caller.name()).await;
        let decision = if approve { "approve" } else { "deny" };
        access::audit_decision(self.caller, id, &format!("decision={decision} tool={tool}"), decided.is_ok());
        if let Err(error) = decided {
            tracing::debug!("the decision of a client about approval {id} was not recorded: {error}");
        }
    }
}
