//! What is asked and what is answered.

use crate::{Origin, OutboundError};
use reqwest::{
    Method, Url,
    header::{HeaderMap, HeaderName, HeaderValue},
};

const MAX_URL_BYTES: usize = 8 << 10;
const MAX_HEADERS: usize = 64;
const MAX_HEADER_BYTES: usize = 32 << 10;
const METHODS: [Method; 7] =
    [Method::GET, Method::HEAD, Method::POST, Method::PUT, Method::PATCH, Method::DELETE, Method::OPTIONS];
/// They belong to the connection, or say how long the body is: what they say is not the asker's to decide.
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

/// A request whose parts are right each for itself.
#[derive(Clone, Debug)]
pub struct Request {
    pub(crate) method: Method,
    pub(crate) url: Url,
    pub(crate) origin: Origin,
    pub(crate) headers: HeaderMap,
    pub(crate) body: Vec<u8>,
}

/// What came back, read to its end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Response {
    pub status: u16,
    /// Of the last request, after all redirects.
    pub url: Url,
    pub headers: HeaderMap,
    pub body: Vec<u8>,
}

impl Request {
    pub fn new(method: &str, url: &str) -> Result<Self, OutboundError> {
        let known = METHODS.iter().find(|known| known.as_str() == method);
        let method = known.ok_or_else(|| OutboundError::Method { method: shortened(method) })?.clone();
        let invalid = |problem: String| OutboundError::Url { url: shortened(url), problem };
        if url.len() > MAX_URL_BYTES {
            return Err(invalid(format!("it has {} bytes; {MAX_URL_BYTES} are allowed", url.len())));
        }
        // The parser would drop them; whoever sends them means something else.
        if url.contains(|character: char| character.is_ascii_control() || character == ' ') {
            return Err(invalid("it holds a space or a control character".to_owned()));
        }
        let mut url = Url::parse(url).map_err(|error| invalid(error.to_string()))?;
        url.set_fragment(None);
        let origin = Origin::of(&url)?;
        Ok(Request { method, url, origin, headers: HeaderMap::new(), body: Vec::new() })
    }

    /// Adds a header beside those of the same name.
    pub fn header(mut self, name: &str, value: &str) -> Result<Self, OutboundError> {
        let refused = |problem: String| OutboundError::Header { name: shortened(name), problem };
        let parsed = HeaderName::from_bytes(name.as_bytes()).map_err(|error| refused(error.to_string()))?;
        if OF_THE_CONNECTION.contains(&parsed.as_str()) {
            return Err(refused("it belongs to the connection, which the host makes".to_owned()));
        }
        let value = HeaderValue::from_str(value).map_err(|_| {
            refused("its value holds a line break, a control character or no ASCII".to_owned())
        })?;
        self.headers.append(parsed, value);
        let bytes = self.headers.iter().map(|(name, value)| name.as_str().len() + value.len()).sum::<usize>();
        if self.headers.len() > MAX_HEADERS || bytes > MAX_HEADER_BYTES {
            return Err(refused(format!(
                "a request has at most {MAX_HEADERS} headers, of {MAX_HEADER_BYTES} bytes together"
            )));
        }
        Ok(self)
    }

    pub fn body(self, body: Vec<u8>) -> Self {
        Request { body, ..self }
    }

    pub fn method(&self) -> &Method {
        &self.method
    }

    pub fn url(&self) -> &Url {
        &self.url
    }

    pub fn origin(&self) -> &Origin {
        &self.origin
    }

    /// Of URL, headers and body.
    pub fn size(&self) -> usize {
        let headers =
            self.headers.iter().map(|(name, value)| name.as_str().len() + value.len()).sum::<usize>();
        self.url.as_str().len() + headers + self.body.len()
    }

    /// Whether making it twice is making it once: by its method, or because it has an `Idempotency-Key`.
    pub fn is_idempotent(&self) -> bool {
        self.method.is_idempotent() || self.headers.contains_key("idempotency-key")
    }
}

/// Of something that is named in an error because it is wrong, and may be as long as it likes.
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
    fn a_header_cannot_smuggle_another_one() {
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
    fn the_headers_of_the_connection_are_the_hosts() {
        for name in
            ["Host", "content-length", "Transfer-Encoding", "Connection", "Upgrade", "Proxy-Authorization"]
        {
            let error = get("https://x.org/").expect("valid").header(name, "x").expect_err(name).to_string();
            assert!(error.contains("belongs to the connection"), "{error}");
        }
    }

    #[test]
    fn headers_are_bounded_in_number_and_in_bytes() {
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
    fn a_url_is_bounded_and_has_no_white_space() {
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
    fn methods_are_those_of_http_in_capitals() {
        for method in ["get", "CONNECT", "TRACE", "GET ", "G\r\nET", ""] {
            assert_eq!(Request::new(method, "https://x.org/").expect_err(method).code(), "invalid_method");
        }
    }

    #[test]
    fn a_post_may_be_made_again_only_with_a_key() {
        let post = Request::new("POST", "https://x.org/").expect("valid");
        assert!(!post.is_idempotent());
        assert!(post.header("Idempotency-Key", "k").expect("valid").is_idempotent());
        assert!(Request::new("DELETE", "https://x.org/").expect("valid").is_idempotent());
    }
}
