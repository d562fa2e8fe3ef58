//! What the macros' output refers to. Not for people; it may change with every version.

pub use schemars;
pub use serde;
pub use serde_json;

pub use crate::agent::{AlarmFunction, EventFunction, TurnFunction};
pub use crate::example::Example;
pub use crate::host::Task;
pub use crate::schema::{input_schema, output_schema};
pub use crate::tool::{Tool, ToolFunction};

#[cfg(target_arch = "wasm32")]
pub use crate::component::{AgentSource, bindings, export};

use schemars::JsonSchema;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::{ToolError, schema};

/// What a tool may return. The macro wraps any other type in a `Result`.
#[diagnostic::on_unimplemented(
    message = "a tool cannot return `{Self}`",
    note = "return a `Result` of a type that is `Serialize + JsonSchema`, and an error that becomes a `ToolError`"
)]
pub trait ToolReturn {
    fn schema() -> Value;
    fn into_json(self) -> Result<Value, ToolError>;
}

impl<T: Serialize + JsonSchema, E: Into<ToolError>> ToolReturn for Result<T, E> {
    fn schema() -> Value {
        output_schema::<T>()
    }

    fn into_json(self) -> Result<Value, ToolError> {
        let value = self.map_err(Into::into)?;
        serde_json::to_value(value)
            .map_err(|error| ToolError::new(format!("the result is not JSON: {error}")))
    }
}

/// The arguments of a call as the function's parameters; a misfit is told to the model.
pub fn arguments<T: DeserializeOwned>(tool: &str, arguments: Value) -> Result<T, ToolError> {
    schema::from_model(arguments)
        .map_err(|error| ToolError::new(format!("the arguments of `{tool}` do not fit: {error}")))
}
