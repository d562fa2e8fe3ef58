//! The parts of a constraint that its mask does not enforce in full, and the schemas that decide about them.
//!
//! The compiler lets the mask accept a superset where a keyword cannot be followed token by token
//! (`uniqueItems`, `not`, …) and names the affected values here. A value is checked when it is complete; until
//! then no part of it is reported to the caller.

use serde_json::Value;

/// A value of the output that has to be checked when it is complete.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct UnenforcedValue {
    /// The tool whose arguments hold the value; `None` where the output itself is the JSON document.
    pub tool: Option<String>,
    /// The path to the value from the root of the document or of the tool's arguments. An empty path means the
    /// root.
    pub path: Vec<PathStep>,
    /// A self-contained schema (references resolve within it) that the value must validate against.
    pub schema: Value,
}

/// One step from a value to one that it contains.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum PathStep {
    Property(String),
    AnyProperty,
    Item(usize),
    AnyItem,
}
