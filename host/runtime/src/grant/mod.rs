//! Grants: what a manifest asks for, and what the operator allows.

mod model;
mod secret;
mod tool;

pub use model::ModelGrant;
pub use secret::SecretGrant;
pub use tool::ToolGrant;
pub(crate) use tool::ToolName;
