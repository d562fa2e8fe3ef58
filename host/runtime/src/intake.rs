//! How many bytes of messages may wait: of one session, of one tenant and of the whole host. A message counts from before it is
//! stored until its turn has ended, so that nothing is accepted for which there is no room.

use crate::{
    Invocation, Origin, RuntimeError, metric,
    session::SessionKey,
    tenancy::{Tenancy, may_take},
};
use std::{
    collections::HashMap,
    hash::Hash,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

/// What a caller is told to wait.
const RETRY_AFTER_MS: u32 = 1_000;

/// Bounds on the bytes of messages that wait or whose turns run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WaitingBytes {
    pub session: usize,
    pub tenant: usize,
    pub host: usize,
}

impl Default for WaitingBytes {
    fn default() -> Self {
        WaitingBytes { session: 32 << 20, tenant: 128 << 20, host: 512 << 20 }
    }
}

/// The messages of one host, as sums of their bytes.
pub(crate) struct Intake {
    limits: WaitingBytes,
    tenancy: Tenancy,
    held: Mutex<Sums>,
}

#[derive(Default)]
struct Sums {
    host: usize,
    tenants: HashMap<String, usize>,
    sessions: HashMap<SessionKey, usize>,
}

/// The room of one message. Dropping it gives it back.
pub(crate) struct Held {
    intake: Arc<Intake>,
    tenant: String,
    session: SessionKey,
    bytes: usize,
}

impl Intake {
    pub(crate) fn new(limits: WaitingBytes, tenancy: Tenancy) -> Arc<Self> {
        Arc::new(Intake { limits, tenancy, held: Mutex::default() })
    }

    /// Takes room for a message, if its session, its tenant and the host have it.
    pub(crate) fn take(self: &Arc<Self>, invocation: &Invocation) -> Result<Held, RuntimeError> {
        let bytes = bytes_of(invocation);
        let Invocation { agent, session, principal, .. } = invocation;
        let session = SessionKey { agent: agent.clone(), session: session.clone() };
        let mut held = self.lock();
        let WaitingBytes { session: of_session, tenant: of_tenant, host: of_host } = self.limits;
        let sums = [
            (held.sessions.get(&session).copied().unwrap_or_default(), of_session, Scope::Session),
            (held.tenants.get(principal).copied().unwrap_or_default(), of_tenant, Scope::Tenant),
            (held.host, of_host, Scope::Host),
        ];
        for (sum, limit, scope) in sums {
            if bytes > limit {
                let message = format!(
                    "the message has {bytes} bytes; messages of {limit} bytes may wait {scope}, so send less; the operator \
                     allows more with `{}` under [runtime] in skep.toml",
                    scope.setting()
                );
                return Err(RuntimeError::InvalidMessage { message });
            }
            if sum + bytes > limit {
                let message = format!(
                    "messages of {sum} bytes wait or run {scope} already, and this one of {bytes} bytes would be over the \
                     {limit} that are allowed; wait for turns to end, or cancel some; the operator allows more with `{}` \
                     under [runtime] in skep.toml",
                    scope.setting()
                );
                return Err(RuntimeError::IntakeFull { message, retry_after_ms: RETRY_AFTER_MS });
            }
        }
        let of_tenant = held.tenants.get(principal).copied().unwrap_or_default();
        if !may_take(of_tenant, held.host, bytes, of_host, self.tenancy.has_several()) {
            let message = format!(
                "messages of {of_tenant} bytes wait or run for the tenant already, and what is left of the {of_host} bytes of the \
                 host is for other tenants; wait for turns to end, or cancel some; the operator allows more with \
                 `max_waiting_bytes` under [runtime] in skep.toml"
            );
            return Err(RuntimeError::IntakeFull { message, retry_after_ms: RETRY_AFTER_MS });
        }
        Ok(self.hold(&mut held, principal.clone(), session, bytes))
    }

    /// Counts a message that was accepted before, whatever room there is.
    pub(crate) fn take_again(self: &Arc<Self>, tenant: String, session: SessionKey, bytes: usize) -> Held {
        self.hold(&mut self.lock(), tenant, session, bytes)
    }

    fn hold(self: &Arc<Self>, held: &mut Sums, tenant: String, session: SessionKey, bytes: usize) -> Held {
        held.host += bytes;
        *held.tenants.entry(tenant.clone()).or_default() += bytes;
        *held.sessions.entry(session.clone()).or_default() += bytes;
        metrics::gauge!(metric::WAITING_BYTES).increment(bytes as f64);
        Held { intake: self.clone(), tenant, session, bytes }
    }

    fn lock(&self) -> MutexGuard<'_, Sums> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    #[cfg(test)]
    pub(crate) fn bytes(&self) -> usize {
        let held = self.lock();
        assert_eq!(held.host, held.tenants.values().sum::<usize>());
        assert_eq!(held.host, held.sessions.values().sum::<usize>());
        held.host
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        let mut held = self.intake.lock();
        held.host -= self.bytes;
        give_back(&mut held.tenants, &self.tenant, self.bytes);
        give_back(&mut held.sessions, &self.session, self.bytes);
        metrics::gauge!(metric::WAITING_BYTES).decrement(self.bytes as f64);
    }
}

fn give_back<K: Eq + Hash>(sums: &mut HashMap<K, usize>, key: &K, bytes: usize) {
    if let Some(sum) = sums.get_mut(key) {
        *sum -= bytes;
        if *sum == 0 {
            sums.remove(key);
        }
    }
}

/// Whose bytes are bounded.
#[derive(Clone, Copy)]
enum Scope {
    Session,
    Tenant,
    Host,
}

impl Scope {
    fn setting(self) -> &'static str {
        match self {
            Scope::Session => "max_waiting_bytes_per_session",
            Scope::Tenant => "max_waiting_bytes_per_tenant",
            Scope::Host => "max_waiting_bytes",
        }
    }
}

impl std::fmt::Display for Scope {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Scope::Session => "in the session",
            Scope::Tenant => "for the tenant",
            Scope::Host => "on the host",
        })
    }
}

fn bytes_of(invocation: &Invocation) -> usize {
    let Invocation { text, data, origin, .. } = invocation;
    let origin = match origin {
        Origin::Http(origin) => {
            let parameters = origin.parameters.iter().map(|(name, value)| name.len() + value.len());
            origin.path.len() + origin.query.as_ref().map_or(0, String::len) + parameters.sum::<usize>()
        }
        Origin::Direct | Origin::Chat | Origin::Alarm(_) | Origin::Event(_) | Origin::Tool(_) => 0,
    };
    text.len() + data.as_ref().map_or(0, |data| data.get().len()) + origin
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::fixture::invocation;

    fn message(tenant: &str, session: &str, bytes: usize) -> Invocation {
        Invocation { principal: tenant.into(), ..invocation("a", session, &"x".repeat(bytes)) }
    }

    #[test]
    fn a_session_a_tenant_and_the_host_have_bounds_of_their_own() {
        let intake = Intake::new(WaitingBytes { session: 10, tenant: 20, host: 30 }, Tenancy::default());
        let take = |tenant, session, bytes| intake.take(&message(tenant, session, bytes));
        let refused = |tenant, session, bytes| take(tenant, session, bytes).err().expect("refused");
        let first = take("t", "t/1", 10).expect("there is room");
        let of_session = refused("t", "t/1", 1);
        assert_eq!(of_session.code(), "intake_full");
        assert!(of_session.to_string().contains("`max_waiting_bytes_per_session`"), "{of_session}");
        let _second = take("t", "t/2", 10).expect("another session");
        let of_tenant = refused("t", "t/3", 1).to_string();
        assert!(
            of_tenant.contains("for the tenant already") && of_tenant.contains("20 that are"),
            "{of_tenant}"
        );
        let _third = take("u", "u/1", 10).expect("another tenant");
        assert!(refused("v", "v/1", 1).to_string().contains("`max_waiting_bytes`"));
        assert_eq!(refused("v", "v/1", 11).code(), "invalid_message");
        take("v", "v/1", 0).expect("nothing needs no room");
        drop(first);
        assert_eq!(intake.bytes(), 20);
        take("t", "t/1", 10).expect("there is room again");
        let again =
            intake.take_again("t".into(), SessionKey { agent: "a".into(), session: "t/2".into() }, 99);
        assert_eq!(intake.bytes(), 119);
        drop(again);
        assert_eq!(intake.bytes(), 20);
    }
}
