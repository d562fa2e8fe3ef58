//! The audit log: one line for each act of an operator, at the target `skep::audit`: who did what, and what came of it.
//!
//! Which requests are acts is a table, so that a handler cannot forget to tell. What only a handler knows, such as the id of
//! what it made, it puts on its answer as [`Details`].

use super::{Caller, Requester};
use crate::{client_address::ClientAddress, trace::RequestId};
use axum::{
    extract::{MatchedPath, RawPathParams},
    http::{Extensions, Method, StatusCode, request::Parts},
};
use std::{fmt::Write, net::IpAddr};

/// By method and path as the router knows it, what the act is called, and whether it is one only if an admin does it.
const ACTS: &[(Method, &str, &str, Of)] = &[
    (Method::POST, "/v1/agents", "agent.deploy", Of::Everyone),
    (Method::DELETE, "/v1/agents/{agent}", "agent.delete", Of::Everyone),
    (Method::POST, "/v1/agents/{agent}/rollback", "agent.rollback", Of::Everyone),
    (Method::PUT, "/v1/agents/{agent}/sessions/{session}", "session.import", Of::Admins),
    (Method::DELETE, "/v1/agents/{agent}/sessions/{session}", "session.delete", Of::Admins),
    (Method::POST, "/v1/approvals/{id}", "approval.decide", Of::Everyone),
    (Method::DELETE, "/v1/agents/{agent}/schedules/{id}", "schedule.cancel", Of::Everyone),
    (Method::POST, "/v1/agents/{agent}/schedules/{id}/run", "schedule.run", Of::Everyone),
    (Method::POST, "/v1/webhooks", "webhook.add", Of::Everyone),
    (Method::DELETE, "/v1/webhooks/{webhook}", "webhook.remove", Of::Everyone),
    (Method::POST, "/v1/webhooks/{webhook}/test", "webhook.test", Of::Everyone),
    (Method::POST, "/v1/webhooks/dead-letters/{id}/redeliver", "webhook.redeliver", Of::Everyone),
    (Method::POST, "/v1/held", "held.decide", Of::Everyone),
    (Method::POST, "/v1/keys", "key.create", Of::Everyone),
    (Method::DELETE, "/v1/keys/{key}", "key.revoke", Of::Everyone),
    (Method::PUT, "/v1/secrets/{name}", "secret.set", Of::Everyone),
    (Method::DELETE, "/v1/secrets/{name}", "secret.delete", Of::Everyone),
];

/// Whose acts are told. Those who may not do something are told too, as refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Of {
    Everyone,
    /// What clients do to their own sessions is no act of an operator.
    Admins,
}

/// What a handler adds to the line of its act.
#[derive(Clone, Debug)]
pub(crate) struct Details(pub(crate) String);

/// A line that is written when it is dropped: also if the client went away before it was answered.
pub(super) struct Act {
    name: &'static str,
    requester: Requester,
    role: &'static str,
    client: Option<IpAddr>,
    request_id: Option<String>,
    /// The parameters of the path.
    subject: String,
    /// `None` until the act is over: what came of it is not known, if the client went away.
    status: Option<StatusCode>,
    details: Option<Details>,
}

impl Act {
    /// What the request is an act of, if it is one.
    pub(super) fn of(parts: &Parts, caller: &Caller, parameters: Option<&RawPathParams>) -> Option<Act> {
        let route = parts.extensions.get::<MatchedPath>()?.as_str();
        let known = ACTS.iter().find(|(known, path, ..)| *known == parts.method && *path == route);
        let (.., name, _) = known.filter(|(.., of)| *of == Of::Everyone || caller.is_admin())?;
        Some(Act {
            name,
            requester: caller.requester(),
            role: caller.role(),
            client: parts.extensions.get::<ClientAddress>().map(|client| client.0),
            request_id: parts.extensions.get::<RequestId>().map(|id| id.0.clone()),
            subject: parameters.map(subject).unwrap_or_default(),
            status: None,
            details: None,
        })
    }

    pub(super) fn ended(mut self, status: StatusCode, extensions: &mut Extensions) {
        self.status = Some(status);
        self.details = extensions.remove();
    }
}

/// The parameters of a path, as `agent=concierge version=2`.
fn subject(parameters: &RawPathParams) -> String {
    let mut subject = String::new();
    for (name, value) in parameters {
        let space = if subject.is_empty() { "" } else { " " };
        let _ = write!(subject, "{space}{name}={value}");
    }
    subject
}

impl Drop for Act {
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
            "act of an operator"
        );
    }
}

#[cfg(test)]
mod tests {
    use super::{super::roles, *};

    #[test]
    fn every_route_that_changes_something_and_needs_an_admin_is_an_act() {
        let changing = roles::of_admins().filter(|(method, _)| *method != Method::GET);
        let mut known = 0;
        for (method, path) in changing {
            let is_act = ACTS.iter().any(|(known, route, ..)| *known == method && *route == path);
            assert!(is_act, "{method} {path} needs a line in ACTS");
            known += 1;
        }
        assert_eq!(
            known,
            ACTS.iter().filter(|(.., of)| *of == Of::Everyone).count(),
            "a line that is no route"
        );
    }
}
