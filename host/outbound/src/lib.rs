//! Connections that the host makes for agents.
#![forbid(unsafe_code)]

pub mod tls;
mod tool_server;

pub use tool_server::{ServedTool, ToolHints, ToolServer, ToolServerError};
