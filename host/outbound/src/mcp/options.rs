//! The operator's options of an MCP server.

use reqwest::{
    Url,
    header::{HeaderName, HeaderValue},
};
use std::{collections::HashMap, path::PathBuf, time::Duration};

/// Options of one MCP server. Its address and command come from the operator and are trusted; its messages are not.
#[derive(Clone)]
pub struct McpOptions {
    pub transport: McpTransport,
    /// The tools that are offered to agents. `None` means all of them.
    pub tools: Option<Vec<String>>,
    pub forms: McpForms,
    pub bounds: McpBounds,
}

/// The answer to a form with which a server asks for what a person knows (elicitation).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum McpForms {
    /// The client declares to the server that nobody fills in forms.
    #[default]
    Refused,
    /// A form is accepted with its default values, and declined if it requires a value without one.
    Defaults,
}

/// The transport that a server is reached over.
#[derive(Clone)]
pub enum McpTransport {
    /// A process that reads requests from its standard input and writes responses to its standard output. Its
    /// standard error goes to the log.
    Process {
        program: String,
        arguments: Vec<String>,
        /// The complete environment of the process.
        environment: HashMap<String, String>,
        folder: Option<PathBuf>,
    },
    /// Streamable HTTP.
    Http { url: Url, headers: HashMap<HeaderName, HeaderValue> },
}

/// Bounds on the time and the data that a server may take.
#[derive(Clone, Copy, Debug)]
pub struct McpBounds {
    /// Timeout of the handshake of a connection, and of listing the tools.
    pub connect: Duration,
    /// Timeout of a call.
    pub call: Duration,
    /// Maximum size of one message. A longer message is dropped, and a caller waiting for it runs into its timeout.
    pub message_bytes: usize,
    /// Maximum size of a result, as JSON.
    pub result_bytes: usize,
    /// Maximum number of tools. Further tools are ignored, which is logged.
    pub tools: usize,
    /// Maximum size of a tool's description and schemas together.
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
