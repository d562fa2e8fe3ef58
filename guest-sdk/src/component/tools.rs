//! `skep:agent/tools`, in the SDK's types.

use serde_json::Value;

use super::bindings::skep::agent::{tools as wit, types};
use crate::{HostToolError, HostToolInfo, ToolHints};

pub(super) async fn list() -> Vec<HostToolInfo> {
    wit::list().await.into_iter().map(info_from).collect()
}

pub(super) async fn approve(call_id: &str) -> Result<(), String> {
    wit::approve(call_id.to_owned()).await
}

pub(super) async fn call(
    name: &str,
    arguments: &Value,
    timeout_ms: Option<u32>,
) -> Result<Value, HostToolError> {
    let options = wit::CallOptions { timeout_ms };
    let result = wit::call(name.to_owned(), arguments.to_string(), options).await.map_err(error_from)?;
    serde_json::from_str(&result).map_err(|error| HostToolError::Json(error.to_string()))
}

fn info_from(info: wit::ToolInfo) -> HostToolInfo {
    let schema = |text: &str| serde_json::from_str(text).unwrap_or(Value::Bool(true));
    HostToolInfo {
        name: info.name,
        model_name: info.model_name,
        description: info.description,
        input_schema: schema(&info.input_schema),
        output_schema: info.output_schema.as_deref().map(schema),
        hints: hints_from(info.hints),
    }
}

fn error_from(error: wit::ToolError) -> HostToolError {
    match error {
        wit::ToolError::Unknown(why) => HostToolError::Unknown(why),
        wit::ToolError::Denied(why) => HostToolError::Denied(why),
        wit::ToolError::InvalidArguments(why) => HostToolError::InvalidArguments(why),
        wit::ToolError::Failed(why) => HostToolError::Failed(why),
        wit::ToolError::TimedOut(after_ms) => HostToolError::TimedOut { after_ms },
        wit::ToolError::Unavailable(why) => HostToolError::Unavailable(why),
        wit::ToolError::Interrupted(why) => HostToolError::Interrupted(why),
        wit::ToolError::Refused(why) => HostToolError::Refused(why),
        wit::ToolError::Cancelled => HostToolError::Cancelled,
    }
}

fn hints_from(hints: types::ToolHints) -> ToolHints {
    let types::ToolHints { read_only, destructive, idempotent, open_world } = hints;
    ToolHints { read_only, destructive, idempotent, open_world }
}
