//! Requests, whose parts are validated as they are set, and responses.

use crate::{Origin, OutboundError, origin::OriginError};
use reqwest::{
    Method, Url,
    header::{HeaderMap, HeaderName, HeaderValue},
};

const MAX_URL_BYTES: usize = 8 << 10;
const MAX_HEADERS: usize = 64;
const MAX_HEADER_BYTES: usize = 32 << 10;
const METHODS: [Method; 7] =
    [Method::GET, Method::HEAD, Method::POST, Method::PUT, Method::PATCH, Method::DELETE, Method::OPTIONS];
/// Headers that describe the connection or the length of the body. The host sets them, and the caller may not.
const OF_THE_CONNECTION: [&str; 11] = [
    "connection",
    "content-length",
    "expect",
    "host",
    "keep-alive",
    "proxy-authorization",
    "proxy-connection",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
];

/// A request whose method, URL and headers are each valid.
#[derive(Clone, Debug)]
pub struct Request {
    pub(crate) method: Method,
    pub(crate) url: Url,
    pub(crate) origin: Origin,
    pub(crate) headers: HeaderMap,
    pub(crate) body: Vec<u8>,
}

/// A response, read to its end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Response {
    pub status: u16,
    /// The URL of the last request, after all redirects.
    pub url: Url,
    pub headers: HeaderMap,
    pub body: Vec<u8>,
}

impl Request {
    /// Creates a request without headers and body. Fails for an unsupported method or an invalid URL.
    pub fn new(method: &str, url: &str) -> Result<Self, OutboundError> {
        let known = METHODS.iter().find(|known| known.as_str() == method);
        let method = known.ok_or_else(|| OutboundError::Method { method: shortened(method) })?.clone();
        let invalid =
            |problem: String| OutboundError::from(OriginError::Url { url: shortened(url), problem });
        if url.len() > MAX_URL_BYTES {
            return Err(invalid(format!("it has {} bytes; {MAX_URL_BYTES} are allowed", url.len())));
        }
        // The URL parser would silently drop these characters, and the URL would not mean what its author
        // wrote.
        if url.contains(|character: char| character.is_ascii_control() || character == ' ') {
            return Err(invalid("it contains a space or a control character".to_owned()));
        }
        let mut url = Url::parse(url).map_err(|error| invalid(error.to_string()))?;
        url.set_fragment(None);
        let origin = Origin::of(&url)?;
        Ok(Request { method, url, origin, headers: HeaderMap::new(), body: Vec::new() })
    }

    /// Adds a header; others of the same name are kept.
    pub fn header(mut self, name: &str, value: &str) -> Result<Self, OutboundError> {
        let refused = |problem: String| OutboundError::Header { name: shortened(name), problem };
        let parsed = HeaderName::from_bytes(name.as_bytes()).map_err(|error| refused(error.to_string()))?;
        if OF_THE_CONNECTION.contains(&parsed.as_str()) {
            return Err(refused("it belongs to the connection, which the host manages".to_owned()));
        }
        let value = HeaderValue::from_str(value).map_err(|_| {
            refused(
                "its value contains a line break, a control character or a non-ASCII character".to_owned(),
            )
        })?;
        self.headers.append(parsed, value);
        let bytes = self.headers.iter().map(|(name, value)| name.as_str().len() + value.len()).sum::<usize>();
        if self.headers.len() > MAX_HEADERS || bytes > MAX_HEADER_BYTES {
            return Err(refused(format!(
                "a request may have at most {MAX_HEADERS} headers, of {MAX_HEADER_BYTES} bytes in total"
            )));
        }
        Ok(self)
    }

    /// Replaces the body. Its size is checked when the request is sent.
    pub fn body(self, body: Vec<u8>) -> Self {
        Request { body, ..self }
    }

    /// Returns the method, one of those that agents may use.
    pub fn method(&self) -> &Method {
        &self.method
    }

    /// Returns the URL, without its fragment.
    pub fn url(&self) -> &Url {
        &self.url
    }

    /// Returns the origin that a policy has to allow.
    pub fn origin(&self) -> &Origin {
        &self.origin
    }

    /// Returns the size in bytes of the URL, the headers and the body together.
    pub fn size(&self) -> usize {
        let headers =
            self.headers.iter().map(|(name, value)| name.as_str().len() + value.len()).sum::<usize>();
        self.url.as_str().len() + headers + self.body.len()
    }

    /// Returns whether the request can be sent twice with the effect of once: its method is idempotent, or it has an
    /// `Idempotency-Key` header.
    pub fn is_idempotent(&self) -> bool {
        self.method.is_idempotent() || self.headers.contains_key("idempotency-key")
    }
}

/// Shortens an invalid value for an error, because it may be arbitrarily long.
fn shortened(text: &str) -> String {
    const SHOWN: usize = 200;
    match text.len() {
        ..=SHOWN => text.to_owned(),
        _ => format!("{}…", &text[..text.floor_char_boundary(SHOWN)]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn get(url: &str) -> Result<Request, OutboundError> {
        Request::new("GET", url)
    }

    #[test]
    fn a_header_cannot_inject_another_one() {
        let request = get("https://x.org/").expect("valid");
        for (name, value) in [
            ("x-a", "1\r\nx-b: 2"),
            ("x-a", "1\nx-b: 2"),
            ("x-a", "1\r"),
            ("x-a", "\0"),
            ("x-a\r\nx-b", "1"),
            ("x a", "1"),
            ("", "1"),
        ] {
            let error = request.clone().header(name, value).expect_err(value);
            assert_eq!(error.code(), "invalid_header", "{error}");
        }
        assert!(request.header("X-A", "plain value").is_ok());
    }

    #[test]
    fn rejects_headers_that_belong_to_the_connection() {
        for name in
            ["Host", "content-length", "Transfer-Encoding", "Connection", "Upgrade", "Proxy-Authorization"]
        {
            let error = get("https://x.org/").expect("valid").header(name, "x").expect_err(name).to_string();
            assert!(error.contains("belongs to the connection"), "{error}");
        }
    }

    #[test]
    fn limits_the_number_and_the_bytes_of_headers() {
        let fill = |count: usize, bytes: usize| {
            let value = "v".repeat(bytes);
            (0..count)
                .try_fold(get("https://x.org/").expect("valid"), |request, _| request.header("x", &value))
        };
        assert!(fill(MAX_HEADERS, 1).is_ok());
        assert!(fill(MAX_HEADERS + 1, 1).is_err());
        assert!(fill(2, MAX_HEADER_BYTES / 2).is_err());
    }

    #[test]
    fn rejects_long_urls_and_urls_with_white_space() {
        for url in [
            &format!("https://x.org/{}", "a".repeat(MAX_URL_BYTES)),
            "https://x.org/a b",
            "https://x.org/\r\nHost: y.org",
            "https://x\t.org/",
            "//x.org",
            "https://",
        ] {
            assert_eq!(get(url).expect_err(url).code(), "invalid_url");
        }
        assert_eq!(get("https://x.org/a#fragment").expect("valid").url().as_str(), "https://x.org/a");
    }

    #[test]
    fn accepts_only_uppercase_http_methods() {
        for method in ["get", "CONNECT", "TRACE", "GET ", "G\r\nET", ""] {
            assert_eq!(Request::new(method, "https://x.org/").expect_err(method).code(), "invalid_method");
        }
    }

    #[test]
    fn a_post_is_idempotent_only_with_a_key() {
        let post = Request::new("POST", "https://x.org/").expect("valid");
        assert!(!post.is_idempotent());
        assert!(post.header("Idempotency-Key", "k").expect("valid").is_idempotent());
        assert!(Request::new("DELETE", "https://x.org/").expect("valid").is_idempotent());
    }
}
