//! An agent as a value: what `#[agent]` makes of a function, and what a host or a harness runs.

use std::rc::Rc;

use crate::host::{Host, Task};
use crate::tool::Tool;
use crate::{AgentError, Context, Message, Reply, ToolDefinition};

/// A turn of an agent. `#[agent]` wraps the author's function in one.
#[doc(hidden)]
pub type TurnFunction = for<'a> fn(&'a mut Context, Message) -> Task<'a, Result<Reply, AgentError>>;

/// An agent: a description, its tools, and the function that takes a turn. `#[agent]` makes it.
#[derive(Clone, Copy)]
pub struct Agent {
    name: &'static str,
    description: &'static str,
    tools: &'static [Tool],
    turn: TurnFunction,
}

impl Agent {
    #[doc(hidden)]
    pub const fn new(
        name: &'static str,
        description: &'static str,
        tools: &'static [Tool],
        turn: TurnFunction,
    ) -> Self {
        Self { name, description, tools, turn }
    }

    /// The function's name. The manifest's name is the one that it is deployed under.
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// The function's doc comment.
    pub fn description(&self) -> &'static str {
        self.description
    }

    /// What the model and the host are told of its tools.
    pub fn tools(&self) -> Vec<ToolDefinition> {
        self.tools.iter().map(Tool::definition).collect()
    }

    pub(crate) async fn take_turn(&self, host: Rc<dyn Host>, message: Message) -> Result<Reply, AgentError> {
        let mut cx = Context::new(host, self.tools, message.clone());
        (self.turn)(&mut cx, message).await
    }
}
