//! Secrets that a request names and never contains.
//!
//! The author of a request knows only a placeholder. The value is inserted on the way out, at each hop, and only for
//! origins that the secret is allowed for. Wherever the value occurs in a response, it is replaced with the
//! placeholder. So requests and responses can be stored and shown.
//!
//! A response is searched only for the secrets that its own request carried. Otherwise the author of a response could
//! guess a value by observing what is redacted.

mod spelling;
mod strength;

pub use strength::check_secret_value;

use super::Policy;
use crate::{Origin, OutboundError, Request};
use reqwest::{
    StatusCode, Url,
    header::{
        ACCEPT_ENCODING, CONTENT_ENCODING, CONTENT_RANGE, HeaderMap, HeaderName, HeaderValue, IF_RANGE, RANGE,
    },
};
use spelling::Pattern;
use std::{borrow::Cow, fmt};

/// A secret: its placeholder, its value, and the origins that it may be sent to.
#[derive(Clone)]
pub struct Secret {
    pub name: String,
    /// The text that stands for the value in a request. It consists of letters, digits, `_`, `-` and `.`, so that it
    /// is the same in a URL, a header and a body, and it cannot be guessed.
    pub placeholder: String,
    /// The value, or `None` if the operator has not set it.
    pub value: Option<String>,
    /// The origins that the value may be sent to.
    pub allowed: Policy,
}

/// The secrets that a request may name.
#[derive(Clone, Debug, Default)]
pub struct Secrets(Vec<Secret>);

/// Replaces values in texts that are stored or shown.
pub struct Redactor(Vec<(Vec<Pattern>, String)>);

/// The secrets that were inserted into a request, or into one that led to it by a redirect.
#[derive(Debug, Default)]
pub(crate) struct Carried(Vec<Secret>);

impl Secrets {
    /// Creates the set of secrets that a request may name.
    pub fn new(secrets: Vec<Secret>) -> Self {
        Secrets(secrets)
    }

    /// Returns the request with values in place of placeholders, for this hop only. The body may have at most `limit`
    /// bytes.
    pub(crate) fn fill(
        &self,
        request: &Request,
        limit: usize,
        carried: &mut Carried,
    ) -> Result<Request, OutboundError> {
        let mut filled = request.clone();
        let mut carries = false;
        for secret in &self.0 {
            if secret.fill(&mut filled, limit)? {
                carries = true;
                carried.add(secret);
            }
        }
        if carries {
            ask_for_all_of_it(&mut filled.headers)?;
        }
        Ok(filled)
    }

    /// Removes the headers that name a secret, because a redirect goes to another origin.
    pub(crate) fn leave_behind(&self, headers: &mut HeaderMap) {
        let names = |value: &HeaderValue| {
            self.0.iter().any(|secret| find(value.as_bytes(), &secret.placeholder).is_some())
        };
        let held = headers.iter().filter(|(_, value)| names(value)).map(|(name, _)| name.clone());
        for name in held.collect::<Vec<_>>() {
            headers.remove(name);
        }
    }
}

impl Carried {
    fn add(&mut self, secret: &Secret) {
        if self.0.iter().all(|known| known.name != secret.name) {
            self.0.push(secret.clone());
        }
    }

    /// Refuses a response that cannot be searched for a value.
    pub(crate) fn check(
        &self,
        origin: &Origin,
        status: StatusCode,
        headers: &HeaderMap,
    ) -> Result<(), OutboundError> {
        let concealed = |problem: String| Err(OutboundError::Concealed { origin: origin.clone(), problem });
        if self.0.is_empty() {
            return Ok(());
        }
        if status == StatusCode::PARTIAL_CONTENT || headers.contains_key(CONTENT_RANGE) {
            return concealed("it is partial content".to_owned());
        }
        match headers.get_all(CONTENT_ENCODING).iter().find(|encoding| *encoding != "identity") {
            Some(encoding) => concealed(format!("its content encoding is {encoding:?}")),
            None => Ok(()),
        }
    }

    /// Redacts the values of headers, and removes a header whose name contains the value of a secret.
    pub(crate) fn redact_headers(&self, headers: &mut HeaderMap) {
        if self.0.is_empty() {
            return;
        }
        let in_lowercase =
            self.0.iter().filter_map(|secret| secret.value.as_ref()).map(|value| value.to_lowercase());
        let in_lowercase: Vec<Pattern> = in_lowercase.flat_map(|value| Pattern::of(&value)).collect();
        let is_named = |name: &HeaderName| {
            in_lowercase.iter().any(|pattern| pattern.find(name.as_str().as_bytes(), 0).is_some())
        };
        for name in headers.keys().filter(|name| is_named(name)).cloned().collect::<Vec<_>>() {
            headers.remove(name);
        }
        for value in headers.values_mut() {
            if let Cow::Owned(redacted) = self.redacted(value.as_bytes()) {
                *value = HeaderValue::from_bytes(&redacted)
                    .expect("a placeholder consists of characters that a header may have");
            }
        }
    }

    pub(crate) fn redact_body(&self, body: Vec<u8>, limit: usize) -> Result<Vec<u8>, OutboundError> {
        match self.redacted(&body) {
            Cow::Owned(longer) if longer.len() > limit => Err(OutboundError::ResponseTooLarge { limit }),
            Cow::Owned(redacted) => Ok(redacted),
            Cow::Borrowed(_) => Ok(body),
        }
    }

    fn redacted<'a>(&self, bytes: &'a [u8]) -> Cow<'a, [u8]> {
        let values =
            self.0.iter().filter_map(|secret| Some((secret.value.as_deref()?, &*secret.placeholder)));
        Redactor::new(values).redacted(bytes)
    }
}

impl Redactor {
    /// Creates a redactor of values, each with the text that replaces it.
    pub fn new<'a>(values: impl IntoIterator<Item = (&'a str, &'a str)>) -> Self {
        let mut values: Vec<_> = values.into_iter().collect();
        // A value that contains another one is found first, because nothing of it may remain.
        values.sort_by_key(|(value, _)| std::cmp::Reverse(value.len()));
        Redactor(
            values.into_iter().map(|(value, instead)| (Pattern::of(value), instead.to_owned())).collect(),
        )
    }

    /// Replaces each value, wherever it occurs in any encoding.
    pub fn redacted<'a>(&self, bytes: &'a [u8]) -> Cow<'a, [u8]> {
        self.0.iter().fold(Cow::Borrowed(bytes), |bytes, (patterns, instead)| {
            patterns
                .iter()
                .fold(bytes, |bytes, pattern| replaced(&bytes, pattern, instead).map_or(bytes, Cow::Owned))
        })
    }
}

/// Removes `Accept-Encoding` and refuses range headers, because a value in a compressed or partial response could not
/// be found.
fn ask_for_all_of_it(headers: &mut HeaderMap) -> Result<(), OutboundError> {
    headers.remove(ACCEPT_ENCODING);
    let partial = [RANGE, IF_RANGE].into_iter().find(|name| headers.contains_key(name));
    partial.map_or(Ok(()), |name| {
        Err(OutboundError::Header {
            name: name.to_string(),
            problem: "a request with a secret must ask for the whole response, so that the secret can be redacted; \
                      remove the header"
                .to_owned(),
        })
    })
}

/// Returns the bytes with every match replaced, or `None` if there is no match.
fn replaced(bytes: &[u8], pattern: &Pattern, placeholder: &str) -> Option<Vec<u8>> {
    let mut found = pattern.find(bytes, 0)?;
    let mut replaced = Vec::with_capacity(bytes.len());
    let mut from = 0;
    loop {
        // A match may extend backwards to a neighbor that the previous match already covers.
        replaced.extend_from_slice(&bytes[from..found.start.max(from)]);
        replaced.extend_from_slice(placeholder.as_bytes());
        from = found.end;
        match pattern.find(bytes, from) {
            Some(next) => found = next,
            None => break,
        }
    }
    replaced.extend_from_slice(&bytes[from..]);
    Some(replaced)
}

impl Secret {
    /// Inserts the value into the request. Returns whether the request named the secret.
    fn fill(&self, request: &mut Request, limit: usize) -> Result<bool, OutboundError> {
        let in_url = request.url.as_str().contains(&self.placeholder);
        let in_headers =
            request.headers.values().any(|value| find(value.as_bytes(), &self.placeholder).is_some());
        let in_body = find(&request.body, &self.placeholder).is_some();
        if !(in_url || in_headers || in_body) {
            return Ok(false);
        }
        self.check(&request.origin)?;
        let Some(value) = &self.value else {
            return Err(OutboundError::SecretUnset { name: self.name.clone() });
        };
        if in_url {
            request.url = self.fill_url(&request.url, value)?;
        }
        if in_headers {
            self.fill_headers(&mut request.headers, value)?;
        }
        if in_body {
            let count =
                request.body.windows(self.placeholder.len()).filter(|at| *at == self.placeholder.as_bytes());
            // The value may be longer than its placeholder, so the size is checked before memory is allocated.
            let bytes =
                request.body.len() + count.count() * value.len().saturating_sub(self.placeholder.len());
            if bytes > limit {
                return Err(OutboundError::RequestTooLarge { bytes, limit });
            }
            request.body = replace(&request.body, &self.placeholder, value);
        }
        Ok(true)
    }

    fn check(&self, origin: &Origin) -> Result<(), OutboundError> {
        self.allowed.check(origin).map_err(|error| match error {
            OutboundError::NotGranted { origin, line } => {
                OutboundError::SecretNotGranted { name: self.name.clone(), origin, line }
            }
            other => other,
        })
    }

    /// Inserts the value into the query only, because servers write paths into their logs and pages.
    fn fill_url(&self, url: &Url, value: &str) -> Result<Url, OutboundError> {
        let query = url.query().unwrap_or_default().replace(&self.placeholder, &percent_encoded(value));
        let mut filled = url.clone();
        filled.set_query(Some(&query));
        match filled.as_str().contains(&self.placeholder) {
            true => Err(OutboundError::SecretMisplaced { name: self.name.clone() }),
            false => Ok(filled),
        }
    }

    fn fill_headers(&self, headers: &mut HeaderMap, value: &str) -> Result<(), OutboundError> {
        for (name, header) in headers.iter_mut() {
            if find(header.as_bytes(), &self.placeholder).is_none() {
                continue;
            }
            let filled = replace(header.as_bytes(), &self.placeholder, value);
            *header = HeaderValue::from_bytes(&filled).map_err(|_| OutboundError::Header {
                name: name.to_string(),
                problem: format!(
                    "the value of the secret {:?} contains a line break or a control character",
                    self.name
                ),
            })?;
            header.set_sensitive(true);
        }
        Ok(())
    }
}

/// Percent-encodes everything but letters, digits and `-._~`.
fn percent_encoded(value: &str) -> String {
    value.bytes().fold(String::with_capacity(value.len()), |mut text, byte| {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' => text.push(byte.into()),
            _ => text.push_str(&format!("%{byte:02X}")),
        }
        text
    })
}

fn find(bytes: &[u8], text: &str) -> Option<usize> {
    bytes.windows(text.len()).position(|window| window == text.as_bytes())
}

fn replace(bytes: &[u8], from: &str, to: &str) -> Vec<u8> {
    let mut replaced = Vec::with_capacity(bytes.len());
    let mut rest = bytes;
    while let Some(at) = find(rest, from) {
        replaced.extend_from_slice(&rest[..at]);
        replaced.extend_from_slice(to.as_bytes());
        rest = &rest[at + from.len()..];
    }
    replaced.extend_from_slice(rest);
    replaced
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Secret")
            .field("name", &self.name)
            .field("allowed", &self.allowed)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Origins;

    const PLACEHOLDER: &str = "secret.KEY.0123456789abcdef";

    fn secrets(value: &str) -> Secrets {
        let patterns = vec!["https://api.example.com".parse().expect("an origin")];
        let origins = Origins::try_from(patterns).expect("one");
        Secrets::new(vec![Secret {
            name: "KEY".into(),
            placeholder: PLACEHOLDER.into(),
            value: Some(value.into()),
            allowed: Policy::default().and(origins, "hosts of KEY"),
        }])
    }

    fn post(url: &str, header: &str, body: &str) -> Request {
        let request =
            Request::new("POST", url).and_then(|request| request.header("x-key", header)).expect("valid");
        request.body(body.as_bytes().to_vec())
    }

    #[test]
    fn a_placeholder_becomes_the_value_in_headers_query_and_body() {
        let request = post(
            &format!("https://api.example.com/v1?key={PLACEHOLDER}"),
            &format!("Bearer {PLACEHOLDER}"),
            &format!("a={PLACEHOLDER}&b={PLACEHOLDER}"),
        );
        let filled = secrets("s3cret/&value")
            .fill(&request, 1_000, &mut Carried::default())
            .expect("it is for this origin");
        assert_eq!(filled.url.as_str(), "https://api.example.com/v1?key=s3cret%2F%26value");
        assert_eq!(filled.headers["x-key"], "Bearer s3cret/&value");
        assert!(filled.headers["x-key"].is_sensitive());
        assert_eq!(filled.body, b"a=s3cret/&value&b=s3cret/&value");
    }

    #[test]
    fn a_secret_goes_to_no_other_origin_and_into_no_path() {
        let secrets = secrets("s3cret-value");
        for (url, header, body) in [
            ("https://evil.example/", PLACEHOLDER, ""),
            ("https://evil.example/", "", PLACEHOLDER),
            (&format!("https://evil.example/?{PLACEHOLDER}"), "", ""),
            ("http://api.example.com/", PLACEHOLDER, ""),
        ] {
            let error =
                secrets.fill(&post(url, header, body), 1_000, &mut Carried::default()).expect_err(url);
            assert_eq!(error.code(), "secret_not_granted");
            assert!(
                error.to_string().contains("KEY") && error.to_string().ends_with("to hosts of KEY"),
                "{error}"
            );
        }
        for url in [
            format!("https://api.example.com/{PLACEHOLDER}/x"),
            format!("https://api.example.com/{PLACEHOLDER}?k={PLACEHOLDER}"),
        ] {
            let error =
                secrets.fill(&post(&url, "", ""), 1_000, &mut Carried::default()).expect_err("a path");
            assert_eq!(error.code(), "secret_misplaced");
        }
        let unnamed = post("https://evil.example/", "plain", "plain");
        assert!(
            secrets.fill(&unnamed, 1_000, &mut Carried::default()).is_ok(),
            "a request that names no secret may go to any granted origin"
        );
    }

    #[test]
    fn a_value_with_a_line_break_is_allowed_only_in_bodies() {
        let secrets = secrets("line one\nline two");
        let error = secrets
            .fill(&post("https://api.example.com/", PLACEHOLDER, ""), 1_000, &mut Carried::default())
            .expect_err("a header");
        assert!(!error.to_string().contains("line one"), "{error}");
        assert!(
            secrets
                .fill(&post("https://api.example.com/", "", PLACEHOLDER), 1_000, &mut Carried::default())
                .is_ok()
        );
    }

    #[test]
    fn a_body_that_grows_over_its_limit_is_refused() {
        let body = PLACEHOLDER.repeat(100);
        let request = post("https://api.example.com/", "", &body);
        let error = secrets(&"v".repeat(4_000))
            .fill(&request, 10_000, &mut Carried::default())
            .expect_err("400 kB of values");
        assert!(matches!(error, OutboundError::RequestTooLarge { bytes: 400_000, .. }), "{error}");
    }

    #[test]
    fn redacts_every_encoding_of_a_value() {
        let secrets = Carried(secrets("s3cret/\"value").0);
        let body = br#"plain s3cret/"value, url s3cret%2F%22value, json "s3cret/\"value""#.to_vec();
        let redacted = secrets.redact_body(body, 1_000).expect("small");
        let text = String::from_utf8(redacted).expect("it was text");
        assert_eq!(text, format!("plain {PLACEHOLDER}, url {PLACEHOLDER}, json \"{PLACEHOLDER}\""));
        let mut headers = HeaderMap::from_iter([(
            "x-echo".parse().expect("a name"),
            HeaderValue::from_static("s3cret/\"value"),
        )]);
        secrets.redact_headers(&mut headers);
        assert_eq!(headers["x-echo"], PLACEHOLDER);
        let error =
            secrets.redact_body("s3cret/\"value".repeat(100).into_bytes(), 1_500).expect_err("it grew");
        assert!(matches!(error, OutboundError::ResponseTooLarge { limit: 1_500 }));
    }

    #[test]
    fn nothing_remains_of_a_value_that_contains_another_one() {
        let redactor = Redactor::new([("inner-value-1", "[one]"), ("outer-inner-value-1-rest", "[two]")]);
        let redacted = redactor.redacted(b"outer-inner-value-1-rest, inner-value-1, rest");
        assert_eq!(String::from_utf8_lossy(&redacted), "[two], [one], rest");
    }

    #[test]
    fn no_value_is_ever_printed() {
        assert!(!format!("{:?}", secrets("s3cret-value")).contains("s3cret-value"));
    }
}
