//! Builds the request that a redirect asks for.

use crate::{Origin, OutboundError, Request};
use reqwest::{
    Method, StatusCode,
    header::{AUTHORIZATION, CONTENT_ENCODING, CONTENT_LANGUAGE, CONTENT_TYPE, COOKIE, HeaderMap, LOCATION},
};

/// Returns the next request, or `None` if the response is not a redirect to follow and is therefore the answer.
///
/// The method follows RFC 9110: 303 turns the request into a GET; 301 and 302 do the same to a POST, as every
/// client does; 307 and 308 repeat the request unchanged. Credentials are not sent to another origin.
pub(crate) fn follow(
    request: &Request,
    status: StatusCode,
    headers: &HeaderMap,
) -> Result<Option<Request>, OutboundError> {
    let repeats = match status {
        StatusCode::MOVED_PERMANENTLY | StatusCode::FOUND => request.method != Method::POST,
        StatusCode::SEE_OTHER => request.method == Method::HEAD || request.method == Method::GET,
        StatusCode::TEMPORARY_REDIRECT | StatusCode::PERMANENT_REDIRECT => true,
        _ => return Ok(None),
    };
    let Some(location) = headers.get(LOCATION) else { return Ok(None) };
    let refused = |problem: String| OutboundError::Redirect { origin: request.origin.clone(), problem };
    let location = location.to_str().map_err(|_| refused("its location is not ASCII".to_owned()))?;
    let mut url = request.url.join(location).map_err(|error| refused(format!("its location: {error}")))?;
    url.set_fragment(None);
    let origin = Origin::of(&url)?;
    let mut next = Request { url, origin, ..request.clone() };
    if !repeats {
        next.method = Method::GET;
        next.body = Vec::new();
        for name in [CONTENT_TYPE, CONTENT_ENCODING, CONTENT_LANGUAGE] {
            next.headers.remove(name);
        }
    }
    if next.origin != request.origin {
        next.headers.remove(AUTHORIZATION);
        next.headers.remove(COOKIE);
    }
    Ok(Some(next))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn redirected(method: &str, status: u16, location: &str) -> Result<Option<Request>, OutboundError> {
        let request = Request::new(method, "https://a.org/x/y?z")
            .and_then(|request| request.header("authorization", "Bearer t"))
            .and_then(|request| request.header("content-type", "text/plain"))
            .expect("valid")
            .body(b"body".to_vec());
        let headers = HeaderMap::from_iter([(LOCATION, location.parse().expect("a header"))]);
        follow(&request, StatusCode::from_u16(status).expect("a status"), &headers)
    }

    #[test]
    fn the_status_decides_whether_method_and_body_are_kept() {
        for (method, status, expected) in [
            ("POST", 301, ("GET", 0)),
            ("POST", 302, ("GET", 0)),
            ("POST", 303, ("GET", 0)),
            ("POST", 307, ("POST", 4)),
            ("POST", 308, ("POST", 4)),
            ("PUT", 301, ("PUT", 4)),
            ("PUT", 303, ("GET", 0)),
            ("HEAD", 303, ("HEAD", 4)),
        ] {
            let next = redirected(method, status, "/next").expect("valid").expect("followed");
            assert_eq!((next.method.as_str(), next.body.len()), expected, "{method} {status}");
            assert_eq!(next.headers.contains_key("content-type"), expected.1 > 0, "{method} {status}");
        }
        for status in [200, 300, 304, 305, 404] {
            assert!(redirected("GET", status, "/next").expect("valid").is_none(), "{status}");
        }
    }

    #[test]
    fn credentials_are_not_sent_to_another_origin() {
        for (location, kept) in [
            ("z", true),
            ("https://a.org:443/z", true),
            ("//b.org/z", false),
            ("http://a.org/z", false),
            ("https://a.org:8443/z", false),
            ("https://sub.a.org/", false),
        ] {
            let next = redirected("GET", 302, location).expect("valid").expect("followed");
            assert_eq!(next.headers.contains_key("authorization"), kept, "{location}");
        }
    }

    #[test]
    fn rejects_a_location_that_http_cannot_request() {
        for location in
            ["file:///etc/passwd", "javascript:1", "https://u:p@b.org/", "https://", "gopher://b.org"]
        {
            assert!(redirected("GET", 302, location).is_err(), "{location}");
        }
    }
}
