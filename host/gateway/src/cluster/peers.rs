//! Asks the other hosts to run, follow and cancel turns, and to answer with their models: the runtime's [`Peers`] over HTTP.

use super::{
    generation,
    key::{ClusterKey, SignedBody},
    lines,
    link::{Link, LinkError, Outgoing},
    routes::{self, Refusal},
};
use axum::{
    body::{Body, to_bytes},
    http::{HeaderMap, HeaderValue, Method, Response, header, uri::PathAndQuery},
};
use futures::future::BoxFuture;
use serde::Serialize;
use skep_runtime::{
    GenerationEvents, Member, PeerError, PeerGeneration, PeerInvocation, Peers, RemoteRun, TurnAddress,
};
use std::{fmt, sync::Arc, time::Duration};

/// Time within which another host must have accepted a turn. It may wait for a session that a third one hands over; the runtime
/// gives up before.
const HEAD_TIMEOUT: Duration = Duration::from_secs(150);
const MAX_REFUSAL_BYTES: usize = 64 << 10;

/// The other hosts of a cluster, as the runtime asks them. Clones share their connections.
#[derive(Clone)]
pub struct HttpPeers {
    link: Arc<Link>,
}

impl HttpPeers {
    /// Creates the connections to the other hosts, which have the same key.
    pub fn new(key: ClusterKey) -> Self {
        HttpPeers { link: Arc::new(Link::new(key)) }
    }

    /// Starts a run at another host with this body, and reads its events.
    fn run(
        &self,
        member: Member,
        path: &'static str,
        body: Result<Vec<u8>, PeerError>,
    ) -> BoxFuture<'static, Result<RemoteRun, PeerError>> {
        let link = self.link.clone();
        Box::pin(async move {
            let answer = call(&link, &member, path, body?).await?;
            lines::read(answer.into_body()).await
        })
    }
}

impl Peers for HttpPeers {
    fn invoke(
        &self,
        member: Member,
        invocation: PeerInvocation,
    ) -> BoxFuture<'static, Result<RemoteRun, PeerError>> {
        self.run(member, routes::INVOKE, json(&invocation))
    }

    fn follow(&self, member: Member, turn: TurnAddress) -> BoxFuture<'static, Result<RemoteRun, PeerError>> {
        self.run(member, routes::FOLLOW, json(&turn))
    }

    fn cancel(&self, member: Member, turn: TurnAddress) -> BoxFuture<'static, Result<(), PeerError>> {
        let link = self.link.clone();
        Box::pin(async move { call(&link, &member, routes::CANCEL, json(&turn)?).await.map(drop) })
    }

    fn generate(
        &self,
        member: Member,
        generation: PeerGeneration,
    ) -> BoxFuture<'static, Result<GenerationEvents, PeerError>> {
        let link = self.link.clone();
        Box::pin(async move {
            let asked = call(&link, &member, routes::GENERATE, json(&generation)?);
            // A host answers before its model does.
            match tokio::time::timeout(generation::SILENCE, asked).await {
                Ok(answer) => Ok(generation::read(answer?.into_body())),
                Err(_) => {
                    let why =
                        format!("host {} did not answer within {:?}", member.number, generation::SILENCE);
                    Err(PeerError::Broken(why))
                }
            }
        })
    }
}

impl fmt::Debug for HttpPeers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("HttpPeers")
    }
}

/// The type of a body that is not text.
pub(super) const BYTES: HeaderValue = HeaderValue::from_static("application/octet-stream");
pub(super) const JSON: HeaderValue = HeaderValue::from_static("application/json");

/// Sends JSON to an internal route of another host, and returns its answer if it is not a refusal.
pub(super) async fn call(
    link: &Link,
    member: &Member,
    path: &'static str,
    body: Vec<u8>,
) -> Result<Response<Body>, PeerError> {
    post(link, member, path, JSON, body).await
}

/// Does the same with a body of another type.
pub(super) async fn post(
    link: &Link,
    member: &Member,
    path: &'static str,
    content_type: HeaderValue,
    body: Vec<u8>,
) -> Result<Response<Body>, PeerError> {
    let mut headers = HeaderMap::new();
    headers.insert(header::CONTENT_TYPE, content_type);
    let outgoing = Outgoing {
        method: Method::POST,
        path: PathAndQuery::from_static(path),
        headers,
        signed_body: SignedBody::of(&body),
        body: Body::from(body),
        needs_key: false,
    };
    let sent = tokio::time::timeout(HEAD_TIMEOUT, link.send(member, outgoing)).await;
    let answer = match sent {
        Ok(answer) => answer.map_err(|error| match error {
            LinkError::Unreached(why) => PeerError::Unreached(why),
            LinkError::Broken(why) => PeerError::Broken(why),
        })?,
        Err(_) => {
            let silence = format!("host {} did not answer within {HEAD_TIMEOUT:?}", member.number);
            return Err(PeerError::Broken(silence));
        }
    };
    let status = answer.status();
    if status.is_success() {
        return Ok(answer);
    }
    let bytes = tokio::time::timeout(HEAD_TIMEOUT, to_bytes(answer.into_body(), MAX_REFUSAL_BYTES)).await;
    let refusal = bytes.ok().and_then(Result::ok).and_then(|bytes| serde_json::from_slice(&bytes).ok());
    Err(match refusal {
        Some(Refusal { code, .. }) if code == routes::ELSEWHERE => PeerError::Moved,
        Some(Refusal { code, message, retry_after_ms }) => {
            PeerError::Refused { code, message, status: status.as_u16(), retry_after_ms }
        }
        None => PeerError::Broken(format!("host {} answered {status} without a reason", member.number)),
    })
}

/// Returns the text of an error, for a person.
pub(super) fn refusal_of(error: PeerError) -> String {
    match error {
        PeerError::Moved => "its session has moved".to_owned(),
        PeerError::Refused { message, .. } => message,
        PeerError::Unreached(why) | PeerError::Broken(why) => why,
    }
}

fn json(value: &impl Serialize) -> Result<Vec<u8>, PeerError> {
    serde_json::to_vec(value).map_err(|error| PeerError::Broken(error.to_string()))
}
