//! Origins, and the lists that grant them.
//!
//! An origin is a scheme, a host and a port; all three must match. Hosts are compared as the URL standard
//! normalizes them, so capitals, percent-encoding, Unicode names and numeric forms of IPv4 addresses cannot
//! bypass a list.

use reqwest::Url;
use serde::{Deserialize, Serialize};
use std::{fmt, str::FromStr};

/// Maximum number of entries in a list, more than any legitimate list has.
const MAX_PATTERNS: usize = 256;
const MAX_PATTERN_BYTES: usize = 300;

/// The server that a request goes to: a scheme, a host and a port.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Origin {
    scheme: Scheme,
    /// Normalized. IPv6 addresses keep their brackets.
    host: String,
    port: u16,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Scheme {
    Http,
    Https,
}

/// One entry of a list: `https://api.example.com`, `https://*.example.com`, `http://10.1.2.3:8080`, `https://*`
/// or `*`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct OriginPattern(Pattern);

#[derive(Clone, Debug, PartialEq, Eq)]
enum Pattern {
    /// Every host, scheme and port.
    Everything,
    /// Every host with this scheme and port.
    AnyHost {
        scheme: Scheme,
        port: u16,
    },
    /// Names that end with `suffix`, which starts with a dot: `*.example.com` does not match `example.com`
    /// itself.
    Below {
        scheme: Scheme,
        suffix: String,
        port: u16,
    },
    Exactly(Origin),
}

/// A list of granted origins. An empty list grants nothing.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "Vec<OriginPattern>", into = "Vec<OriginPattern>")]
pub struct Origins(Vec<OriginPattern>);

/// The reason why a URL has no usable origin, or an entry of a list is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum OriginError {
    #[error("the URL {url:?} cannot be requested: {problem}")]
    Url { url: String, problem: String },
    #[error("{pattern:?} is not a valid origin: {problem}; use a form such as \"https://api.example.com\"")]
    Pattern { pattern: String, problem: String },
}

impl Origin {
    /// Returns the origin of a URL. Fails if the URL has no host or contains credentials.
    pub fn of(url: &Url) -> Result<Self, OriginError> {
        // A refused URL may contain a password, which must not appear in the error.
        let refused =
            |problem: &str| OriginError::Url { url: without_credentials(url), problem: problem.to_owned() };
        let scheme = match url.scheme() {
            "http" => Scheme::Http,
            "https" => Scheme::Https,
            _ => return Err(refused("its scheme is neither https nor http")),
        };
        if !url.username().is_empty() || url.password().is_some() {
            return Err(refused("it contains credentials; send them in a header"));
        }
        let host = url.host_str().ok_or_else(|| refused("it has no host"))?;
        if host.ends_with('.') {
            return Err(refused("its host ends with a dot; remove the dot"));
        }
        let port = url.port_or_known_default().ok_or_else(|| refused("it has no port"))?;
        if port == 0 {
            return Err(refused("its port is 0"));
        }
        Ok(Origin { scheme, host: host.to_owned(), port })
    }

    /// Returns the host. An IPv6 address keeps its brackets.
    pub fn host(&self) -> &str {
        &self.host
    }

    /// Returns the port, which is the scheme's default if the URL names none.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Returns whether the scheme is `https`.
    pub fn is_https(&self) -> bool {
        self.scheme == Scheme::Https
    }
}

impl Origins {
    /// Returns whether an entry of the list matches `origin`.
    pub fn allows(&self, origin: &Origin) -> bool {
        self.0.iter().any(|pattern| pattern.0.matches(origin))
    }

    /// Returns whether the list has no entries and therefore grants nothing.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns the entries; each displays in its normalized form.
    pub fn patterns(&self) -> impl Iterator<Item = &OriginPattern> {
        self.0.iter()
    }
}

impl Pattern {
    fn matches(&self, origin: &Origin) -> bool {
        match self {
            Pattern::Everything => true,
            Pattern::AnyHost { scheme, port } => (*scheme, *port) == (origin.scheme, origin.port),
            Pattern::Below { scheme, suffix, port } => {
                (*scheme, *port) == (origin.scheme, origin.port)
                    && origin.host.len() > suffix.len()
                    && origin.host.ends_with(suffix.as_str())
            }
            Pattern::Exactly(exactly) => exactly == origin,
        }
    }
}

impl FromStr for OriginPattern {
    type Err = OriginError;

    fn from_str(text: &str) -> Result<Self, OriginError> {
        let refused =
            |problem: &str| OriginError::Pattern { pattern: text.to_owned(), problem: problem.to_owned() };
        if text.len() > MAX_PATTERN_BYTES {
            return Err(refused("it is too long"));
        }
        if text == "*" {
            return Ok(OriginPattern(Pattern::Everything));
        }
        let (scheme, rest) = text.split_once("://").ok_or_else(|| refused("it has no scheme"))?;
        // A label stands in for the star, which a URL cannot contain.
        let (kind, rest) = match rest.strip_prefix("*.") {
            Some(rest) => (Kind::Below, rest.to_owned()),
            None if rest == "*" || rest.starts_with("*:") => (Kind::Any, rest.replacen('*', "any", 1)),
            None => (Kind::Exactly, rest.to_owned()),
        };
        let url = Url::parse(&format!("{scheme}://{rest}")).map_err(|error| refused(&error.to_string()))?;
        let origin = Origin::of(&url).map_err(|error| match error {
            OriginError::Url { problem, .. } => refused(&problem),
            other => other,
        })?;
        if url.path() != "/" || rest.ends_with('/') || url.query().is_some() || url.fragment().is_some() {
            return Err(refused("it has a path; an origin is a scheme, a host and a port"));
        }
        if origin.host.contains('*') {
            return Err(refused("a star may stand only for the whole host or before its first dot"));
        }
        let Origin { scheme, port, .. } = origin;
        Ok(OriginPattern(match kind {
            Kind::Any => Pattern::AnyHost { scheme, port },
            Kind::Below if url.domain().is_none() => return Err(refused("an IP address has no subdomains")),
            Kind::Below => Pattern::Below { scheme, suffix: format!(".{}", origin.host), port },
            Kind::Exactly => Pattern::Exactly(origin),
        }))
    }
}

enum Kind {
    Exactly,
    Below,
    Any,
}

impl Scheme {
    fn default_port(self) -> u16 {
        match self {
            Scheme::Http => 80,
            Scheme::Https => 443,
        }
    }
}

impl fmt::Display for Scheme {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Scheme::Http => "http",
            Scheme::Https => "https",
        })
    }
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        spell(f, self.scheme, &self.host, self.port)
    }
}

impl fmt::Display for OriginPattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Pattern::Everything => f.write_str("*"),
            Pattern::AnyHost { scheme, port } => spell(f, *scheme, "*", *port),
            Pattern::Below { scheme, suffix, port } => spell(f, *scheme, &format!("*{suffix}"), *port),
            Pattern::Exactly(origin) => origin.fmt(f),
        }
    }
}

fn spell(f: &mut fmt::Formatter<'_>, scheme: Scheme, host: &str, port: u16) -> fmt::Result {
    write!(f, "{scheme}://{host}")?;
    if port == scheme.default_port() { Ok(()) } else { write!(f, ":{port}") }
}

/// Returns the URL without its credentials, for use in an error.
pub(crate) fn without_credentials(url: &Url) -> String {
    let mut shown = url.clone();
    // These fail only for URLs that cannot have credentials.
    let _ = shown.set_username("");
    let _ = shown.set_password(None);
    shown.to_string()
}

impl TryFrom<String> for OriginPattern {
    type Error = OriginError;

    fn try_from(text: String) -> Result<Self, OriginError> {
        text.parse()
    }
}

impl From<OriginPattern> for String {
    fn from(pattern: OriginPattern) -> String {
        pattern.to_string()
    }
}

impl TryFrom<Vec<OriginPattern>> for Origins {
    type Error = OriginError;

    fn try_from(patterns: Vec<OriginPattern>) -> Result<Self, OriginError> {
        match patterns.get(MAX_PATTERNS) {
            Some(first_over) => Err(OriginError::Pattern {
                pattern: first_over.to_string(),
                problem: format!("a list has at most {MAX_PATTERNS} entries"),
            }),
            None => Ok(Origins(patterns)),
        }
    }
}

impl From<Origins> for Vec<OriginPattern> {
    fn from(origins: Origins) -> Self {
        origins.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn origins(patterns: &[&str]) -> Origins {
        let patterns =
            patterns.iter().map(|pattern| pattern.parse().expect(pattern)).collect::<Vec<OriginPattern>>();
        patterns.try_into().expect("few")
    }

    fn origin(url: &str) -> Origin {
        Origin::of(&Url::parse(url).expect(url)).expect(url)
    }

    #[test]
    fn requires_scheme_host_and_port_to_match() {
        let granted = origins(&["https://api.example.com", "http://10.1.2.3:8080", "https://[2001:db8::1]"]);
        for url in [
            "https://api.example.com/v1?x=1",
            "https://api.example.com:443/",
            "https://API.Example.COM/",
            "https://api.ex%61mple.com/",
            "http://10.1.2.3:8080/x",
            "http://167838211:8080/",
            "http://0xa.0x1.0x2.0x3:8080/",
            "http://012.1.2.3:8080/",
            "https://[2001:DB8:0::1]/",
        ] {
            assert!(granted.allows(&origin(url)), "{url}");
        }
        for url in [
            "http://api.example.com/",
            "https://api.example.com:8443/",
            "https://example.com/",
            "https://x.api.example.com/",
            "https://api.example.com.evil.com/",
            "https://evilapi.example.com/",
            "http://10.1.2.3/",
            "http://10.1.2.4:8080/",
        ] {
            assert!(!granted.allows(&origin(url)), "{url}");
        }
        assert!(
            !Origins::default().allows(&origin("https://api.example.com")),
            "an empty list grants nothing"
        );
    }

    #[test]
    fn a_star_matches_subdomains_or_every_host() {
        let below = origins(&["https://*.example.com"]);
        assert!(
            below.allows(&origin("https://a.example.com"))
                && below.allows(&origin("https://a.b.example.com"))
        );
        for url in [
            "https://example.com",
            "https://badexample.com",
            "http://a.example.com",
            "https://a.example.com:1",
        ] {
            assert!(!below.allows(&origin(url)), "{url}");
        }
        let any = origins(&["https://*"]);
        assert!(any.allows(&origin("https://x.org")) && !any.allows(&origin("http://x.org")));
        assert!(origins(&["http://*:8080"]).allows(&origin("http://x.org:8080")));
        assert!(origins(&["*"]).allows(&origin("http://x.org:99")));
    }

    #[test]
    fn unicode_hosts_are_compared_as_punycode() {
        let granted = origins(&["https://bücher.example"]);
        assert!(granted.allows(&origin("https://xn--bcher-kva.example/")));
        // A Cyrillic letter that looks like an `a`.
        assert!(!origins(&["https://example.com"]).allows(&origin("https://ex\u{430}mple.com/")));
    }

    #[test]
    fn origin_patterns_are_normalized() {
        for (text, expected) in [
            ("https://API.example.com:443", "https://api.example.com"),
            ("http://*.Example.com:8080", "http://*.example.com:8080"),
            ("https://*", "https://*"),
            ("*", "*"),
            ("http://0x7f.1", "http://127.0.0.1"),
        ] {
            assert_eq!(text.parse::<OriginPattern>().expect(text).to_string(), expected);
        }
    }

    #[test]
    fn rejects_invalid_origins_with_an_example_of_a_valid_one() {
        for (text, expected) in [
            ("api.example.com", "no scheme"),
            ("ftp://x.org", "neither https nor http"),
            ("https://x.org/v1", "has a path"),
            ("https://x.org/", "has a path"),
            ("https://x.org?q", "has a path"),
            ("https://user:pw@x.org", "credentials"),
            ("https://x.org.", "ends with a dot"),
            ("https://a.*.org", "star"),
            ("https://*.*.org", "star"),
            ("https://*.10.0.0.1", "no subdomains"),
            ("https://x.org:0", "port is 0"),
            ("https://", "empty host"),
        ] {
            let message = text.parse::<OriginPattern>().expect_err(text).to_string();
            assert!(
                message.contains(expected) && message.contains("https://api.example.com"),
                "{text}: {message}"
            );
        }
    }

    #[test]
    fn credentials_and_other_schemes_are_refused_without_being_repeated() {
        for url in ["https://user:hunter2@x.org/", "ftp://x.org/", "https://x.org./", "file:///etc/passwd"] {
            let message = Origin::of(&Url::parse(url).expect(url)).expect_err(url).to_string();
            assert!(!message.contains("hunter2"), "{message}");
        }
    }
}
