//! `/openapi.json`: the description of all routes.

use crate::Gateway;
use axum::{
    extract::State,
    http::header,
    response::{IntoResponse, Response},
};

/// Returns this document.
#[utoipa::path(get, path = "/openapi.json", tag = "host", operation_id = "get_openapi", responses(
    (status = 200, description = "An OpenAPI 3.1 document.", body = Value),
))]
pub(crate) async fn show(State(gateway): State<Gateway>) -> Response {
    let text = gateway.openapi.get_or_init(|| crate::openapi_document().to_string().into()).clone();
    ([(header::CONTENT_TYPE, "application/json")], text).into_response()
}
