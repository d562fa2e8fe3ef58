//! The internal routes: what another host may ask this one. Only requests that were signed with the cluster's key get here.

use super::{
    Cluster, ClusterPages, generation,
    key::{Signed, SignedBody},
    lines,
    pages::{PrefillOrderBody, TransferName, TransferPart},
    peers::{BYTES, JSON},
};
use crate::{ApiError, Gateway};
use axum::{
    Json,
    body::{Body, Bytes, to_bytes},
    extract::Request,
    http::{HeaderValue, Method, StatusCode, header},
    response::{IntoResponse, Response},
};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use skep_runtime::{PeerGeneration, PeerInvocation, RunHandle, RuntimeError, TurnAddress};
use std::time::Duration;

pub(super) const INVOKE: &str = "/cluster/v1/invoke";
pub(super) const FOLLOW: &str = "/cluster/v1/follow";
pub(super) const CANCEL: &str = "/cluster/v1/cancel";
pub(super) const DRAIN: &str = "/cluster/v1/drain";
/// The answer of a model.
pub(super) const GENERATE: &str = "/cluster/v1/generate";
/// How many of some KV pages a host has.
pub(super) const PAGES_COUNT: &str = "/cluster/v1/pages/count";
/// The KV pages themselves.
pub(super) const PAGES_READ: &str = "/cluster/v1/pages/read";
/// Lends KV pages, and answers where in the memory of the host they can be read.
pub(super) const PAGES_LEND: &str = "/cluster/v1/pages/lend";
/// The KV pages that a host was lent were read.
pub(super) const PAGES_RETURN: &str = "/cluster/v1/pages/return";
/// An order of a prompt's pages, which a prefill host computes.
pub(super) const PREFILL: &str = "/cluster/v1/prefill";
/// The pages of such an order, as they become ready.
pub(super) const PREFILL_PAGES: &str = "/cluster/v1/prefill/pages";
/// Lends the pages of such an order that are ready, and answers where in the memory of the host they can be read.
pub(super) const PREFILL_LEND: &str = "/cluster/v1/prefill/lend";
/// The end of such an order, whose pages nobody fetches anymore.
pub(super) const PREFILL_END: &str = "/cluster/v1/prefill/end";
pub(super) const ROUTES: [&str; 13] = [
    INVOKE,
    FOLLOW,
    CANCEL,
    DRAIN,
    GENERATE,
    PAGES_COUNT,
    PAGES_READ,
    PAGES_LEND,
    PAGES_RETURN,
    PREFILL,
    PREFILL_PAGES,
    PREFILL_LEND,
    PREFILL_END,
];
/// The code of the error that a session is owned by another host.
pub(super) const ELSEWHERE: &str = "session_elsewhere";

const BODY_TIMEOUT: Duration = Duration::from_secs(60);
pub(super) const LINES: HeaderValue = HeaderValue::from_static("application/x-ndjson");

/// The body of an error.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Refusal {
    pub(super) code: String,
    pub(super) message: String,
    pub(super) retry_after_ms: Option<u32>,
}

/// Returns whether a request is for one of these routes.
pub(super) fn is_internal(method: &Method, path: &str) -> bool {
    method == Method::POST && ROUTES.contains(&path)
}

/// Answers a request of another host.
pub(super) async fn answer(
    gateway: &Gateway,
    cluster: &Cluster,
    signed: &Signed,
    request: Request,
) -> Response {
    let path = request.uri().path().to_owned();
    let answer = match read(gateway, signed, request).await {
        Ok(body) => act(gateway, cluster, &path, &body).await,
        Err(error) => Err(error),
    };
    answer.unwrap_or_else(|error| {
        tracing::debug!(path, code = error.code, message = error.message, "a request of another host failed");
        refusal(error)
    })
}

/// Returns an error in the form in which hosts tell each other.
pub(super) fn refusal(error: ApiError) -> Response {
    let ApiError { status, code, message, retry_after_ms, .. } = error;
    (status, Json(Refusal { code: code.to_owned(), message, retry_after_ms })).into_response()
}

async fn act(gateway: &Gateway, cluster: &Cluster, path: &str, body: &[u8]) -> Result<Response, ApiError> {
    let host = &gateway.host;
    match path {
        INVOKE => {
            let invocation: PeerInvocation = parse(body)?;
            Ok(events(host.invoke_here(invocation.into_invocation()).await.map_err(refused)?))
        }
        FOLLOW => {
            let TurnAddress { agent, session, turn } = parse(body)?;
            Ok(events(host.follow_here(&agent, &session, &turn).await.map_err(refused)?))
        }
        CANCEL => {
            let TurnAddress { agent, session, turn } = parse(body)?;
            host.cancel_here(&agent, &session, &turn).await.map_err(refused)?;
            Ok(StatusCode::NO_CONTENT.into_response())
        }
        GENERATE => {
            let generation: PeerGeneration = parse(body)?;
            let body = generation::write(host.generate_here(generation));
            Ok(([(header::CONTENT_TYPE, LINES)], body).into_response())
        }
        DRAIN => {
            tracing::info!("an admin asked, through another host, to drain this one");
            cluster.drain.ask();
            Ok(StatusCode::ACCEPTED.into_response())
        }
        PAGES_COUNT => Ok(([(header::CONTENT_TYPE, JSON)], pages(cluster)?.count(body)?).into_response()),
        PAGES_READ => Ok(([(header::CONTENT_TYPE, BYTES)], pages(cluster)?.give(body)?).into_response()),
        PAGES_LEND => Ok(Json(pages(cluster)?.lend(body).await?).into_response()),
        PAGES_RETURN => {
            pages(cluster)?.take_back(parse(body)?);
            Ok(StatusCode::NO_CONTENT.into_response())
        }
        PREFILL => {
            let order: PrefillOrderBody = parse(body)?;
            pages(cluster)?.order(host.models(), order)
        }
        PREFILL_PAGES => {
            let part: TransferPart = parse(body)?;
            Ok(([(header::CONTENT_TYPE, BYTES)], pages(cluster)?.transfer(&part)?).into_response())
        }
        PREFILL_LEND => {
            let part: TransferPart = parse(body)?;
            Ok(Json(pages(cluster)?.lend_transfer(&part).await?).into_response())
        }
        PREFILL_END => {
            pages(cluster)?.end_transfer(&parse::<TransferName>(body)?)?;
            Ok(StatusCode::NO_CONTENT.into_response())
        }
        _ => Err(ApiError::new(StatusCode::NOT_FOUND, "route_not_found", "there is no such internal route")),
    }
}

/// Returns the pages of this host, if it gives any.
fn pages(cluster: &Cluster) -> Result<&ClusterPages, ApiError> {
    cluster.pages.as_ref().ok_or_else(|| {
        let message = "this host gives no KV pages: it keeps none on disk, or `peers` under [kv] is false";
        ApiError::new(StatusCode::NOT_FOUND, "pages_off", message)
    })
}

/// Reads a body, which must be the one that was signed.
async fn read(gateway: &Gateway, signed: &Signed, request: Request) -> Result<Bytes, ApiError> {
    // JSON takes up to six bytes for one of a message.
    let limit = gateway.options.max_body_bytes.saturating_mul(6).saturating_add(1 << 20);
    let body = tokio::time::timeout(BODY_TIMEOUT, to_bytes(request.into_body(), limit)).await;
    let body = body.map_err(|_| {
        let message = format!("the body was not received within {BODY_TIMEOUT:?}");
        ApiError::new(StatusCode::REQUEST_TIMEOUT, "body_timeout", message)
    })?;
    let body = body.map_err(|error| {
        let message = format!("the body cannot be read, or is larger than {limit} bytes: {error}");
        ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, "body_too_large", message)
    })?;
    if SignedBody::of(&body) != signed.body {
        let message = "the body is not the one that was signed";
        return Err(ApiError::new(StatusCode::UNAUTHORIZED, "cluster_signature_refused", message));
    }
    Ok(body)
}

fn parse<T: DeserializeOwned>(body: &[u8]) -> Result<T, ApiError> {
    serde_json::from_slice(body).map_err(|error| {
        let message = format!("the body is not what this version expects: {error}");
        ApiError::new(StatusCode::BAD_REQUEST, "invalid_json", message)
    })
}

/// Returns the events of a turn. A host that does not read on drops the turn's handle.
fn events(run: RunHandle) -> Response {
    let body: Body = lines::write(run.turn_id().to_owned(), run);
    ([(header::CONTENT_TYPE, LINES)], body).into_response()
}

/// Returns an error of the runtime with its own code, which clients of some errors do not see.
fn refused(error: RuntimeError) -> ApiError {
    let code = error.code();
    ApiError { code, ..ApiError::from(error) }
}
