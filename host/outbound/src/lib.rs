//! Connections that the host makes for agents.
#![forbid(unsafe_code)]

pub mod tls;
