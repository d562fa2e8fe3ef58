//! Decides which web pages may send requests, and which host names a host without keys responds to.
//!
//! A browser can reach hosts that the author of a page cannot, such as the one on its own machine, which requires no
//! key. So a page is refused unless the operator granted its origin, or it is a page of this host itself. A host for
//! the local machine responds only to names of the local machine, because a page can make any other name resolve to
//! its address (DNS rebinding).

use super::NeedsKey;
use crate::{ApiError, Gateway, GatewayOptions, console};
use axum::{
    extract::{Request, State},
    http::{
        HeaderName, HeaderValue, Method, StatusCode, header,
        uri::{Authority, InvalidUri},
    },
    middleware::Next,
    response::{IntoResponse, Response},
};
use std::net::IpAddr;

const FETCH_SITE: HeaderName = HeaderName::from_static("sec-fetch-site");

/// Methods that a page may use.
const METHODS: HeaderValue = HeaderValue::from_static("GET, POST, PUT, PATCH, DELETE");
/// Response headers that a page may read: all of them.
const EVERYTHING: HeaderValue = HeaderValue::from_static("*");
/// Maximum time that a browser may cache the response to a preflight request, in seconds.
const MAX_AGE: HeaderValue = HeaderValue::from_static("600");
/// Maximum length of a header value that an error repeats.
const MAX_SHOWN: usize = 200;

/// Checks the origin of every request, including those to routes without a key and to the agents' own routes.
pub(crate) async fn guard(State(gateway): State<Gateway>, request: Request, next: Next) -> Response {
    let page = match page(&request, &gateway.options) {
        Ok(page) => page,
        Err(refusal) => return refusal.into_response(),
    };
    // A request that needs a key after all may have any name.
    if gateway.options.access.local_names_only
        && request.extensions().get::<NeedsKey>().is_none()
        && let Err(refusal) = is_local_name(&request, &gateway.options.origins)
    {
        return refusal.into_response();
    }
    let Some(origin) = page else { return next.run(request).await };
    let asked_headers = request.headers().get(header::ACCESS_CONTROL_REQUEST_HEADERS).cloned();
    let is_preflight = request.method() == Method::OPTIONS
        && request.headers().contains_key(header::ACCESS_CONTROL_REQUEST_METHOD);
    let mut response =
        if is_preflight { StatusCode::NO_CONTENT.into_response() } else { next.run(request).await };
    let headers = response.headers_mut();
    headers.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, origin);
    headers.append(header::VARY, HeaderValue::from_static("origin"));
    if is_preflight {
        headers.insert(header::ACCESS_CONTROL_ALLOW_METHODS, METHODS);
        headers.insert(header::ACCESS_CONTROL_MAX_AGE, MAX_AGE);
        if let Some(asked) = asked_headers {
            headers.insert(header::ACCESS_CONTROL_ALLOW_HEADERS, asked);
        }
    } else {
        headers.insert(header::ACCESS_CONTROL_EXPOSE_HEADERS, EVERYTHING);
    }
    response
}

/// Returns the origin of the page that sends the request, if a page does. Programs send no origin.
fn page(request: &Request, options: &GatewayOptions) -> Result<Option<HeaderValue>, ApiError> {
    let headers = request.headers();
    let mut page = None;
    for origin in headers.get_all(header::ORIGIN) {
        let text = origin.to_str().unwrap_or_default();
        let is_granted = options.origins.iter().any(|granted| matches(granted, text));
        if !is_granted && !is_own(request, text, options.access.keys_required) {
            return Err(foreign_page(text));
        }
        page = Some(origin.clone());
    }
    let comes_from_elsewhere =
        headers.get_all(FETCH_SITE).iter().any(|site| site != "none" && site != "same-origin");
    // A page of another site may link to the console, whose files are the same for everyone.
    let is_link =
        matches!(*request.method(), Method::GET | Method::HEAD) && console::is_page(request.uri().path());
    if page.is_none() && comes_from_elsewhere && !is_link {
        let message = "the request comes from a web page of another site and has no origin; a page may use this host if \
                       skep.toml names its origin, such as `[http] origins = [\"https://app.example.com\"]`, and if it \
                       sends CORS requests";
        return Err(forbidden(message.to_owned()));
    }
    Ok(page)
}

/// Returns whether an origin is the address that the request was sent to. A page can make a name of its own resolve to this
/// host, so a name counts only where a key is required anyway, or if it cannot mean another machine.
fn is_own(request: &Request, origin: &str, keys_required: bool) -> bool {
    let Some((scheme @ ("http" | "https"), authority)) = origin.split_once("://") else { return false };
    let Ok(authority) = Authority::try_from(authority) else { return false };
    let mut names = names(request).peekable();
    let addressed = names.peek().is_some()
        && names.all(|name| {
            name.is_ok_and(|name| same(&with_port(&format!("{scheme}://{name}")), &with_port(origin)))
        });
    addressed && (keys_required || is_loopback(authority.host()) || address(authority.host()).is_some())
}

/// Returns the names by which the request addresses this host. HTTP/2 has the name only in the authority. No browser
/// omits both.
fn names(request: &Request) -> impl Iterator<Item = Result<Authority, InvalidUri>> + '_ {
    let in_path = request.uri().authority().map(|authority| Ok(authority.clone()));
    let in_headers = request.headers().get_all(header::HOST).iter();
    in_headers.map(|host| Authority::try_from(host.as_bytes())).chain(in_path)
}

fn foreign_page(origin: &str) -> ApiError {
    let shown: String = origin.chars().take(MAX_SHOWN).collect();
    forbidden(match shown.as_str() {
        "null" | "" => "web pages without an origin may not use this host".to_owned(),
        shown => format!(
            "web pages of {shown} may not use this host; to allow them, set `[http] origins = [\"{shown}\"]` in skep.toml"
        ),
    })
}

fn forbidden(message: String) -> ApiError {
    ApiError::new(StatusCode::FORBIDDEN, "origin_not_allowed", message)
}

/// Checks that the request addresses this machine by a name that cannot mean another machine, or by the host of a
/// granted origin.
fn is_local_name(request: &Request, granted: &[String]) -> Result<(), ApiError> {
    for name in names(request) {
        let name = name.as_ref().map(Authority::host).unwrap_or_default();
        let is_granted = || {
            let hosts = granted.iter().filter_map(|origin| authority(origin));
            hosts.filter_map(|host| Authority::try_from(host).ok()).any(|host| same(host.host(), name))
        };
        if !is_loopback(name) && !is_granted() {
            let shown: String = name.chars().take(MAX_SHOWN).collect();
            let message = format!(
                "this host requires no key, so it responds only to localhost, 127.0.0.1 and [::1], and not to {shown:?}; \
                 require keys with `[auth] required = true` in skep.toml, or allow {shown:?} with `[http] origins = \
                 [\"http://{shown}\"]`"
            );
            return Err(ApiError::new(StatusCode::MISDIRECTED_REQUEST, "host_not_allowed", message));
        }
    }
    Ok(())
}

fn is_loopback(name: &str) -> bool {
    same(name, "localhost") || address(name).is_some_and(|address| address.is_loopback())
}

/// Returns the IP address that a host is named by, if it is.
fn address(name: &str) -> Option<IpAddr> {
    let address = name.strip_prefix('[').and_then(|name| name.strip_suffix(']')).unwrap_or(name);
    address.parse().ok()
}

/// Returns whether an origin matches a granted one. A granted origin that ends in `:*` matches any port.
fn matches(granted: &str, origin: &str) -> bool {
    match granted.strip_suffix(":*") {
        Some(granted) => same(granted, without_port(origin)),
        None => same(&with_port(granted), &with_port(origin)),
    }
}

fn same(one: &str, other: &str) -> bool {
    one.eq_ignore_ascii_case(other)
}

fn authority(origin: &str) -> Option<&str> {
    origin.split_once("://").map(|(_, authority)| authority.trim_end_matches(":*"))
}

/// Appends the scheme's default port to an origin without a port.
fn with_port(origin: &str) -> String {
    let port = match origin.split_once("://") {
        Some(("https", rest)) if port(rest).is_none() => ":443",
        Some(("http", rest)) if port(rest).is_none() => ":80",
        _ => "",
    };
    format!("{origin}{port}")
}

fn without_port(origin: &str) -> &str {
    match port(origin.split_once("://").map_or("", |(_, rest)| rest)) {
        Some(port) => &origin[..origin.len() - port.len() - 1],
        None => origin,
    }
}

fn port(authority: &str) -> Option<&str> {
    authority.rsplit_once(':').map(|(_, port)| port).filter(|port| !port.contains(']'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_origin_matches_one_port_unless_all_are_granted() {
        for (granted, origin, expected) in [
            ("https://app.example.com", "https://app.example.com", true),
            ("https://app.example.com", "https://APP.example.com:443", true),
            ("https://app.example.com", "https://app.example.com:444", false),
            ("https://app.example.com", "http://app.example.com", false),
            ("https://app.example.com", "https://app.example.com.evil.example", false),
            ("http://localhost:3000", "http://localhost:3000", true),
            ("http://localhost", "http://localhost:3000", false),
            ("http://localhost:*", "http://localhost:3000", true),
            ("http://localhost:*", "http://localhost", true),
            ("http://localhost:*", "http://localhost.evil.example:3000", false),
            ("http://[::1]", "http://[::1]:80", true),
            ("http://[::1]:*", "http://[::1]:90", true),
            ("http://[::1]:90", "http://[::1]", false),
            ("https://app.example.com", "null", false),
            ("https://app.example.com", "", false),
        ] {
            assert_eq!(matches(granted, origin), expected, "{granted} and {origin}");
        }
    }

    #[test]
    fn only_local_names_are_loopback() {
        for name in ["localhost", "LocalHost", "127.0.0.1", "127.8.0.1", "[::1]"] {
            assert!(is_loopback(name), "{name}");
        }
        for name in
            ["", "evil.example", "localhost.evil.example", "127.0.0.1.evil.example", "10.0.0.7", "[::2]"]
        {
            assert!(!is_loopback(name), "{name}");
        }
    }
}
