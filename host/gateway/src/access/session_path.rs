//! Adds the caller's tenant to the session in a path. A tenant can only name its own sessions; the operator can name
//! any.

use crate::{ApiError, caller::Caller};
use axum::http::{StatusCode, Uri, uri::PathAndQuery};

/// The session is the segment at index 5 of `/v1/agents/{agent}/sessions/{session}`.
const BEFORE: [(usize, &str); 3] = [(1, "v1"), (2, "agents"), (4, "sessions")];
const AT: usize = 5;

/// Prefixes the session in the path with the name of its tenant. Other paths are unchanged.
pub(super) fn name_tenant(uri: &mut Uri, caller: &Caller) -> Result<(), ApiError> {
    let mut segments: Vec<&str> = uri.path().split('/').collect();
    if segments.len() <= AT || BEFORE.iter().any(|(at, name)| segments[*at] != *name) {
        return Ok(());
    }
    // Only a slash could name another tenant, and in a segment it is always escaped.
    let plain = segments[AT].replace("%2f", "/").replace("%2F", "/");
    let session = caller.session(&plain)?.replace('/', "%2F");
    if session == segments[AT] {
        return Ok(());
    }
    segments[AT] = &session;
    let query = uri.query().map(|query| format!("?{query}")).unwrap_or_default();
    let path = PathAndQuery::try_from(format!("{}{query}", segments.join("/"))).map_err(|_| {
        ApiError::new(
            StatusCode::BAD_REQUEST,
            "invalid_request",
            "the path is too long for the path of a session",
        )
    })?;
    let mut parts = std::mem::take(uri).into_parts();
    parts.path_and_query = Some(path);
    *uri = Uri::from_parts(parts).map_err(|error| ApiError::internal(&error.to_string()))?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use skep_runtime::{ApiKey, Role, Tenant};

    fn caller(tenant: &str) -> Caller {
        Caller::with(&ApiKey {
            id: "key-1".into(),
            tenant: Tenant::new(tenant).unwrap(),
            role: Role::Invoke,
            agents: None,
            name: String::new(),
            created_at_ms: 0,
            expires_at_ms: None,
            revoked_at_ms: None,
            last_used_day: None,
            requests_per_minute: None,
            bodies: false,
        })
    }

    fn named(uri: &str, caller: &Caller) -> Result<String, ApiError> {
        let mut uri: Uri = uri.parse().unwrap();
        name_tenant(&mut uri, caller).map(|()| uri.to_string())
    }

    #[test]
    fn a_session_is_resolved_within_the_callers_tenant() {
        for (uri, expected) in [
            ("/v1/agents/a/sessions/s", "/v1/agents/a/sessions/acme%2Fs"),
            (
                "/v1/agents/a/sessions/s/messages?detach=true",
                "/v1/agents/a/sessions/acme%2Fs/messages?detach=true",
            ),
            ("/v1/agents/a/sessions/acme%2Fs", "/v1/agents/a/sessions/acme%2Fs"),
            ("/v1/agents/a/sessions/acme%2fs", "/v1/agents/a/sessions/acme%2Fs"),
            ("/v1/agents/a/sessions/a%20b", "/v1/agents/a/sessions/acme%2Fa%20b"),
            ("/v1/agents/a/sessions", "/v1/agents/a/sessions"),
            ("/v1/agents/a/logs?after=1", "/v1/agents/a/logs?after=1"),
            ("/a/b/c/d/e/f", "/a/b/c/d/e/f"),
        ] {
            assert_eq!(named(uri, &caller("acme")).unwrap(), expected);
        }
        assert_eq!(named("/v1/agents/a/sessions/s", &caller("local")).unwrap(), "/v1/agents/a/sessions/s");
    }

    #[test]
    fn rejects_sessions_of_other_tenants() {
        for (uri, tenant) in [
            ("/v1/agents/a/sessions/other%2Fs", "acme"),
            ("/v1/agents/a/sessions/other%2fs/turns/t", "acme"),
            ("/v1/agents/a/sessions/acme%2Fs", "local"),
            ("/v1/agents/a/sessions/local%2Fs", "local"),
        ] {
            assert!(named(uri, &caller(tenant)).is_err(), "{uri} as {tenant}");
        }
    }

    #[test]
    fn the_operator_can_name_sessions_of_all_tenants() {
        let operator = Caller::operator();
        for (session, expected) in [("acme%2Fs", "acme%2Fs"), ("s", "s"), ("local%2Fs", "s")] {
            let uri = format!("/v1/agents/a/sessions/{session}/export");
            let expected = format!("/v1/agents/a/sessions/{expected}/export");
            assert_eq!(named(&uri, &operator).unwrap(), expected);
        }
        for session in ["acme%2Fs%2Ft", "%2Fs", "Acme%2Fs"] {
            assert!(named(&format!("/v1/agents/a/sessions/{session}"), &operator).is_err(), "{session}");
        }
    }
}
