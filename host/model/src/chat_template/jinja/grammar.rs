//! Parses tokens into expressions, with the precedence of Python's Jinja.

use super::{
    Fault,
    lexer::Token,
    syntax::{Arguments, Arithmetic, Comparison, Expression, Step},
    tokens::Tokens,
};

impl Tokens {
    pub(super) fn whole_expression(&mut self) -> Result<Expression, Fault> {
        let value = self.expression()?;
        self.end()?;
        Ok(value)
    }

    /// Parses an expression, or several separated by commas, which form a list.
    pub(super) fn tuple(&mut self) -> Result<Expression, Fault> {
        let first = self.expression()?;
        self.more_of_tuple(first, Self::expression)
    }

    /// Parses the items of a `for`. Here `if` starts the condition of the loop.
    pub(super) fn items(&mut self) -> Result<Expression, Fault> {
        let first = self.nested(Self::or)?;
        self.more_of_tuple(first, Self::or)
    }

    fn more_of_tuple(
        &mut self,
        first: Expression,
        parse: impl Fn(&mut Self) -> Result<Expression, Fault>,
    ) -> Result<Expression, Fault> {
        if !self.is_next(",") {
            return Ok(first);
        }
        let mut all = vec![first];
        while self.take(",") {
            if self.is_at_end() || self.is_next(")") {
                break;
            }
            all.push(parse(self)?);
        }
        Ok(Expression::List(all))
    }

    pub(super) fn expression(&mut self) -> Result<Expression, Fault> {
        self.nested(|tokens| {
            let then = tokens.or()?;
            if !tokens.take_word("if") {
                return Ok(then);
            }
            let condition = Box::new(tokens.or()?);
            let otherwise = match tokens.take_word("else") {
                true => Some(Box::new(tokens.expression()?)),
                false => None,
            };
            Ok(Expression::Choice { condition, then: Box::new(then), otherwise })
        })
    }

    fn or(&mut self) -> Result<Expression, Fault> {
        self.words("or", Self::and, Expression::Or)
    }

    fn and(&mut self) -> Result<Expression, Fault> {
        self.words("and", Self::not, Expression::And)
    }

    fn words(
        &mut self,
        word: &str,
        parse: impl Fn(&mut Self) -> Result<Expression, Fault>,
        join: impl Fn(Vec<Expression>) -> Expression,
    ) -> Result<Expression, Fault> {
        let first = parse(self)?;
        if !self.is_next_word(word) {
            return Ok(first);
        }
        let mut all = vec![first];
        while self.take_word(word) {
            all.push(parse(self)?);
        }
        Ok(join(all))
    }

    fn not(&mut self) -> Result<Expression, Fault> {
        match self.take_word("not") {
            true => self.nested(|tokens| Ok(Expression::Not(Box::new(tokens.not()?)))),
            false => self.compare(),
        }
    }

    fn compare(&mut self) -> Result<Expression, Fault> {
        use Comparison::{Equal, Greater, GreaterOrEqual, In, Less, LessOrEqual, NotEqual, NotIn};
        let first = self.sum()?;
        let mut rest = Vec::new();
        loop {
            let signs = [
                ("==", Equal),
                ("!=", NotEqual),
                ("<=", LessOrEqual),
                (">=", GreaterOrEqual),
                ("<", Less),
                (">", Greater),
            ];
            let comparison = match signs.into_iter().find(|(sign, _)| self.take(sign)) {
                Some((_, comparison)) => comparison,
                None if self.take_word("in") => In,
                None if self.is_next_word("not") => {
                    self.left.next();
                    self.expect_word("in")?;
                    NotIn
                }
                None => break,
            };
            rest.push((comparison, self.sum()?));
        }
        Ok(if rest.is_empty() { first } else { Expression::Compare(Box::new(first), rest) })
    }

    fn sum(&mut self) -> Result<Expression, Fault> {
        self.arithmetic(&[("+", Arithmetic::Add), ("-", Arithmetic::Subtract)], Self::join)
    }

    fn join(&mut self) -> Result<Expression, Fault> {
        self.arithmetic(&[("~", Arithmetic::Join)], Self::product)
    }

    fn product(&mut self) -> Result<Expression, Fault> {
        let signs = [
            ("*", Arithmetic::Multiply),
            ("/", Arithmetic::Divide),
            ("//", Arithmetic::DivideDown),
            ("%", Arithmetic::Remainder),
        ];
        self.arithmetic(&signs, Self::power)
    }

    fn power(&mut self) -> Result<Expression, Fault> {
        self.arithmetic(&[("**", Arithmetic::Power)], |tokens| tokens.unary(true))
    }

    fn arithmetic(
        &mut self,
        signs: &[(&str, Arithmetic)],
        parse: impl Fn(&mut Self) -> Result<Expression, Fault>,
    ) -> Result<Expression, Fault> {
        let first = parse(self)?;
        let mut rest = Vec::new();
        while let Some((_, operator)) = signs.iter().find(|(sign, _)| self.take(sign)) {
            rest.push((*operator, parse(self)?));
        }
        Ok(if rest.is_empty() { first } else { Expression::Arithmetic(Box::new(first), rest) })
    }

    /// Parses a primary expression with its sign and steps. A sign binds more tightly than filters
    /// and less tightly than attributes.
    fn unary(&mut self, with_filters: bool) -> Result<Expression, Fault> {
        let base = if self.take("-") {
            self.nested(|tokens| Ok(Expression::Negative(Box::new(tokens.unary(false)?))))?
        } else if self.take("+") {
            self.nested(|tokens| tokens.unary(false))?
        } else {
            self.primary()?
        };
        let mut steps = Vec::new();
        loop {
            let step = if self.take(".") {
                match self.left.next() {
                    Some(Token::Name(name)) => Step::Attribute(name.into()),
                    Some(Token::Integer(index)) => Step::Item(Expression::Integer(index)),
                    _ => return Err(Fault::new("a name is expected after a dot")),
                }
            } else if self.take("[") {
                self.item()?
            } else if self.take("(") {
                Step::Call(self.arguments()?)
            } else if with_filters && self.take("|") {
                self.filter()?
            } else if with_filters && self.take_word("is") {
                self.test()?
            } else {
                break;
            };
            steps.push(step);
        }
        Ok(if steps.is_empty() { base } else { Expression::Steps(Box::new(base), steps) })
    }

    /// Parses an index or a slice, after the opening bracket.
    fn item(&mut self) -> Result<Step, Fault> {
        let mut parts = [None, None, None];
        let mut part = 0;
        loop {
            if self.take("]") {
                break;
            }
            if self.take(":") {
                part += 1;
                if part > 2 {
                    return Err(Fault::new("a slice has at most three parts"));
                }
                continue;
            }
            if parts[part].is_some() {
                return Err(self.unexpected());
            }
            parts[part] = Some(self.expression()?);
        }
        match (part, parts) {
            (0, [Some(item), None, None]) => Ok(Step::Item(item)),
            (0, _) => Err(Fault::new("an index is missing")),
            (_, parts) => Ok(Step::Slice(parts)),
        }
    }

    fn test(&mut self) -> Result<Step, Fault> {
        let negated = self.take_word("not");
        let name = self.name()?;
        const GO_ON: [&str; 7] = ["else", "or", "and", "if", "is", "in", "not"];
        let has_argument = match self.left.peek() {
            Some(Token::Name(next)) => !GO_ON.contains(&next.as_str()) && next != "recursive",
            Some(Token::Text(_) | Token::Integer(_) | Token::Float(_)) => true,
            Some(Token::Sign(sign)) => matches!(*sign, "[" | "{"),
            None => false,
        };
        let arguments = if self.take("(") {
            self.arguments()?
        } else if has_argument {
            Arguments { positional: vec![self.nested(|tokens| tokens.unary(false))?], named: Vec::new() }
        } else {
            Arguments::default()
        };
        Ok(Step::Test { name, arguments, negated })
    }

    fn primary(&mut self) -> Result<Expression, Fault> {
        if self.take("(") {
            if self.take(")") {
                return Ok(Expression::List(Vec::new()));
            }
            let value = self.nested(Self::tuple)?;
            self.expect(")")?;
            return Ok(value);
        }
        if self.take("[") {
            return Ok(Expression::List(self.until("]", Self::expression)?));
        }
        if self.take("{") {
            let pair = |tokens: &mut Self| {
                let key = tokens.expression()?;
                tokens.expect(":")?;
                Ok((key, tokens.expression()?))
            };
            return Ok(Expression::Map(self.until("}", pair)?));
        }
        let is_value = |token: &Token| !matches!(token, Token::Sign(_));
        match self.left.next_if(is_value) {
            Some(Token::Text(mut text)) => {
                while let Some(Token::Text(more)) = self.left.next_if(|token| matches!(token, Token::Text(_)))
                {
                    text.push_str(&more);
                }
                Ok(Expression::Text(text.into()))
            }
            Some(Token::Integer(value)) => Ok(Expression::Integer(value)),
            Some(Token::Float(value)) => Ok(Expression::Float(value)),
            Some(Token::Name(name)) => Ok(match name.as_str() {
                "true" | "True" => Expression::Boolean(true),
                "false" | "False" => Expression::Boolean(false),
                "none" | "None" => Expression::None,
                _ => Expression::Variable(name.into()),
            }),
            _ => Err(self.unexpected()),
        }
    }

    /// Parses elements separated by commas, up to `end`. A trailing comma is allowed.
    fn until<T>(
        &mut self,
        end: &str,
        parse: impl Fn(&mut Self) -> Result<T, Fault>,
    ) -> Result<Vec<T>, Fault> {
        let mut all = Vec::new();
        while !self.take(end) {
            all.push(parse(self)?);
            if !self.take(",") && !self.is_next(end) {
                return Err(self.unexpected());
            }
        }
        Ok(all)
    }
}
