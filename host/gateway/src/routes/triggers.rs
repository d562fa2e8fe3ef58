//! The routes that agents' manifests name, and 404 for everything else.

use super::messages;
use crate::{ApiError, Gateway, access::Caller, body, headers};
use axum::{
    extract::{Request, State},
    http::{StatusCode, header},
    response::Response,
};
use serde_json::Value;
use skep_engine::Priority;
use skep_runtime::{HttpOrigin, Invocation, Origin};

/// A JSON body is the message's data, and its `text` (or `message`), if it has one, the message's text. Any other body
/// is the text.
pub(crate) async fn run(
    State(gateway): State<Gateway>,
    caller: Caller,
    request: Request,
) -> Result<Response, ApiError> {
    let (parts, body) = request.into_parts();
    let path = parts.uri.path();
    let Some(found) = gateway.host.match_route(parts.method.as_str(), path) else {
        // One of the paths that have a method, but not this one?
        let others = ["GET", "POST", "PUT", "PATCH", "DELETE"];
        if others.iter().any(|method| gateway.host.match_route(method, path).is_some()) {
            let message = format!("{path} has no method {}", parts.method);
            return Err(ApiError::new(StatusCode::METHOD_NOT_ALLOWED, "method_not_allowed", message));
        }
        let message = format!("nothing answers at {path}; agents' own routes are listed at /v1/agents");
        return Err(ApiError::new(StatusCode::NOT_FOUND, "route_not_found", message));
    };
    caller.may_reach(&found.agent)?;
    let content_type = parts.headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok());
    let is_json = content_type
        .is_some_and(|kind| kind.split(';').next().is_some_and(|kind| kind.trim().ends_with("json")));
    let origin = HttpOrigin {
        method: parts.method.to_string(),
        path: path.to_owned(),
        query: parts.uri.query().map(str::to_owned),
        parameters: found.parameters,
        content_type: content_type.map(str::to_owned),
    };
    let headers = parts.headers.clone();
    let bytes = body::read(Request::from_parts(parts, body), &gateway).await?;
    let (text, data) = if is_json {
        let data: Value = body::parse(&bytes)?;
        let text = ["text", "message"].iter().find_map(|key| data[*key].as_str()).unwrap_or("").to_owned();
        (text, Some(data))
    } else {
        let text = String::from_utf8(bytes.into()).map_err(|_| {
            ApiError::new(StatusCode::BAD_REQUEST, "invalid_body", "the body is neither JSON nor UTF-8 text")
        })?;
        (text, None)
    };
    let spent = caller.spent().clone();
    let invocation = Invocation {
        session: caller.session(&found.session)?,
        principal: caller.tenant.into(),
        agent: found.agent,
        text,
        data,
        origin: Origin::Http(origin),
        priority: Priority::Interactive,
        deadline: None,
        idempotency_key: headers::idempotency_key(&headers)?,
        detached: headers::prefers_async(&headers),
    };
    messages::answer(&gateway, invocation, headers::wants_events(&headers), spent).await
}
