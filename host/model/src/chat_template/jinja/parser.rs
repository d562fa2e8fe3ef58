//! Parses tags into statements. Their nesting is limited, so that walking over a template and dropping it need only a
//! limited stack.

use super::{
    Fault,
    lexer::Tag,
    syntax::{For, Macro, Node, Statement},
    tokens::{MAX_NESTING, Tokens},
};
use std::{sync::Arc, vec::IntoIter};

pub(super) fn parse(tags: Vec<Tag>) -> Result<Vec<Node>, Fault> {
    let mut blocks = Blocks { tags: tags.into_iter(), nesting: 0 };
    let (nodes, end) = blocks.body(&[])?;
    debug_assert!(end.is_none(), "a body without closing tags extends to the end of the template");
    Ok(nodes)
}

struct Blocks {
    tags: IntoIter<Tag>,
    nesting: u32,
}

/// The tag that closed a body. Its name has been consumed; its other tokens have not.
struct End {
    name: String,
    rest: Tokens,
}

impl Blocks {
    /// Parses statements up to a tag with one of these names.
    fn body(&mut self, ends: &[&str]) -> Result<(Vec<Node>, Option<End>), Fault> {
        let mut nodes = Vec::new();
        let mut last_line = 1;
        while let Some(tag) = self.tags.next() {
            let (line, kind) = match tag {
                Tag::Text(text) => (last_line, Statement::Raw(text)),
                Tag::Emit(line) => {
                    let mut tokens = Tokens::of(line, self.nesting);
                    let value = tokens.at_line(Tokens::tuple)?;
                    tokens.at_line(Tokens::end)?;
                    (tokens.line, Statement::Emit(value))
                }
                Tag::Block(line) => {
                    let mut tokens = Tokens::of(line, self.nesting);
                    let name = tokens.at_line(Tokens::name)?;
                    if ends.contains(&&*name) {
                        return Ok((nodes, Some(End { name: name.to_string(), rest: tokens })));
                    }
                    (tokens.line, self.statement(&name, tokens)?)
                }
            };
            last_line = line;
            nodes.push(Node { line, kind });
        }
        match ends.last() {
            Some(end) => Err(Fault::new(format!("{{% {end} %}} is missing"))),
            None => Ok((nodes, None)),
        }
    }

    /// Parses a body that only the tag `end` closes.
    fn inner(&mut self, end: &str) -> Result<Vec<Node>, Fault> {
        let (nodes, found) = self.nested(&[end])?;
        // `endblock` may repeat the name of the block.
        if end != "endblock" {
            let mut rest = found.rest;
            rest.at_line(Tokens::end)?;
        }
        Ok(nodes)
    }

    fn nested(&mut self, ends: &[&str]) -> Result<(Vec<Node>, End), Fault> {
        if self.nesting >= MAX_NESTING {
            return Err(Fault::new(format!("its syntax nests deeper than {MAX_NESTING}")));
        }
        self.nesting += 1;
        let (nodes, end) = self.body(ends)?;
        self.nesting -= 1;
        Ok((nodes, end.expect("a body with closing tags stops at one of them")))
    }

    fn statement(&mut self, name: &str, mut tokens: Tokens) -> Result<Statement, Fault> {
        let line = tokens.line;
        self.statement_of(name, &mut tokens).map_err(|fault| fault.at(line))
    }

    fn statement_of(&mut self, name: &str, tokens: &mut Tokens) -> Result<Statement, Fault> {
        Ok(match name {
            "if" => return self.choice(tokens),
            "for" => return self.repetition(tokens),
            "set" => return self.assignment(tokens),
            "with" => {
                let mut values = Vec::new();
                while !tokens.is_at_end() {
                    let targets = tokens.targets()?;
                    tokens.expect("=")?;
                    values.push((targets, tokens.expression()?));
                    tokens.take(",");
                }
                Statement::With(values, self.inner("endwith")?)
            }
            "macro" => {
                let name = tokens.name()?;
                let parameters = tokens.parameters()?;
                tokens.end()?;
                Statement::Macro(Arc::new(Macro { name, parameters, body: self.inner("endmacro")? }))
            }
            "call" => {
                let parameters = if tokens.is_next("(") { tokens.parameters()? } else { Vec::new() };
                let call = tokens.expression()?;
                tokens.end()?;
                let caller = Macro { name: "caller".into(), parameters, body: self.inner("endcall")? };
                Statement::Call { call, caller: Arc::new(caller) }
            }
            "filter" => {
                let filters = tokens.filters()?;
                tokens.end()?;
                Statement::Filter { filters, body: self.inner("endfilter")? }
            }
            "block" => {
                tokens.name()?;
                Statement::Body(self.inner("endblock")?)
            }
            // Marks the text to train on.
            "generation" => Statement::Body(self.inner("endgeneration")?),
            "autoescape" => {
                tokens.expression()?;
                Statement::Body(self.inner("endautoescape")?)
            }
            "do" => {
                let value = tokens.expression()?;
                tokens.end()?;
                Statement::Do(value)
            }
            "break" => Statement::Break,
            "continue" => Statement::Continue,
            other => return Err(Fault::new(format!("unexpected {{% {other} %}}"))),
        })
    }

    /// Parses all branches into one list of conditions, however many `elif` there are.
    fn choice(&mut self, tokens: &mut Tokens) -> Result<Statement, Fault> {
        let mut condition = tokens.whole_expression()?;
        let mut branches = Vec::new();
        loop {
            let (body, mut end) = self.nested(&["elif", "else", "endif"])?;
            branches.push((condition, body));
            match end.name.as_str() {
                "elif" => condition = end.rest.at_line(Tokens::whole_expression)?,
                "else" => return Ok(Statement::If(branches, self.inner("endif")?)),
                _ => return Ok(Statement::If(branches, Vec::new())),
            }
        }
    }

    fn repetition(&mut self, tokens: &mut Tokens) -> Result<Statement, Fault> {
        let targets = tokens.targets()?;
        tokens.expect_word("in")?;
        let items = tokens.items()?;
        let condition = if tokens.take_word("if") { Some(tokens.expression()?) } else { None };
        let recursive = tokens.take_word("recursive");
        tokens.end()?;
        let (body, end) = self.nested(&["else", "endfor"])?;
        let otherwise = if end.name == "else" { self.inner("endfor")? } else { Vec::new() };
        let line = tokens.line;
        Ok(Statement::For(Arc::new(For { line, targets, items, condition, recursive, body, otherwise })))
    }

    fn assignment(&mut self, tokens: &mut Tokens) -> Result<Statement, Fault> {
        let mut targets = tokens.targets()?;
        if tokens.take("=") {
            let value = tokens.tuple()?;
            tokens.end()?;
            return Ok(Statement::Set(targets, value));
        }
        let filters = if tokens.take("|") { tokens.filters()? } else { Vec::new() };
        tokens.end()?;
        match (targets.pop(), targets.is_empty()) {
            (Some(target), true) => Ok(Statement::SetBlock { target, filters, body: self.inner("endset")? }),
            _ => Err(Fault::new("a set block assigns to exactly one name")),
        }
    }
}
