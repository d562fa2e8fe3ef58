//! Notes on a schema for its author, made before a model is asked to follow it.

use super::{OutputConstraint, PathStep, UnenforcedValue};
use crate::json_pointer;

/// The notes on a valid schema.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SchemaNotes {
    /// Likely mistakes, and requests that are not followed.
    pub warnings: Vec<String>,
    /// Values that a mask cannot enforce in full. They are checked when they are complete, and generated again if they
    /// are wrong.
    pub checked: Vec<CheckedValue>,
}

/// A value that is checked when it is complete.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CheckedValue {
    /// The place of the value, such as `/items/*/name`.
    pub path: String,
    /// The keywords of its schema.
    pub keywords: Vec<String>,
}

impl SchemaNotes {
    pub(crate) fn of(constraint: &OutputConstraint) -> Self {
        let checked = constraint.unenforced().iter().map(CheckedValue::of);
        SchemaNotes { warnings: constraint.warnings().to_vec(), checked: checked.collect() }
    }
}

impl CheckedValue {
    fn of(UnenforcedValue { path, schema, .. }: &UnenforcedValue) -> Self {
        let path = path.iter().map(|step| match step {
            PathStep::Property(name) => format!("/{}", json_pointer::escape(name)),
            PathStep::Item(index) => format!("/{index}"),
            PathStep::AnyProperty | PathStep::AnyItem => "/*".to_owned(),
        });
        let keywords = schema.as_object().into_iter().flat_map(|schema| schema.keys());
        let keywords =
            keywords.filter(|keyword| !matches!(keyword.as_str(), "$defs" | "definitions" | "$schema"));
        CheckedValue { path: path.collect(), keywords: keywords.cloned().collect() }
    }
}
