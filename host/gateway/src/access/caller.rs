//! Who asks. Handlers take it as an argument; there is no other way to learn it.

use crate::{ApiError, spent::Spent};
use axum::{
    extract::FromRequestParts,
    http::{StatusCode, request::Parts},
};
use skep_engine::Affinity;
use skep_runtime::{AgentName, ApiKey, Role, Tenant, plain_session, tenant_of};
use std::num::NonZeroU32;

/// A tenant, in a role.
#[derive(Clone, Debug)]
pub(crate) struct Caller {
    pub(crate) tenant: Tenant,
    role: Role,
    /// The agents that it may reach; `None` is all of them, and the models.
    agents: Option<Vec<AgentName>>,
    /// The key's id; `None` where no key is asked for.
    key: Option<String>,
    requests_per_minute: Option<NonZeroU32>,
    spent: Spent,
}

/// Who asks, for logs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Requester {
    pub(crate) tenant: Tenant,
    /// The key's id; `None` where no key is asked for.
    pub(crate) key: Option<String>,
}

impl Caller {
    /// Everyone, where no key is asked for.
    pub(super) fn operator() -> Self {
        Caller {
            tenant: Tenant::local(),
            role: Role::Admin,
            agents: None,
            key: None,
            requests_per_minute: None,
            spent: Spent::default(),
        }
    }

    pub(super) fn with(key: &ApiKey) -> Self {
        let ApiKey { id, tenant, role, agents, requests_per_minute, .. } = key.clone();
        Caller { tenant, role, agents, key: Some(id), requests_per_minute, spent: Spent::default() }
    }

    /// The key's id, where one is asked for.
    pub(crate) fn key(&self) -> Option<&str> {
        self.key.as_deref()
    }

    pub(crate) fn requester(&self) -> Requester {
        Requester { tenant: self.tenant.clone(), key: self.key.clone() }
    }

    pub(super) fn role(&self) -> &'static str {
        self.role.as_str()
    }

    /// Where the tokens of the answer are counted for the access log.
    pub(crate) fn spent(&self) -> &Spent {
        &self.spent
    }

    /// The key's own limit.
    pub(crate) fn requests_per_minute(&self) -> Option<NonZeroU32> {
        self.requests_per_minute
    }

    /// How a deployment names who made it.
    pub(crate) fn name(&self) -> String {
        self.key.clone().unwrap_or_else(|| self.tenant.to_string())
    }

    /// The host's id of a session that the caller names. An admin may name one of any tenant, as `TENANT/ID`.
    pub(crate) fn session(&self, id: &str) -> Result<String, ApiError> {
        match id.split_once('/') {
            Some((tenant, id)) if self.is_admin() => Ok(Tenant::new(tenant)?.session(id)?),
            _ => Ok(self.tenant.session(id)?),
        }
    }

    /// What the caller calls a session, by the host's id of it.
    pub(crate) fn name_of(&self, session: &str) -> String {
        let is_own = tenant_of(session) == self.tenant.as_str();
        if is_own { plain_session(session).to_owned() } else { session.to_owned() }
    }

    /// The tenant whose sessions are asked for, if it is not the caller's own.
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

    /// Where this tenant's prefixes may be warm.
    pub(crate) fn affinity(&self, session: Option<String>, parent: Option<String>) -> Affinity {
        Affinity { tenant: self.tenant.to_string(), agent: None, session, parent }
    }

    pub(super) fn must_be(&self, role: Role) -> Result<(), ApiError> {
        if self.role.may(role) {
            return Ok(());
        }
        let message = format!("this needs a key with the role `{role}`; {} has `{}`", self.name(), self.role);
        Err(forbidden("role_missing", message))
    }

    /// Whether it may reach some agents only.
    pub(super) fn is_narrow(&self) -> bool {
        self.agents.is_some()
    }

    pub(super) fn refuse_wide(&self) -> ApiError {
        forbidden("key_is_for_agents", format!("{} is for {} only", self.name(), self.agent_names()))
    }

    /// Whether it sees an agent in a list.
    pub(crate) fn reaches(&self, agent: &str) -> bool {
        self.agents.as_ref().is_none_or(|agents| agents.iter().any(|known| known.as_str() == agent))
    }

    /// For handlers that learn the agent from anything but the path.
    pub(crate) fn may_reach(&self, agent: &str) -> Result<(), ApiError> {
        if self.reaches(agent) { Ok(()) } else { Err(self.refuse_wide()) }
    }

    /// For handlers that ask a model without an agent.
    pub(crate) fn may_reach_models(&self) -> Result<(), ApiError> {
        if self.is_narrow() { Err(self.refuse_wide()) } else { Ok(()) }
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
        caller.ok_or_else(|| ApiError::internal("a route that is open to everyone asks who asks"))
    }
}

fn forbidden(code: &'static str, message: String) -> ApiError {
    ApiError::new(StatusCode::FORBIDDEN, code, message)
}
