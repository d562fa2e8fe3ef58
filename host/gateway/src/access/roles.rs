//! The role that each route needs. A route that is not in this table needs an admin.

use super::AccessOptions;
use crate::console::PAGES;
use axum::http::Method;
use skep_runtime::Role::{self, Admin, Invoke, Metrics, Read};

/// Roles by method and route. HEAD is treated as GET.
const ROUTES: &[(Method, &str, Role)] = &[
    (Method::GET, "/v1/agents", Read),
    (Method::POST, "/v1/agents", Admin),
    (Method::GET, "/v1/agents/{agent}", Read),
    (Method::DELETE, "/v1/agents/{agent}", Admin),
    (Method::GET, "/v1/agents/{agent}/versions", Read),
    (Method::POST, "/v1/agents/{agent}/rollback", Admin),
    (Method::GET, "/v1/agents/{agent}/logs", Read),
    (Method::GET, "/v1/agents/{agent}/sessions", Read),
    (Method::GET, "/v1/agents/{agent}/sessions/{session}", Read),
    (Method::PUT, "/v1/agents/{agent}/sessions/{session}", Invoke),
    (Method::DELETE, "/v1/agents/{agent}/sessions/{session}", Invoke),
    (Method::GET, "/v1/agents/{agent}/sessions/{session}/messages", Read),
    (Method::POST, "/v1/agents/{agent}/sessions/{session}/messages", Invoke),
    (Method::POST, "/v1/agents/{agent}/sessions/{session}/fork", Invoke),
    (Method::POST, "/v1/agents/{agent}/sessions/{session}/warm", Invoke),
    (Method::POST, "/v1/agents/{agent}/sessions/{session}/pin", Admin),
    (Method::DELETE, "/v1/agents/{agent}/sessions/{session}/pin", Admin),
    (Method::GET, "/v1/agents/{agent}/sessions/{session}/export", Read),
    (Method::GET, "/v1/agents/{agent}/sessions/{session}/turns/{turn}", Read),
    (Method::DELETE, "/v1/agents/{agent}/sessions/{session}/turns/{turn}", Invoke),
    (Method::GET, "/v1/agents/{agent}/sessions/{session}/turns/{turn}/events", Read),
    (Method::GET, "/v1/agents/{agent}/sessions/{session}/turns", Read),
    (Method::GET, "/v1/agents/{agent}/sessions/{session}/turns/{turn}/timeline", Read),
    (Method::GET, "/v1/agents/{agent}/sessions/{session}/state", Read),
    (Method::GET, "/v1/sessions", Read),
    (Method::GET, "/v1/approvals", Read),
    // The following routes concern all tenants.
    (Method::POST, "/v1/approvals/{id}", Admin),
    (Method::DELETE, "/v1/agents/{agent}/schedules/{id}", Admin),
    (Method::POST, "/v1/agents/{agent}/schedules/{id}/run", Admin),
    (Method::GET, "/v1/schedules", Admin),
    (Method::GET, "/v1/events", Admin),
    (Method::POST, "/v1/events", Invoke),
    (Method::GET, "/v1/webhooks", Admin),
    (Method::POST, "/v1/webhooks", Admin),
    (Method::DELETE, "/v1/webhooks/{webhook}", Admin),
    (Method::POST, "/v1/webhooks/{webhook}/test", Admin),
    (Method::GET, "/v1/webhooks/dead-letters", Admin),
    (Method::POST, "/v1/webhooks/dead-letters/{id}/redeliver", Admin),
    (Method::GET, "/v1/engine", Read),
    (Method::GET, "/v1/engine/load", Read),
    (Method::GET, "/v1/engine/pages", Admin),
    (Method::GET, "/v1/status", Admin),
    (Method::GET, "/v1/cluster", Read),
    (Method::POST, "/v1/cluster/hosts/{number}/drain", Admin),
    (Method::GET, "/v1/config", Admin),
    (Method::POST, "/v1/config/reload", Admin),
    (Method::GET, "/v1/held", Admin),
    (Method::POST, "/v1/held", Admin),
    (Method::GET, "/v1/mcp", Admin),
    (Method::POST, "/v1/chat/completions", Invoke),
    (Method::POST, "/v1/completions", Invoke),
    (Method::POST, "/v1/messages", Invoke),
    (Method::POST, "/v1/messages/count_tokens", Invoke),
    (Method::POST, "/v1/responses", Invoke),
    (Method::GET, "/v1/responses/{response}", Read),
    (Method::DELETE, "/v1/responses/{response}", Invoke),
    (Method::POST, "/v1/responses/{response}/cancel", Invoke),
    (Method::GET, "/v1/responses/{response}/input_items", Read),
    (Method::POST, "/v1/schemas/check", Invoke),
    (Method::POST, "/tokenize", Invoke),
    (Method::POST, "/detokenize", Invoke),
    (Method::POST, "/ai/run/{*model}", Invoke),
    (Method::POST, "/client/v4/accounts/{account}/ai/run/{*model}", Invoke),
    (Method::GET, "/ai/batches/{id}", Read),
    (Method::DELETE, "/ai/batches/{id}", Invoke),
    (Method::GET, "/v1/files", Read),
    (Method::POST, "/v1/files", Invoke),
    (Method::GET, "/v1/files/{id}", Read),
    (Method::DELETE, "/v1/files/{id}", Invoke),
    (Method::GET, "/v1/files/{id}/content", Read),
    (Method::GET, "/v1/batches", Read),
    (Method::POST, "/v1/batches", Invoke),
    (Method::GET, "/v1/batches/{id}", Read),
    (Method::POST, "/v1/batches/{id}/cancel", Invoke),
    (Method::GET, "/v1/caller", Read),
    (Method::GET, "/v1/keys", Admin),
    (Method::POST, "/v1/keys", Admin),
    (Method::DELETE, "/v1/keys/{key}", Admin),
    (Method::GET, "/v1/tenants", Admin),
    (Method::DELETE, "/v1/tenants/{tenant}", Admin),
    (Method::GET, "/v1/kv", Admin),
    (Method::DELETE, "/v1/kv", Admin),
    (Method::GET, "/v1/secrets", Admin),
    (Method::PUT, "/v1/secrets/{name}", Admin),
    (Method::DELETE, "/v1/secrets/{name}", Admin),
    (Method::GET, "/v1/logs", Read),
    (Method::GET, "/v1/usage", Read),
    (Method::GET, "/v1/limits", Read),
    (Method::GET, "/v1/requests", Read),
    (Method::GET, "/v1/requests/{id}", Read),
    (Method::GET, "/v1/models", Read),
    (Method::POST, "/v1/models", Admin),
    (Method::GET, "/v1/models/{*model}", Read),
    (Method::GET, "/mcp", Invoke),
    (Method::POST, "/mcp", Invoke),
    (Method::DELETE, "/mcp", Invoke),
    (Method::GET, "/mcp/{agent}", Invoke),
    (Method::POST, "/mcp/{agent}", Invoke),
    (Method::DELETE, "/mcp/{agent}", Invoke),
    (Method::GET, "/metrics", Metrics),
];

/// Routes without authentication: neither the health of the process nor the description of the routes is secret, and
/// signing in checks the key itself.
const OPEN: [&str; 4] = ["/healthz", "/openapi.json", "/readyz", "/ui/session"];

/// Routes without an agent in their path that keys for specific agents may use, because their handlers check the
/// caller.
const NARROWED: [&str; 11] = [
    "/v1/agents",
    "/v1/caller",
    "/v1/chat/completions",
    "/v1/responses",
    "/v1/responses/{response}",
    "/v1/responses/{response}/cancel",
    "/v1/responses/{response}/input_items",
    "/v1/models",
    "/v1/models/{*model}",
    "/v1/sessions",
    "/mcp",
];

/// Returns the role that a request needs, or `None` if it is open. A request that matches no route may be for an
/// agent's own route.
pub(crate) fn need(method: &Method, route: Option<&str>, options: &AccessOptions) -> Option<Role> {
    let Some(route) = route else { return Some(Invoke) };
    if OPEN.contains(&route) || PAGES.contains(&route) || (route == "/metrics" && options.open_metrics) {
        return None;
    }
    let method = if method == Method::HEAD { &Method::GET } else { method };
    let known = ROUTES.iter().find(|(known, path, _)| known == method && *path == route);
    Some(known.map_or(Admin, |(_, _, role)| *role))
}

/// Returns the routes that only an admin may use.
#[cfg(test)]
pub(super) fn of_admins() -> impl Iterator<Item = (Method, &'static str)> {
    let of_admins = ROUTES.iter().filter(|(.., role)| *role == Admin);
    of_admins.map(|(method, path, _)| (method.clone(), *path))
}

/// Returns whether the handler itself checks which agents the caller may reach.
pub(super) fn is_narrowed(route: Option<&str>) -> bool {
    route.is_none_or(|route| NARROWED.contains(&route))
}

/// Returns whether the request invokes something and counts toward the caller's rate limit. A caller over the limit may still
/// cancel, delete and listen.
pub(crate) fn is_counted(method: &Method, route: Option<&str>, options: &AccessOptions) -> bool {
    let cancels = route.is_some_and(|route| route.ends_with("/cancel"));
    let changes = matches!(*method, Method::POST | Method::PUT | Method::PATCH);
    let invokes = route.is_none() || (changes && !cancels);
    invokes && need(method, route, options) == Some(Invoke)
}

/// Returns whether the route responds in the shapes of Workers AI.
pub(super) fn is_of_workers_ai(route: Option<&str>) -> bool {
    route.is_some_and(|route| route.ends_with("/ai/run/{*model}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the routes of the router, from which the document is made.
    fn routes_of_the_router() -> Vec<(Method, String)> {
        let paths = crate::routes(&crate::GatewayOptions::default()).into_openapi().paths.paths;
        let paths = serde_json::to_value(&paths).unwrap();
        let paths = paths.as_object().unwrap().iter();
        let routes = paths.flat_map(|(path, methods)| {
            let methods = methods.as_object().unwrap().keys();
            methods.map(|method| (method.to_uppercase().parse().unwrap(), path.clone()))
        });
        routes.collect()
    }

    #[test]
    fn the_table_and_the_router_have_the_same_routes() {
        let routes = routes_of_the_router();
        // A browser signs in and out at one of the open paths.
        assert_eq!(routes.len(), ROUTES.len() + OPEN.len() + 1, "{routes:?}");
        for (method, path) in &routes {
            let listed = ROUTES.iter().any(|(known, route, _)| known == method && route == path);
            assert!(listed || OPEN.contains(&path.as_str()), "{method} {path} needs a line in ROUTES");
        }
        for (method, path, _) in ROUTES {
            assert!(routes.contains(&(method.clone(), (*path).to_owned())), "{method} {path} is not a route");
        }
    }

    #[test]
    fn session_routes_have_the_path_that_the_tenant_is_written_into() {
        for (_, path, _) in ROUTES.iter().filter(|(_, path, _)| path.contains("{session}")) {
            assert!(path.starts_with("/v1/agents/{agent}/sessions/{session}"), "{path}");
        }
    }

    #[test]
    fn a_route_that_is_not_listed_needs_an_admin() {
        let options = AccessOptions { keys_required: true, ..AccessOptions::default() };
        let need = |method, route| need(&method, route, &options);
        assert_eq!(need(Method::GET, Some("/v1/secrets")), Some(Admin));
        assert_eq!(need(Method::PUT, Some("/v1/models")), Some(Admin));
        assert_eq!(need(Method::HEAD, Some("/v1/models")), Some(Read));
        assert_eq!(need(Method::POST, None), Some(Invoke));
        assert_eq!(need(Method::GET, Some("/healthz")), None);
        assert_eq!(need(Method::GET, Some("/metrics")), Some(Metrics));
        let open = AccessOptions { open_metrics: true, ..options };
        assert_eq!(super::need(&Method::GET, Some("/metrics"), &open), None);
    }

    #[test]
    fn only_requests_that_invoke_something_are_counted() {
        let options = AccessOptions { keys_required: true, ..AccessOptions::default() };
        let counted: Vec<String> = ROUTES
            .iter()
            .filter(|(method, path, _)| is_counted(method, Some(path), &options))
            .map(|(method, path, _)| format!("{method} {path}"))
            .collect();
        assert_eq!(
            counted,
            [
                "PUT /v1/agents/{agent}/sessions/{session}",
                "POST /v1/agents/{agent}/sessions/{session}/messages",
                "POST /v1/agents/{agent}/sessions/{session}/fork",
                "POST /v1/agents/{agent}/sessions/{session}/warm",
                "POST /v1/events",
                "POST /v1/chat/completions",
                "POST /v1/completions",
                "POST /v1/messages",
                "POST /v1/messages/count_tokens",
                "POST /v1/responses",
                "POST /v1/schemas/check",
                "POST /tokenize",
                "POST /detokenize",
                "POST /ai/run/{*model}",
                "POST /client/v4/accounts/{account}/ai/run/{*model}",
                "POST /v1/files",
                "POST /v1/batches",
                "POST /mcp",
                "POST /mcp/{agent}",
            ]
        );
        assert!(is_counted(&Method::GET, None, &options), "an agent's own route");
        for open in OPEN {
            assert!(!is_counted(&Method::GET, Some(open), &options), "{open}");
        }
    }
}
