//! A session as one JSON document, which `GET …/sessions/{session}/export` returns and `PUT …/sessions/{session}`
//! accepts.
//!
//! The document has its own version. It contains everything that a session needs to continue token for token: state,
//! messages, and the tokens that the model has seen and produced. An import is validated as a whole before anything
//! is written.

use super::sessions::created;
use crate::{
    ApiError, Gateway,
    body::{self, LONG, run_on_compute},
};
use axum::{
    Json,
    extract::{Path, Query, Request, State},
    http::StatusCode,
    response::{IntoResponse, Response},
};
use base64::{Engine as _, prelude::BASE64_STANDARD};
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};
use skep_engine::{ModelDigest, chat::Transcript};
use skep_runtime::{PortableConversation, PortableSession, SessionSummary, excerpt, tenant_of};
use std::{borrow::Cow, collections::BTreeMap};
use utoipa::{IntoParams, ToSchema};

/// Maximum size of a document to import. Every session that can be exported fits.
pub(crate) const MAX_BYTES: usize = 64 << 20;
const FORMAT: &str = "skep.session";
const VERSION: u32 = 1;

/// The fields that every version starts with.
#[derive(Deserialize)]
struct Header {
    format: String,
    version: u32,
}

/// A session with everything that it needs to continue token for token.
#[derive(Serialize, Deserialize, ToSchema)]
#[schema(as = SessionExport)]
#[serde(deny_unknown_fields)]
struct Document {
    /// `skep.session`
    #[schema(value_type = String)]
    format: Cow<'static, str>,
    version: u32,
    agent: String,
    session: String,
    turns: u64,
    created_at_ms: u64,
    updated_at_ms: u64,
    /// Values in base64, by their keys.
    #[schema(value_type = BTreeMap<String, String>)]
    state: BTreeMap<String, Base64>,
    conversations: Vec<Conversation>,
}

/// A conversation of an exported session.
#[derive(Serialize, Deserialize, ToSchema)]
#[schema(as = ExportedConversation)]
#[serde(deny_unknown_fields)]
struct Conversation {
    name: String,
    model: String,
    /// The model whose tokens these are. If it is missing, the tokens must spell the text.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Object>)]
    digest: Option<ModelDigest>,
    /// The messages, the tokens, the text that the tokens encode, and the total usage.
    #[schema(value_type = Object)]
    transcript: Transcript,
}

/// Bytes, which may not be text, encoded as base64.
struct Base64(Vec<u8>);

#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(crate) struct ImportQuery {
    /// Whether an existing session is replaced.
    #[serde(default)]
    replace: bool,
    /// Whether the document may come from an agent with a different name.
    #[serde(default)]
    from_other_agent: bool,
}

/// Exports a session as one document: state, messages and tokens.
#[utoipa::path(get, path = "/v1/agents/{agent}/sessions/{session}/export", tag = "sessions", operation_id = "export_session",
    params(
        ("agent" = String, Path, description = "Name of the agent"),
        ("session" = String, Path, description = "Id of the session"),
    ),
    responses(
        (status = 200, description = "The document.", body = Document),
        (status = 404, description = "`agent_not_found` or `session_not_found`"),
        (status = 413, description = "`session_too_large`"),
    ))]
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
    run_on_compute(&gateway, tenant_of(&full), LONG, move |_| Ok(Json(document).into_response())).await
}

/// Imports a document under the ids in the path: the session may have a different name and, if `from_other_agent` is
/// set, belong to a different agent.
#[utoipa::path(put, path = "/v1/agents/{agent}/sessions/{session}", tag = "sessions", operation_id = "import_session",
    params(
        ("agent" = String, Path, description = "Name of the agent"),
        ("session" = String, Path, description = "Id of the session"),
        ImportQuery,
    ),
    request_body = Document,
    responses(
        (status = 201, description = "The session.", body = skep_api::Session,
            headers(("location" = String, description = "Path of the session"))),
        (status = 404, description = "`agent_not_found`"),
        (status = 409, description = "`session_exists`, `other_agent` or `waiting_for_approval`"),
        (status = 422, description = "`invalid_session`"),
    ))]
pub(crate) async fn import(
    State(gateway): State<Gateway>,
    Path((agent, session)): Path<(String, String)>,
    Query(query): Query<ImportQuery>,
    request: Request,
) -> Result<Response, ApiError> {
    let bytes = body::read_within(MAX_BYTES, request, &gateway).await?;
    let (exported_from, export) =
        run_on_compute(&gateway, tenant_of(&session.clone()), LONG, move |_| read(&bytes, session)).await?;
    if exported_from != agent && !query.from_other_agent {
        let exported_from = excerpt(&exported_from);
        let message = format!(
            "the session was exported from agent {exported_from:?} but is being imported into {agent:?}; if this is \
             intended, set from_other_agent=true (`skep session import --from-other-agent`)"
        );
        return Err(ApiError::new(StatusCode::CONFLICT, "other_agent", message));
    }
    let summary = gateway.host.import_session(&agent, export, query.replace).await?;
    Ok(created(&agent, &summary))
}

/// Parses a document. Returns the agent that it was exported from, and the session to import.
fn read(bytes: &[u8], session: String) -> Result<(String, PortableSession), ApiError> {
    let Header { format, version } = body::parse(bytes)?;
    if format != FORMAT {
        let message = format!("`format` is {format:?}; it must be {FORMAT:?} in an exported session");
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
