//! What comes in and what goes out of a turn.

use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::AgentError;

/// A message for one session of the agent.
#[derive(Debug, Clone, PartialEq)]
pub struct Message {
    /// What was said.
    pub text: String,
    /// JSON that came with the text.
    pub data: Option<Value>,
    /// The session it is for.
    pub session: String,
    /// 1 for the session's first turn.
    pub turn: u64,
    /// When the host accepted it, in milliseconds since 1970-01-01 UTC.
    pub received_at_ms: u64,
    /// How it came.
    pub origin: Origin,
}

impl Message {
    /// The message's data as a `T`. Absent or unfitting data is an [`AgentError::InvalidMessage`].
    pub fn json<T: DeserializeOwned>(&self) -> Result<T, AgentError> {
        let data = self.data.clone().ok_or_else(|| {
            AgentError::InvalidMessage("it has no `data`; send a JSON value beside the text".into())
        })?;
        serde_json::from_value(data)
            .map_err(|error| AgentError::InvalidMessage(format!("its `data` does not fit: {error}")))
    }
}

/// How a message came.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Origin {
    /// The session's own address, or the command line.
    Direct,
    /// One of the manifest's HTTP routes.
    Http(HttpRequest),
    /// A chat completion with the model `agent:NAME`.
    Chat,
}

/// The request that came in by a route of the manifest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HttpRequest {
    /// In capitals.
    pub method: String,
    /// As requested, without the query.
    pub path: String,
    /// Without the question mark.
    pub query: Option<String>,
    /// The parameters of the route, by name.
    pub parameters: Vec<(String, String)>,
    /// As the caller sent it.
    pub content_type: Option<String>,
}

/// The answer of a turn.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Reply {
    /// For people.
    pub text: String,
    /// For programs.
    pub data: Option<Value>,
}

impl Reply {
    /// A text alone.
    pub fn text(text: impl Into<String>) -> Self {
        Self { text: text.into(), data: None }
    }

    /// A text with a JSON value beside it.
    ///
    /// ```
    /// # use skep_sdk::Reply;
    /// let reply = Reply::json("Two nights.", &serde_json::json!({"nights": 2}))?;
    /// assert_eq!(reply.data.unwrap()["nights"], 2);
    /// # Ok::<(), skep_sdk::AgentError>(())
    /// ```
    pub fn json<T: Serialize + ?Sized>(text: impl Into<String>, data: &T) -> Result<Self, AgentError> {
        let data = serde_json::to_value(data)
            .map_err(|error| AgentError::Failed(format!("the reply's data is not JSON: {error}")))?;
        Ok(Self { text: text.into(), data: Some(data) })
    }
}

impl From<String> for Reply {
    fn from(text: String) -> Self {
        Self::text(text)
    }
}

impl From<&str> for Reply {
    fn from(text: &str) -> Self {
        Self::text(text)
    }
}
