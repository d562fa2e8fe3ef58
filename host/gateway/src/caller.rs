//! The caller of a request, and the id of the request. Handlers take the caller as an argument; there is no other way
//! to obtain it. The module `access` determines it.

use crate::{ApiError, Gateway, spent::Spent};
use axum::{
    extract::FromRequestParts,
    http::{StatusCode, request::Parts},
};
use skep_engine::{Affinity, Observer, ServedModel};
use skep_runtime::{AgentName, ApiKey, RequestOrigin, Role, Surface, Tenant, plain_session, tenant_of};
use std::{num::NonZeroU32, sync::Arc};

/// An authenticated caller: a tenant in a role.
#[derive(Clone, Debug)]
pub(crate) struct Caller {
    pub(crate) tenant: Tenant,
    role: Role,
    /// The agents that the caller may reach. `None` means all agents, and the models.
    agents: Option<Vec<AgentName>>,
    /// The key's id, or `None` where no key is required.
    key: Option<String>,
    requests_per_minute: Option<NonZeroU32>,
    /// Whether the caller may read what was said in requests to models.
    reads_bodies: bool,
    spent: Spent,
}

/// The caller's identity, for logs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Requester {
    pub(crate) tenant: Tenant,
    /// The key's id, or `None` where no key is required.
    pub(crate) key: Option<String>,
}

/// The id of a request, stored in its extensions.
#[derive(Clone, Debug)]
pub(crate) struct RequestId(pub(crate) String);

impl Caller {
    /// Returns the caller of every request where no key is required.
    pub(crate) fn operator() -> Self {
        Caller {
            tenant: Tenant::local(),
            role: Role::Admin,
            agents: None,
            key: None,
            requests_per_minute: None,
            reads_bodies: true,
            spent: Spent::default(),
        }
    }

    pub(crate) fn with(key: &ApiKey) -> Self {
        let ApiKey { id, tenant, role, agents, requests_per_minute, bodies, .. } = key.clone();
        let (key, spent) = (Some(id), Spent::default());
        Caller { tenant, role, agents, key, requests_per_minute, reads_bodies: bodies, spent }
    }

    /// Returns the key's id, if a key was required.
    pub(crate) fn key(&self) -> Option<&str> {
        self.key.as_deref()
    }

    pub(crate) fn requester(&self) -> Requester {
        Requester { tenant: self.tenant.clone(), key: self.key.clone() }
    }

    pub(crate) fn role(&self) -> &'static str {
        self.role.as_str()
    }

    /// Returns the token counts of this request for the access log.
    pub(crate) fn spent(&self) -> &Spent {
        &self.spent
    }

    /// Returns the key's own rate limit.
    pub(crate) fn requests_per_minute(&self) -> Option<NonZeroU32> {
        self.requests_per_minute
    }

    /// Returns the name that deployments and approvals record for the caller.
    pub(crate) fn name(&self) -> String {
        self.key.clone().unwrap_or_else(|| self.tenant.to_string())
    }

    /// Returns the host's id of a session that the caller names. An admin may name a session of any tenant as
    /// `TENANT/ID`.
    pub(crate) fn session(&self, id: &str) -> Result<String, ApiError> {
        match id.split_once('/') {
            Some((tenant, id)) if self.is_admin() => Ok(Tenant::new(tenant)?.session(id)?),
            _ => Ok(self.tenant.session(id)?),
        }
    }

    /// Returns the name that the caller uses for a session, given the host's id.
    pub(crate) fn name_of(&self, session: &str) -> String {
        let is_own = tenant_of(session) == self.tenant.as_str();
        if is_own { plain_session(session).to_owned() } else { session.to_owned() }
    }

    /// Returns the tenant whose sessions are requested. Naming another tenant needs an admin.
    pub(crate) fn tenant(&self, named: Option<&str>) -> Result<Tenant, ApiError> {
        match named {
            Some(name) if name != self.tenant.as_str() => {
                self.must_be(Role::Admin)?;
                Ok(Tenant::new(name)?)
            }
            _ => Ok(self.tenant.clone()),
        }
    }

    pub(crate) fn is_admin(&self) -> bool {
        self.role == Role::Admin
    }

    /// Returns the affinity for this tenant's cached prefixes.
    pub(crate) fn affinity(&self, session: Option<String>, parent: Option<String>) -> Affinity {
        Affinity { tenant: self.tenant.to_string(), session, parent, ..Affinity::default() }
    }

    pub(crate) fn must_be(&self, role: Role) -> Result<(), ApiError> {
        if self.role.may(role) {
            return Ok(());
        }
        let message =
            format!("this request needs a key with the role `{role}`; {} has `{}`", self.name(), self.role);
        Err(forbidden("role_missing", message))
    }

    /// Returns whether the caller may read what was said in requests to models.
    pub(crate) fn reads_bodies(&self) -> bool {
        self.reads_bodies
    }

    pub(crate) fn must_read_bodies(&self) -> Result<(), ApiError> {
        if self.reads_bodies {
            return Ok(());
        }
        let message = format!(
            "this request needs a key that may read bodies, which {} may not; an operator creates one with `skep key \
             create --bodies`",
            self.name()
        );
        Err(forbidden("role_missing", message))
    }

    /// Returns the observer of requests of this caller that name a model, if they are logged.
    pub(crate) fn observer(
        &self,
        gateway: &Gateway,
        surface: Surface,
        asked: Option<&str>,
        streamed: bool,
    ) -> Option<Arc<dyn Observer>> {
        let origin = RequestOrigin::of_client(self.tenant.as_str(), self.key(), surface);
        gateway.host.requests().observer(origin.asking(asked).streamed(streamed))
    }

    /// Returns the agents that the caller may reach, unless it may reach all.
    pub(crate) fn agents(&self) -> Option<&[AgentName]> {
        self.agents.as_deref()
    }

    /// Returns whether the caller may reach only some agents.
    pub(crate) fn is_narrow(&self) -> bool {
        self.agents.is_some()
    }

    pub(crate) fn refuse_wide(&self) -> ApiError {
        forbidden("key_is_for_agents", format!("{} is for {} only", self.name(), self.agent_names()))
    }

    /// Returns whether the caller may reach an agent and sees it in lists.
    pub(crate) fn reaches(&self, agent: &str) -> bool {
        self.agents.as_ref().is_none_or(|agents| agents.iter().any(|known| known.as_str() == agent))
    }

    /// Checks access to an agent, for handlers that learn the agent from something other than the path.
    pub(crate) fn may_reach(&self, agent: &str) -> Result<(), ApiError> {
        if self.reaches(agent) { Ok(()) } else { Err(self.refuse_wide()) }
    }

    /// Checks that the caller may use a model without an agent.
    pub(crate) fn may_use(&self, gateway: &Gateway, model: &ServedModel) -> Result<(), ApiError> {
        if self.is_narrow() {
            return Err(self.refuse_wide());
        }
        let allowed = gateway.host.may_use_model(self.tenant.as_str(), self.is_admin(), model);
        allowed.map_err(|why| forbidden("model_not_granted", why))
    }

    fn agent_names(&self) -> String {
        let names = self.agents.iter().flatten().map(|name| format!("agent {name}"));
        names.collect::<Vec<_>>().join(", ")
    }
}

impl<S: Sync> FromRequestParts<S> for Caller {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, _state: &S) -> Result<Self, ApiError> {
        let caller = parts.extensions.get::<Caller>().cloned();
        caller.ok_or_else(|| ApiError::internal("a route without authentication requires a caller"))
    }
}

fn forbidden(code: &'static str, message: String) -> ApiError {
    ApiError::new(StatusCode::FORBIDDEN, code, message)
}
