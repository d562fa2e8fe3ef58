//! Connections that the host makes for agents.
//!
//! A request takes this path: [`Request`] validates its parts → [`Policy`] checks that its origin is granted →
//! [`Client`] resolves the name, checks every address that it resolves to, connects only to a checked address,
//! and reads the response within [`Bounds`] → a redirect takes the same path again. An origin that no list
//! grants is refused, and the refusal names the line that would allow it. The value of a [`Secret`] is inserted
//! on the way out and redacted from the response.
//!
//! This crate knows nothing about agents, turns or journals, and reads no files and no environment variables.
//! [`Client`] has its own `rustls` configuration with ring, so no process-wide provider has to be installed for
//! it.
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
#[cfg(test)]
mod tests;
pub mod tls;
mod tool_server;
mod webhook;

pub use address::{AddressPolicy, AddressRange};
pub use client::{Bounds, Client, Options};
pub use error::OutboundError;
pub use mcp::{McpBounds, McpForms, McpOptions, McpServer, McpTransport};
pub use origin::{Origin, OriginError, OriginPattern, Origins};
pub use policy::{Policy, Redactor, Secret, Secrets, check_secret_value};
pub use request::{Request, Response};
pub use reqwest::{Method, Url, header};
pub use resolve::{Resolve, SystemResolver};
pub use tool_server::{ServedTool, ToolHints, ToolServer, ToolServerError};
pub use webhook::{WebhookAnswer, WebhookMessage, WebhookSecret, check_webhook_url};
