//! Who may ask for what: tenants, their API keys, and roles.
//!
//! A key speaks for one tenant in one role. Tenants share the agents that the operator deployed, and nothing else: their
//! sessions and their KV pages are apart. What a request needs is the gateway's to say.

mod api_key;
mod key_ring;
mod known_keys;
mod tenant;

pub use api_key::{ApiKey, NewApiKey, Role};
pub use key_ring::KeyRing;
pub use tenant::{Tenant, plain_session, tenant_of};
pub(crate) use tenant::{is_prefix, session_beside, session_in};
