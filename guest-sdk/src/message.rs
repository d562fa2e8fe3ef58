//! Input and output of a turn.

use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::AgentError;

/// A message for one session of the agent.
#[derive(Debug, Clone, PartialEq)]
pub struct Message {
    /// The text of the message.
    pub text: String,
    /// JSON that was sent with the text.
    pub data: Option<Value>,
    /// The id of the session.
    pub session: String,
    /// 1 for the session's first turn.
    pub turn: u64,
    /// The time at which the host accepted the message, in milliseconds since 1970-01-01 UTC.
    pub received_at_ms: u64,
    /// The way in which the message arrived.
    pub origin: Origin,
}

impl Message {
    /// Returns the message's data as a `T`. If the data is absent or does not fit, the error is an
    /// [`AgentError::InvalidMessage`].
    pub fn json<T: DeserializeOwned>(&self) -> Result<T, AgentError> {
        let data = self.data.clone().ok_or_else(|| {
            AgentError::InvalidMessage("it has no `data`; send a JSON value with the text".into())
        })?;
        serde_json::from_value(data).map_err(|error| {
            AgentError::InvalidMessage(format!("its `data` does not fit the expected type: {error}"))
        })
    }
}

/// The way in which a message arrived.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Origin {
    /// Through the session's own URL, or the command line.
    Direct,
    /// Through one of the manifest's HTTP routes.
    Http(HttpRequest),
    /// Through a chat completion with the model `agent:NAME`.
    Chat,
}

/// An HTTP request that arrived through a route of the manifest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HttpRequest {
    /// The method, in upper case.
    pub method: String,
    /// The path as requested, without the query.
    pub path: String,
    /// The query, without the question mark.
    pub query: Option<String>,
    /// The parameters of the route, by name.
    pub parameters: Vec<(String, String)>,
    /// The content type that the caller sent.
    pub content_type: Option<String>,
}

/// The reply of a turn.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Reply {
    /// Text for people.
    pub text: String,
    /// JSON for programs.
    pub data: Option<Value>,
}

impl Reply {
    /// Creates a reply with text only.
    pub fn text(text: impl Into<String>) -> Self {
        Self { text: text.into(), data: None }
    }

    /// Creates a reply with text and a JSON value.
    ///
    /// ```
    /// # use skep_sdk::Reply;
    /// let reply = Reply::json("Two nights.", &serde_json::json!({"nights": 2}))?;
    /// assert_eq!(reply.data.unwrap()["nights"], 2);
    /// # Ok::<(), skep_sdk::AgentError>(())
    /// ```
    pub fn json<T: Serialize + ?Sized>(text: impl Into<String>, data: &T) -> Result<Self, AgentError> {
        let data = serde_json::to_value(data).map_err(|error| {
            AgentError::Failed(format!("the reply's data cannot be written as JSON: {error}"))
        })?;
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
