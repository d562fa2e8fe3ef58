//! Errors in the shape of Anthropic's API, on its routes.

use crate::ApiError;
use axum::{
    Json,
    extract::Request,
    http::{HeaderName, header},
    middleware::Next,
    response::{IntoResponse, Response},
};
use skep_api::{AnthropicError, AnthropicErrorDetail, marker};

const ROUTES: &str = "/v1/messages";
/// Header of the request's id that clients of this API read.
const REQUEST_ID: HeaderName = HeaderName::from_static("request-id");

/// Gives the errors on the routes of this API its shape, wherever they come from.
pub(crate) async fn in_shape(request: Request, next: Next) -> Response {
    let path = request.uri().path();
    let is_here = path.strip_prefix(ROUTES).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'));
    let mut response = next.run(request).await;
    if !is_here {
        return response;
    }
    let id = response.headers().get("x-request-id").cloned();
    if let Some(error) = response.extensions_mut().remove::<ApiError>() {
        let request_id = id.as_ref().and_then(|id| id.to_str().ok()).map(str::to_owned);
        let body = AnthropicError { kind: marker::Error, error: detail(&error), request_id };
        let (mut parts, _) = response.into_parts();
        parts.headers.remove(header::CONTENT_LENGTH);
        parts.headers.remove(header::CONTENT_TYPE);
        response = (parts, Json(body)).into_response();
    }
    if let Some(id) = id {
        response.headers_mut().insert(REQUEST_ID, id);
    }
    response
}

/// Returns an error in the terms of this API.
pub(crate) fn detail(error: &ApiError) -> AnthropicErrorDetail {
    let kind = match error.status.as_u16() {
        401 => "authentication_error",
        403 => "permission_error",
        404 => "not_found_error",
        413 => "request_too_large",
        429 => "rate_limit_error",
        503 => "overloaded_error",
        504 => "timeout_error",
        400..=499 => "invalid_request_error",
        _ => "api_error",
    };
    AnthropicErrorDetail { kind: kind.to_owned(), message: error.message.clone() }
}
