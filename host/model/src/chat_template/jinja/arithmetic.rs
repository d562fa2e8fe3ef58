//! Implements `+`, `-`, `*`, `/`, `//`, `%`, `**` and `~` with Python's semantics.

use super::{Fault, Meter, Value, syntax::Arithmetic};

pub(super) fn apply(
    operator: Arithmetic,
    left: &Value,
    right: &Value,
    meter: &Meter,
) -> Result<Value, Fault> {
    match (operator, left, right) {
        (Arithmetic::Join, _, _) => join(&[left.shown(meter)?.as_ref(), right.shown(meter)?.as_ref()], meter),
        (Arithmetic::Add, Value::Text(left), Value::Text(right)) => join(&[left, right], meter),
        (Arithmetic::Add, Value::List(left), Value::List(right)) => {
            meter.step(left.items().len() + right.items().len())?;
            concatenated(&[left.items(), right.items()], meter)
        }
        (Arithmetic::Multiply, Value::Text(_) | Value::List(_), count)
        | (Arithmetic::Multiply, count, Value::Text(_) | Value::List(_)) => {
            let repeated = if matches!(left, Value::Text(_) | Value::List(_)) { left } else { right };
            let wrong =
                || Fault::new(format!("{} cannot be multiplied by {}", repeated.kind(), count.kind()));
            let count = usize::try_from(count.as_integer().ok_or_else(wrong)?.max(0)).unwrap_or(usize::MAX);
            repeat(repeated, count, meter)
        }
        _ => numbers(operator, left, right),
    }
}

fn join(texts: &[&str], meter: &Meter) -> Result<Value, Fault> {
    let bytes = texts.iter().map(|text| text.len()).sum::<usize>();
    // Charged once for writing the text and once for keeping it.
    meter.make(bytes)?;
    Value::text(&texts.concat(), meter)
}

fn concatenated(lists: &[&[Value]], meter: &Meter) -> Result<Value, Fault> {
    Value::list_of(lists.iter().map(|list| list.len()).sum(), || lists.concat(), meter)
}

fn repeat(repeated: &Value, count: usize, meter: &Meter) -> Result<Value, Fault> {
    match repeated {
        Value::Text(text) => {
            meter.make(text.len().saturating_mul(count))?;
            Value::text(&text.repeat(count), meter)
        }
        Value::List(list) => {
            let length = list.items().len().saturating_mul(count);
            Value::list_of(length, || list.items().iter().cycle().take(length).cloned().collect(), meter)
        }
        _ => unreachable!("only texts and lists are repeated"),
    }
}

fn numbers(operator: Arithmetic, left: &Value, right: &Value) -> Result<Value, Fault> {
    let sign = match operator {
        Arithmetic::Add => "+",
        Arithmetic::Subtract => "-",
        Arithmetic::Multiply => "*",
        Arithmetic::Divide => "/",
        Arithmetic::DivideDown => "//",
        Arithmetic::Remainder => "%",
        Arithmetic::Power => "**",
        Arithmetic::Join => "~",
    };
    let wrong = || Fault::new(format!("{sign} does not apply to {} and {}", left.kind(), right.kind()));
    let impossible = || Fault::new(format!("{sign} has no result for these numbers"));
    let whole = |value: &Value| match value {
        Value::Integer(value) => Some(*value),
        Value::Boolean(value) => Some(i128::from(*value)),
        _ => None,
    };
    if let (Some(left), Some(right)) = (whole(left), whole(right))
        && operator != Arithmetic::Divide
        && !(operator == Arithmetic::Power && right < 0)
    {
        let result = match operator {
            Arithmetic::Add => left.checked_add(right),
            Arithmetic::Subtract => left.checked_sub(right),
            Arithmetic::Multiply => left.checked_mul(right),
            Arithmetic::Power => u32::try_from(right).ok().and_then(|right| left.checked_pow(right)),
            // Division rounds down, and the remainder has the sign of the divisor, as in Python.
            Arithmetic::DivideDown => left.checked_div(right).and_then(|quotient| {
                let is_exact = quotient * right == left;
                if is_exact || (left < 0) == (right < 0) { Some(quotient) } else { quotient.checked_sub(1) }
            }),
            Arithmetic::Remainder => left
                .checked_rem(right)
                .map(|rest| if rest != 0 && (rest < 0) != (right < 0) { rest + right } else { rest }),
            Arithmetic::Divide | Arithmetic::Join => None,
        };
        return result.map(Value::Integer).ok_or_else(impossible);
    }
    let (left, right) = (left.as_float().ok_or_else(wrong)?, right.as_float().ok_or_else(wrong)?);
    if right == 0.0 && matches!(operator, Arithmetic::Divide | Arithmetic::DivideDown | Arithmetic::Remainder)
    {
        return Err(impossible());
    }
    Ok(Value::Float(match operator {
        Arithmetic::Add => left + right,
        Arithmetic::Subtract => left - right,
        Arithmetic::Multiply => left * right,
        Arithmetic::Divide => left / right,
        Arithmetic::DivideDown => (left / right).floor(),
        Arithmetic::Remainder => left - right * (left / right).floor(),
        Arithmetic::Power => left.powf(right),
        Arithmetic::Join => return Err(wrong()),
    }))
}
