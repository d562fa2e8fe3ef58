//! Refuses the routes of OpenAI that Skep does not have, so that a client learns that it is not a wrong address.
//!
//! The status is 404, which clients do not retry; OpenAI's own libraries send a request again after a 501.

use crate::ApiError;
use axum::http::StatusCode;
use skep_runtime::excerpt;

/// Beginnings of the paths of OpenAI's other routes, after `/v1/`.
const OTHERS: [&str; 22] = [
    "assistants",
    "audio",
    "chat/completions/",
    "chatkit",
    "containers",
    "conversations",
    "edits",
    "embeddings",
    "engines",
    "evals",
    "fine-tunes",
    "fine_tuning",
    "images",
    "moderations",
    "organization",
    "projects",
    "realtime",
    "responses/",
    "threads",
    "uploads",
    "vector_stores",
    "videos",
];

/// Returns the error for a path that is a route of OpenAI and not of this host.
pub(super) fn refusal(path: &str) -> Option<ApiError> {
    let rest = path.strip_prefix("/v1/")?;
    let is_other = |other: &str| {
        let after = rest.strip_prefix(other);
        after.is_some_and(|after| after.is_empty() || other.ends_with('/') || after.starts_with('/'))
    };
    OTHERS.into_iter().find(|other| is_other(other))?;
    let shown = excerpt(path);
    let message = format!(
        "Skep does not implement {shown}, which is a route of OpenAI; it implements POST /v1/chat/completions, POST \
         /v1/completions, GET /v1/models, GET /v1/models/{{model}}, /v1/responses, /v1/files and /v1/batches; GET \
         /openapi.json describes all routes"
    );
    Some(ApiError::new(StatusCode::NOT_FOUND, "route_not_implemented", message))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_routes_of_openai_are_refused_as_such() {
        for path in [
            "/v1/embeddings",
            "/v1/responses/resp_1/cancel",
            "/v1/images/generations",
            "/v1/audio/speech",
            "/v1/chat/completions/chatcmpl-1",
        ] {
            let error = refusal(path).expect(path);
            assert_eq!(
                (error.status, error.code),
                (StatusCode::NOT_FOUND, "route_not_implemented"),
                "{path}"
            );
            assert!(error.message.contains(path) && error.message.contains("/v1/chat/completions"), "{path}");
        }
        for path in
            ["/embeddings", "/v1", "/v1/", "/v1/filesystem", "/v1/nothing", "/v2/files", "/v1/agents/files"]
        {
            assert!(refusal(path).is_none(), "{path}");
        }
    }
}
