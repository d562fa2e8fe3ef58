//! Implements Jinja's tests, which follow `is`.

use super::{Fault, Value, arguments::Values, statements::Render};
use std::cmp::Ordering;

pub(super) fn ask(render: &Render<'_>, name: &str, value: &Value, arguments: Values) -> Result<bool, Fault> {
    let meter = render.meter;
    let ordered = |arguments: Values, wanted: &[Ordering]| {
        Ok(wanted.contains(&value.compare(&arguments.one(name, "other")?, meter)?))
    };
    let all_cased = |other: fn(char) -> bool| {
        let text = value.as_text().unwrap_or_default();
        meter.read(text.len())?;
        Ok(text.chars().any(char::is_alphabetic) && !text.chars().any(other))
    };
    let remainder = |divisor: i128| {
        let wrong = || Fault::new(format!("{} is not a whole number", value.kind()));
        value
            .as_integer()
            .ok_or_else(wrong)?
            .checked_rem(divisor)
            .ok_or_else(|| Fault::new("cannot divide by 0"))
    };
    // These tests take an argument.
    match name {
        "eq" | "equalto" => return value.equals(&arguments.one(name, "other")?, meter),
        "ne" => return Ok(!value.equals(&arguments.one(name, "other")?, meter)?),
        "lt" | "lessthan" => return ordered(arguments, &[Ordering::Less]),
        "le" => return ordered(arguments, &[Ordering::Less, Ordering::Equal]),
        "gt" | "greaterthan" => return ordered(arguments, &[Ordering::Greater]),
        "ge" => return ordered(arguments, &[Ordering::Greater, Ordering::Equal]),
        "in" => return render.contains(&arguments.one(name, "holder")?, value),
        "sameas" => {
            let other = arguments.one(name, "other")?;
            return Ok(other.kind() == value.kind() && value.equals(&other, meter)?);
        }
        "divisibleby" => {
            let divisor = arguments.one(name, "divisor")?;
            let divisor =
                divisor.as_integer().ok_or_else(|| Fault::new("divisibleby expects a whole number"))?;
            return Ok(remainder(divisor)? == 0);
        }
        _ => arguments.none(name)?,
    }
    Ok(match name {
        "defined" => !matches!(value, Value::Undefined),
        "undefined" => matches!(value, Value::Undefined),
        "none" => matches!(value, Value::None),
        "boolean" => matches!(value, Value::Boolean(_)),
        "true" => matches!(value, Value::Boolean(true)),
        "false" => matches!(value, Value::Boolean(false)),
        "integer" => matches!(value, Value::Integer(_)),
        "float" => matches!(value, Value::Float(_)),
        "number" => matches!(value, Value::Integer(_) | Value::Float(_) | Value::Boolean(_)),
        "string" => matches!(value, Value::Text(_)),
        "mapping" => matches!(value, Value::Map(_)),
        // An undefined value can be iterated over and counted.
        "iterable" | "sequence" => {
            matches!(value, Value::Text(_) | Value::List(_) | Value::Map(_) | Value::Undefined)
        }
        "callable" => matches!(value, Value::Macro(_) | Value::Loop(_)),
        "odd" => remainder(2)? != 0,
        "even" => remainder(2)? == 0,
        "lower" => all_cased(char::is_uppercase)?,
        "upper" => all_cased(char::is_lowercase)?,
        _ => return Err(Fault::new(format!("there is no test {name:?}"))),
    })
}
