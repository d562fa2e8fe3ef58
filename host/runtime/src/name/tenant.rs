//! Tenants, and the isolation of their session ids.
//!
//! The host's id of a session is `TENANT/ID`, or just `ID` for the tenant of a host that requires
//! no keys. Ids written by clients contain no slash, so no client can name a session of another
//! tenant; such a session does not exist for it.

use crate::RuntimeError;
use serde::{Deserialize, Serialize};
use skep_store::SessionFolder;
use std::{collections::BTreeMap, fmt};

/// The tenant of all requests to a host that requires no keys.
const LOCAL: &str = "local";
/// Principal of deployments and measurements, which belong to no tenant.
pub(crate) const OPERATOR: &str = "";
const RULE: &str = "a tenant's name has 1 to 64 of the characters a-z, 0-9 and -, starts with a letter and is not \
                    `default`, which in skep.toml stands for all other tenants";

/// The name of a tenant.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Tenant(String);

impl Tenant {
    /// Checks a name: 1 to 64 of the characters `a-z`, `0-9` and `-`, the first one a letter; `default` is reserved.
    pub fn new(name: &str) -> Result<Self, RuntimeError> {
        if is_name(name) && name != "default" {
            return Ok(Tenant(name.to_owned()));
        }
        Err(super::invalid("tenant", name, RULE))
    }

    /// Returns the tenant of everyone on a host that requires no keys. Keys of this tenant access
    /// the same sessions.
    pub fn local() -> Self {
        Tenant(LOCAL.to_owned())
    }

    /// Returns whether this is the tenant of a host that requires no keys, whose session ids have no prefix.
    pub fn is_local(&self) -> bool {
        self.0 == LOCAL
    }

    /// Returns the name, which is also the principal in the database.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Returns the location of the tenant's sessions among those of all tenants.
    pub fn folder(&self) -> SessionFolder {
        SessionFolder::of((!self.is_local()).then_some(&self.0))
    }

    /// Returns the host's id of the session that this tenant calls `id`. An id that already has the
    /// tenant's prefix is returned unchanged.
    pub fn session(&self, id: &str) -> Result<String, RuntimeError> {
        match id.split_once('/') {
            Some((tenant, _)) if tenant == self.0 && !self.is_local() => Ok(id.to_owned()),
            None => Ok(session_in(&self.0, id)),
            Some(_) => Err(super::session::invalid_session(id)),
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

/// Returns the tenant that owns a session, given the host's id of the session.
pub fn tenant_of(session: &str) -> &str {
    session.split_once('/').map_or(LOCAL, |(tenant, _)| tenant)
}

/// Returns the tenant's own name of a session, given the host's id of the session.
pub fn plain_session(session: &str) -> &str {
    session.split_once('/').map_or(session, |(_, id)| id)
}

/// Returns the host's id of the session `id` of the tenant that owns `session`.
pub(crate) fn session_beside(session: &str, id: &str) -> String {
    session_in(tenant_of(session), id)
}

/// Returns the host's id of the session that this tenant calls `id`, which must not contain a
/// slash.
pub(crate) fn session_in(tenant: &str, id: &str) -> String {
    if tenant == LOCAL { id.to_owned() } else { format!("{tenant}/{id}") }
}

/// Returns whether a host's session id may start with this name and a slash.
pub(super) fn is_prefix(tenant: &str) -> bool {
    is_name(tenant) && tenant != LOCAL
}

fn is_name(name: &str) -> bool {
    (1..=64).contains(&name.len())
        && name.starts_with(|c: char| c.is_ascii_lowercase())
        && name.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-')
}

/// Key in `skep.toml` that stands for all tenants not named there.
const ALL_OTHERS: &str = "default";

/// Returns the setting of a tenant: its own, or that of all others.
pub(crate) fn setting_of<'a, T>(settings: &'a BTreeMap<String, T>, tenant: &str) -> Option<&'a T> {
    settings.get(tenant).or_else(|| settings.get(ALL_OTHERS))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_tenant_can_name_a_session_of_another_one() {
        let (acme, local) = (Tenant::new("acme").expect("a name"), Tenant::local());
        assert_eq!(acme.session("s").expect("plain"), "acme/s");
        assert_eq!(acme.session("acme/s").expect("the tenant's own"), "acme/s");
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
