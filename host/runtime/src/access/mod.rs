//! Access control: tenants, their API keys, and roles.
//!
//! A key acts for one tenant in one role. Tenants share only the agents that the operator deployed;
//! their sessions and KV pages are separate. The gateway decides which role a request needs.

mod api_key;
mod key_ring;
mod known_keys;

pub use api_key::{ApiKey, NewApiKey, Role};
pub use key_ring::KeyRing;
