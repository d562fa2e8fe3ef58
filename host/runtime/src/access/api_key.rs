//! API keys and their roles.

use crate::{AgentName, RuntimeError, Tenant, text::excerpt};
use serde::{Deserialize, Serialize};
use std::{fmt, num::NonZeroU32, str::FromStr, time::Duration};

/// The role of a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// Read the host's metrics, which cover all tenants, and nothing else. Only keys of `local`
    /// have this role.
    Metrics,
    /// Read lists, sessions, turns and logs.
    Read,
    /// Send messages and generate.
    Invoke,
    /// Do everything, for all tenants. This is the operator's role, so only keys of `local` have
    /// it.
    Admin,
}

/// The properties of a key, without the secret.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ApiKey {
    pub id: String,
    pub tenant: Tenant,
    pub role: Role,
    /// The agents that the key may use. `None` means all agents, and the models.
    pub agents: Option<Vec<AgentName>>,
    /// A label for people.
    pub name: String,
    pub created_at_ms: u64,
    pub expires_at_ms: Option<u64>,
    pub revoked_at_ms: Option<u64>,
    /// Day of the last use, in days since 1970.
    pub last_used_day: Option<u32>,
    /// Maximum number of requests per minute, within the tenant's own limit.
    pub requests_per_minute: Option<NonZeroU32>,
    /// Whether the key may read what was said in requests to models.
    pub bodies: bool,
}

/// A key to be created.
#[derive(Clone, Debug)]
pub struct NewApiKey {
    pub tenant: Tenant,
    pub role: Role,
    pub agents: Option<Vec<AgentName>>,
    pub name: String,
    pub expires_in: Option<Duration>,
    pub requests_per_minute: Option<NonZeroU32>,
    /// Whether the key may read what was said in requests to models. No role includes it.
    pub bodies: bool,
}

const MAX_NAME_BYTES: usize = 128;
const MAX_AGENTS: usize = 64;

impl Role {
    /// Returns whether a key of this role may do what requires the role `needed`. Each of `read`,
    /// `invoke` and `admin` includes the ones before it; metrics are for `metrics` and `admin`.
    pub fn may(self, needed: Role) -> bool {
        match needed {
            Role::Metrics => matches!(self, Role::Metrics | Role::Admin),
            Role::Read => matches!(self, Role::Read | Role::Invoke | Role::Admin),
            Role::Invoke => matches!(self, Role::Invoke | Role::Admin),
            Role::Admin => self == Role::Admin,
        }
    }

    /// Returns the role as requests and the database spell it.
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
                value: excerpt(other),
                rule: "a role is read, invoke, admin or metrics",
            }),
        }
    }
}

impl NewApiKey {
    /// Checks whether the combination of settings is valid.
    pub fn check(&self) -> Result<(), RuntimeError> {
        let invalid = |message: &str| Err(RuntimeError::InvalidKey { message: message.to_owned() });
        if self.name.len() > MAX_NAME_BYTES || self.name.chars().any(char::is_control) {
            return invalid("the name of a key must have at most 128 bytes and no control characters");
        }
        if self.role == Role::Admin && !self.tenant.is_local() {
            let message = format!(
                "admin is the operator's role: it has access to all tenants, so only keys of `local` can have it; choose \
                 invoke or read for {}, or omit the tenant",
                self.tenant
            );
            return invalid(&message);
        }
        if self.role == Role::Metrics && !self.tenant.is_local() {
            let message = format!(
                "the metrics of a host cover all tenants, so only keys of `local` can have the role metrics; omit the \
                 tenant {}",
                self.tenant
            );
            return invalid(&message);
        }
        match &self.agents {
            _ if self.role == Role::Metrics && self.bodies => invalid(
                "a metrics key reads nothing but metrics; omit the bodies, or choose read, invoke or admin",
            ),
            Some(agents) if self.role == Role::Metrics && !agents.is_empty() => {
                invalid("a metrics key has no access to agents; omit the agents, or choose invoke or read")
            }
            Some(agents) if self.role == Role::Admin && !agents.is_empty() => {
                invalid("an admin key applies to all agents; omit the agents, or choose invoke or read")
            }
            Some(agents) if agents.is_empty() || agents.len() > MAX_AGENTS => {
                invalid("a key must name 1 to 64 agents, or none to apply to all of them")
            }
            _ if self.expires_in.is_some_and(|time| time.is_zero()) => {
                invalid("a key must be valid for some time; omit the expiry if it never expires")
            }
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_role_includes_the_ones_before_it_and_metrics_are_separate() {
        use Role::{Admin, Invoke, Metrics, Read};
        for (role, may) in [
            (Metrics, vec![Metrics]),
            (Read, vec![Read]),
            (Invoke, vec![Read, Invoke]),
            (Admin, vec![Metrics, Read, Invoke, Admin]),
        ] {
            assert_eq!(role.as_str().parse::<Role>().expect("its own name"), role);
            for needed in [Metrics, Read, Invoke, Admin] {
                assert_eq!(
                    role.may(needed),
                    may.contains(&needed),
                    "{role} for an action that requires {needed}"
                );
            }
        }
        "owner".parse::<Role>().expect_err("no such role");
    }

    #[test]
    fn admin_and_metrics_keys_are_only_for_the_local_tenant() {
        let key = |tenant: &str, role| NewApiKey {
            tenant: Tenant::new(tenant).expect("a name"),
            role,
            agents: None,
            name: String::new(),
            expires_in: None,
            requests_per_minute: None,
            bodies: false,
        };
        let error = key("acme", Role::Admin).check().expect_err("the operator's").to_string();
        assert!(error.contains("choose invoke or read for acme"), "{error}");
        key("acme", Role::Metrics).check().expect_err("metrics cover all tenants");
        key("local", Role::Metrics).check().expect("the operator's");
        let reads = NewApiKey { bodies: true, ..key("local", Role::Metrics) };
        reads.check().expect_err("a metrics key reads nothing else");
        NewApiKey { bodies: true, ..key("acme", Role::Read) }.check().expect("a tenant's own");
        key("acme", Role::Invoke).check().expect("a tenant's own");
        key("local", Role::Admin).check().expect("the operator's");
    }

    #[test]
    fn an_admin_key_cannot_be_restricted_to_agents() {
        let key = |role, agents: &[&str]| NewApiKey {
            tenant: Tenant::local(),
            role,
            agents: Some(agents.iter().map(|name| AgentName::new(name).expect("a name")).collect()),
            name: String::new(),
            expires_in: None,
            requests_per_minute: None,
            bodies: false,
        };
        key(Role::Invoke, &["a"]).check().expect("for one agent");
        key(Role::Admin, &["a"]).check().expect_err("admins deploy all of them");
        key(Role::Read, &[]).check().expect_err("for no agent");
    }
}
