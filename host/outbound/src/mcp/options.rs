//! What the operator says of a server.

use reqwest::{
    Url,
    header::{HeaderName, HeaderValue},
};
use std::{collections::HashMap, path::PathBuf, time::Duration};

/// One server. Its address and its command are the operator's and trusted; what it says is not.
#[derive(Clone)]
pub struct McpOptions {
    pub transport: McpTransport,
    /// The tools that are offered; `None` is all of them.
    pub tools: Option<Vec<String>>,
    pub bounds: McpBounds,
}

#[derive(Clone)]
pub enum McpTransport {
    /// A process that reads requests from its standard input and answers on its standard output. What it writes to
    /// standard error goes to the log.
    Process {
        program: String,
        arguments: Vec<String>,
        /// The whole environment of the process.
        environment: HashMap<String, String>,
        folder: Option<PathBuf>,
    },
    /// Streamable HTTP.
    Http { url: Url, headers: HashMap<HeaderName, HeaderValue> },
}

#[derive(Clone, Copy, Debug)]
pub struct McpBounds {
    /// How long a connection may take until the server has introduced itself, and a list of tools until it is whole.
    pub connect: Duration,
    pub call: Duration,
    /// Of one message. A longer one is dropped, and whoever waits for it waits until its time is over.
    pub message_bytes: usize,
    pub result_bytes: usize,
    /// What is over is left out, and the log says so.
    pub tools: usize,
    /// Of a tool's description and schemas together.
    pub tool_bytes: usize,
}

impl Default for McpBounds {
    fn default() -> Self {
        McpBounds {
            connect: Duration::from_secs(20),
            call: Duration::from_secs(60),
            message_bytes: 4 << 20,
            result_bytes: 768 << 10,
            tools: 256,
            tool_bytes: 64 << 10,
        }
    }
}
