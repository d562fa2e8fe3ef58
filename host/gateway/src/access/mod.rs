//! Authenticates and authorizes requests before any handler sees them.
//!
//! [`guard`] refuses web pages that the operator did not allow. [`identify`] runs before a request is matched to its
//! route: it determines the caller's tenant and writes the tenant's name into the path of a session, so that no
//! handler can reach a session of another tenant by omitting a check. [`authorize`] runs after the route is known and
//! checks the role that it needs; a route that is not in the table of `roles` needs an admin. Requests that invoke
//! something are then counted (`rates`).

mod audit;
mod presented_key;
pub(crate) mod roles;
mod session_path;
mod web_pages;

pub(crate) use audit::{Details, LoggedReads, audit_decision};
pub(crate) use web_pages::guard;

use crate::{
    ApiError, Gateway,
    caller::{Caller, Requester},
    client_address::ClientAddress,
    rates::{RateStatus, Refusal},
    spent::Spent,
    workers_ai::failure::Failure,
};
use audit::AuditedAction;
use axum::{
    extract::{FromRequestParts, MatchedPath, RawPathParams, Request, State},
    http::{Extensions, HeaderMap, StatusCode, header},
    middleware::Next,
    response::{IntoResponse, Response},
};
use skep_runtime::RuntimeError;

/// Whether requests need a key.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AccessOptions {
    /// Whether every request except health checks needs a key. If not, every caller is the operator.
    pub keys_required: bool,
    /// Whether `/metrics` needs no key.
    pub open_metrics: bool,
    /// Whether only requests to names of the local machine are accepted. This protects a host without keys, where
    /// every caller is the operator.
    pub local_names_only: bool,
}

/// Marks a request that needs a key: this host requires one, or the host of the cluster that has passed the request on.
#[derive(Clone, Copy, Debug)]
pub(crate) struct NeedsKey;

/// The result of [`identify`], for [`authorize`].
#[derive(Clone)]
struct Identity(Result<Caller, ApiError>);

/// Returns the caller of a request and its token counts, for logs.
pub(crate) fn requester(extensions: &Extensions) -> (Option<Requester>, Spent) {
    match extensions.get::<Identity>() {
        Some(Identity(Ok(caller))) => (Some(caller.requester()), caller.spent().clone()),
        _ => (None, Spent::default()),
    }
}

/// Determines the caller. [`authorize`] decides about the result, because only then the route is known.
pub(crate) async fn identify(State(gateway): State<Gateway>, mut request: Request, next: Next) -> Response {
    if gateway.options.access.keys_required {
        request.extensions_mut().insert(NeedsKey);
    }
    let caller = if request.extensions().get::<NeedsKey>().is_some() {
        caller_by_key(&gateway, request.headers()).await
    } else {
        Ok(Caller::operator())
    };
    let caller = caller.and_then(|caller| {
        session_path::name_tenant(request.uri_mut(), &caller)?;
        Ok(caller)
    });
    let proxies = &gateway.options.trusted_proxies;
    // Another host of the cluster has already named the client.
    if request.extensions().get::<ClientAddress>().is_none()
        && let Some(client) = ClientAddress::of_request(request.extensions(), request.headers(), proxies)
    {
        request.extensions_mut().insert(client);
    }
    request.extensions_mut().insert(Identity(caller));
    next.run(request).await
}

async fn caller_by_key(gateway: &Gateway, headers: &HeaderMap) -> Result<Caller, ApiError> {
    let Some(key) = presented_key::of(headers)? else {
        let message = "this host requires an API key: send `authorization: Bearer skep_…`; `skep key create` creates one";
        let error = ApiError::new(StatusCode::UNAUTHORIZED, "missing_api_key", message);
        return Err(error.with_header(header::WWW_AUTHENTICATE, "Bearer realm=\"skep\""));
    };
    match gateway.host.keys().authenticate(key).await {
        Ok(key) => Ok(Caller::with(&key)),
        Err(error @ RuntimeError::KeyRefused { .. }) => Err(ApiError::from(error)
            .with_header(header::WWW_AUTHENTICATE, "Bearer realm=\"skep\", error=\"invalid_token\"")),
        Err(error) => Err(error.into()),
    }
}

/// Passes a request to its handler if the caller may make it, and writes its audit line.
pub(crate) async fn authorize(State(gateway): State<Gateway>, request: Request, next: Next) -> Response {
    let (request, act) = act_of(&gateway, request).await;
    let mut response = match admit(&gateway, request).await {
        Ok((request, status)) => {
            let mut response = next.run(request).await;
            status.write_headers(response.headers_mut());
            response
        }
        Err(refusal) => refusal,
    };
    if let Some(act) = act {
        act.ended(response.status(), response.extensions_mut());
    }
    response
}

/// Returns the audit action of a request, if it has one.
async fn act_of(gateway: &Gateway, request: Request) -> (Request, Option<AuditedAction>) {
    let (mut parts, body) = request.into_parts();
    let Some(Identity(Ok(caller))) = parts.extensions.get::<Identity>().cloned() else {
        return (Request::from_parts(parts, body), None);
    };
    let parameters = RawPathParams::from_request_parts(&mut parts, &()).await.ok();
    let act = AuditedAction::of(&parts, &caller, parameters.as_ref(), &gateway.reads);
    (Request::from_parts(parts, body), act)
}

async fn admit(gateway: &Gateway, request: Request) -> Result<(Request, RateStatus), Response> {
    let (mut parts, body) = request.into_parts();
    let route = parts.extensions.get::<MatchedPath>().map(|path| path.as_str().to_owned());
    let identity = parts.extensions.remove::<Identity>();
    let identity = identity
        .map_or_else(|| Err(ApiError::internal("the request was not authenticated")), |found| found.0);
    let need = roles::need(&parts.method, route.as_deref(), &gateway.options.access);
    let Some(role) = need else {
        return Ok((Request::from_parts(parts, body), RateStatus::default()));
    };
    let caller = identity.map_err(IntoResponse::into_response)?;
    caller.must_be(role).map_err(IntoResponse::into_response)?;
    if caller.is_narrow() {
        let parameters = RawPathParams::from_request_parts(&mut parts, &()).await;
        let parameters = parameters.map_err(IntoResponse::into_response)?;
        let agent = parameters.iter().find(|(name, _)| *name == "agent").map(|(_, agent)| agent);
        let narrowed = match agent {
            Some(agent) => caller.may_reach(agent),
            // The handlers of these routes check the agents themselves.
            None if roles::is_narrowed(route.as_deref()) => Ok(()),
            None => Err(caller.refuse_wide()),
        };
        narrowed.map_err(IntoResponse::into_response)?;
    }
    let mut status = RateStatus::default();
    if roles::is_counted(&parts.method, route.as_deref(), &gateway.options.access) {
        let address = parts.extensions.get::<ClientAddress>().map(|client| client.0);
        let counted = gateway.options.rates.admit(&caller, address);
        status = counted.map_err(|refusal| over_limit(refusal, route.as_deref()))?;
    }
    parts.extensions.insert(caller);
    Ok((Request::from_parts(parts, body), status))
}

/// Returns the response to a request over a rate limit, in the shape of its route.
fn over_limit(refusal: Refusal, route: Option<&str>) -> Response {
    let status = refusal.status;
    let error = refusal.into_error();
    let mut response = match roles::is_of_workers_ai(route) {
        true => Failure::from(error).into_response(),
        false => error.into_response(),
    };
    status.write_headers(response.headers_mut());
    response
}
