//! Errors as clients see them: in OpenAI's shape, with a fitting status and a stable code.

use axum::{
    Json,
    body::to_bytes,
    http::{HeaderName, HeaderValue, StatusCode, header},
    response::{IntoResponse, Response},
};
use skep_api::{ErrorBody, ErrorDetail};
use skep_engine::{EngineError, UpstreamFault};
use skep_runtime::{BudgetUsedUp, RuntimeError};
use std::any::Any;

/// An error response.
#[derive(Clone, Debug)]
pub struct ApiError {
    pub(crate) status: StatusCode,
    pub(crate) code: &'static str,
    pub(crate) message: String,
    pub(crate) param: Option<String>,
    pub(crate) retry_after_ms: Option<u32>,
    pub(crate) headers: Vec<(HeaderName, HeaderValue)>,
}

impl ApiError {
    pub(crate) fn new(status: StatusCode, code: &'static str, message: impl Into<String>) -> Self {
        ApiError {
            status,
            code,
            message: message.into(),
            param: None,
            retry_after_ms: None,
            headers: Vec::new(),
        }
    }

    /// Creates an error of the host that a client cannot avoid.
    pub(crate) fn internal(message: &str) -> Self {
        ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, "internal", message)
    }

    pub(crate) fn with_header(mut self, name: HeaderName, value: &'static str) -> Self {
        self.headers.push((name, HeaderValue::from_static(value)));
        self
    }

    /// Creates a 400 error about one parameter.
    pub(crate) fn parameter(param: impl Into<String>, message: impl Into<String>) -> Self {
        let error = ApiError::new(StatusCode::BAD_REQUEST, "invalid_value", message);
        ApiError { param: Some(param.into()), ..error }
    }

    /// Converts an engine error to the terms of the request, which specified the form of its output in `field`.
    pub(crate) fn of_request(error: EngineError, field: Option<&'static str>) -> Self {
        let named = |parameter: String| match (parameter.as_str(), field) {
            ("output" | "constraint", Some(field)) => field.to_owned(),
            _ => parameter,
        };
        ApiError::from(match error {
            EngineError::Constraint { parameter, message } => {
                EngineError::Constraint { parameter: named(parameter), message }
            }
            EngineError::InvalidRequest { parameter, message } => {
                EngineError::InvalidRequest { parameter: named(parameter), message }
            }
            error => error,
        })
    }

    /// Returns the response body, which is also used for errors in the middle of a stream.
    pub(crate) fn body(&self) -> ErrorBody {
        let kind = match self.status.as_u16() {
            401 | 403 => "permission_error",
            404 => "not_found_error",
            429 => "rate_limit_error",
            400..=499 => "invalid_request_error",
            _ => "server_error",
        };
        ErrorBody {
            error: ErrorDetail {
                message: self.message.clone(),
                kind: kind.to_owned(),
                param: self.param.clone(),
                code: self.code.to_owned(),
            },
        }
    }

    fn busy(message: String, code: &'static str, retry_after_ms: u32) -> Self {
        let error = ApiError::new(StatusCode::TOO_MANY_REQUESTS, code, message);
        ApiError { retry_after_ms: Some(retry_after_ms), ..error }
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        if self.status.is_server_error() {
            tracing::error!(code = self.code, message = self.message, "request failed");
        }
        let mut response = (self.status, Json(self.body())).into_response();
        response.headers_mut().extend(self.headers.clone());
        if let Some(milliseconds) = self.retry_after_ms {
            let seconds = milliseconds.div_ceil(1000).max(1);
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        // Routes of other APIs give it their shape.
        response.extensions_mut().insert(self);
        response
    }
}

impl From<EngineError> for ApiError {
    fn from(error: EngineError) -> Self {
        let (message, code) = (error.to_string(), error.code());
        match error {
            EngineError::Busy { retry_after_ms } => ApiError::busy(message, "busy", retry_after_ms),
            EngineError::ModelLoading { retry_after_ms, .. } => {
                let error = ApiError::new(StatusCode::SERVICE_UNAVAILABLE, code, message);
                ApiError { retry_after_ms: Some(retry_after_ms), ..error }
            }
            EngineError::ModelUnloaded { .. } => {
                ApiError::new(StatusCode::SERVICE_UNAVAILABLE, code, message)
            }
            EngineError::ContextOverflow { .. } => {
                ApiError::new(StatusCode::BAD_REQUEST, "context_length_exceeded", message)
            }
            EngineError::InvalidRequest { parameter, .. } => ApiError::parameter(parameter, message),
            EngineError::Constraint { parameter, .. } => {
                let error = ApiError::new(StatusCode::BAD_REQUEST, "schema_invalid", message);
                ApiError { param: Some(parameter), ..error }
            }
            EngineError::ModelUnknown { .. } => {
                ApiError::new(StatusCode::NOT_FOUND, "model_not_found", message)
            }
            EngineError::SchemaUnsatisfied { .. } => {
                ApiError::new(StatusCode::UNPROCESSABLE_ENTITY, "schema_unsatisfied", message)
            }
            EngineError::Upstream { fault, .. } => match fault {
                UpstreamFault::Busy { retry_after_ms } => ApiError::busy(message, "busy", retry_after_ms),
                UpstreamFault::Unavailable => ApiError::new(StatusCode::SERVICE_UNAVAILABLE, code, message),
                // The same request would be refused again.
                UpstreamFault::Refused => {
                    ApiError::new(StatusCode::BAD_GATEWAY, code, message).with_header(SHOULD_RETRY, "false")
                }
                UpstreamFault::CutOff | UpstreamFault::Malformed => {
                    ApiError::new(StatusCode::BAD_GATEWAY, code, message)
                }
            },
            EngineError::Truncated => ApiError::new(StatusCode::UNPROCESSABLE_ENTITY, "truncated", message),
            EngineError::Cancelled => ApiError::new(CLIENT_CLOSED, "cancelled", message),
            EngineError::DeadlineExceeded => {
                ApiError::new(StatusCode::GATEWAY_TIMEOUT, "deadline_exceeded", message)
            }
            EngineError::ShuttingDown => {
                ApiError::new(StatusCode::SERVICE_UNAVAILABLE, "shutting_down", message)
            }
            _ => ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, "engine_failed", message),
        }
    }
}

impl From<BudgetUsedUp> for ApiError {
    fn from(error: BudgetUsedUp) -> Self {
        RuntimeError::from(error).into()
    }
}

impl From<RuntimeError> for ApiError {
    fn from(error: RuntimeError) -> Self {
        let (code, message) = (error.code(), error.to_string());
        let status = match error {
            RuntimeError::Engine(error) => return error.into(),
            RuntimeError::MailboxFull { retry_after_ms, .. }
            | RuntimeError::IntakeFull { retry_after_ms, .. }
            | RuntimeError::TooManyTurns { retry_after_ms, .. }
            | RuntimeError::QueueFull { retry_after_ms, .. }
            | RuntimeError::OutboxFull { retry_after_ms, .. }
            | RuntimeError::BudgetUsedUp(BudgetUsedUp { retry_after_ms, .. }) => {
                return ApiError::busy(message, code, retry_after_ms);
            }
            RuntimeError::AgentNotFound { .. }
            | RuntimeError::SessionNotFound { .. }
            | RuntimeError::VersionNotFound { .. }
            | RuntimeError::ConversationNotFound { .. }
            | RuntimeError::SecretNotFound { .. }
            | RuntimeError::KeyNotFound { .. }
            | RuntimeError::TenantNotFound { .. }
            | RuntimeError::TurnNotFound { .. }
            | RuntimeError::BatchNotFound { .. }
            | RuntimeError::ResponseNotFound { .. }
            | RuntimeError::FileNotFound { .. }
            | RuntimeError::ScheduleNotFound { .. }
            | RuntimeError::WebhookNotFound { .. }
            | RuntimeError::DeadLetterNotFound { .. }
            | RuntimeError::ApprovalNotFound { .. } => StatusCode::NOT_FOUND,
            RuntimeError::CallRefused { .. }
            | RuntimeError::PriceUnknown(_)
            | RuntimeError::ModelNotGranted { .. } => StatusCode::FORBIDDEN,
            // Another host of the cluster has refused it, with a status of its own.
            RuntimeError::RefusedElsewhere { status, retry_after_ms, .. } => {
                let status = StatusCode::from_u16(status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
                return ApiError { retry_after_ms, ..ApiError::new(status, code, message) };
            }
            // Waiting does not help, and each retry of the same request would compute its answer again.
            RuntimeError::ResponsesFull { .. } => {
                return ApiError::new(StatusCode::CONFLICT, code, message).with_header(SHOULD_RETRY, "false");
            }
            RuntimeError::ResponseChainTooLong { .. } => StatusCode::BAD_REQUEST,
            RuntimeError::ApprovalDecided { .. }
            | RuntimeError::WaitingForApproval { .. }
            | RuntimeError::HeldSinceRestore { .. }
            | RuntimeError::TurnDropped { .. }
            | RuntimeError::TenantInUse { .. }
            | RuntimeError::NothingHeld
            | RuntimeError::KvDiskOff
            | RuntimeError::HostFull { .. } => StatusCode::CONFLICT,
            RuntimeError::KeyRefused { .. } => StatusCode::UNAUTHORIZED,
            RuntimeError::Route { .. }
            | RuntimeError::SessionExists { .. }
            | RuntimeError::ModelGone { .. } => StatusCode::CONFLICT,
            RuntimeError::InvalidName { .. }
            | RuntimeError::InvalidSecret { .. }
            | RuntimeError::InvalidEvent { .. }
            | RuntimeError::InvalidWebhook { .. }
            | RuntimeError::Manifest { .. }
            | RuntimeError::Component { .. }
            | RuntimeError::InvalidBatch { .. }
            | RuntimeError::UsageTooLong { .. }
            | RuntimeError::ModelUnknown { .. } => StatusCode::BAD_REQUEST,
            RuntimeError::InvalidMessage { .. }
            | RuntimeError::InvalidKey { .. }
            | RuntimeError::InvalidSession { .. }
            | RuntimeError::ToolFailed { .. } => StatusCode::UNPROCESSABLE_ENTITY,
            RuntimeError::SessionTooLarge { .. } => StatusCode::PAYLOAD_TOO_LARGE,
            RuntimeError::DeadlineExceeded => StatusCode::GATEWAY_TIMEOUT,
            RuntimeError::ShuttingDown | RuntimeError::StoreStalled { .. } => StatusCode::SERVICE_UNAVAILABLE,
            RuntimeError::Cancelled => CLIENT_CLOSED,
            // The error may come from this turn or from another one that the request follows.
            _ if code == "store_full" => {
                let error = ApiError::new(StatusCode::SERVICE_UNAVAILABLE, code, message);
                return ApiError { retry_after_ms: Some(STORE_FULL_RETRY_MS), ..error };
            }
            // Another host may answer the next attempt.
            _ if code == "store_away" || code == "host_replaced" || code == "session_elsewhere" => {
                let error = ApiError::new(StatusCode::SERVICE_UNAVAILABLE, code, message);
                return ApiError { retry_after_ms: Some(STORE_AWAY_RETRY_MS), ..error };
            }
            _ => StatusCode::INTERNAL_SERVER_ERROR,
        };
        ApiError::new(status, code, message)
    }
}

/// Returns the response when a handler panicked. This is an error of the host, and the server continues.
pub(crate) fn panicked(panic: Box<dyn Any + Send>) -> Response {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    let text = text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("no message");
    tracing::error!(panic = text, "a request handler panicked");
    ApiError::new(
        StatusCode::INTERNAL_SERVER_ERROR,
        "internal",
        "the server failed to handle this request; the error is logged",
    )
    .into_response()
}

/// Converts the errors of the HTTP library (paths, queries, methods, sizes) to the shape of all others.
pub(crate) async fn in_shape(response: Response) -> Response {
    let status = response.status();
    let is_plain = response
        .headers()
        .get(header::CONTENT_TYPE)
        .is_none_or(|kind| kind.to_str().is_ok_and(|kind| kind.starts_with("text/plain")));
    if !(status.is_client_error() || status.is_server_error()) || !is_plain {
        return response;
    }
    let (parts, body) = response.into_parts();
    let text = to_bytes(body, MAX_PLAIN_BYTES).await.unwrap_or_default();
    let text = String::from_utf8_lossy(&text);
    let message = if text.is_empty() { status.canonical_reason().unwrap_or("refused") } else { &text };
    let code = match status {
        StatusCode::NOT_FOUND => "route_not_found",
        StatusCode::METHOD_NOT_ALLOWED => "method_not_allowed",
        StatusCode::PAYLOAD_TOO_LARGE => "body_too_large",
        _ => "invalid_request",
    };
    let mut shaped = ApiError::new(status, code, message).into_response();
    if let Some(allow) = parts.headers.get(header::ALLOW) {
        shaped.headers_mut().insert(header::ALLOW, allow.clone());
    }
    shaped
}

/// Retry delay that is sent to clients when the disk is full, because somebody has to free space first.
const STORE_FULL_RETRY_MS: u32 = 30_000;
/// Header that the official clients of OpenAI and Anthropic obey. Without it, they send a request again after 409 and after 5xx.
const SHOULD_RETRY: HeaderName = HeaderName::from_static("x-should-retry");
/// Retry delay that is sent to clients when the database cannot be reached, or it or the session belongs to another host.
const STORE_AWAY_RETRY_MS: u32 = 1_000;
/// Maximum size of an error text that is converted.
const MAX_PLAIN_BYTES: usize = 16 << 10;

/// 499, as proxies log a request whose client disconnected. No client reads it.
const CLIENT_CLOSED: StatusCode = match StatusCode::from_u16(499) {
    Ok(status) => status,
    Err(_) => StatusCode::BAD_REQUEST,
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn official_clients_do_not_repeat_a_request_that_an_upstream_refuses() {
        let retries = |fault: UpstreamFault| {
            let error = EngineError::Upstream { upstream: "u".into(), fault, message: "why".into() };
            let response = ApiError::from(error).into_response();
            (response.status().as_u16(), response.headers().get(SHOULD_RETRY).cloned())
        };
        assert_eq!(retries(UpstreamFault::Refused), (502, Some(HeaderValue::from_static("false"))));
        assert_eq!(retries(UpstreamFault::CutOff), (502, None));
    }
}
