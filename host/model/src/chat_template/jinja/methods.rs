//! Implements Python's methods of strings, lists and dicts. Of those that modify the value, there are only `append` and `pop`,
//! for lists of a namespace.

use super::{
    Fault, Meter, Value,
    arguments::{Values, integer, text},
    statements::Render,
    syntax::Name,
};

const OF_TEXTS: [&str; 30] = [
    "capitalize",
    "count",
    "endswith",
    "find",
    "format",
    "index",
    "isalnum",
    "isalpha",
    "isdigit",
    "islower",
    "isnumeric",
    "isspace",
    "isupper",
    "join",
    "lower",
    "lstrip",
    "partition",
    "removeprefix",
    "removesuffix",
    "replace",
    "rfind",
    "rpartition",
    "rsplit",
    "rstrip",
    "split",
    "splitlines",
    "startswith",
    "strip",
    "title",
    "upper",
];
const OF_LISTS: [&str; 2] = ["count", "index"];
const OF_MAPS: [&str; 5] = ["copy", "get", "items", "keys", "values"];
const OF_LOOPS: [&str; 2] = ["changed", "cycle"];

pub(super) fn has(value: &Value, name: &str) -> bool {
    match value {
        Value::Text(_) => OF_TEXTS.contains(&name),
        Value::List(_) => OF_LISTS.contains(&name),
        Value::Map(_) => OF_MAPS.contains(&name),
        Value::Loop(_) => OF_LOOPS.contains(&name),
        _ => false,
    }
}

/// Returns whether the method changes the list that this attribute of a namespace has. Such a call replaces the list.
pub(super) fn changes_list(value: &Value, attribute: &str, name: &str) -> bool {
    let Value::Namespace(attributes) = value else { return false };
    let is_list = |(known, value): &(Name, Value)| &**known == attribute && matches!(value, Value::List(_));
    matches!(name, "append" | "pop") && attributes.borrow().iter().any(is_list)
}

/// Calls a method that changes a list according to [`changes_list`].
pub(super) fn change_list(
    render: &Render<'_>,
    value: &Value,
    attribute: &str,
    name: &str,
    arguments: Values,
) -> Result<Value, Fault> {
    let Value::Namespace(attributes) = value else { return Ok(Value::Undefined) };
    let mut attributes = attributes.borrow_mut();
    let found = attributes.iter_mut().find(|(known, _)| &**known == attribute);
    let Some((_, slot @ Value::List(_))) = found else { return Ok(Value::Undefined) };
    let list = slot.items(render.meter)?;
    if name == "append" {
        let more = arguments.one(name, "value")?;
        if !more.is_plain() {
            return Err(Fault::new(format!("{} cannot be stored in a namespace", more.kind())));
        }
        let items = || list.items().iter().cloned().chain([more]).collect();
        *slot = Value::list_of(list.items().len() + 1, items, render.meter)?;
        return Ok(Value::None);
    }
    let [index] = arguments.bind(name, ["index"])?;
    let (index, length) = (integer(&index, name)?.unwrap_or(-1), list.items().len());
    let index = if index < 0 { index + length as i128 } else { index };
    let Some(index) = usize::try_from(index).ok().filter(|index| *index < length) else {
        return Err(Fault::new("pop did not find the element"));
    };
    let rest = list.items().iter().enumerate().filter(|(at, _)| *at != index);
    *slot = Value::list_of(length - 1, || rest.map(|(_, item)| item.clone()).collect(), render.meter)?;
    Ok(list.items()[index].clone())
}

/// Calls a method that the value has according to [`has`].
pub(super) fn call(
    render: &Render<'_>,
    value: &Value,
    name: &str,
    arguments: Values,
) -> Result<Value, Fault> {
    let meter = render.meter;
    match value {
        Value::Text(subject) => of_text(subject, name, arguments, meter),
        Value::List(list) => {
            let wanted = arguments.one(name, "value")?;
            let mut indices = Vec::new();
            for (index, item) in list.items().iter().enumerate() {
                if item.equals(&wanted, meter)? {
                    indices.push(index);
                }
            }
            match (name, indices.first()) {
                ("count", _) => Ok(Value::Integer(indices.len() as i128)),
                (_, Some(index)) => Ok(Value::Integer(*index as i128)),
                (_, None) => Err(Fault::new("index did not find the value")),
            }
        }
        Value::Map(map) => match name {
            "get" => {
                let [key, default] = arguments.bind("get", ["key", "default"])?;
                let key = key.ok_or_else(|| Fault::new("get requires a key"))?;
                Ok(map.get(&key, meter)?.cloned().or(default).unwrap_or(Value::None))
            }
            "copy" => Ok(value.clone()),
            _ => {
                arguments.none(name)?;
                let entries = map.entries().iter();
                let items = match name {
                    "keys" => entries.map(|(key, _)| key.clone()).collect(),
                    "values" => entries.map(|(_, value)| value.clone()).collect(),
                    _ => return items(value, meter),
                };
                Value::list(items, meter)
            }
        },
        Value::Loop(state) => match name {
            "cycle" => {
                let values = arguments.positional;
                let wanted = values.get(state.index.get() % values.len().max(1)).cloned();
                wanted.ok_or_else(|| Fault::new("cycle requires values"))
            }
            _ => {
                let now = Value::list(arguments.positional, meter)?;
                let changed = match &*state.changed.borrow() {
                    Some(before) => !before.equals(&now, meter)?,
                    None => true,
                };
                *state.changed.borrow_mut() = Some(now);
                Ok(Value::Boolean(changed))
            }
        },
        other => Err(Fault::new(format!("{} has no method {name:?}", other.kind()))),
    }
}

/// Returns a list of the keys, each with its value.
pub(super) fn items(value: &Value, meter: &Meter) -> Result<Value, Fault> {
    let Value::Map(map) = value else {
        return Err(Fault::new(format!("{} has no items", value.kind())));
    };
    let pairs = map.entries().iter().map(|(key, value)| Value::list(vec![key.clone(), value.clone()], meter));
    Value::list(pairs.collect::<Result<_, _>>()?, meter)
}

fn of_text(subject: &str, name: &str, arguments: Values, meter: &Meter) -> Result<Value, Fault> {
    meter.read(subject.len())?;
    let all = |is: fn(char) -> bool| Ok(Value::Boolean(!subject.is_empty() && subject.chars().all(is)));
    let made = |text: &str| Value::text(text, meter);
    match name {
        "strip" | "lstrip" | "rstrip" => {
            let [characters] = arguments.bind(name, ["characters"])?;
            made(stripped(subject, text(&characters, name)?, name))
        }
        "removeprefix" => {
            let prefix = arguments.one(name, "prefix")?;
            made(subject.strip_prefix(required(&prefix, name)?).unwrap_or(subject))
        }
        "removesuffix" => {
            let suffix = arguments.one(name, "suffix")?;
            made(subject.strip_suffix(required(&suffix, name)?).unwrap_or(subject))
        }
        "split" | "rsplit" => {
            let [separator, most] = arguments.bind(name, ["sep", "maxsplit"])?;
            let most = integer(&most, name)?.and_then(|most| usize::try_from(most).ok());
            split(subject, text(&separator, name)?, most, name == "rsplit", meter)
        }
        "partition" | "rpartition" => {
            let separator = arguments.one(name, "sep")?;
            let separator = required(&separator, name)?;
            let (parts, missing) = match name {
                "partition" => (subject.split_once(separator), [subject, "", ""]),
                _ => (subject.rsplit_once(separator), ["", "", subject]),
            };
            texts(parts.map_or(missing, |(before, after)| [before, separator, after]), meter)
        }
        "splitlines" => {
            arguments.none(name)?;
            texts(subject.lines(), meter)
        }
        "startswith" | "endswith" => {
            let [wanted] = arguments.bind(name, ["text"])?;
            let wanted = wanted.ok_or_else(|| Fault::new(format!("{name} requires a string")))?;
            let is = |wanted: &Value| {
                let wanted = required(wanted, name)?;
                Ok(if name == "startswith" { subject.starts_with(wanted) } else { subject.ends_with(wanted) })
            };
            match &wanted {
                Value::List(several) => {
                    let found = several.items().iter().map(is).collect::<Result<Vec<bool>, Fault>>()?;
                    Ok(Value::Boolean(found.contains(&true)))
                }
                one => Ok(Value::Boolean(is(one)?)),
            }
        }
        "replace" => {
            let [from, to, most] = arguments.bind(name, ["old", "new", "count"])?;
            let (Some(from), Some(to)) = (text(&from, name)?, text(&to, name)?) else {
                return Err(Fault::new("replace requires two strings"));
            };
            replace(subject, from, to, integer(&most, name)?, meter)
        }
        "find" | "rfind" | "index" => {
            let wanted = arguments.one(name, "text")?;
            let wanted = required(&wanted, name)?;
            let at = if name == "rfind" { subject.rfind(wanted) } else { subject.find(wanted) };
            match at {
                Some(at) => Ok(Value::Integer(subject[..at].chars().count() as i128)),
                None if name == "index" => Err(Fault::new("index did not find the text")),
                None => Ok(Value::Integer(-1)),
            }
        }
        "count" => {
            let wanted = arguments.one(name, "text")?;
            Ok(Value::Integer(subject.matches(required(&wanted, name)?).count() as i128))
        }
        "join" => join(&arguments.one(name, "items")?, subject, meter),
        "format" => format(subject, &arguments.positional, &arguments.named, meter),
        _ => {
            arguments.none(name)?;
            match name {
                "isdigit" | "isnumeric" => all(char::is_numeric),
                "isalpha" => all(char::is_alphabetic),
                "isalnum" => all(char::is_alphanumeric),
                "isspace" => all(char::is_whitespace),
                "isupper" => Ok(Value::Boolean(is_cased(subject, char::is_lowercase))),
                "islower" => Ok(Value::Boolean(is_cased(subject, char::is_uppercase))),
                _ => cased(subject, name, meter),
            }
        }
    }
}

/// Implements `lower`, `upper`, `title` and `capitalize`. The name `words` stands for the filter `title`, which
/// starts a word only where Jinja does.
pub(super) fn cased(subject: &str, name: &str, meter: &Meter) -> Result<Value, Fault> {
    // Changing the case of a character can produce up to three characters.
    meter.make(subject.len().saturating_mul(3))?;
    let text = match name {
        "lower" => subject.to_lowercase(),
        "upper" => subject.to_uppercase(),
        "capitalize" => {
            let mut characters = subject.chars();
            let first = characters.next().map(char::to_uppercase).into_iter().flatten();
            first.chain(characters.flat_map(char::to_lowercase)).collect()
        }
        _ => {
            let mut text = String::with_capacity(subject.len());
            let mut begins = true;
            for character in subject.chars() {
                match begins {
                    true => text.extend(character.to_uppercase()),
                    false => text.extend(character.to_lowercase()),
                }
                begins = match name {
                    "words" => character.is_whitespace() || "-({[<".contains(character),
                    _ => !character.is_alphabetic(),
                };
            }
            text
        }
    };
    Value::text(&text, meter)
}

/// Implements `strip`, `lstrip` and `rstrip`.
pub(super) fn stripped<'t>(subject: &'t str, characters: Option<&str>, name: &str) -> &'t str {
    let is_stripped = |character: char| match characters {
        Some(characters) => characters.contains(character),
        None => character.is_whitespace(),
    };
    match name {
        "lstrip" => subject.trim_start_matches(is_stripped),
        "rstrip" => subject.trim_end_matches(is_stripped),
        _ => subject.trim_matches(is_stripped),
    }
}

pub(super) fn replace(
    subject: &str,
    from: &str,
    to: &str,
    most: Option<i128>,
    meter: &Meter,
) -> Result<Value, Fault> {
    let most = most.and_then(|most| usize::try_from(most).ok()).unwrap_or(usize::MAX);
    let count = subject.matches(from).count().min(most);
    meter.make(subject.len().saturating_add(count.saturating_mul(to.len())))?;
    Value::text(&subject.replacen(from, to, most), meter)
}

pub(super) fn join(items: &Value, separator: &str, meter: &Meter) -> Result<Value, Fault> {
    let mut text = String::new();
    for (index, item) in items.items(meter)?.items().iter().enumerate() {
        if index > 0 {
            meter.make(separator.len())?;
            text.push_str(separator);
        }
        item.show(&mut text, meter)?;
    }
    Value::text(&text, meter)
}

fn split(
    subject: &str,
    separator: Option<&str>,
    most: Option<usize>,
    from_the_end: bool,
    meter: &Meter,
) -> Result<Value, Fault> {
    let parts = most.map_or(usize::MAX, |most| most.saturating_add(1));
    let Some(separator) = separator else {
        let subject = subject.trim_start();
        let mut words = Vec::new();
        let mut rest = subject;
        while !rest.is_empty() && words.len() + 1 < parts {
            let end = rest.find(char::is_whitespace).unwrap_or(rest.len());
            meter.step(1)?;
            words.push(&rest[..end]);
            rest = rest[end..].trim_start();
        }
        if !rest.is_empty() {
            words.push(rest);
        }
        return texts(words, meter);
    };
    if separator.is_empty() {
        return Err(Fault::new("a string cannot be split at an empty string"));
    }
    if from_the_end {
        let mut found: Vec<&str> = subject.rsplitn(parts, separator).collect();
        found.reverse();
        return texts(found, meter);
    }
    texts(subject.splitn(parts, separator), meter)
}

fn texts<'t>(parts: impl IntoIterator<Item = &'t str>, meter: &Meter) -> Result<Value, Fault> {
    let parts = parts.into_iter().map(|part| Value::text(part, meter)).collect::<Result<_, _>>()?;
    Value::list(parts, meter)
}

/// Implements `{}`, `{0}` and `{name}`, without format specifications.
fn format(
    subject: &str,
    positional: &[Value],
    named: &[(super::syntax::Name, Value)],
    meter: &Meter,
) -> Result<Value, Fault> {
    let mut text = String::new();
    let (mut rest, mut next) = (subject, 0);
    while let Some(at) = rest.find(['{', '}']) {
        meter.make(at + 1)?;
        text.push_str(&rest[..at]);
        let sign = &rest[at..=at];
        rest = &rest[at + 1..];
        if let Some(behind) = rest.strip_prefix(sign) {
            text.push_str(sign);
            rest = behind;
            continue;
        }
        let (field, behind) =
            rest.split_once('}').ok_or_else(|| Fault::new("a field of format is not closed"))?;
        let value = match (field, field.parse::<usize>()) {
            ("", _) => {
                next += 1;
                positional.get(next - 1)
            }
            (_, Ok(index)) => positional.get(index),
            (name, Err(_)) => named.iter().find(|(known, _)| &**known == name).map(|(_, value)| value),
        };
        value.ok_or_else(|| Fault::new("format has no value for a field"))?.show(&mut text, meter)?;
        rest = behind;
    }
    meter.make(rest.len())?;
    text.push_str(rest);
    Value::text(&text, meter)
}

fn is_cased(subject: &str, other: fn(char) -> bool) -> bool {
    subject.chars().any(char::is_alphabetic) && !subject.chars().any(other)
}

fn required<'v>(value: &'v Value, name: &str) -> Result<&'v str, Fault> {
    value.as_text().ok_or_else(|| Fault::new(format!("{name} expects a string, not {}", value.kind())))
}
