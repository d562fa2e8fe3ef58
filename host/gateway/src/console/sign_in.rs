//! Signing in to the console: the browser keeps the API key in a cookie that no script can read.
//!
//! The cookie counts only for requests with the header `x-skep-console`. A page of another site cannot send that
//! header, because the host refuses its preflight request, and the cookie is sent to its own site only. Revoking the
//! key ends every sign-in with it.

use crate::{ApiError, Gateway, body::JsonBody};
use axum::{
    extract::State,
    http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header},
    response::{IntoResponse, Response},
};
use skep_api::SignIn;

/// The header of every request that the console sends.
pub(crate) const CONSOLE: HeaderName = HeaderName::from_static("x-skep-console");

/// Signs in to the console with an API key, which the browser then sends as a cookie.
#[utoipa::path(post, path = "/ui/session", tag = "keys", operation_id = "sign_in", request_body = SignIn, responses(
    (status = 204, description = "The browser is signed in.", headers(("set-cookie" = String, description = "The key"))),
    (status = 401, description = "`invalid_api_key`"),
))]
pub(crate) async fn sign_in(
    State(gateway): State<Gateway>,
    headers: HeaderMap,
    JsonBody(SignIn { key }): JsonBody<SignIn>,
) -> Result<Response, ApiError> {
    if !headers.contains_key(CONSOLE) {
        let message =
            "the header x-skep-console is missing; only the console signs in, other clients send their key";
        return Err(ApiError::parameter(CONSOLE.as_str(), message));
    }
    let key = key.trim();
    gateway.host.keys().authenticate(key).await?;
    Ok(with_cookie(&headers, key, ""))
}

/// Signs out of the console.
#[utoipa::path(delete, path = "/ui/session", tag = "keys", operation_id = "sign_out", responses(
    (status = 204, description = "The browser has no key."),
))]
pub(crate) async fn sign_out(headers: HeaderMap) -> Response {
    with_cookie(&headers, "", "; Max-Age=0")
}

/// Returns the key of a signed-in browser, if the request comes from the console.
pub(crate) fn key(headers: &HeaderMap) -> Option<&str> {
    headers.get(CONSOLE)?;
    let name = cookie_name(headers);
    let cookies = headers.get_all(header::COOKIE).iter().filter_map(|value| value.to_str().ok());
    let mut pairs = cookies.flat_map(|value| value.split(';')).filter_map(|pair| pair.trim().split_once('='));
    pairs.find(|(known, _)| *known == name).map(|(_, key)| key).filter(|key| !key.is_empty())
}

/// Returns a response that sets the cookie. Keys have only characters that a cookie may have.
fn with_cookie(headers: &HeaderMap, key: &str, end: &str) -> Response {
    let origin = headers.get(header::ORIGIN).and_then(|origin| origin.to_str().ok());
    let secure = if origin.is_some_and(|origin| origin.starts_with("https://")) { "; Secure" } else { "" };
    let cookie = format!("{}={key}; Path=/; HttpOnly; SameSite=Strict{secure}{end}", cookie_name(headers));
    match HeaderValue::from_str(&cookie) {
        Ok(cookie) => (StatusCode::NO_CONTENT, [(header::SET_COOKIE, cookie)]).into_response(),
        Err(_) => ApiError::parameter("key", "the key has characters that are not allowed in an API key")
            .into_response(),
    }
}

/// Returns the name of the cookie. Browsers share cookies among the ports of a machine, so it has the port.
fn cookie_name(headers: &HeaderMap) -> String {
    let host = headers.get(header::HOST).and_then(|host| host.to_str().ok()).unwrap_or_default();
    let port = host.rsplit_once(':').map(|(_, port)| port).filter(|port| port.parse::<u16>().is_ok());
    port.map_or_else(|| "skep_key".to_owned(), |port| format!("skep_key_{port}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(pairs: &[(&'static str, &'static str)]) -> HeaderMap {
        pairs
            .iter()
            .map(|(name, value)| (HeaderName::from_static(name), HeaderValue::from_static(value)))
            .collect()
    }

    #[test]
    fn the_cookie_counts_only_for_the_console_and_its_port() {
        let host = ("host", "localhost:8080");
        let cookie = ("cookie", "a=b; skep_key_8080=skep_1; skep_key_8081=skep_2");
        assert_eq!(key(&headers(&[host, cookie])), None);
        assert_eq!(key(&headers(&[host, cookie, ("x-skep-console", "1")])), Some("skep_1"));
        assert_eq!(key(&headers(&[("host", "localhost"), cookie, ("x-skep-console", "1")])), None);
        assert_eq!(key(&headers(&[("host", "[::1]:8081"), cookie, ("x-skep-console", "1")])), Some("skep_2"));
    }

    #[test]
    fn the_cookie_is_strict_and_secure_where_the_page_is() {
        let cookie = |origin| with_cookie(&headers(&[("host", "h"), ("origin", origin)]), "skep_1", "");
        let set = |origin| cookie(origin).headers()[header::SET_COOKIE].to_str().unwrap().to_owned();
        assert_eq!(set("https://h"), "skep_key=skep_1; Path=/; HttpOnly; SameSite=Strict; Secure");
        assert_eq!(set("http://h"), "skep_key=skep_1; Path=/; HttpOnly; SameSite=Strict");
        assert_eq!(with_cookie(&HeaderMap::new(), "a\nb", "").status(), StatusCode::BAD_REQUEST);
    }
}
