//! Errors in the envelope, with the codes and statuses of Workers AI. An error without a Workers AI code has its HTTP
//! status as its code.

use crate::ApiError;
use axum::{
    Json,
    http::StatusCode,
    response::{IntoResponse, Response},
};
use skep_api::{AiError, AiErrorSource, AiFailure};

/// An error on the routes of Workers AI.
#[derive(Debug)]
pub(crate) struct Failure(ApiError);

impl Failure {
    pub(crate) fn body(&self) -> AiFailure {
        AiFailure { result: (), success: false, errors: vec![described(&self.0)], messages: Vec::new() }
    }
}

impl From<ApiError> for Failure {
    fn from(error: ApiError) -> Self {
        Failure(error)
    }
}

impl IntoResponse for Failure {
    fn into_response(self) -> Response {
        let (status, body) = (numbered(&self.0).1, self.body());
        let mut response = self.0.into_response();
        *response.status_mut() = status;
        let (mut parts, _) = response.into_parts();
        parts.headers.remove(axum::http::header::CONTENT_LENGTH);
        (parts, Json(body)).into_response()
    }
}

/// Returns one entry of `errors`.
pub(crate) fn described(error: &ApiError) -> AiError {
    let (number, _) = numbered(error);
    let message = match number {
        BUSY if error.code != "queue_full" => "Capacity temporarily exceeded, please try again.",
        _ => &error.message,
    };
    AiError {
        code: number.into(),
        message: message.to_owned(),
        source: error.param.clone().map(|pointer| AiErrorSource { pointer }),
    }
}

/// Returns the Workers AI code and the HTTP status of an error.
pub(crate) fn numbered(error: &ApiError) -> (u16, StatusCode) {
    match error.code {
        "busy" | "mailbox_full" | "too_many_turns" | "queue_full" => (BUSY, StatusCode::TOO_MANY_REQUESTS),
        "tokens_used_up" | "money_used_up" => (3036, StatusCode::TOO_MANY_REQUESTS),
        "body_too_large" => (3006, StatusCode::PAYLOAD_TOO_LARGE),
        "body_timeout" | "deadline_exceeded" => (3007, StatusCode::REQUEST_TIMEOUT),
        "cancelled" => (3008, StatusCode::REQUEST_TIMEOUT),
        "lora_unsupported" => (5005, StatusCode::METHOD_NOT_ALLOWED),
        // The codes of the gateway and those stored with an item of a batch.
        "invalid_value" | "invalid_json" | "invalid_batch" | "invalid_request" | "schema_invalid" => {
            (5006, StatusCode::BAD_REQUEST)
        }
        "model_not_found" | "model_unknown" | "agent_not_found" => (5007, StatusCode::BAD_REQUEST),
        "context_length_exceeded" | "context_overflow" => (5021, StatusCode::BAD_REQUEST),
        // Workers AI: "JSON Mode couldn't be met".
        "truncated" | "schema_unsatisfied" => (5024, StatusCode::UNPROCESSABLE_ENTITY),
        _ => (error.status.as_u16(), error.status),
    }
}

const BUSY: u16 = 3040;
