//! Names of agents, sessions, tenants and secrets, as callers give them.
//!
//! A value of these types has been validated, so code that receives one does not validate it again.

mod agent;
mod secret;
mod session;
mod tenant;

pub use agent::AgentName;
pub use secret::SecretName;
pub use session::SessionId;
pub(crate) use session::SessionKey;
pub(crate) use tenant::{OPERATOR, session_beside, session_in, setting_of};
pub use tenant::{Tenant, plain_session, tenant_of};

use crate::RuntimeError;
use crate::text::excerpt;

/// Builds the error for an invalid name. The value is truncated so that a hostile name cannot fill a log.
pub(crate) fn invalid(kind: &'static str, value: &str, rule: &'static str) -> RuntimeError {
    RuntimeError::InvalidName { kind, value: excerpt(value), rule }
}
