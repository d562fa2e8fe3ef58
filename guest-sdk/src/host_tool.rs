//! A typed reference to one tool that the host calls: its name, and the Rust types of its arguments and of
//! its outcome.
//!
//! A reference is a constant. It knows nothing of a turn; the call takes the [`Context`].

use std::borrow::Borrow;
use std::fmt;
use std::marker::PhantomData;
use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::context::Context;
use crate::error::HostToolError;
use crate::host_tools::{HostTools, OfferedTool};

/// A typed reference to a tool of another agent, of an MCP server, or of the host.
///
/// ```
/// use serde::{Deserialize, Serialize};
/// use skep_sdk::{AgentError, Context, HostTool, Message, Reply, agent};
///
/// #[derive(Serialize, Deserialize)]
/// struct FindOrder {
///     id: u32,
/// }
///
/// #[derive(Serialize, Deserialize)]
/// struct Order {
///     parcel: String,
/// }
///
/// const FIND_ORDER: HostTool<FindOrder, Order> = HostTool::new("agent:orders/find_order");
///
/// /// Knows where parcels are.
/// #[agent]
/// async fn parcels(cx: &mut Context, message: Message) -> Result<Reply, AgentError> {
///     let order = FIND_ORDER.call(cx, FindOrder { id: 7 }).await?;
///     Ok(Reply::text(order.parcel))
/// }
///
/// // In a test, a closure takes the place of the other agent.
/// use skep_sdk::testing::Harness;
/// let mut harness = Harness::new(parcels)
///     .typed_host_tool(FIND_ORDER, |find| Ok(Order { parcel: format!("P{}", find.id) }));
/// assert_eq!(harness.send("Where is it?").unwrap().reply.text, "P7");
/// ```
///
/// The tool has to be granted under `[grants] tools` in `agent.toml`. `()` as the arguments stands for a tool
/// without arguments. Without type parameters, `HostTool` takes and returns JSON.
///
/// To offer the tool to the model, pass the reference to
/// [`Conversation::host_tools`](crate::Conversation::host_tools). References of different types go into one
/// list with [`offer`](Self::offer):
///
/// ```
/// # use skep_sdk::{AgentError, Context, HostTool, Message, Reply, agent};
/// # use std::time::Duration;
/// # const FIND_ORDER: HostTool = HostTool::new("agent:orders/find_order");
/// const OFFICES: HostTool<(), Vec<String>> =
///     HostTool::new("mcp:post/offices").timeout(Duration::from_secs(5));
///
/// /// Answers questions about parcels.
/// #[agent]
/// async fn desk(cx: &mut Context, message: Message) -> Result<Reply, AgentError> {
///     cx.conversation().user(message.text).host_tools([FIND_ORDER.offer(), OFFICES.offer()]).run().await
/// }
/// ```
pub struct HostTool<Arguments = Value, Outcome = Value> {
    name: &'static str,
    timeout_ms: Option<u32>,
    types: PhantomData<fn(Arguments) -> Outcome>,
}

impl<Arguments, Outcome> HostTool<Arguments, Outcome> {
    /// Creates a reference to the tool with this name, such as `agent:NAME/TOOL`, `mcp:SERVER/TOOL` or `http/fetch`.
    ///
    /// # Panics
    /// Panics if the name has no owner or no tool, or is a pattern. For a constant, this is a compile error:
    ///
    /// ```compile_fail
    /// # use skep_sdk::HostTool;
    /// const FIND_ORDER: HostTool = HostTool::new("find_order");
    /// ```
    pub const fn new(name: &'static str) -> Self {
        assert!(
            names_one_tool(name),
            "a host tool is named with its owner, such as `agent:NAME/TOOL`, `mcp:SERVER/TOOL` or `http/fetch`"
        );
        Self { name, timeout_ms: None, types: PhantomData }
    }

    /// Sets the timeout of a call. It also applies to calls that the model makes.
    pub const fn timeout(mut self, timeout: Duration) -> Self {
        let timeout_ms = timeout.as_millis();
        self.timeout_ms = Some(if timeout_ms > u32::MAX as u128 { u32::MAX } else { timeout_ms as u32 });
        self
    }

    /// Returns the name of the tool.
    pub const fn name(&self) -> &'static str {
        self.name
    }

    /// Returns the reference without its types, for a list of tools that the model may call.
    pub fn offer(&self) -> OfferedTool {
        OfferedTool { name: self.name.to_owned(), timeout_ms: self.timeout_ms }
    }
}

impl<Arguments: Serialize, Outcome: DeserializeOwned> HostTool<Arguments, Outcome> {
    /// Calls the tool. The host checks the arguments against the tool's own schema.
    ///
    /// In an agent, `?` turns the error into [`AgentError::HostTool`](crate::AgentError::HostTool); in a tool,
    /// into the text for the model.
    pub async fn call(
        &self,
        cx: &Context,
        arguments: impl Borrow<Arguments>,
    ) -> Result<Outcome, HostToolError> {
        let tools = HostTools { host: cx.host(), timeout_ms: self.timeout_ms };
        tools.call(self.name, arguments.borrow()).await
    }
}

/// Returns whether the name has an owner and a tool, and is not a pattern.
const fn names_one_tool(name: &str) -> bool {
    let bytes = name.as_bytes();
    let (mut slash, mut at) = (None, 0);
    while at < bytes.len() {
        match bytes[at] {
            b'*' => return false,
            b'/' if slash.is_none() => slash = Some(at),
            _ => {}
        }
        at += 1;
    }
    match slash {
        Some(slash) => slash > 0 && slash + 1 < bytes.len(),
        None => false,
    }
}

// Derives would demand the same traits of the arguments and of the outcome.
impl<Arguments, Outcome> Clone for HostTool<Arguments, Outcome> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<Arguments, Outcome> Copy for HostTool<Arguments, Outcome> {}

impl<Arguments, Outcome> fmt::Debug for HostTool<Arguments, Outcome> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HostTool").field("name", &self.name).field("timeout_ms", &self.timeout_ms).finish()
    }
}

impl<Arguments, Outcome> From<HostTool<Arguments, Outcome>> for OfferedTool {
    fn from(tool: HostTool<Arguments, Outcome>) -> Self {
        tool.offer()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_needs_an_owner_and_a_tool() {
        for name in ["agent:orders/find_order", "mcp:files/a/b", "http/fetch"] {
            assert!(names_one_tool(name), "{name}");
        }
        for name in ["", "find_order", "agent:orders/", "/find_order", "agent:orders/*"] {
            assert!(!names_one_tool(name), "{name}");
        }
    }

    #[test]
    fn a_timeout_saturates() {
        const BRIEF: HostTool = HostTool::new("http/fetch").timeout(Duration::from_millis(500));
        assert_eq!(BRIEF.offer(), OfferedTool { name: "http/fetch".into(), timeout_ms: Some(500) });
        assert_eq!(BRIEF.timeout(Duration::MAX).offer().timeout_ms, Some(u32::MAX));
    }
}
