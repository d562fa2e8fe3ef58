//! A prefill host answers clients only about itself. Its models are for other hosts.

use crate::ApiError;
use axum::http::StatusCode;

/// Returns whether a request is about the host, and not about agents, sessions or models.
pub(super) fn is_about_host(path: &str) -> bool {
    let under =
        |route: &str| path.strip_prefix(route).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'));
    [
        "/healthz",
        "/readyz",
        "/metrics",
        "/openapi.json",
        "/v1/status",
        "/v1/engine",
        "/v1/kv",
        "/v1/config",
        "/v1/cluster",
    ]
    .into_iter()
    .any(under)
}

/// Returns the error for any other request.
pub(super) fn refused() -> ApiError {
    let message = "this host only computes prompts for other hosts (--role prefill); send the request to another host of the cluster, \
                   or to the balancer in front of them";
    ApiError::new(StatusCode::MISDIRECTED_REQUEST, "prefill_host", message)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_routes_about_the_host_are_answered() {
        for own in
            ["/healthz", "/v1/status", "/v1/engine", "/v1/engine/load", "/v1/cluster", "/v1/config/reload"]
        {
            assert!(is_about_host(own), "{own}");
        }
        for other in ["/v1/chat/completions", "/v1/agents", "/v1/enginery", "/mcp", "/ui", "/", "/v1/models"]
        {
            assert!(!is_about_host(other), "{other}");
        }
    }
}
