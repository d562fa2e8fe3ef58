//! What a key allows.

use super::Tenant;
use crate::{AgentName, RuntimeError};
use serde::{Deserialize, Serialize};
use std::{fmt, num::NonZeroU32, str::FromStr, time::Duration};

/// What a key may do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// Read the figures of the host, which are about all tenants, and nothing else. Only keys of `local` have it.
    Metrics,
    /// Look: lists, sessions, turns, logs.
    Read,
    /// Send messages and generate.
    Invoke,
    /// Everything, of all tenants: the operator's role, so only keys of `local` have it.
    Admin,
}

/// A key, without the key itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ApiKey {
    pub id: String,
    pub tenant: Tenant,
    pub role: Role,
    /// The agents that it may talk to; `None` is all of them, and the models.
    pub agents: Option<Vec<AgentName>>,
    /// For people.
    pub name: String,
    pub created_at_ms: u64,
    pub expires_at_ms: Option<u64>,
    pub revoked_at_ms: Option<u64>,
    /// In days since 1970.
    pub last_used_day: Option<u32>,
    /// That it may send, within what its tenant may.
    pub requests_per_minute: Option<NonZeroU32>,
}

/// A key to be made.
#[derive(Clone, Debug)]
pub struct NewApiKey {
    pub tenant: Tenant,
    pub role: Role,
    pub agents: Option<Vec<AgentName>>,
    pub name: String,
    pub expires_in: Option<Duration>,
    pub requests_per_minute: Option<NonZeroU32>,
}

const MAX_NAME_BYTES: usize = 128;
const MAX_AGENTS: usize = 64;

impl Role {
    /// Whether a key of this role may do what needs the other one. Each of `read`, `invoke` and `admin` may do what those
    /// before it may; figures are for `metrics` and `admin`.
    pub fn may(self, needed: Role) -> bool {
        match needed {
            Role::Metrics => matches!(self, Role::Metrics | Role::Admin),
            Role::Read => matches!(self, Role::Read | Role::Invoke | Role::Admin),
            Role::Invoke => matches!(self, Role::Invoke | Role::Admin),
            Role::Admin => self == Role::Admin,
        }
    }

    pub fn as_str(self) -> &'static str {
        match self {
            Role::Metrics => "metrics",
            Role::Read => "read",
            Role::Invoke => "invoke",
            Role::Admin => "admin",
        }
    }
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl FromStr for Role {
    type Err = RuntimeError;
    fn from_str(role: &str) -> Result<Self, RuntimeError> {
        match role {
            "metrics" => Ok(Role::Metrics),
            "read" => Ok(Role::Read),
            "invoke" => Ok(Role::Invoke),
            "admin" => Ok(Role::Admin),
            other => Err(RuntimeError::InvalidName {
                kind: "role",
                value: other.chars().take(80).collect(),
                rule: "a role is read, invoke, admin or metrics",
            }),
        }
    }
}

impl NewApiKey {
    /// Whether there can be such a key.
    pub fn check(&self) -> Result<(), RuntimeError> {
        let invalid = |message: &str| Err(RuntimeError::InvalidKey { message: message.to_owned() });
        if self.name.len() > MAX_NAME_BYTES || self.name.chars().any(char::is_control) {
            return invalid("the name of a key has at most 128 bytes and no control characters");
        }
        if self.role == Role::Admin && !self.tenant.is_local() {
            let message = format!(
                "admin is the operator's role: it reaches what is of all tenants, so only keys of `local` have it; choose \
                 invoke or read for {}, or leave out the tenant",
                self.tenant
            );
            return invalid(&message);
        }
        if self.role == Role::Metrics && !self.tenant.is_local() {
            let message = format!(
                "the figures of a host are about all tenants, so only keys of `local` have the role metrics; leave out the \
                 tenant {}",
                self.tenant
            );
            return invalid(&message);
        }
        match &self.agents {
            Some(agents) if self.role == Role::Metrics && !agents.is_empty() => {
                invalid("a key for metrics reaches no agent; leave out the agents, or choose invoke or read")
            }
            Some(agents) if self.role == Role::Admin && !agents.is_empty() => {
                invalid("an admin key is for all agents; leave out the agents, or choose invoke or read")
            }
            Some(agents) if agents.is_empty() || agents.len() > MAX_AGENTS => {
                invalid("a key is for 1 to 64 agents, or for all of them if none is named")
            }
            _ if self.expires_in.is_some_and(|time| time.is_zero()) => {
                invalid("a key must be valid for some time; leave out when it expires if it never does")
            }
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_role_may_do_what_those_before_it_may_and_figures_are_apart() {
        use Role::{Admin, Invoke, Metrics, Read};
        for (role, may) in [
            (Metrics, vec![Metrics]),
            (Read, vec![Read]),
            (Invoke, vec![Read, Invoke]),
            (Admin, vec![Metrics, Read, Invoke, Admin]),
        ] {
            assert_eq!(role.as_str().parse::<Role>().expect("its own name"), role);
            for needed in [Metrics, Read, Invoke, Admin] {
                assert_eq!(role.may(needed), may.contains(&needed), "{role} for what needs {needed}");
            }
        }
        "owner".parse::<Role>().expect_err("no such role");
    }

    #[test]
    fn an_admin_key_of_a_tenant_would_be_the_whole_platform() {
        let key = |tenant: &str, role| NewApiKey {
            tenant: Tenant::new(tenant).expect("a name"),
            role,
            agents: None,
            name: String::new(),
            expires_in: None,
            requests_per_minute: None,
        };
        let error = key("acme", Role::Admin).check().expect_err("the operator's").to_string();
        assert!(error.contains("choose invoke or read for acme"), "{error}");
        key("acme", Role::Metrics).check().expect_err("figures are about all tenants");
        key("local", Role::Metrics).check().expect("the operator's");
        key("acme", Role::Invoke).check().expect("a tenant's own");
        key("local", Role::Admin).check().expect("the operator's");
    }

    #[test]
    fn an_admin_key_for_one_agent_would_be_a_promise_that_nothing_keeps() {
        let key = |role, agents: &[&str]| NewApiKey {
            tenant: Tenant::local(),
            role,
            agents: Some(agents.iter().map(|name| AgentName::new(name).expect("a name")).collect()),
            name: String::new(),
            expires_in: None,
            requests_per_minute: None,
        };
        key(Role::Invoke, &["a"]).check().expect("for one agent");
        key(Role::Admin, &["a"]).check().expect_err("admins deploy all of them");
        key(Role::Read, &[]).check().expect_err("for no agent");
    }
}
