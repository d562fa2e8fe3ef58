//! Evaluates expressions.

use super::{
    Fault, Value,
    arguments::Values,
    arithmetic, filters, methods, questions,
    statements::Render,
    syntax::{Arguments, Comparison, Expression, Step},
    value::{List, Loop},
};
use std::{cell::RefCell, cmp::Ordering, rc::Rc};

/// Maximum length of a range, as in Python's Jinja.
const MAX_RANGE: i128 = 100_000;

impl Render<'_> {
    pub(super) fn value(&mut self, expression: &Expression) -> Result<Value, Fault> {
        self.meter.step(1)?;
        match expression {
            Expression::Text(text) => Ok(Value::Text(text.clone())),
            Expression::Integer(value) => Ok(Value::Integer(*value)),
            Expression::Float(value) => Ok(Value::Float(*value)),
            Expression::Boolean(value) => Ok(Value::Boolean(*value)),
            Expression::None => Ok(Value::None),
            Expression::Variable(name) => Ok(self.lookup(name)?.unwrap_or(Value::Undefined)),
            nested => self.deeper(|render| render.nested_value(nested)),
        }
    }

    fn nested_value(&mut self, expression: &Expression) -> Result<Value, Fault> {
        match expression {
            Expression::List(items) => {
                let items = items.iter().map(|item| self.value(item)).collect::<Result<_, _>>()?;
                Value::list(items, self.meter)
            }
            Expression::Map(pairs) => {
                let pair =
                    |(key, value): &(Expression, Expression)| Ok((self.value(key)?, self.value(value)?));
                let pairs = pairs.iter().map(pair).collect::<Result<_, Fault>>()?;
                Value::map(pairs, self.meter)
            }
            Expression::Not(value) => Ok(Value::Boolean(!self.value(value)?.is_true())),
            Expression::Negative(value) => match self.value(value)? {
                Value::Float(value) => Ok(Value::Float(-value)),
                other => {
                    let negative = other.as_integer().and_then(i128::checked_neg);
                    let wrong = || Fault::new(format!("{} cannot be negated", other.kind()));
                    negative.map(Value::Integer).ok_or_else(wrong)
                }
            },
            Expression::Arithmetic(first, rest) => {
                let mut left = self.value(first)?;
                for (operator, right) in rest {
                    let right = self.value(right)?;
                    left = arithmetic::apply(*operator, &left, &right, self.meter)?;
                }
                Ok(left)
            }
            Expression::Compare(first, rest) => {
                let mut left = self.value(first)?;
                for (comparison, right) in rest {
                    let right = self.value(right)?;
                    if !self.compare(*comparison, &left, &right)? {
                        return Ok(Value::Boolean(false));
                    }
                    left = right;
                }
                Ok(Value::Boolean(true))
            }
            Expression::And(all) => self.first(all, false),
            Expression::Or(all) => self.first(all, true),
            Expression::Choice { condition, then, otherwise } => {
                match (self.value(condition)?.is_true(), otherwise) {
                    (true, _) => self.value(then),
                    (false, Some(otherwise)) => self.value(otherwise),
                    (false, None) => Ok(Value::Undefined),
                }
            }
            Expression::Steps(base, steps) => self.steps(base, steps, None),
            scalar => self.value(scalar),
        }
    }

    /// Returns the first value whose truth is `wanted`, or else the last value.
    fn first(&mut self, all: &[Expression], wanted: bool) -> Result<Value, Fault> {
        let mut value = Value::Undefined;
        for expression in all {
            value = self.value(expression)?;
            if value.is_true() == wanted {
                break;
            }
        }
        Ok(value)
    }

    fn compare(&self, comparison: Comparison, left: &Value, right: &Value) -> Result<bool, Fault> {
        let ordered = |wanted: &[Ordering]| Ok(wanted.contains(&left.compare(right, self.meter)?));
        match comparison {
            Comparison::Equal => left.equals(right, self.meter),
            Comparison::NotEqual => Ok(!left.equals(right, self.meter)?),
            Comparison::Less => ordered(&[Ordering::Less]),
            Comparison::LessOrEqual => ordered(&[Ordering::Less, Ordering::Equal]),
            Comparison::Greater => ordered(&[Ordering::Greater]),
            Comparison::GreaterOrEqual => ordered(&[Ordering::Greater, Ordering::Equal]),
            Comparison::In => self.contains(right, left),
            Comparison::NotIn => Ok(!self.contains(right, left)?),
        }
    }

    pub(super) fn contains(&self, holder: &Value, value: &Value) -> Result<bool, Fault> {
        match holder {
            Value::Undefined => Ok(false),
            Value::Text(text) => {
                let wrong = || Fault::new(format!("{} cannot be contained in a string", value.kind()));
                self.meter.read(text.len())?;
                Ok(text.contains(value.as_text().ok_or_else(wrong)?))
            }
            Value::List(list) => {
                for item in list.items() {
                    self.meter.step(1)?;
                    if item.equals(value, self.meter)? {
                        return Ok(true);
                    }
                }
                Ok(false)
            }
            Value::Map(map) => Ok(map.get(value, self.meter)?.is_some()),
            other => Err(Fault::new(format!("{} is not a container", other.kind()))),
        }
    }

    /// Calls a macro for a call block, which the macro can call as `caller`.
    pub(super) fn call_with(&mut self, call: &Expression, caller: Value) -> Result<Value, Fault> {
        match call {
            Expression::Steps(base, steps) if matches!(steps.last(), Some(Step::Call(_))) => {
                self.deeper(|render| render.steps(base, steps, Some(caller)))
            }
            _ => Err(Fault::new("a call block must call a macro")),
        }
    }

    /// Applies the steps to the base. `caller` is passed to the last call.
    fn steps(&mut self, base: &Expression, steps: &[Step], caller: Option<Value>) -> Result<Value, Fault> {
        let (mut value, mut steps) = match (base, steps) {
            // A built-in function is not a value; it is called by its name.
            (Expression::Variable(name), [Step::Call(arguments), rest @ ..]) => match self.lookup(name)? {
                Some(Value::Undefined) | None => {
                    let arguments = self.arguments(arguments)?;
                    (self.function(name, arguments)?, rest)
                }
                Some(value) => (value, steps),
            },
            _ => (self.value(base)?, steps),
        };
        loop {
            value = match steps {
                [] => return Ok(value),
                // Lists do not change, but a namespace may get another one.
                [Step::Attribute(attribute), Step::Attribute(name), Step::Call(arguments), rest @ ..]
                    if methods::changes_list(&value, attribute, name) =>
                {
                    let arguments = self.arguments(arguments)?;
                    steps = rest;
                    self.meter.step(1)?;
                    methods::change_list(self, &value, attribute, name, arguments)?
                }
                // A method takes precedence over a dict entry with the same name, as in Python.
                [Step::Attribute(name), Step::Call(arguments), rest @ ..] if methods::has(&value, name) => {
                    let arguments = self.arguments(arguments)?;
                    steps = rest;
                    self.meter.step(1)?;
                    methods::call(self, &value, name, arguments)?
                }
                [Step::Call(arguments), rest @ ..] => {
                    let arguments = self.arguments(arguments)?;
                    steps = rest;
                    let caller = if rest.is_empty() { caller.clone() } else { None };
                    self.call(&value, arguments, caller)?
                }
                [step, rest @ ..] => {
                    steps = rest;
                    self.step(value, step)?
                }
            };
        }
    }

    pub(super) fn step(&mut self, value: Value, step: &Step) -> Result<Value, Fault> {
        self.meter.step(1)?;
        match step {
            Step::Attribute(name) => self.attribute(&value, name),
            Step::Item(item) => {
                let item = self.value(item)?;
                self.item(&value, &item)
            }
            Step::Slice(parts) => {
                let mut bounds = [None; 3];
                for (bound, part) in bounds.iter_mut().zip(parts) {
                    if let Some(part) = part {
                        let part = self.value(part)?;
                        let wrong = || {
                            Fault::new(format!(
                                "the bounds of a slice must be whole numbers, not {}",
                                part.kind()
                            ))
                        };
                        *bound = match part {
                            Value::None => None,
                            _ => Some(part.as_integer().ok_or_else(wrong)?),
                        };
                    }
                }
                self.slice(&value, bounds)
            }
            Step::Call(arguments) => {
                let arguments = self.arguments(arguments)?;
                self.call(&value, arguments, None)
            }
            Step::Filter(name, arguments) => {
                let arguments = self.arguments(arguments)?;
                filters::apply(self, name, value, arguments)
            }
            Step::Test { name, arguments, negated } => {
                let arguments = self.arguments(arguments)?;
                Ok(Value::Boolean(questions::ask(self, name, &value, arguments)? != *negated))
            }
        }
    }

    fn arguments(&mut self, arguments: &Arguments) -> Result<Values, Fault> {
        let positional =
            arguments.positional.iter().map(|value| self.value(value)).collect::<Result<_, _>>()?;
        let named = arguments.named.iter().map(|(name, value)| Ok((name.clone(), self.value(value)?)));
        Ok(Values { positional, named: named.collect::<Result<_, Fault>>()? })
    }

    pub(super) fn attribute(&self, value: &Value, name: &str) -> Result<Value, Fault> {
        match value {
            Value::Undefined => {
                Err(Fault::new(format!("cannot read the attribute {name:?} of an undefined value")))
            }
            Value::Map(map) => Ok(map.named(name, self.meter)?.cloned().unwrap_or(Value::Undefined)),
            Value::Namespace(attributes) => {
                let attributes = attributes.borrow();
                self.meter.step(1 + attributes.len() / 8)?;
                let found = attributes.iter().find(|(known, _)| &**known == name);
                Ok(found.map_or(Value::Undefined, |(_, value)| value.clone()))
            }
            Value::Loop(state) => Ok(loop_attribute(state, name)),
            _ => Ok(Value::Undefined),
        }
    }

    fn item(&self, value: &Value, item: &Value) -> Result<Value, Fault> {
        let index_in = |length: usize| {
            let index = item.as_integer()?;
            let index = if index < 0 { index + length as i128 } else { index };
            usize::try_from(index).ok().filter(|index| *index < length)
        };
        match (value, item) {
            (Value::Map(map), _) => Ok(map.get(item, self.meter)?.cloned().unwrap_or(Value::Undefined)),
            (_, Value::Text(name)) => self.attribute(value, name),
            (Value::List(list), _) => {
                Ok(index_in(list.items().len()).map_or(Value::Undefined, |index| list.items()[index].clone()))
            }
            (Value::Text(text), _) => {
                let Some(index) = index_in(value.length(self.meter)?) else { return Ok(Value::Undefined) };
                let character =
                    text.chars().nth(index).expect("the index is less than the length of the text");
                Value::text(character.encode_utf8(&mut [0; 4]), self.meter)
            }
            (Value::Undefined, _) => Err(Fault::new("cannot read an element of an undefined value")),
            _ => Ok(Value::Undefined),
        }
    }

    fn slice(&self, value: &Value, [from, to, by]: [Option<i128>; 3]) -> Result<Value, Fault> {
        let by = by.unwrap_or(1);
        if by == 0 {
            return Err(Fault::new("the step of a slice cannot be 0"));
        }
        let length = match value {
            Value::Text(_) | Value::List(_) | Value::Undefined => value.length(self.meter)? as i128,
            other => return Err(Fault::new(format!("{} cannot be sliced", other.kind()))),
        };
        // A larger step reaches no more elements, and the limit keeps the sums small.
        let by = by.clamp(-length - 1, length + 1);
        // The bounds are clamped as in Python.
        let (least, most) = if by > 0 { (0, length) } else { (-1, length - 1) };
        let bound = |bound: Option<i128>, missing: i128| match bound {
            None => missing,
            Some(at) if at < 0 => (at + length).clamp(least, most),
            Some(at) => at.clamp(least, most),
        };
        let (first, last) = if by > 0 { (least, most) } else { (most, least) };
        let (from, to) = (bound(from, first), bound(to, last));
        let count = if by > 0 { (to - from + by - 1) / by } else { (from - to - by - 1) / -by };
        let count = usize::try_from(count).unwrap_or(0);
        let indices = (0..count).map(|step| (from + step as i128 * by) as usize);
        match value {
            Value::List(list) => Value::list_of(
                count,
                || indices.map(|index| list.items()[index].clone()).collect(),
                self.meter,
            ),
            Value::Text(text) => {
                // A `char` takes four bytes, and a backward slice needs all characters.
                self.meter.make(text.len().saturating_mul(4))?;
                let characters: Vec<char> = text.chars().collect();
                Value::text(&indices.map(|index| characters[index]).collect::<String>(), self.meter)
            }
            _ => Value::list(Vec::new(), self.meter),
        }
    }

    fn call(&mut self, value: &Value, arguments: Values, caller: Option<Value>) -> Result<Value, Fault> {
        match value {
            Value::Macro(function) => self.call_macro(function, arguments, caller),
            Value::Loop(state) => {
                let items = arguments.one("loop", "items")?;
                self.recurse(state, &items)
            }
            other => Err(Fault::new(format!("{} cannot be called", other.kind()))),
        }
    }

    fn function(&mut self, name: &str, arguments: Values) -> Result<Value, Fault> {
        match name {
            "range" => {
                let [first, second, step] = arguments.bind("range", ["start", "stop", "step"])?;
                let whole = |value: Option<Value>, missing| match value {
                    None => Ok(missing),
                    Some(value) => {
                        value.as_integer().ok_or_else(|| Fault::new("range expects whole numbers"))
                    }
                };
                let (start, stop) = match second {
                    None => (0, whole(first, 0)?),
                    second => (whole(first, 0)?, whole(second, 0)?),
                };
                let step = whole(step, 1)?;
                let distance = if step > 0 { stop.checked_sub(start) } else { start.checked_sub(stop) };
                let count = match (distance, step.checked_abs()) {
                    (Some(distance), Some(step)) if step > 0 => (distance.max(0) - 1).div_euclid(step) + 1,
                    _ => return Err(Fault::new("range got a step of 0 or numbers that are too large")),
                };
                if count > MAX_RANGE {
                    return Err(Fault::new(format!("range returns at most {MAX_RANGE} numbers")));
                }
                let numbers = || (0..count).map(|index| Value::Integer(start + index * step)).collect();
                Value::list_of(count as usize, numbers, self.meter)
            }
            "namespace" | "dict" => {
                let Values { positional, named } = arguments;
                let mut pairs = Vec::new();
                for given in positional {
                    match given {
                        Value::Map(map) => pairs.extend(map.entries().iter().cloned()),
                        other => {
                            return Err(Fault::new(format!(
                                "{name} cannot be created from {}",
                                other.kind()
                            )));
                        }
                    }
                }
                for (key, value) in named {
                    pairs.push((Value::text(&key, self.meter)?, value));
                }
                let Value::Map(map) = Value::map(pairs, self.meter)? else {
                    unreachable!("Value::map returns a dict")
                };
                if name == "dict" {
                    return Ok(Value::Map(map));
                }
                let attributes = map
                    .entries()
                    .iter()
                    .filter_map(|(key, value)| Some((key.as_text()?.into(), value.clone())));
                Ok(Value::Namespace(Rc::new(RefCell::new(attributes.collect()))))
            }
            "raise_exception" => {
                let message = arguments.one("raise_exception", "message")?;
                Err(Fault::new(message.shown(self.meter)?.as_ref()))
            }
            "strftime_now" => {
                let format = arguments.one("strftime_now", "format")?;
                let wrong = || Fault::new(format!("strftime_now expects a string, not {}", format.kind()));
                let format = format.as_text().ok_or_else(wrong)?;
                self.meter.make(format.len().saturating_mul(8))?;
                Value::text(&super::super::clock::strftime_now(format).map_err(Fault::new)?, self.meter)
            }
            _ => Err(Fault::new(format!("there is no function {name:?}"))),
        }
    }
}

fn loop_attribute(state: &Loop, name: &str) -> Value {
    let items: &List = &state.items;
    let (index, length) = (state.index.get(), items.items().len());
    let number = |value: usize| Value::Integer(value as i128);
    let neighbor = |index: Option<usize>| index.and_then(|index| items.items().get(index).cloned());
    match name {
        "index" => number(index + 1),
        "index0" => number(index),
        "revindex" => number(length - index),
        "revindex0" => number(length - index - 1),
        "first" => Value::Boolean(index == 0),
        "last" => Value::Boolean(index + 1 == length),
        "length" => number(length),
        "depth" => number(state.depth + 1),
        "depth0" => number(state.depth),
        "previtem" => neighbor(index.checked_sub(1)).unwrap_or(Value::Undefined),
        "nextitem" => neighbor(Some(index + 1)).unwrap_or(Value::Undefined),
        _ => Value::Undefined,
    }
}
