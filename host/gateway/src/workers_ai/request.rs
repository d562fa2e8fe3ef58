//! Reads the requests of Workers AI clients: `prompt` or `messages` with parameters, in the native schema or in
//! OpenAI's.
//!
//! A body with a field that exists only in OpenAI's schema gets a response in OpenAI's schema; any other body gets
//! one in Workers AI's native schema.

use crate::{
    ApiError,
    openai::{chat_request::ChatBody, fields::Fields},
};
use axum::http::StatusCode;
use serde_json::{Value, json};

/// Fields that exist only in OpenAI's schema.
const ONLY_OPENAI: &[&str] = &[
    "model",
    "max_completion_tokens",
    "n",
    "stream_options",
    "logprobs",
    "top_logprobs",
    "parallel_tool_calls",
    "user",
];
const UNSUPPORTED: &[(&str, &str)] = &[
    ("functions", "use tools"),
    ("image", "put it into `messages`, as a part of type image_url"),
    ("audio", "models accept only text, and images in messages"),
];
/// The default of Workers AI.
const DEFAULT_MAX_TOKENS: u32 = 256;

/// The schema of a response.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Schema {
    /// Workers AI's native schema: `{"response": …}`.
    Native,
    /// OpenAI's schema: `{"choices": […]}`.
    OpenAi,
}

/// One inference request as its client sent it.
#[derive(Debug)]
pub(crate) struct RunRequest {
    pub schema: Schema,
    pub body: ChatBody,
}

impl RunRequest {
    pub(crate) fn read(mut fields: Fields) -> Result<Self, ApiError> {
        if fields.has("lora") {
            let message = "`lora`: this model does not support LoRA inference; remove the field";
            let error = ApiError::new(StatusCode::METHOD_NOT_ALLOWED, "lora_unsupported", message);
            return Err(ApiError { param: Some("lora".to_owned()), ..error });
        }
        if fields.take("raw")?.unwrap_or(false) {
            let message = "raw is not supported; use /v1/completions to continue a text without a template";
            return Err(ApiError::parameter("raw", message));
        }
        if ONLY_OPENAI.iter().any(|field| fields.has(field)) {
            return Ok(RunRequest { schema: Schema::OpenAi, body: ChatBody::read(fields)? });
        }
        fields.refuse(UNSUPPORTED)?;
        match (fields.take::<String>("prompt")?, fields.has("messages")) {
            (Some(_), true) => {
                return Err(ApiError::parameter("prompt", "send either `prompt` or `messages`, not both"));
            }
            (Some(prompt), false) => {
                fields.put("messages", json!([{"role": "user", "content": prompt}]));
            }
            (None, true) => {}
            (None, false) => {
                return Err(ApiError::parameter("prompt", "`prompt` or `messages` is missing"));
            }
        }
        if !fields.has("max_tokens") {
            fields.put("max_tokens", Value::from(DEFAULT_MAX_TOKENS));
        }
        Ok(RunRequest { schema: Schema::Native, body: ChatBody::read(fields)? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(value: Value) -> Result<RunRequest, ApiError> {
        RunRequest::read(serde_json::from_value(value).unwrap())
    }

    #[test]
    fn a_field_of_openai_only_selects_its_schema() {
        let messages = json!([{"role": "user", "content": "x"}]);
        for (body, schema) in [
            (json!({"prompt": "x"}), Schema::Native),
            (json!({"messages": messages, "tools": [], "temperature": 0.5, "stream": true}), Schema::Native),
            (json!({"messages": messages, "n": null}), Schema::Native),
            (json!({"messages": messages, "model": "m"}), Schema::OpenAi),
            (json!({"messages": messages, "max_completion_tokens": 7}), Schema::OpenAi),
        ] {
            assert_eq!(read(body.clone()).unwrap().schema, schema, "{body}");
        }
    }

    #[test]
    fn errors_name_the_invalid_field() {
        for (body, param) in [
            (json!({}), "prompt"),
            (json!({"prompt": "x", "messages": []}), "prompt"),
            (json!({"prompt": 7}), "prompt"),
            (json!({"prompt": "x", "lora": "mine"}), "lora"),
            (json!({"prompt": "x", "raw": true}), "raw"),
            (json!({"prompt": "x", "functions": []}), "functions"),
            (json!({"prompt": "x", "max_tokens": "many"}), "max_tokens"),
            (json!({"prompt": "x", "model": "m"}), "messages"),
        ] {
            assert_eq!(read(body.clone()).unwrap_err().param.as_deref(), Some(param), "{body}");
        }
    }
}
