//! Jinja, as far as chat templates use it, for templates that nobody vouches for.
//!
//! The language is that of Python's Jinja 2 with `trim_blocks` and `lstrip_blocks`, as `transformers` sets it up: expressions,
//! `for`, `if`, `set`, `with`, `macro`, `call`, `filter`, and the filters, tests and methods of strings, lists and dicts that
//! templates use. There is no `include` and no `extends`, because there is one template.
//!
//! Invariant: a render ends, within a bound of steps and a bound of memory, whatever the template does. Every value has
//! its whole size in memory when it is made, is never changed, and is paid for at the [`Meter`] before it is made; so nothing
//! can grow behind the meter's back, however often a text is doubled or a list holds itself twice. How deep syntax, values
//! and calls nest is bounded, and so is the stack.

mod arguments;
mod arithmetic;
mod expressions;
mod fault;
mod filters;
mod grammar;
mod lexer;
mod meter;
mod methods;
mod parser;
mod questions;
mod statements;
mod syntax;
#[cfg(test)]
mod tests;
mod tokens;
mod value;

pub(super) use fault::Fault;
pub(super) use meter::Meter;
pub(super) use value::Value;

use syntax::Node;

/// A template that can be rendered, by several threads at once.
#[derive(Debug)]
pub(super) struct Template {
    nodes: Vec<Node>,
}

impl Template {
    pub(super) fn parse(source: &str) -> Result<Template, Fault> {
        Ok(Template { nodes: parser::parse(lexer::tags(source)?)? })
    }

    /// The text that it makes with these variables.
    pub(super) fn render(&self, variables: Vec<(&str, Value)>, meter: &Meter) -> Result<String, Fault> {
        statements::Render::new(variables, meter).text(&self.nodes)
    }
}
