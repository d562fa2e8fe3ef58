//! The tokens of one tag, consumed one after the other. This module parses names, arguments and
//! everything else that is not an expression.

use super::{
    Fault,
    lexer::{Line, Token},
    syntax::{Arguments, Expression, Name, Step, Target},
};
use std::vec::IntoIter;

/// Maximum nesting of statements and expressions together.
pub(super) const MAX_NESTING: u32 = 64;

pub(super) struct Tokens {
    pub(super) line: u32,
    pub(super) left: std::iter::Peekable<IntoIter<Token>>,
    nesting: u32,
}

impl Tokens {
    pub(super) fn of(line: Line, nesting: u32) -> Tokens {
        Tokens { line: line.number, left: line.tokens.into_iter().peekable(), nesting }
    }

    /// Adds the line to an error of `parse`.
    pub(super) fn at_line<T>(
        &mut self,
        parse: impl FnOnce(&mut Self) -> Result<T, Fault>,
    ) -> Result<T, Fault> {
        let line = self.line;
        parse(self).map_err(|fault| fault.at(line))
    }

    pub(super) fn is_at_end(&mut self) -> bool {
        self.left.peek().is_none()
    }

    pub(super) fn end(&mut self) -> Result<(), Fault> {
        if self.is_at_end() { Ok(()) } else { Err(self.unexpected()) }
    }

    pub(super) fn unexpected(&mut self) -> Fault {
        Fault::new(match self.left.peek() {
            Some(Token::Sign(sign)) => format!("unexpected {sign:?}"),
            Some(Token::Name(name)) => format!("unexpected {name:?}"),
            Some(_) => "unexpected string or number".to_owned(),
            None => "the tag ends too early".to_owned(),
        })
    }

    pub(super) fn is_next(&mut self, sign: &str) -> bool {
        matches!(self.left.peek(), Some(Token::Sign(next)) if *next == sign)
    }

    pub(super) fn take(&mut self, sign: &str) -> bool {
        let found = self.is_next(sign);
        if found {
            self.left.next();
        }
        found
    }

    pub(super) fn expect(&mut self, sign: &str) -> Result<(), Fault> {
        if self.take(sign) { Ok(()) } else { Err(self.unexpected()) }
    }

    pub(super) fn is_next_word(&mut self, word: &str) -> bool {
        matches!(self.left.peek(), Some(Token::Name(name)) if name == word)
    }

    pub(super) fn take_word(&mut self, word: &str) -> bool {
        let found = self.is_next_word(word);
        if found {
            self.left.next();
        }
        found
    }

    pub(super) fn expect_word(&mut self, word: &str) -> Result<(), Fault> {
        if self.take_word(word) { Ok(()) } else { Err(self.unexpected()) }
    }

    pub(super) fn name(&mut self) -> Result<Name, Fault> {
        match self.left.next_if(|token| matches!(token, Token::Name(_))) {
            Some(Token::Name(name)) => Ok(name.into()),
            _ => Err(self.unexpected()),
        }
    }

    pub(super) fn nested<T>(
        &mut self,
        parse: impl FnOnce(&mut Self) -> Result<T, Fault>,
    ) -> Result<T, Fault> {
        if self.nesting >= MAX_NESTING {
            return Err(Fault::new(format!("its syntax nests deeper than {MAX_NESTING}")));
        }
        self.nesting += 1;
        let parsed = parse(self);
        self.nesting -= 1;
        parsed
    }

    /// Parses names separated by commas, which may be in parentheses.
    pub(super) fn targets(&mut self) -> Result<Vec<Target>, Fault> {
        let in_parentheses = self.take("(");
        let mut targets = Vec::new();
        loop {
            let name = self.name()?;
            targets.push(match self.take(".") {
                true => Target::Attribute(name, self.name()?),
                false => Target::Variable(name),
            });
            if !self.take(",") || self.is_next("=") {
                break;
            }
        }
        if in_parentheses {
            self.expect(")")?;
        }
        Ok(targets)
    }

    pub(super) fn parameters(&mut self) -> Result<Vec<(Name, Option<Expression>)>, Fault> {
        self.expect("(")?;
        let mut parameters = Vec::new();
        while !self.take(")") {
            let name = self.name()?;
            let default = if self.take("=") { Some(self.expression()?) } else { None };
            parameters.push((name, default));
            if !self.take(",") && !self.is_next(")") {
                return Err(self.unexpected());
            }
        }
        Ok(parameters)
    }

    /// Parses `name` or `name(arguments)`, and more of them after `|`.
    pub(super) fn filters(&mut self) -> Result<Vec<Step>, Fault> {
        let mut filters = vec![self.filter()?];
        while self.take("|") {
            filters.push(self.filter()?);
        }
        Ok(filters)
    }

    pub(super) fn filter(&mut self) -> Result<Step, Fault> {
        let name = self.name()?;
        let arguments = if self.take("(") { self.arguments()? } else { Arguments::default() };
        Ok(Step::Filter(name, arguments))
    }

    /// Parses arguments, after the opening parenthesis.
    pub(super) fn arguments(&mut self) -> Result<Arguments, Fault> {
        let mut arguments = Arguments::default();
        while !self.take(")") {
            let value = self.expression()?;
            match value {
                Expression::Variable(name) if self.take("=") => {
                    arguments.named.push((name, self.expression()?));
                }
                value if arguments.named.is_empty() => arguments.positional.push(value),
                _ => return Err(Fault::new("a positional argument follows a named argument")),
            }
            if !self.take(",") && !self.is_next(")") {
                return Err(self.unexpected());
            }
        }
        Ok(arguments)
    }
}
