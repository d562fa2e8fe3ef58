//! An implementation of the part of Jinja that chat templates use, for untrusted templates.
//!
//! The language is that of Python's Jinja 2 with `trim_blocks` and `lstrip_blocks`, as `transformers` configures it:
//! expressions, `for`, `if`, `set`, `with`, `macro`, `call`, `filter`, and the filters, tests and methods of strings,
//! lists and dicts that templates use. There is no `include` and no `extends`, because there is only one template.
//!
//! Invariant: every render terminates within a limit of steps and a limit of memory, whatever the template does.
//! Every value occupies its full size in memory, is immutable, and is charged to the [`Meter`] before it is created.
//! Memory therefore cannot grow without the meter, however often a text is doubled or a list contains itself twice.
//! The nesting of syntax, values and calls is limited, and with it the stack.

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

/// A parsed template. Several threads can render it at once.
#[derive(Debug)]
pub(super) struct Template {
    nodes: Vec<Node>,
}

impl Template {
    pub(super) fn parse(source: &str) -> Result<Template, Fault> {
        Ok(Template { nodes: parser::parse(lexer::tags(source)?)? })
    }

    /// Renders the template with these variables.
    pub(super) fn render(&self, variables: Vec<(&str, Value)>, meter: &Meter) -> Result<String, Fault> {
        statements::Render::new(variables, meter).text(&self.nodes)
    }
}
