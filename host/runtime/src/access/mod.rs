//! Access control: tenants, their API keys, and roles.
//!
//! A key acts for one tenant in one role. Tenants share only the agents that the operator deployed;
//! their sessions and KV pages are separate. The gateway decides which role a request needs.

mod api_key;
mod key_ring;
mod known_keys;
mod tenant;

pub use api_key::{ApiKey, NewApiKey, Role};
pub use key_ring::KeyRing;
pub use tenant::{Tenant, plain_session, tenant_of};
pub(crate) use tenant::{is_prefix, session_beside, session_in};
