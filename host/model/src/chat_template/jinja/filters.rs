//! Implements Jinja's filters.

use super::{
    Fault, Value,
    arguments::{Values, integer, is_true, text},
    methods, questions,
    statements::Render,
};
use std::{cell::RefCell, cmp::Ordering};

pub(super) fn apply(
    render: &mut Render<'_>,
    name: &str,
    value: Value,
    arguments: Values,
) -> Result<Value, Fault> {
    let meter = render.meter;
    match name {
        "default" | "d" => {
            let [default, even_if_false] = arguments.bind(name, ["default_value", "boolean"])?;
            let is_missing = matches!(value, Value::Undefined) || is_true(&even_if_false) && !value.is_true();
            Ok(if is_missing { default.unwrap_or(Value::Text("".into())) } else { value })
        }
        "tojson" => to_json(render, &value, arguments),
        "join" => {
            let [separator, attribute] = arguments.bind(name, ["d", "attribute"])?;
            let items = attributes(render, value, &attribute)?;
            methods::join(&items, text(&separator, name)?.unwrap_or_default(), meter)
        }
        "trim" => {
            let [characters] = arguments.bind(name, ["chars"])?;
            let subject = value.shown(meter)?;
            Value::text(methods::stripped(&subject, text(&characters, name)?, "strip"), meter)
        }
        "replace" => {
            let [from, to, most] = arguments.bind(name, ["old", "new", "count"])?;
            let (Some(from), Some(to)) = (from, to) else {
                return Err(Fault::new("replace requires two strings"));
            };
            let (from, to) = (from.shown(meter)?, to.shown(meter)?);
            let subject = value.shown(meter)?;
            meter.read(subject.len())?;
            methods::replace(&subject, &from, &to, integer(&most, name)?, meter)
        }
        "indent" => indent(render, &value, arguments),
        "format" => format(render, &value, &arguments.positional),
        "batch" => {
            let [size, fill] = arguments.bind(name, ["linecount", "fill_with"])?;
            batch(render, &value, integer(&size, name)?, fill)
        }
        "round" => {
            let [precision, method] = arguments.bind(name, ["precision", "method"])?;
            round(&value, integer(&precision, name)?.unwrap_or(0), text(&method, name)?)
        }
        "int" => {
            let [default] = arguments.bind(name, ["default"])?;
            let parsed = match &value {
                Value::Float(value) => Some(value.trunc() as i128),
                Value::Text(text) => {
                    let text = text.trim();
                    text.parse().ok().or_else(|| text.parse::<f64>().ok().map(|value| value.trunc() as i128))
                }
                other => other.as_integer(),
            };
            Ok(parsed.map_or(default.unwrap_or(Value::Integer(0)), Value::Integer))
        }
        "float" => {
            let [default] = arguments.bind(name, ["default"])?;
            let parsed = value.as_float().or_else(|| value.as_text()?.trim().parse().ok());
            Ok(parsed.map_or(default.unwrap_or(Value::Float(0.0)), Value::Float))
        }
        "attr" => {
            let attribute = arguments.one(name, "name")?;
            let attribute =
                attribute.as_text().ok_or_else(|| Fault::new("attr expects the name of an attribute"))?;
            render.attribute(&value, attribute)
        }
        "map" => map(render, &value, arguments),
        "select" | "reject" | "selectattr" | "rejectattr" => select(render, name, &value, arguments),
        "sort" => {
            let [reverse, case_sensitive, attribute] =
                arguments.bind(name, ["reverse", "case_sensitive", "attribute"])?;
            let items = value.items(meter)?;
            let keys = attributes(render, value, &attribute)?.items(meter)?;
            sorted(render, items.items(), keys.items(), is_true(&reverse), is_true(&case_sensitive))
        }
        "dictsort" => {
            let [case_sensitive, by, reverse] = arguments.bind(name, ["case_sensitive", "by", "reverse"])?;
            let pairs = methods::items(&value, meter)?.items(meter)?;
            let index = usize::from(text(&by, name)? == Some("value"));
            let key = |pair: &Value| Ok(pair.items(meter)?.items()[index].clone());
            let keys = pairs.items().iter().map(key).collect::<Result<Vec<_>, Fault>>()?;
            sorted(render, pairs.items(), &keys, is_true(&reverse), is_true(&case_sensitive))
        }
        "unique" | "min" | "max" => {
            let [case_sensitive, attribute] = arguments.bind(name, ["case_sensitive", "attribute"])?;
            let items = value.items(meter)?;
            let keys = attributes(render, value, &attribute)?.items(meter)?;
            let keys = folded(render, keys.items(), is_true(&case_sensitive))?;
            one_of_each(render, name, items.items(), &keys)
        }
        "sum" => {
            let [attribute, start] = arguments.bind(name, ["attribute", "start"])?;
            let items = attributes(render, value, &attribute)?.items(meter)?;
            let mut sum = start.unwrap_or(Value::Integer(0));
            for item in items.items() {
                sum = super::arithmetic::apply(super::syntax::Arithmetic::Add, &sum, item, meter)?;
            }
            Ok(sum)
        }
        _ => {
            arguments.none(name)?;
            plain(render, name, value)
        }
    }
}

/// Applies the filters that take no arguments.
fn plain(render: &Render<'_>, name: &str, value: Value) -> Result<Value, Fault> {
    let meter = render.meter;
    match name {
        "length" | "count" => Ok(Value::Integer(value.length(meter)? as i128)),
        "title" => methods::cased(&value.shown(meter)?, "words", meter),
        "lower" | "upper" | "capitalize" => methods::cased(&value.shown(meter)?, name, meter),
        "string" => Ok(Value::Text(value.shown(meter)?)),
        "safe" => Ok(value),
        "list" => Ok(Value::List(value.items(meter)?)),
        "items" => match value {
            Value::Undefined => Value::list(Vec::new(), meter),
            value => methods::items(&value, meter),
        },
        "first" => Ok(value.items(meter)?.items().first().cloned().unwrap_or(Value::Undefined)),
        "last" => Ok(value.items(meter)?.items().last().cloned().unwrap_or(Value::Undefined)),
        "reverse" => match &value {
            Value::Text(subject) => {
                meter.make(subject.len())?;
                Value::text(&subject.chars().rev().collect::<String>(), meter)
            }
            other => {
                let items = other.items(meter)?;
                Value::list_of(items.items().len(), || items.items().iter().rev().cloned().collect(), meter)
            }
        },
        "abs" => match value {
            Value::Float(value) => Ok(Value::Float(value.abs())),
            other => {
                let absolute = other.as_integer().and_then(i128::checked_abs);
                absolute
                    .map(Value::Integer)
                    .ok_or_else(|| Fault::new(format!("{} has no absolute value", other.kind())))
            }
        },
        "escape" | "e" => {
            let subject = value.shown(meter)?;
            meter.make(subject.len().saturating_mul(6))?;
            let escaped = subject.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
            Value::text(&escaped.replace('"', "&#34;").replace('\'', "&#39;"), meter)
        }
        "wordcount" => {
            let subject = value.shown(meter)?;
            meter.read(subject.len())?;
            Ok(Value::Integer(subject.split_whitespace().count() as i128))
        }
        _ => Err(Fault::new(format!("there is no filter {name:?}"))),
    }
}

/// Implements `tojson` as Python's `json.dumps`. An escape takes up to six bytes per byte.
fn to_json(render: &Render<'_>, value: &Value, arguments: Values) -> Result<Value, Fault> {
    use super::super::json;
    let meter = render.meter;
    let names = ["indent", "separators", "ensure_ascii", "sort_keys"];
    let [indent, separators, ascii_only, sorted] = arguments.bind("tojson", names)?;
    if is_true(&sorted) {
        return Err(Fault::new("tojson does not support sort_keys"));
    }
    let width = integer(&indent, "tojson")?.map(|width| usize::try_from(width).unwrap_or(0).min(16));
    let mut layout = json::Layout::new(width);
    let mut separator_bytes = 2;
    if let Some(separators) = separators.filter(|separators| !matches!(separators, Value::None)) {
        let separators = separators.items(meter)?;
        let [Some(item), Some(key)] =
            [0, 1].map(|index| separators.items().get(index).and_then(Value::as_text))
        else {
            return Err(Fault::new("tojson expects two separators"));
        };
        separator_bytes = item.len().max(key.len());
        layout = layout.with_separators(item.to_owned(), key.to_owned());
    }
    // `bytes` counts at least eight bytes per element, and an indent puts each element on a separate line.
    let per_element = separator_bytes + width.unwrap_or(0) * (value.depth() as usize + 1);
    let bytes = value.bytes();
    meter.make(bytes.saturating_mul(6).saturating_add((bytes / 8).saturating_mul(per_element)))?;
    let json = layout.dump(&value.to_json(meter)?);
    match is_true(&ascii_only) {
        true => {
            meter.make(json.len().saturating_mul(6))?;
            Value::text(&json::ascii(&json), meter)
        }
        false => Value::text(&json, meter),
    }
}

fn indent(render: &Render<'_>, value: &Value, arguments: Values) -> Result<Value, Fault> {
    let meter = render.meter;
    let [width, first, blank] = arguments.bind("indent", ["width", "first", "blank"])?;
    let subject = value.shown(meter)?;
    let width = match &width {
        Some(Value::Text(text)) => text.to_string(),
        other => {
            let width = integer(other, "indent")?.unwrap_or(4);
            let width = usize::try_from(width).unwrap_or(0);
            meter.make(width)?;
            " ".repeat(width)
        }
    };
    let lines = subject.split('\n').count();
    meter.make(subject.len().saturating_add(lines.saturating_mul(width.len())))?;
    let mut text = String::new();
    for (number, line) in subject.split('\n').enumerate() {
        text.push_str(if number > 0 { "\n" } else { "" });
        let is_indented = if number == 0 { is_true(&first) } else { is_true(&blank) || !line.is_empty() };
        text.push_str(if is_indented { &width } else { "" });
        text.push_str(line);
    }
    Value::text(&text, meter)
}

/// Implements `%s` and `%d`, without widths.
fn format(render: &Render<'_>, value: &Value, values: &[Value]) -> Result<Value, Fault> {
    let meter = render.meter;
    let subject = value.shown(meter)?;
    let mut text = String::new();
    let (mut rest, mut values) = (&*subject, values.iter());
    while let Some(at) = rest.find('%') {
        meter.make(at + 1)?;
        text.push_str(&rest[..at]);
        match rest[at + 1..].chars().next() {
            Some('%') => text.push('%'),
            Some('s' | 'd' | 'i') => {
                let value = values.next().ok_or_else(|| Fault::new("format has no value for a field"))?;
                value.show(&mut text, meter)?;
            }
            _ => return Err(Fault::new("format supports only %s, %d and %%")),
        }
        rest = &rest[at + 2..];
    }
    meter.make(rest.len())?;
    text.push_str(rest);
    Value::text(&text, meter)
}

fn batch(
    render: &Render<'_>,
    value: &Value,
    size: Option<i128>,
    fill: Option<Value>,
) -> Result<Value, Fault> {
    let meter = render.meter;
    let size = size.and_then(|size| usize::try_from(size).ok()).filter(|size| *size > 0);
    let size = size.ok_or_else(|| Fault::new("batch requires a positive size"))?;
    let items = value.items(meter)?;
    let mut batches = Vec::new();
    for batch in items.items().chunks(size) {
        let length = if fill.is_some() { size } else { batch.len() };
        let missing = length - batch.len();
        let filled = fill.iter().cycle().take(missing).cloned();
        batches.push(Value::list_of(length, || batch.iter().cloned().chain(filled).collect(), meter)?);
    }
    Value::list(batches, meter)
}

fn round(value: &Value, precision: i128, method: Option<&str>) -> Result<Value, Fault> {
    let number = value.as_float().ok_or_else(|| Fault::new(format!("{} cannot be rounded", value.kind())))?;
    let scale = 10_f64.powi(i32::try_from(precision.clamp(-300, 300)).unwrap_or(0));
    let scaled = number * scale;
    let rounded = match method {
        Some("ceil") => scaled.ceil(),
        Some("floor") => scaled.floor(),
        _ => scaled.round_ties_even(),
    };
    Ok(Value::Float(rounded / scale))
}

/// Implements `map("filter", …)` and `map(attribute="name")`.
fn map(render: &mut Render<'_>, value: &Value, arguments: Values) -> Result<Value, Fault> {
    let meter = render.meter;
    let items = value.items(meter)?;
    let mut mapped = Vec::new();
    let attribute =
        arguments.named.iter().find(|(name, _)| &**name == "attribute").map(|(_, value)| value.clone());
    if let Some(attribute) = attribute {
        let default =
            arguments.named.iter().find(|(name, _)| &**name == "default").map(|(_, value)| value.clone());
        for item in items.items() {
            let found = path(render, item, &attribute)?;
            mapped.push(match (found, &default) {
                (Value::Undefined, Some(default)) => default.clone(),
                (found, _) => found,
            });
        }
        return Value::list(mapped, meter);
    }
    let Values { mut positional, named } = arguments;
    if positional.is_empty() {
        return Err(Fault::new("map requires the name of a filter or an attribute"));
    }
    let filter = positional.remove(0);
    let filter = filter.as_text().ok_or_else(|| Fault::new("map expects the name of a filter"))?;
    for item in items.items() {
        meter.make(64 * (positional.len() + named.len()))?;
        let arguments = Values { positional: positional.clone(), named: named.clone() };
        mapped.push(render.deeper(|render| apply(render, filter, item.clone(), arguments))?);
    }
    Value::list(mapped, meter)
}

fn select(render: &mut Render<'_>, name: &str, value: &Value, arguments: Values) -> Result<Value, Fault> {
    let meter = render.meter;
    let Values { mut positional, named } = arguments;
    let attribute = match name.ends_with("attr") {
        true if positional.is_empty() => {
            return Err(Fault::new(format!("{name} requires the name of an attribute")));
        }
        true => Some(positional.remove(0)),
        false => None,
    };
    let test = if positional.is_empty() { None } else { Some(positional.remove(0)) };
    let test = text(&test, name)?;
    let mut selected = Vec::new();
    for item in value.items(meter)?.items() {
        meter.make(64 * (positional.len() + named.len()))?;
        let subject = match &attribute {
            Some(attribute) => path(render, item, attribute)?,
            None => item.clone(),
        };
        let holds = match test {
            Some(test) => {
                let arguments = Values { positional: positional.clone(), named: named.clone() };
                questions::ask(render, test, &subject, arguments)?
            }
            None => subject.is_true(),
        };
        if holds == name.starts_with("select") {
            selected.push(item.clone());
        }
    }
    Value::list(selected, meter)
}

/// Returns the list itself, or the given attribute of each of its elements.
fn attributes(render: &Render<'_>, value: Value, attribute: &Option<Value>) -> Result<Value, Fault> {
    let Some(attribute) = attribute.as_ref().filter(|attribute| !matches!(attribute, Value::None)) else {
        return Ok(value);
    };
    let items = value.items(render.meter)?;
    let found = items.items().iter().map(|item| path(render, item, attribute)).collect::<Result<_, _>>()?;
    Value::list(found, render.meter)
}

/// Follows an attribute path such as `a.b.0`.
fn path(render: &Render<'_>, value: &Value, attribute: &Value) -> Result<Value, Fault> {
    let mut found = value.clone();
    let attribute = attribute.shown(render.meter)?;
    for part in attribute.split('.') {
        render.meter.step(1)?;
        found = match (&found, part.parse::<usize>()) {
            (Value::List(list), Ok(index)) => list.items().get(index).cloned().unwrap_or(Value::Undefined),
            (found, _) => render.attribute(found, part)?,
        };
    }
    Ok(found)
}

/// Returns the keys as they are compared: in lowercase, unless the comparison is case-sensitive.
fn folded(render: &Render<'_>, keys: &[Value], case_sensitive: bool) -> Result<Vec<Value>, Fault> {
    let fold = |key: &Value| match key.as_text() {
        Some(text) if !case_sensitive => methods::cased(text, "lower", render.meter),
        _ => Ok(key.clone()),
    };
    keys.iter().map(fold).collect()
}

fn sorted(
    render: &Render<'_>,
    items: &[Value],
    keys: &[Value],
    reverse: bool,
    case_sensitive: bool,
) -> Result<Value, Fault> {
    let keys = folded(render, keys, case_sensitive)?;
    render.meter.make(items.len() * 8)?;
    let mut indices: Vec<usize> = (0..items.len()).collect();
    // After a comparison fails, all elements compare as equal, so the sort finishes soon.
    let failed = RefCell::new(None);
    indices.sort_by(|one, other| {
        if failed.borrow().is_some() {
            return Ordering::Equal;
        }
        let order = render.meter.step(1).and_then(|()| keys[*one].compare(&keys[*other], render.meter));
        let order = order.unwrap_or_else(|fault| {
            *failed.borrow_mut() = Some(fault);
            Ordering::Equal
        });
        if reverse { order.reverse() } else { order }
    });
    match failed.into_inner() {
        Some(fault) => Err(fault),
        None => Value::list(indices.into_iter().map(|index| items[index].clone()).collect(), render.meter),
    }
}

/// Implements `unique`, `min` and `max`.
fn one_of_each(render: &Render<'_>, name: &str, items: &[Value], keys: &[Value]) -> Result<Value, Fault> {
    let mut kept: Vec<usize> = Vec::new();
    for (index, key) in keys.iter().enumerate() {
        if name == "unique" {
            let mut is_new = true;
            for known in &kept {
                render.meter.step(1)?;
                is_new &= !key.equals(&keys[*known], render.meter)?;
            }
            kept.extend(is_new.then_some(index));
            continue;
        }
        let wanted = if name == "min" { Ordering::Less } else { Ordering::Greater };
        match kept.first().copied() {
            Some(best) if key.compare(&keys[best], render.meter)? != wanted => {}
            _ => kept = vec![index],
        }
    }
    match (name, kept.first()) {
        ("unique", _) => Value::list(kept.iter().map(|index| items[*index].clone()).collect(), render.meter),
        (_, Some(index)) => Ok(items[*index].clone()),
        (_, None) => Ok(Value::Undefined),
    }
}
