//! The shapes of Workers AI: an envelope around every answer, its own schema for chats beside OpenAI's, and numbered
//! errors.
//!
//! What a request says is read by `openai`; only the names that differ are translated here.

pub(crate) mod batch;
pub(crate) mod failure;
pub(crate) mod native;
pub(crate) mod request;

use serde_json::{Value, json};

/// The envelope of an answer that went well.
pub(crate) fn success(result: Value) -> Value {
    json!({"result": result, "success": true, "errors": [], "messages": []})
}
