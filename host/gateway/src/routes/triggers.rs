//! Handles the routes that agents' manifests declare, and responds with 404 to everything else.

use super::{messages, unimplemented};
use crate::{
    ApiError, Gateway,
    body::{self, run_on_compute},
    caller::Caller,
    headers,
};
use axum::{
    extract::{Request, State},
    http::{StatusCode, header},
    response::Response,
};
use serde::{
    Deserialize, Deserializer,
    de::{IgnoredAny, MapAccess, Visitor},
};
use skep_api::{AcceptedTurn, Turn, TurnEvent};
use skep_engine::{Cancel, Priority};
use skep_runtime::{HttpOrigin, Invocation, Json, Origin};
use std::fmt;

/// Sends the request to its agent as a message. A JSON body is the message's data, and its `text` (or `message`)
/// member, if it has one, is the message's text. Any other body is the text.
#[utoipa::path(post, path = "/{route}", tag = "turns", operation_id = "call_agent_route",
    params(
        ("route" = String, Path, description = "Path of a route that an agent's manifest declares; the method is the declared one"),
        ("idempotency-key" = Option<String>, Header, description = "The same message under the same key is the same turn"),
        ("prefer" = Option<String>, Header, description = "`respond-async` lets the turn continue on its own"),
    ),
    request_body(content((Value = "application/json"), (String = "text/plain"))),
    responses(
        (status = 200, description = "The answer, or the events of the turn, each with an id.",
            content((Turn = "application/json"), (TurnEvent = "text/event-stream"))),
        (status = 202, description = "The turn continues on its own.", body = AcceptedTurn),
        (status = 404, description = "`route_not_found`"),
        (status = 405, description = "`method_not_allowed`"),
        (status = 409, description = "`waiting_for_approval`, `model_gone`, `held_since_restore` or `turn_dropped`"),
        (status = 422, description = "`invalid_message`, `schema_unsatisfied`, `truncated` or `tool_failed`"),
        (status = 499, description = "The turn was cancelled: `cancelled`."),
        (status = 504, description = "`deadline_exceeded`"),
    ))]
pub(crate) async fn run(
    State(gateway): State<Gateway>,
    caller: Caller,
    request: Request,
) -> Result<Response, ApiError> {
    let (parts, body) = request.into_parts();
    let path = parts.uri.path();
    let Some(found) = gateway.host.match_route(parts.method.as_str(), path) else {
        // The path may exist with a different method.
        let others = ["GET", "POST", "PUT", "PATCH", "DELETE"];
        if others.iter().any(|method| gateway.host.match_route(method, path).is_some()) {
            let message = format!("{path} does not support the method {}", parts.method);
            return Err(ApiError::new(StatusCode::METHOD_NOT_ALLOWED, "method_not_allowed", message));
        }
        if let Some(refusal) = unimplemented::refusal(path) {
            return Err(refusal);
        }
        let message = format!("no route matches {path}; /v1/agents lists the routes of agents");
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
    let size = bytes.len();
    let (text, data) = if is_json {
        let read = move |_: &Cancel| {
            let data: Json = body::parse(&bytes)?;
            Ok((text_of(&data), Some(data)))
        };
        run_on_compute(&gateway, caller.tenant.as_str(), size, read).await?
    } else {
        let text = String::from_utf8(bytes.into()).map_err(|_| {
            ApiError::new(StatusCode::BAD_REQUEST, "invalid_body", "the body is neither JSON nor UTF-8 text")
        })?;
        (text, None)
    };
    let spent = caller.spent().clone();
    let invocation = Invocation {
        session: caller.session(&found.session)?,
        key: caller.key().map(str::to_owned),
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

/// Returns the text of a JSON body.
fn text_of(data: &Json) -> String {
    let Texts { text, message } = data.read().unwrap_or_default();
    let text = text.and_then(|text| text.read::<String>().ok());
    text.or_else(|| message.and_then(|text| text.read::<String>().ok())).unwrap_or_default()
}

/// The two members of an object that may be its text. If a name occurs twice, the last one counts.
#[derive(Default)]
struct Texts {
    text: Option<Json>,
    message: Option<Json>,
}

struct ReadTexts;

impl<'de> Deserialize<'de> for Texts {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(ReadTexts)
    }
}

impl<'de> Visitor<'de> for ReadTexts {
    type Value = Texts;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut members: A) -> Result<Texts, A::Error> {
        let mut texts = Texts::default();
        while let Some(name) = members.next_key::<String>()? {
            match name.as_str() {
                "text" => texts.text = members.next_value()?,
                "message" => texts.message = members.next_value()?,
                _ => drop(members.next_value::<IgnoredAny>()?),
            }
        }
        Ok(texts)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_text_of_a_body_is_its_text_or_message_member() {
        for (body, text) in [
            ("{\"text\": \"a\", \"message\": \"b\"}", "a"),
            ("{\"x\": [{\"text\": \"no\"}], \"message\": \"b\\n\"}", "b\n"),
            ("{\"text\": 1, \"message\": \"b\"}", "b"),
            ("{\"text\": \"a\", \"text\": \"z\"}", "z"),
            ("{\"text\": null}", ""),
            ("[\"text\"]", ""),
            ("1", ""),
        ] {
            assert_eq!(text_of(&Json::from_text(body.to_owned()).expect("JSON")), text, "{body}");
        }
    }
}
