//! Connections that the host makes for agents.
//!
//! The way of a request: [`Request`] checks what was asked for → a [`Policy`] says whether its origin is granted →
//! [`Client`] resolves the name, looks at every address that it has, connects to one of those and no other, and reads
//! the answer within [`Bounds`] → a redirect goes the same way again. Nothing is granted that nobody wrote down, and a
//! refusal names the line that would allow it. A [`Secret`] is put in on the way out, and taken out of what comes back.
//!
//! This crate knows nothing of agents, turns and journals, and reads no files and no environment. [`Client`] has its own
//! `rustls` configuration with ring, so that no process-wide provider has to be installed for it.
#![forbid(unsafe_code)]

mod address;
mod bounded_body;
mod client;
mod connections;
mod error;
mod mcp;
mod origin;
mod policy;
mod redirect;
mod request;
mod resolve;
mod secret;
#[cfg(test)]
mod tests;
pub mod tls;
mod tool_server;
mod webhook;

pub use address::{AddressPolicy, AddressRange};
pub use client::{Bounds, Client, Options};
pub use error::OutboundError;
pub use mcp::{McpBounds, McpOptions, McpServer, McpTransport};
pub use origin::{Origin, OriginPattern, Origins};
pub use policy::Policy;
pub use request::{Request, Response};
pub use reqwest::{Method, Url, header};
pub use resolve::{Resolve, SystemResolver};
pub use secret::{Secret, Secrets, check_secret_value};
pub use tool_server::{ServedTool, ToolHints, ToolServer, ToolServerError};
pub use webhook::{WebhookAnswer, WebhookMessage, WebhookSecret, check_webhook_url};
