//! Reads the API key from `authorization: Bearer`, as OpenAI's clients send it, from `x-api-key`, as Anthropic's do, or
//! from the cookie of a browser that is signed in to the console.

use crate::{ApiError, console::sign_in};
use axum::http::{HeaderMap, StatusCode, header};

/// Maximum length of a key; longer strings cannot be keys of this host.
const MAX_BYTES: usize = 256;

pub(super) fn of(headers: &HeaderMap) -> Result<Option<&str>, ApiError> {
    let bad = |message: &str| ApiError::new(StatusCode::UNAUTHORIZED, "invalid_api_key", message);
    let text = |value: &axum::http::HeaderValue| value.len() <= MAX_BYTES;
    for name in ["authorization", "x-api-key"] {
        if headers.get_all(name).iter().nth(1).is_some() {
            let message = format!("the header {name} is given more than once; send one API key");
            return Err(ApiError::parameter(name, message));
        }
    }
    if let Some(value) = headers.get(header::AUTHORIZATION) {
        let value = Some(value).filter(|value| text(value)).and_then(|value| value.to_str().ok());
        let scheme_and_key = value.and_then(|value| value.split_once(' '));
        return match scheme_and_key {
            Some((scheme, key)) if scheme.eq_ignore_ascii_case("bearer") => Ok(Some(key.trim())),
            _ => Err(bad("the header authorization must be `Bearer` followed by an API key")),
        };
    }
    match headers.get("x-api-key") {
        None => Ok(sign_in::key(headers).filter(|key| key.len() <= MAX_BYTES)),
        Some(value) => {
            let key = Some(value).filter(|value| text(value)).and_then(|value| value.to_str().ok());
            key.map(|key| Some(key.trim())).ok_or_else(|| bad("the header x-api-key is not an API key"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn presented(name: &'static str, value: &str) -> Result<Option<String>, ApiError> {
        let mut headers = HeaderMap::new();
        headers.insert(name, value.parse().unwrap());
        of(&headers).map(|key| key.map(str::to_owned))
    }

    #[test]
    fn rejects_two_keys_in_one_header() {
        for name in ["authorization", "x-api-key"] {
            let mut headers = HeaderMap::new();
            for value in ["Bearer a", "Bearer b"] {
                headers.append(name, value.parse().unwrap());
            }
            let error = of(&headers).unwrap_err();
            assert_eq!((error.status.as_u16(), error.param.as_deref()), (400, Some(name)));
        }
    }

    #[test]
    fn accepts_a_key_in_either_header() {
        assert!(of(&HeaderMap::new()).unwrap().is_none());
        for (name, value) in
            [("authorization", "Bearer k"), ("authorization", "bearer  k"), ("x-api-key", "k")]
        {
            assert_eq!(presented(name, value).unwrap().as_deref(), Some("k"), "{name}: {value}");
        }
        for (name, value) in
            [("authorization", "Basic k"), ("authorization", "k"), ("x-api-key", &"k".repeat(257))]
        {
            assert!(presented(name, value).is_err(), "{name}: {value}");
        }
    }
}
