//! Reads request bodies, and runs the work on them where it does not block other requests. Errors in JSON name the field and have the shape of all other errors.

use crate::{ApiError, Gateway, caller::Caller, openai::fields::Fields};
use axum::{
    body::Bytes,
    extract::{FromRequest, Request},
    http::{StatusCode, header},
};
use serde::{
    Deserialize,
    de::{DeserializeOwned, IntoDeserializer, value},
};
use skep_engine::Cancel;
use skep_runtime::QUICK_BYTES;
use std::time::Duration;

/// Timeout of receiving a body.
const BODY_TIMEOUT: Duration = Duration::from_secs(60);
/// The size given to [`run_on_compute`] for work that takes long whatever its size.
pub(crate) const LONG: usize = usize::MAX;
/// Maximum number of values in a body whose fields are taken one by one: each value takes dozens of bytes of memory.
const MAX_VALUES: usize = 1 << 20;

/// A JSON body. The content type is ignored, because many clients omit it.
pub(crate) struct JsonBody<T>(pub T);

impl<T: DeserializeOwned + Send + 'static> FromRequest<Gateway> for JsonBody<T> {
    type Rejection = ApiError;

    async fn from_request(request: Request, gateway: &Gateway) -> Result<Self, ApiError> {
        let tenant = tenant(&request);
        let bytes = read(request, gateway).await?;
        let size = bytes.len();
        let read = move |_: &Cancel| parse_object(&bytes).map(JsonBody);
        run_on_compute(gateway, &tenant, size, read).await
    }
}

/// A type that is built from the fields of a body.
pub(crate) trait FromFields: Send + Sized + 'static {
    fn read(fields: Fields) -> Result<Self, ApiError>;
}

/// A body whose fields are taken one by one.
pub(crate) struct FieldsBody<T>(pub T);

impl<T: FromFields> FromRequest<Gateway> for FieldsBody<T> {
    type Rejection = ApiError;

    async fn from_request(request: Request, gateway: &Gateway) -> Result<Self, ApiError> {
        let tenant = tenant(&request);
        let bytes = read(request, gateway).await?;
        let size = bytes.len();
        let take = move |_: &Cancel| parse_fields(&bytes).and_then(T::read).map(FieldsBody);
        run_on_compute(gateway, &tenant, size, take).await
    }
}

/// Runs work on about `bytes` bytes for a tenant. Work that may take long runs where it does not block other
/// requests, and is cancelled if the client disconnects.
pub(crate) async fn run_on_compute<T: Send + 'static>(
    gateway: &Gateway,
    tenant: &str,
    bytes: usize,
    work: impl FnOnce(&Cancel) -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    gateway.host.compute().run_unless(bytes <= QUICK_BYTES, tenant, work).await
}

/// Returns the tenant whose compute slots the body of a request is read in.
pub(crate) fn tenant(request: &Request) -> String {
    let caller = request.extensions().get::<Caller>();
    caller.map_or_else(String::new, |caller| caller.tenant.to_string())
}

/// Parses a body whose fields are taken one by one.
pub(crate) fn parse_fields(bytes: &[u8]) -> Result<Fields, ApiError> {
    check_values(bytes, MAX_VALUES)?;
    parse(bytes)
}

/// Refuses JSON with too many values before they are allocated.
pub(crate) fn check_values(json: &[u8], most: usize) -> Result<(), ApiError> {
    // JSON with `most` bytes or fewer cannot have more values.
    if json.len() > most && values(json) > most {
        let message = format!("the body has more than {most} values; split it into several requests");
        return Err(ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, "body_too_large", message));
    }
    Ok(())
}

/// Estimates the number of JSON values: commas separate them, and the first one of a list or an object follows its
/// bracket.
fn values(json: &[u8]) -> usize {
    let (mut in_string, mut escaped, mut values) = (false, false, 1);
    for byte in json {
        match (in_string, escaped, byte) {
            (true, true, _) => escaped = false,
            (true, false, b'\\') => escaped = true,
            (_, _, b'"') => in_string = !in_string,
            (false, _, b',' | b'[' | b'{') => values += 1,
            _ => {}
        }
    }
    values
}

/// Reads the bytes of a body within the gateway's limit.
pub(crate) async fn read(request: Request, gateway: &Gateway) -> Result<Bytes, ApiError> {
    read_within(gateway.options.max_body_bytes, request, gateway).await
}

/// Reads the bytes of a body within `limit`, which the route's layer must allow, too.
pub(crate) async fn read_within(
    limit: usize,
    request: Request,
    gateway: &Gateway,
) -> Result<Bytes, ApiError> {
    let too_large = || {
        let message = format!("the body is larger than the {limit} bytes that this server accepts");
        ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, "body_too_large", message)
    };
    // A client that announces the size of its body gets the refusal before it has sent the body.
    let announced = request.headers().get(header::CONTENT_LENGTH).and_then(|length| length.to_str().ok());
    if announced.and_then(|length| length.parse::<usize>().ok()).is_some_and(|length| length > limit) {
        return Err(too_large());
    }
    let bytes = tokio::time::timeout(BODY_TIMEOUT, Bytes::from_request(request, gateway));
    let bytes = bytes.await.map_err(|_| {
        let message = format!("the body was not received within {} s", BODY_TIMEOUT.as_secs());
        ApiError::new(StatusCode::REQUEST_TIMEOUT, "body_timeout", message)
    })?;
    bytes.map_err(|rejection| match rejection.status() {
        StatusCode::PAYLOAD_TOO_LARGE => too_large(),
        status => ApiError::new(status, "body_unreadable", rejection.body_text()),
    })
}

/// Parses a JSON object. A list is refused, because serde would take its entries for the fields in their order.
fn parse_object<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, ApiError> {
    if bytes.trim_ascii_start().starts_with(b"[") {
        let message = "the body is not valid: it is a list, and must be an object";
        return Err(ApiError::new(StatusCode::BAD_REQUEST, "invalid_json", message));
    }
    parse(bytes)
}

/// Parses JSON; errors name the field. `serde_json` bounds the nesting.
pub(crate) fn parse<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, ApiError> {
    let mut deserializer = serde_json::Deserializer::from_slice(bytes);
    let value = serde_path_to_error::deserialize(&mut deserializer).map_err(|error| {
        let path = error.path().to_string();
        let error = error.into_inner();
        match path.as_str() {
            // The path says nothing for text that is not JSON.
            path if error.is_data() && !matches!(path, "." | "?") => {
                ApiError::parameter(path, about(path, &error))
            }
            _ => {
                let message = format!("the body is not valid: {error}");
                ApiError::new(StatusCode::BAD_REQUEST, "invalid_json", message)
            }
        }
    })?;
    deserializer.end().map_err(|error| {
        ApiError::new(
            StatusCode::BAD_REQUEST,
            "invalid_json",
            format!("the body continues after its JSON: {error}"),
        )
    })?;
    Ok(value)
}

/// Converts a field of a body, which is read as plain JSON, to the type that checks it. Errors name the field.
pub(crate) fn field<'de, T: Deserialize<'de>>(
    name: &str,
    value: impl IntoDeserializer<'de, value::Error>,
) -> Result<T, ApiError> {
    serde_path_to_error::deserialize(value.into_deserializer()).map_err(|error| {
        let param = match error.path().to_string().as_str() {
            path if path.starts_with('[') => format!("{name}{path}"),
            _ => name.to_owned(),
        };
        let message = format!("`{param}`: {}", error.into_inner());
        ApiError::parameter(param, message)
    })
}

/// Describes the error in a field. The line and column are removed, because they say nothing that the path does not.
fn about(path: &str, error: &serde_json::Error) -> String {
    let message = error.to_string();
    let place = format!(" at line {} column {}", error.line(), error.column());
    let message = message.strip_suffix(&place).unwrap_or(&message);
    // serde names the unknown field in the message, and its path ends with that field.
    let unknown = message.strip_prefix("unknown field `").and_then(|rest| rest.split('`').next());
    match unknown.and_then(|name| path.strip_suffix(name)) {
        Some("") => message.to_owned(),
        Some(parent) => format!("`{}`: {message}", parent.trim_end_matches('.')),
        None => format!("`{path}`: {message}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(serde::Deserialize, Debug)]
    #[serde(deny_unknown_fields)]
    struct Shape {
        #[expect(dead_code, reason = "only its type matters")]
        numbers: Vec<u32>,
        #[expect(dead_code, reason = "only its type matters")]
        inner: Option<Inner>,
    }

    #[derive(serde::Deserialize, Debug)]
    #[serde(deny_unknown_fields)]
    struct Inner {
        #[expect(dead_code, reason = "only its type matters")]
        text: Option<String>,
    }

    #[test]
    fn an_error_names_the_field() {
        let error = parse::<Shape>(b"{\"numbers\": [1, \"x\"]}").unwrap_err().body().error;
        assert_eq!(error.param.as_deref(), Some("numbers[1]"));
        assert_eq!(error.kind, "invalid_request_error");
    }

    #[test]
    fn an_error_names_its_location_once() {
        for (body, expected) in [
            ("{\"numbers\": [1, \"x\"]}", "`numbers[1]`: invalid type: string \"x\", expected u32"),
            ("{\"txt\": 1}", "unknown field `txt`, expected `numbers` or `inner`"),
            ("{\"inner\": {\"txt\": 1}}", "`inner`: unknown field `txt`, expected `text`"),
        ] {
            assert_eq!(parse::<Shape>(body.as_bytes()).unwrap_err().message, expected);
        }
    }

    #[test]
    fn a_list_is_not_taken_for_an_object() {
        let error = parse_object::<Shape>(b" [[1], null]").unwrap_err();
        assert_eq!(error.code, "invalid_json");
        assert!(parse_object::<Shape>(b" {\"numbers\": [1]}").is_ok());
    }

    #[test]
    fn a_field_that_is_converted_later_is_named_in_the_same_way() {
        let error = field::<u8>("role", "x").unwrap_err();
        assert_eq!(error.param.as_deref(), Some("role"));
        assert_eq!(error.message, "`role`: invalid type: string \"x\", expected u8");
        let error = field::<Vec<std::net::IpAddr>>("hosts", vec!["::1", "y"]).unwrap_err();
        assert_eq!(error.param.as_deref(), Some("hosts[1]"));
        assert!(error.message.starts_with("`hosts[1]`: "), "{}", error.message);
    }

    #[test]
    fn a_body_with_too_many_values_is_refused_before_parsing() {
        assert_eq!(values(br#"{"a": [1, "b,[\",", 3], "c": {}}"#), 7);
        let list = format!("{{\"prompt\": [{}0]}}", "0,".repeat(MAX_VALUES));
        assert_eq!(parse_fields(list.as_bytes()).unwrap_err().code, "body_too_large");
        let text = format!("{{\"prompt\": \"{}\"}}", ",".repeat(MAX_VALUES * 2));
        assert!(parse_fields(text.as_bytes()).is_ok());
    }

    #[test]
    fn deep_nesting_and_trailing_text_are_refused() {
        let deep = "[".repeat(100_000);
        assert_eq!(parse::<serde_json::Value>(deep.as_bytes()).unwrap_err().code, "invalid_json");
        assert!(parse::<serde_json::Value>(b"{} {}").is_err());
    }
}
