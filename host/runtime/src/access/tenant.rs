//! Tenants, and how the ids of their sessions are kept apart.
//!
//! A session's id in the host is `TENANT/ID`, and just `ID` for the tenant of a host that asks for no keys. The id that a
//! client writes has no slash; so no client can name a session of another tenant, and to each of them it is not there.

use crate::RuntimeError;
use serde::{Deserialize, Serialize};
use skep_store::SessionFolder;
use std::fmt;

/// Whose requests they are where no key is asked for.
const LOCAL: &str = "local";
const RULE: &str = "a tenant's name has 1 to 64 of the characters a-z, 0-9 and -, begins with a letter and is not \
                    `default`, which in skep.toml means all others";

/// The name of a tenant.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Tenant(String);

impl Tenant {
    pub fn new(name: &str) -> Result<Self, RuntimeError> {
        if is_name(name) && name != "default" {
            return Ok(Tenant(name.to_owned()));
        }
        let value = name.chars().take(80).collect();
        Err(RuntimeError::InvalidName { kind: "tenant", value, rule: RULE })
    }

    /// The tenant of everyone on a host that asks for no keys; its keys find the same sessions.
    pub fn local() -> Self {
        Tenant(LOCAL.to_owned())
    }

    pub fn is_local(&self) -> bool {
        self.0 == LOCAL
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Where its sessions are among those of all tenants.
    pub fn folder(&self) -> SessionFolder {
        SessionFolder::of((!self.is_local()).then_some(&self.0))
    }

    /// The host's id of the session that this tenant calls `id`. One that is the host's already stays as it is.
    pub fn session(&self, id: &str) -> Result<String, RuntimeError> {
        match id.split_once('/') {
            Some((tenant, _)) if tenant == self.0 && !self.is_local() => Ok(id.to_owned()),
            None => Ok(session_in(&self.0, id)),
            Some(_) => Err(crate::name::invalid_session(id)),
        }
    }
}

impl TryFrom<String> for Tenant {
    type Error = RuntimeError;
    fn try_from(name: String) -> Result<Self, RuntimeError> {
        Self::new(&name)
    }
}

impl From<Tenant> for String {
    fn from(tenant: Tenant) -> Self {
        tenant.0
    }
}

impl fmt::Display for Tenant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// The tenant to which a session belongs, by the host's id of it.
pub fn tenant_of(session: &str) -> &str {
    session.split_once('/').map_or(LOCAL, |(tenant, _)| tenant)
}

/// What its tenant calls a session, by the host's id of it.
pub fn plain_session(session: &str) -> &str {
    session.split_once('/').map_or(session, |(_, id)| id)
}

/// The host's id of the session that the tenant of `session` calls `id`.
pub(crate) fn session_beside(session: &str, id: &str) -> String {
    session_in(tenant_of(session), id)
}

/// The host's id of the session that this tenant calls `id`, which has no slash.
pub(crate) fn session_in(tenant: &str, id: &str) -> String {
    if tenant == LOCAL { id.to_owned() } else { format!("{tenant}/{id}") }
}

/// Whether a host's id may begin with this and a slash.
pub(crate) fn is_prefix(tenant: &str) -> bool {
    is_name(tenant) && tenant != LOCAL
}

fn is_name(name: &str) -> bool {
    (1..=64).contains(&name.len())
        && name.starts_with(|c: char| c.is_ascii_lowercase())
        && name.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_tenant_can_name_a_session_of_another_one() {
        let (acme, local) = (Tenant::new("acme").expect("a name"), Tenant::local());
        assert_eq!(acme.session("s").expect("plain"), "acme/s");
        assert_eq!(acme.session("acme/s").expect("its own"), "acme/s");
        assert_eq!(local.session("s").expect("plain"), "s");
        for (tenant, id) in [(&acme, "other/s"), (&local, "acme/s"), (&local, "local/s"), (&acme, "/s")] {
            assert_eq!(tenant.session(id).expect_err(id).code(), "invalid_name");
        }
        for (session, tenant, plain, beside) in [("acme/s", "acme", "s", "acme/t"), ("s", "local", "s", "t")]
        {
            assert_eq!((tenant_of(session), plain_session(session)), (tenant, plain));
            assert_eq!(session_beside(session, "t"), beside);
        }
    }

    #[test]
    fn names_of_tenants_are_short_lowercase_words() {
        for good in ["acme", "a-1", "local"] {
            assert_eq!(Tenant::new(good).expect(good).as_str(), good);
        }
        for bad in ["", "Acme", "a/b", "default", "1a", &"a".repeat(65)] {
            assert_eq!(Tenant::new(bad).expect_err(bad).code(), "invalid_name");
        }
    }
}
