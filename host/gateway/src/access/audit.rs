//! The audit log: one line for each operator action, at the target `skep::audit`, with who did what and the result.
//!
//! A table defines which requests are logged, so a handler cannot forget to log one. A handler adds details that only
//! it knows, such as the id of a created object, to its response as [`Details`].

use crate::{
    caller::{Caller, RequestId, Requester},
    client_address::ClientAddress,
};
use axum::{
    extract::{MatchedPath, Query, RawPathParams},
    http::{Extensions, Method, StatusCode, request::Parts},
};
use skep_runtime::tenant_of;
use std::{
    collections::{HashMap, hash_map::Entry},
    fmt::Write,
    net::IpAddr,
    sync::{Mutex, PoisonError},
    time::{Duration, Instant},
};

/// The logged actions by method and route: the action's name, and whether it is logged for all callers or only for
/// admins.
const AUDITED_ACTIONS: &[(Method, &str, &str, LoggedFor)] = &[
    (Method::POST, "/v1/agents", "agent.deploy", LoggedFor::Everyone),
    (Method::DELETE, "/v1/agents/{agent}", "agent.delete", LoggedFor::Everyone),
    (Method::POST, "/v1/agents/{agent}/rollback", "agent.rollback", LoggedFor::Everyone),
    (Method::PUT, "/v1/agents/{agent}/sessions/{session}", "session.import", LoggedFor::Admins),
    (Method::DELETE, "/v1/agents/{agent}/sessions/{session}", "session.delete", LoggedFor::Admins),
    (Method::GET, "/v1/agents/{agent}/sessions/{session}", "session.read", LoggedFor::OtherTenants),
    (Method::GET, "/v1/agents/{agent}/sessions/{session}/messages", "session.read", LoggedFor::OtherTenants),
    (Method::GET, "/v1/agents/{agent}/sessions/{session}/state", "session.read", LoggedFor::OtherTenants),
    (Method::GET, "/v1/agents/{agent}/sessions/{session}/export", "session.read", LoggedFor::OtherTenants),
    (
        Method::GET,
        "/v1/agents/{agent}/sessions/{session}/turns/{turn}",
        "session.read",
        LoggedFor::OtherTenants,
    ),
    (
        Method::GET,
        "/v1/agents/{agent}/sessions/{session}/turns/{turn}/events",
        "session.read",
        LoggedFor::OtherTenants,
    ),
    (Method::GET, "/v1/agents/{agent}/sessions/{session}/turns", "session.read", LoggedFor::OtherTenants),
    (
        Method::GET,
        "/v1/agents/{agent}/sessions/{session}/turns/{turn}/timeline",
        "session.read",
        LoggedFor::OtherTenants,
    ),
    (Method::GET, "/v1/sessions", "sessions.search", LoggedFor::Searchers),
    (Method::GET, "/v1/agents/{agent}/logs", "logs.read", LoggedFor::AdminsWithKeys),
    (Method::GET, "/v1/logs", "logs.read", LoggedFor::AdminsWithKeys),
    (Method::GET, "/v1/approvals", "approvals.read", LoggedFor::AdminsWithKeys),
    (Method::GET, "/v1/schedules", "schedules.read", LoggedFor::AdminsWithKeys),
    (Method::GET, "/v1/events", "events.read", LoggedFor::AdminsWithKeys),
    (Method::GET, "/v1/webhooks/dead-letters", "dead_letters.read", LoggedFor::AdminsWithKeys),
    (Method::GET, "/v1/requests", "requests.read", LoggedFor::ReadersOfBodies),
    (Method::GET, "/v1/requests/{id}", "request.read", LoggedFor::Everyone),
    (Method::POST, "/v1/approvals/{id}", "approval.decide", LoggedFor::Everyone),
    (Method::DELETE, "/v1/agents/{agent}/schedules/{id}", "schedule.cancel", LoggedFor::Everyone),
    (Method::POST, "/v1/agents/{agent}/schedules/{id}/run", "schedule.run", LoggedFor::Everyone),
    (Method::POST, "/v1/webhooks", "webhook.add", LoggedFor::Everyone),
    (Method::DELETE, "/v1/webhooks/{webhook}", "webhook.remove", LoggedFor::Everyone),
    (Method::POST, "/v1/webhooks/{webhook}/test", "webhook.test", LoggedFor::Everyone),
    (Method::POST, "/v1/webhooks/dead-letters/{id}/redeliver", "webhook.redeliver", LoggedFor::Everyone),
    (Method::POST, "/v1/config/reload", "config.reload", LoggedFor::Everyone),
    (Method::POST, "/v1/cluster/hosts/{number}/drain", "cluster.drain", LoggedFor::Everyone),
    (Method::POST, "/v1/held", "held.decide", LoggedFor::Everyone),
    (Method::DELETE, "/v1/kv", "kv.purge", LoggedFor::Everyone),
    (Method::POST, "/v1/agents/{agent}/sessions/{session}/pin", "session.pin", LoggedFor::Everyone),
    (Method::DELETE, "/v1/agents/{agent}/sessions/{session}/pin", "session.unpin", LoggedFor::Everyone),
    (Method::POST, "/v1/keys", "key.create", LoggedFor::Everyone),
    (Method::DELETE, "/v1/keys/{key}", "key.revoke", LoggedFor::Everyone),
    (Method::DELETE, "/v1/tenants/{tenant}", "tenant.delete", LoggedFor::Everyone),
    (Method::POST, "/v1/models", "model.change", LoggedFor::Everyone),
    (Method::PUT, "/v1/secrets/{name}", "secret.set", LoggedFor::Everyone),
    (Method::DELETE, "/v1/secrets/{name}", "secret.delete", LoggedFor::Everyone),
];

/// The callers whose actions are logged. Requests that are denied are logged, too, as refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum LoggedFor {
    Everyone,
    /// Logs only admins, because actions of clients on their own sessions are not operator actions.
    Admins,
    /// Logs reads of another tenant's content, which only admins can make.
    OtherTenants,
    /// Logs reads of lists with content of every tenant. Without keys, there is only one tenant.
    AdminsWithKeys,
    /// Logs searches of what was said in sessions of other tenants, which only admins can make.
    Searchers,
    /// Logs reads and searches of prompts and answers.
    ReadersOfBodies,
}

/// The reads that were logged in the last minute. A page of the console reads the same again every few seconds, and one line
/// a minute says as much.
#[derive(Default)]
pub(crate) struct LoggedReads(Mutex<HashMap<Read, Instant>>);

/// A read that is logged: its key, the name of the action, and its subject.
type Read = (Option<String>, &'static str, String);

const REPEATED: Duration = Duration::from_secs(60);
/// Maximum number of reads that are remembered; past it, all are forgotten.
const REMEMBERED: usize = 4096;

impl LoggedReads {
    /// Returns whether a read is the first of its minute.
    fn is_new(&self, read: Read) -> bool {
        let now = Instant::now();
        let mut reads = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if reads.len() >= REMEMBERED {
            reads.retain(|_, logged| now.duration_since(*logged) < REPEATED);
        }
        if reads.len() >= REMEMBERED {
            reads.clear();
        }
        match reads.entry(read) {
            Entry::Occupied(logged) if now.duration_since(*logged.get()) < REPEATED => false,
            entry => {
                entry.insert_entry(now);
                true
            }
        }
    }
}

/// Details that a handler adds to the audit line.
#[derive(Clone, Debug)]
pub(crate) struct Details(pub(crate) String);

/// An audit line, written when it is dropped, so that it is logged even if the client disconnects before the
/// response.
pub(super) struct AuditedAction {
    name: &'static str,
    requester: Requester,
    role: &'static str,
    client: Option<IpAddr>,
    request_id: Option<String>,
    /// The parameters of the path.
    subject: String,
    /// `None` until the action is complete. If the client disconnects before, the result is unknown.
    status: Option<StatusCode>,
    details: Option<Details>,
}

impl AuditedAction {
    /// Returns the action of a request, if it is one that is logged.
    pub(super) fn of(
        parts: &Parts,
        caller: &Caller,
        parameters: Option<&RawPathParams>,
        reads: &LoggedReads,
    ) -> Option<AuditedAction> {
        let route = parts.extensions.get::<MatchedPath>()?.as_str();
        let known = AUDITED_ACTIONS.iter().find(|(known, path, ..)| *known == parts.method && *path == route);
        let (.., name, of) = known?;
        // A query that cannot be read is refused before anything is.
        let pairs = Query::<Vec<(String, String)>>::try_from_uri(&parts.uri);
        let pairs = pairs.map(|Query(pairs)| pairs).unwrap_or_default();
        let query = |name: &str| {
            let pair = pairs.iter().find(|(known, _)| known == name);
            pair.map(|(_, value)| value.as_str())
        };
        let is_logged = match of {
            LoggedFor::Everyone => true,
            LoggedFor::Admins => caller.is_admin(),
            LoggedFor::AdminsWithKeys => caller.is_admin() && caller.key().is_some(),
            LoggedFor::Searchers => {
                let is_search = query("text").is_some_and(|text| !text.is_empty());
                let of_others = query("tenant").is_none_or(|tenant| tenant != caller.tenant.as_str());
                is_search && of_others && caller.is_admin() && caller.key().is_some()
            }
            LoggedFor::ReadersOfBodies => query("q").is_some() || query("bodies") == Some("true"),
            LoggedFor::OtherTenants => parameters.is_some_and(|parameters| {
                let session = parameters.iter().find(|(name, _)| *name == "session");
                session.is_some_and(|(_, session)| tenant_of(session) != caller.tenant.as_str())
            }),
        };
        if !is_logged {
            return None;
        }
        let subject = match of {
            LoggedFor::Searchers => {
                subject(["tenant", "agent"].into_iter().filter_map(|name| Some((name, query(name)?))))
            }
            _ => parameters.map(|parameters| subject(parameters.iter())).unwrap_or_default(),
        };
        let requester = caller.requester();
        let is_read = parts.method == Method::GET;
        if is_read && !reads.is_new((requester.key.clone(), name, subject.clone())) {
            return None;
        }
        Some(AuditedAction {
            name,
            requester,
            role: caller.role(),
            client: parts.extensions.get::<ClientAddress>().map(|client| client.0),
            request_id: parts.extensions.get::<RequestId>().map(|id| id.0.clone()),
            subject,
            status: None,
            details: None,
        })
    }

    pub(super) fn ended(mut self, status: StatusCode, extensions: &mut Extensions) {
        self.status = Some(status);
        self.details = extensions.remove();
    }
}

/// Writes the line of a decision about a call that was made over an open connection, not by a request of its own.
pub(crate) fn audit_decision(caller: &Caller, id: &str, details: &str, done: bool) {
    let status = if done { StatusCode::OK } else { StatusCode::CONFLICT };
    drop(AuditedAction {
        name: "approval.decide",
        requester: caller.requester(),
        role: caller.role(),
        client: None,
        request_id: None,
        subject: format!("id={id}"),
        status: Some(status),
        details: Some(Details(details.to_owned())),
    });
}

/// Formats parameters, such as `agent=concierge version=2`.
fn subject<'a>(parameters: impl Iterator<Item = (&'a str, &'a str)>) -> String {
    let mut subject = String::new();
    for (name, value) in parameters {
        let space = if subject.is_empty() { "" } else { " " };
        let _ = write!(subject, "{space}{name}={value}");
    }
    subject
}

impl Drop for AuditedAction {
    fn drop(&mut self) {
        let result = match self.status {
            Some(status) if status.is_success() => "done",
            Some(status) if status.is_server_error() => "failed",
            Some(_) => "refused",
            None => "unknown",
        };
        tracing::info!(
            target: "skep::audit",
            parent: None,
            act = self.name,
            request_id = self.request_id,
            by = self.requester.key.as_deref().unwrap_or("operator"),
            tenant = self.requester.tenant.as_str(),
            role = self.role,
            client = self.client.map(tracing::field::display),
            subject = self.subject,
            details = self.details.as_ref().map(|details| details.0.as_str()),
            result,
            status = self.status.map(|status| status.as_u16()),
            "operator action"
        );
    }
}

#[cfg(test)]
mod tests {
    use super::{super::roles, *};

    #[test]
    fn every_changing_admin_route_is_audited() {
        let changing = roles::of_admins().filter(|(method, _)| *method != Method::GET);
        let mut known = 0;
        for (method, path) in changing {
            let is_act = AUDITED_ACTIONS.iter().any(|(known, route, ..)| *known == method && *route == path);
            assert!(is_act, "{method} {path} needs a line in AUDITED_ACTIONS");
            known += 1;
        }
        assert_eq!(
            known,
            AUDITED_ACTIONS
                .iter()
                .filter(|(method, .., of)| *method != Method::GET && *of == LoggedFor::Everyone)
                .count(),
            "an entry of AUDITED_ACTIONS is not a route"
        );
    }
}
