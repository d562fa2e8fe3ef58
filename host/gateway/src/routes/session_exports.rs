//! A session as one JSON document: what `GET …/sessions/{session}/export` gives and `PUT …/sessions/{session}` takes.
//!
//! The document has a version of its own. It holds what a session needs to go on token for token: state, messages, and
//! the tokens that the model saw and produced. An import is checked as a whole before anything of it is written.

use super::{LONG, sessions::created};
use crate::{ApiError, Gateway, body};
use axum::{
    Json,
    extract::{Path, Query, Request, State},
    http::StatusCode,
    response::{IntoResponse, Response},
};
use base64::{Engine as _, prelude::BASE64_STANDARD};
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};
use skep_engine::{ModelDigest, chat::Transcript};
use skep_runtime::{PortableConversation, PortableSession, SessionSummary, tenant_of};
use std::{borrow::Cow, collections::BTreeMap};

/// Of a document that is imported. A session that can be exported fits.
pub(crate) const MAX_BYTES: usize = 64 << 20;
const FORMAT: &str = "skep.session";
const VERSION: u32 = 1;

/// What every version begins with.
#[derive(Deserialize)]
struct Header {
    format: String,
    version: u32,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Document {
    format: Cow<'static, str>,
    version: u32,
    agent: String,
    session: String,
    turns: u64,
    created_at_ms: u64,
    updated_at_ms: u64,
    state: BTreeMap<String, Base64>,
    conversations: Vec<Conversation>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Conversation {
    name: String,
    model: String,
    /// The model whose tokens these are. Without it, the tokens have to spell the text.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    digest: Option<ModelDigest>,
    /// Messages, tokens, the text that the tokens are of, and the sum of the usage.
    transcript: Transcript,
}

/// Bytes that may be no text.
struct Base64(Vec<u8>);

#[derive(Deserialize)]
pub(crate) struct ImportQuery {
    /// Whether a session that is there is replaced.
    #[serde(default)]
    replace: bool,
    /// Whether the document may be one of an agent with another name.
    #[serde(default)]
    from_other_agent: bool,
}

pub(crate) async fn export(
    State(gateway): State<Gateway>,
    Path((agent, session)): Path<(String, String)>,
) -> Result<Response, ApiError> {
    let full = session.clone();
    let PortableSession { summary, state, conversations } =
        gateway.host.export_session(&agent, &session).await?;
    let document = Document {
        format: FORMAT.into(),
        version: VERSION,
        agent,
        session: summary.id,
        turns: summary.turns,
        created_at_ms: summary.created_at_ms,
        updated_at_ms: summary.updated_at_ms,
        state: state.into_iter().map(|(key, value)| (key, Base64(value))).collect(),
        conversations: conversations.into_iter().map(Conversation::from).collect(),
    };
    super::apart(&gateway, tenant_of(&full), LONG, move |_| Ok(Json(document).into_response())).await
}

/// The ids in the path count: a document may be imported under another name and, if that is said, into another agent.
pub(crate) async fn import(
    State(gateway): State<Gateway>,
    Path((agent, session)): Path<(String, String)>,
    Query(query): Query<ImportQuery>,
    request: Request,
) -> Result<Response, ApiError> {
    let bytes = body::read_within(MAX_BYTES, request, &gateway).await?;
    let (exported_from, export) =
        super::apart(&gateway, tenant_of(&session.clone()), LONG, move |_| read(&bytes, session)).await?;
    if exported_from != agent && !query.from_other_agent {
        let exported_from: String = exported_from.chars().take(80).collect();
        let message = format!(
            "the session was exported from agent {exported_from:?} and is imported into {agent:?}; if that is meant, say \
             from_other_agent=true (`skep session import --from-other-agent`)"
        );
        return Err(ApiError::new(StatusCode::CONFLICT, "other_agent", message));
    }
    let summary = gateway.host.import_session(&agent, export, query.replace).await?;
    Ok(created(&agent, &summary))
}

/// The agent that it is from, and the session as what it is imported.
fn read(bytes: &[u8], session: String) -> Result<(String, PortableSession), ApiError> {
    let Header { format, version } = body::parse(bytes)?;
    if format != FORMAT {
        let message = format!("`format` is {format:?}; an exported session has {FORMAT:?}");
        return Err(ApiError::parameter("format", message));
    }
    if version != VERSION {
        let message = format!("`version` is {version}; this server imports version {VERSION} of the format");
        return Err(ApiError::parameter("version", message));
    }
    let document: Document = body::parse(bytes)?;
    let Document { agent, turns, created_at_ms, updated_at_ms, state, conversations, .. } = document;
    let session = PortableSession {
        summary: SessionSummary { id: session, turns, created_at_ms, updated_at_ms },
        state: state.into_iter().map(|(key, Base64(value))| (key, value)).collect(),
        conversations: conversations.into_iter().map(PortableConversation::from).collect(),
    };
    Ok((agent, session))
}

impl From<PortableConversation> for Conversation {
    fn from(PortableConversation { name, model, digest, transcript }: PortableConversation) -> Self {
        Conversation { name, model, digest, transcript }
    }
}

impl From<Conversation> for PortableConversation {
    fn from(Conversation { name, model, digest, transcript }: Conversation) -> Self {
        PortableConversation { name, model, digest, transcript }
    }
}

impl Serialize for Base64 {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&BASE64_STANDARD.encode(&self.0))
    }
}

impl<'de> Deserialize<'de> for Base64 {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = <Cow<'de, str>>::deserialize(deserializer)?;
        let bytes = BASE64_STANDARD.decode(text.as_bytes());
        bytes.map(Base64).map_err(|error| de::Error::custom(format!("not base64: {error}")))
    }
}
