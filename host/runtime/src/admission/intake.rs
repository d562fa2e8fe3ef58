//! Bounds the bytes of messages that wait in one session, in one tenant and on the whole host. A
//! message counts from before it is stored until its turn has ended, so that nothing is accepted
//! without memory for it.

use crate::{
    Invocation, Origin, RuntimeError, WaitingBytes, metric,
    name::SessionKey,
    tenancy::{Tenancy, may_take},
};
use std::{
    collections::HashMap,
    hash::Hash,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

/// Retry delay reported to a caller whose message does not fit.
const RETRY_AFTER_MS: u32 = 1_000;

/// Sums of message bytes of one host.
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

/// Memory reserved for one message. Dropping it releases the memory.
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

    /// Reserves memory for a message, if its session, its tenant and the host have enough left.
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
                    "the message has {bytes} bytes, but all messages waiting {scope} may have at most {limit} bytes; send a \
                     smaller one; the operator can raise the limit with `{}` under [runtime] in skep.toml",
                    scope.setting()
                );
                return Err(RuntimeError::InvalidMessage { message });
            }
            if sum + bytes > limit {
                let message = format!(
                    "messages of {sum} bytes are already waiting or running {scope}, and this one of {bytes} bytes would \
                     exceed the limit of {limit}; wait for turns to end, or cancel some; the operator can raise the limit \
                     with `{}` under [runtime] in skep.toml",
                    scope.setting()
                );
                return Err(RuntimeError::IntakeFull { message, retry_after_ms: RETRY_AFTER_MS });
            }
        }
        let of_tenant = held.tenants.get(principal).copied().unwrap_or_default();
        if !may_take(of_tenant, held.host, bytes, of_host, self.tenancy.has_several()) {
            let message = format!(
                "messages of {of_tenant} bytes are already waiting or running for the tenant, and the rest of the host's \
                 {of_host} bytes is reserved for other tenants; wait for turns to end, or cancel some; the operator can \
                 raise the limit with `max_waiting_bytes` under [runtime] in skep.toml"
            );
            return Err(RuntimeError::IntakeFull { message, retry_after_ms: RETRY_AFTER_MS });
        }
        Ok(self.hold(&mut held, principal.clone(), session, bytes))
    }

    /// Returns how many bytes are reserved on the host, and how many there are.
    pub(crate) fn taken(&self) -> (usize, usize) {
        (self.lock().host, self.limits.host)
    }

    /// Returns how many bytes are reserved for a tenant, and how many it may have.
    pub(crate) fn taken_of(&self, tenant: &str) -> (usize, usize) {
        (self.lock().tenants.get(tenant).copied().unwrap_or_default(), self.limits.tenant)
    }

    /// Counts a message that was accepted earlier, regardless of the limits.
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

/// The scope of a limit.
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
    fn sessions_tenants_and_the_host_have_separate_limits() {
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
            of_tenant.contains("running for the tenant") && of_tenant.contains("limit of 20"),
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
