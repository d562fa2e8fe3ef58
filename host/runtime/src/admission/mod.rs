//! Admission of turns: their memory, the concurrent turns of an agent, the shares of tenants, the day's tokens, and
//! sessions that are held.

mod active;
mod held;
mod intake;

pub(crate) use active::Active;
pub(crate) use held::HeldSessions;
pub(crate) use intake::{Held, Intake};

use crate::{
    Invocation, RuntimeError, WaitingBytes, agent::Agent, name::SessionKey, tenancy::Tenancy,
    token_budget::TokenBudgets,
};
use active::ActiveTurns;
use std::sync::Arc;
use tokio::sync::watch;

/// The capacity that a turn occupies until it ends.
pub(crate) struct Admitted {
    pub(crate) active: Active,
    /// The memory reserved for the message.
    pub(crate) held: Held,
}

/// Decides which turns the host accepts.
pub(crate) struct Admission {
    intake: Arc<Intake>,
    active: Arc<watch::Sender<ActiveTurns>>,
    pub(crate) held: HeldSessions,
    tokens: TokenBudgets,
    tenancy: Tenancy,
}

impl Admission {
    pub(crate) fn new(waiting_bytes: WaitingBytes, tokens: TokenBudgets, tenancy: Tenancy) -> Self {
        Admission {
            intake: Intake::new(waiting_bytes, tenancy.clone()),
            active: Arc::default(),
            held: HeldSessions::default(),
            tokens,
            tenancy,
        }
    }

    /// Admits a turn of this agent, or says which limit has been reached.
    pub(crate) fn take(&self, agent: &Agent, invocation: &Invocation) -> Result<Admitted, RuntimeError> {
        let held = self.intake.take(invocation)?;
        Ok(Admitted { active: self.count(agent, &invocation.principal)?, held })
    }

    /// Reserves the memory of a message that is being sent to another host, which admits its turn.
    pub(crate) fn hold(&self, invocation: &Invocation) -> Result<Held, RuntimeError> {
        self.intake.take(invocation)
    }

    /// Counts a turn that was accepted earlier, regardless of the limits.
    pub(crate) fn take_again(&self, tenant: &str, session: &SessionKey, bytes: usize) -> Admitted {
        let active = self.count_again(&session.agent, tenant);
        Admitted { active, held: self.intake.take_again(tenant.to_owned(), session.clone(), bytes) }
    }

    /// Returns the number of accepted turns that have not ended.
    pub(crate) fn open_turns(&self) -> usize {
        self.active.borrow().total()
    }

    /// Returns the number of accepted turns of an agent that have not ended.
    pub(crate) fn open_turns_of(&self, agent: &str) -> usize {
        self.active.borrow().of_agent(agent)
    }

    /// Returns how many bytes of messages are waiting or running, and how many may be.
    pub(crate) fn taken_bytes(&self) -> (usize, usize) {
        self.intake.taken()
    }

    /// Returns what [`Admission::taken_bytes`] does, for one tenant.
    pub(crate) fn taken_bytes_of(&self, tenant: &str) -> (usize, usize) {
        self.intake.taken_of(tenant)
    }

    #[cfg(test)]
    pub(crate) fn waiting_bytes(&self) -> usize {
        self.intake.bytes()
    }
}
