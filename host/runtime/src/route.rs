//! The HTTP routes of agents, such as `/concierge/{session}`.
//!
//! A route may contain the session id as a parameter. It never shadows a path of the host, and two
//! routes that could match the same request never coexist.

use percent_encoding::percent_decode_str;
use serde::{Deserialize, Serialize};
use std::fmt;

/// First path segments that the host itself uses.
const RESERVED: [&str; 8] = ["v1", "mcp", "ui", "cluster", "healthz", "readyz", "metrics", "openapi.json"];
const MAX_SEGMENTS: usize = 16;
const MAX_BYTES: usize = 512;

/// A match between a request and a route.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RouteMatch {
    pub agent: String,
    /// The parameter `session`, or a new id if the route has none.
    pub session: String,
    pub parameters: Vec<(String, String)>,
}

/// A parsed route. Its text form is exactly what the author wrote.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Route {
    text: String,
    segments: Vec<Segment>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Segment {
    Literal(String),
    Parameter(String),
}

impl Route {
    /// Parses a path such as `/concierge/{session}`. The error is a message for its author.
    pub fn parse(text: &str) -> Result<Self, String> {
        let fail = |why: String| Err(format!("route {text:?} {why}"));
        if text.len() > MAX_BYTES {
            return Err(format!("a route has {} bytes; at most {MAX_BYTES} are allowed", text.len()));
        }
        let Some(path) = text.strip_prefix('/') else {
            return fail("must start with /".into());
        };
        if path.is_empty() {
            return fail("must name a path, such as /concierge/{session}".into());
        }
        let mut segments = Vec::new();
        for part in path.split('/') {
            let segment = segment(part).map_err(|why| format!("route {text:?} {why}"))?;
            if let Segment::Parameter(name) = &segment
                && segments.contains(&segment)
            {
                return fail(format!("has the parameter {{{name}}} twice"));
            }
            segments.push(segment);
        }
        if segments.len() > MAX_SEGMENTS {
            return fail(format!("has {} parts; at most {MAX_SEGMENTS} are allowed", segments.len()));
        }
        match &segments[0] {
            Segment::Literal(first) if RESERVED.contains(&first.as_str()) => {
                fail(format!("would shadow the host's own /{first}; start it with another segment"))
            }
            Segment::Parameter(_) => fail(
                "starts with a parameter and would shadow the host's own paths; start it with a fixed segment".into(),
            ),
            Segment::Literal(_) => Ok(Route { text: text.to_owned(), segments }),
        }
    }

    /// Returns the percent-decoded parameters if `path` matches this route.
    pub(crate) fn parameters(&self, path: &str) -> Option<Vec<(String, String)>> {
        let parts: Vec<&str> = path.strip_prefix('/')?.split('/').collect();
        if parts.len() != self.segments.len() {
            return None;
        }
        let mut parameters = Vec::new();
        for (segment, part) in self.segments.iter().zip(parts) {
            match segment {
                Segment::Literal(literal) if literal == part => {}
                Segment::Parameter(name) if !part.is_empty() => {
                    parameters.push((name.clone(), percent_decoded(part)?));
                }
                _ => return None,
            }
        }
        Some(parameters)
    }

    /// Returns whether one path could match both routes.
    pub(crate) fn overlaps(&self, other: &Route) -> bool {
        self.segments.len() == other.segments.len()
            && self.segments.iter().zip(&other.segments).all(|pair| match pair {
                (Segment::Literal(a), Segment::Literal(b)) => a == b,
                _ => true,
            })
    }
}

impl fmt::Display for Route {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl TryFrom<String> for Route {
    type Error = String;
    fn try_from(text: String) -> Result<Self, String> {
        Route::parse(&text)
    }
}

impl From<Route> for String {
    fn from(route: Route) -> Self {
        route.text
    }
}

fn segment(part: &str) -> Result<Segment, String> {
    if let Some(name) = part.strip_prefix('{').and_then(|rest| rest.strip_suffix('}')) {
        let word = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'_';
        return if !name.is_empty() && name.len() <= 32 && name.bytes().all(word) {
            Ok(Segment::Parameter(name.to_owned()))
        } else {
            Err(format!(
                "has the parameter {part}, whose name must have 1 to 32 of the characters a-z, 0-9 and _"
            ))
        };
    }
    let plain = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.' | b'~');
    if part.is_empty() {
        Err("has an empty part".into())
    } else if part == "." || part == ".." || !part.bytes().all(plain) {
        Err(format!("has the part {part:?}; a part is {{name}} or consists of letters, digits, - _ . ~"))
    } else {
        Ok(Segment::Literal(part.to_owned()))
    }
}

/// Returns `None` if a `%` is without two digits, which the library would keep, or if the bytes are not UTF-8.
fn percent_decoded(part: &str) -> Option<String> {
    let has_digits = |rest: &str| rest.bytes().take(2).filter(u8::is_ascii_hexdigit).count() == 2;
    if !part.split('%').skip(1).all(has_digits) {
        return None;
    }
    Some(percent_decode_str(part).decode_utf8().ok()?.into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_route_matches_its_paths_and_decodes_parameters() {
        let route = Route::parse("/shop/{session}/ask/{topic}").expect("valid");
        let pairs = route.parameters("/shop/a%20b/ask/tea").expect("matches");
        assert_eq!(pairs, [("session".into(), "a b".into()), ("topic".into(), "tea".into())]);
        for other in ["/shop/a/ask", "/shop//ask/x", "/shop/a/tell/x", "shop"] {
            assert_eq!(route.parameters(other), None, "{other}");
        }
        for session in ["%zz", "%ff", "%+1", "a%4", "%", "%%41"] {
            assert_eq!(route.parameters(&format!("/shop/{session}/ask/x")), None, "{session}");
        }
    }

    #[test]
    fn invalid_routes_are_rejected_with_the_reason() {
        for (text, why) in [
            ("concierge", "must start with /"),
            ("/", "must name a path"),
            ("/v1/agents", "would shadow the host's own /v1"),
            ("/metrics", "would shadow"),
            ("/openapi.json", "would shadow"),
            ("/mcp", "would shadow the host's own /mcp"),
            ("/{session}", "starts with a parameter"),
            ("/a//b", "empty part"),
            ("/a/{Session}", "whose name must have"),
            ("/a/{x}/{x}", "twice"),
            ("/a/..", "has the part"),
            ("/a b", "has the part"),
        ] {
            let message = Route::parse(text).expect_err(text);
            assert!(message.contains(why), "{text}: {message}");
        }
    }

    #[test]
    fn routes_overlap_if_one_path_could_match_both() {
        let route = |text| Route::parse(text).expect("valid");
        assert!(route("/a/{x}").overlaps(&route("/a/b")));
        assert!(route("/a/{x}").overlaps(&route("/a/{y}")));
        assert!(!route("/a/{x}").overlaps(&route("/b/{x}")));
        assert!(!route("/a/{x}").overlaps(&route("/a/{x}/c")));
    }
}
