//! `client/…`: tools that reach the client that waits for the turn, which is one of the Model Context Protocol.
//!
//! An answer is in the journal like the result of any other tool, so a turn that runs again gets it without asking again.

use crate::{
    ClientError, ClientQuestion, ToolDefinition, TurnClient, TurnProgress,
    bindings::tools::ToolError,
    capability::{Turn, tools::call::timed_out},
    tool::{Tool, check},
};
use serde::Deserialize;
use serde_json::{Value, json};
use skep_engine::{Dialect, SchemaValidator};
use skep_outbound::ToolHints;
use std::{sync::Arc, time::Duration};

const NOBODY: &str = "no client that can be asked waits for this turn: only the caller of a tool over MCP can be asked, \
                      and only while its call lasts";

/// The tools of the client.
pub(in crate::capability) struct ClientTools {
    pub(in crate::capability) elicit: Arc<Tool>,
    pub(in crate::capability) sample: Arc<Tool>,
    progress: Arc<Tool>,
}

/// The arguments of `client/progress`.
#[derive(Deserialize)]
struct Progress {
    progress: f64,
    total: Option<f64>,
    message: Option<String>,
}

impl Default for ClientTools {
    fn default() -> Self {
        ClientTools { elicit: tool(elicit()), sample: tool(sample()), progress: tool(progress()) }
    }
}

impl ClientTools {
    /// Returns the tool with this name. The names are those that a tool's name may have.
    pub(super) fn get(&self, name: &str) -> Arc<Tool> {
        let tool = match name {
            "elicit" => &self.elicit,
            "sample" => &self.sample,
            _ => &self.progress,
        };
        tool.clone()
    }
}

fn tool(definition: ToolDefinition) -> Arc<Tool> {
    Arc::new(Tool::new(definition).expect("the tool's own schemas compile"))
}

fn elicit() -> ToolDefinition {
    let input = json!({
        "type": "object",
        "properties": {
            "message": {"type": "string", "description": "What the person is asked."},
            "requestedSchema": {
                "type": "object",
                "description": "JSON Schema of the form: an object with properties that are strings, numbers, \
                                booleans or choices.",
            },
        },
        "required": ["message", "requestedSchema"],
        "additionalProperties": false,
    });
    let output = json!({
        "type": "object",
        "properties": {
            "action": {"enum": ["accept", "decline", "cancel"]},
            "content": {"type": "object", "description": "What the person filled in, if they accepted."},
        },
        "required": ["action"],
    });
    definition("elicit", "Asks the person at the client to fill in a form.", input, Some(output))
}

fn sample() -> ToolDefinition {
    let input = json!({
        "type": "object",
        "properties": {
            "messages": {
                "type": "array",
                "minItems": 1,
                "items": {
                    "type": "object",
                    "properties": {"role": {"enum": ["user", "assistant"]}, "content": {"type": "object"}},
                    "required": ["role", "content"],
                },
            },
            "maxTokens": {"type": "integer", "minimum": 1},
            "systemPrompt": {"type": "string"},
            "temperature": {"type": "number", "minimum": 0},
            "stopSequences": {"type": "array", "items": {"type": "string"}},
        },
        "required": ["messages", "maxTokens"],
        "additionalProperties": false,
    });
    let output = json!({
        "type": "object",
        "properties": {
            "role": {"enum": ["user", "assistant"]},
            "content": {},
            "model": {"type": "string"},
            "stopReason": {"type": "string"},
        },
        "required": ["role", "content", "model"],
    });
    definition("sample", "Asks the client's model for a completion.", input, Some(output))
}

fn progress() -> ToolDefinition {
    let input = json!({
        "type": "object",
        "properties": {
            "progress": {"type": "number"},
            "total": {"type": "number"},
            "message": {"type": "string"},
        },
        "required": ["progress"],
        "additionalProperties": false,
    });
    definition("progress", "Reports the progress of the call to the client.", input, None)
}

fn definition(name: &str, description: &str, input: Value, output: Option<Value>) -> ToolDefinition {
    ToolDefinition {
        name: name.to_owned(),
        description: description.to_owned(),
        input_schema: input,
        output_schema: output,
        hints: ToolHints { read_only: true, destructive: false, idempotent: false, open_world: true },
        timeout_ms: None,
        retries: 0,
        needs_approval: false,
    }
}

pub(super) async fn call(
    turn: &Turn,
    name: &str,
    arguments: Value,
    timeout: Option<Duration>,
) -> Result<Value, ToolError> {
    let client = turn.client();
    let question = match name {
        "elicit" => ClientQuestion::Elicit(arguments.clone()),
        "sample" => ClientQuestion::Sample(arguments.clone()),
        _ => {
            let invalid = |error: serde_json::Error| ToolError::InvalidArguments(error.to_string());
            let Progress { progress, total, message } = serde_json::from_value(arguments).map_err(invalid)?;
            // Other callers have nobody to notify; the tool works for them anyway.
            if let Some(client) = client {
                client.progress(TurnProgress { progress, total, message });
            }
            return Ok(Value::Null);
        }
    };
    let form = match &question {
        ClientQuestion::Elicit(asked) => {
            Some(SchemaValidator::compile(&asked["requestedSchema"], Dialect::Linear).map_err(|why| {
                ToolError::InvalidArguments(format!("requestedSchema does not compile: {why}"))
            })?)
        }
        ClientQuestion::Sample(_) => None,
    };
    let client = client.ok_or_else(|| ToolError::Unavailable(NOBODY.to_owned()))?;
    let answer = match &question {
        // The time that a person takes is not the turn's, and has a limit of its own.
        ClientQuestion::Elicit(_) => {
            let most = Duration::from_millis(turn.agent.limits.approval_ms.into());
            let _stopped = turn.deadline.stop();
            ask(&*client, question, Some(timeout.map_or(most, |timeout| timeout.min(most)))).await?
        }
        ClientQuestion::Sample(_) => ask(&*client, question, timeout).await?,
    };
    match form {
        Some(form) if answer["action"] == "accept" => {
            let content = answer.get("content").cloned().unwrap_or_else(|| json!({}));
            let wrong =
                |why| ToolError::Failed(format!("the client's answer does not match the form: {why}"));
            check(&content, &form).map_err(wrong)?;
            Ok(answer)
        }
        _ => Ok(answer),
    }
}

async fn ask(
    client: &dyn TurnClient,
    question: ClientQuestion,
    timeout: Option<Duration>,
) -> Result<Value, ToolError> {
    let asked = client.ask(question);
    let answer = match timeout {
        None => asked.await,
        Some(timeout) => tokio::time::timeout(timeout, asked).await.map_err(|_elapsed| timed_out(timeout))?,
    };
    answer.map_err(|error| match error {
        ClientError::Invalid(why) => ToolError::InvalidArguments(why),
        ClientError::Unavailable(why) => ToolError::Unavailable(why),
        ClientError::Failed(why) => ToolError::Failed(why),
    })
}
