//! The values that templates compute with.
//!
//! Texts, lists and dicts are immutable. Lists and dicts know how deep they nest and how large they are when written
//! out, where every value in them counts as often as it appears.

use super::{
    Fault, Meter,
    syntax::{For, Macro, Name},
};
use std::{
    cell::{Cell, RefCell},
    cmp::Ordering,
    rc::Rc,
    sync::Arc,
};

/// Maximum nesting of lists and dicts. JSON that arrives over HTTP nests less.
const MAX_DEPTH: u32 = 160;
/// Maximum size of an element of a list.
const ELEMENT_BYTES: usize = 40;
/// Size of an allocation beyond its contents.
const OVERHEAD_BYTES: usize = 64;

#[derive(Clone, Debug)]
pub(in super::super) enum Value {
    Undefined,
    None,
    Boolean(bool),
    Integer(i128),
    Float(f64),
    Text(Arc<str>),
    List(Rc<List>),
    Map(Rc<Map>),
    /// The only mutable value. No other value holds one, so there are no cycles.
    Namespace(Rc<RefCell<Vec<(Name, Value)>>>),
    Macro(Function),
    Loop(Rc<Loop>),
}

#[derive(Debug)]
pub(in super::super) struct List {
    items: Vec<Value>,
    extent: Extent,
}

#[derive(Debug)]
pub(in super::super) struct Map {
    /// In insertion order.
    entries: Vec<(Value, Value)>,
    extent: Extent,
}

/// The size of a value when it is written out.
#[derive(Clone, Copy, Debug, Default)]
struct Extent {
    bytes: usize,
    depth: u32,
}

/// A macro, and the scope in which it is defined.
#[derive(Clone, Debug)]
pub(in super::super) struct Function {
    pub(super) syntax: Arc<Macro>,
    pub(super) scope: usize,
}

/// The `loop` variable of a `for`.
#[derive(Debug)]
pub(in super::super) struct Loop {
    pub(super) syntax: Arc<For>,
    pub(super) scope: usize,
    pub(super) items: Rc<List>,
    pub(super) index: Cell<usize>,
    pub(super) depth: usize,
    pub(super) changed: RefCell<Option<Value>>,
}

impl Value {
    pub(in super::super) fn text(text: &str, meter: &Meter) -> Result<Value, Fault> {
        meter.make(text.len() + OVERHEAD_BYTES)?;
        Ok(Value::Text(text.into()))
    }

    pub(in super::super) fn list(items: Vec<Value>, meter: &Meter) -> Result<Value, Fault> {
        meter.make(items.len() * ELEMENT_BYTES + OVERHEAD_BYTES)?;
        let extent = Extent::of(items.iter())?;
        Ok(Value::List(Rc::new(List { items, extent })))
    }

    /// Charges a list of this length to the meter before `make` creates it.
    pub(super) fn list_of(
        length: usize,
        make: impl FnOnce() -> Vec<Value>,
        meter: &Meter,
    ) -> Result<Value, Fault> {
        meter.make(length.saturating_mul(ELEMENT_BYTES))?;
        Value::list(make(), meter)
    }

    /// Creates a dict. Of several pairs with the same key, the last value is kept, at the position of the first.
    pub(super) fn map(pairs: Vec<(Value, Value)>, meter: &Meter) -> Result<Value, Fault> {
        meter.make(2 * pairs.len() * ELEMENT_BYTES + OVERHEAD_BYTES)?;
        let mut entries: Vec<(Value, Value)> = Vec::with_capacity(pairs.len());
        for (key, value) in pairs {
            if !matches!(
                key,
                Value::Text(_) | Value::Integer(_) | Value::Boolean(_) | Value::Float(_) | Value::None
            ) {
                return Err(Fault::new(format!("{} cannot be a dict key", key.kind())));
            }
            meter.step(entries.len() / 8)?;
            match entries.iter_mut().find(|(known, _)| is_same_scalar(known, &key)) {
                Some(entry) => entry.1 = value,
                None => entries.push((key, value)),
            }
        }
        let extent = Extent::of(entries.iter().flat_map(|(key, value)| [key, value]))?;
        Ok(Value::Map(Rc::new(Map { entries, extent })))
    }

    /// Converts the input of a template.
    pub(in super::super) fn of_json(json: &serde_json::Value, meter: &Meter) -> Result<Value, Fault> {
        match json {
            serde_json::Value::Null => Ok(Value::None),
            serde_json::Value::Bool(value) => Ok(Value::Boolean(*value)),
            serde_json::Value::Number(number) => {
                let integer = number.as_i64().map(i128::from).or_else(|| number.as_u64().map(i128::from));
                Ok(match integer {
                    Some(value) => Value::Integer(value),
                    None => Value::Float(number.as_f64().unwrap_or(f64::NAN)),
                })
            }
            serde_json::Value::String(text) => Value::text(text, meter),
            serde_json::Value::Array(items) => Value::list(
                items.iter().map(|item| Value::of_json(item, meter)).collect::<Result<_, _>>()?,
                meter,
            ),
            serde_json::Value::Object(fields) => {
                let pair = |(key, value): (&String, &serde_json::Value)| {
                    Ok((Value::text(key, meter)?, Value::of_json(value, meter)?))
                };
                // The keys are already distinct, so they need not be compared.
                let entries = fields.iter().map(pair).collect::<Result<Vec<_>, Fault>>()?;
                meter.make(2 * entries.len() * ELEMENT_BYTES + OVERHEAD_BYTES)?;
                let extent = Extent::of(entries.iter().flat_map(|(key, value)| [key, value]))?;
                Ok(Value::Map(Rc::new(Map { entries, extent })))
            }
        }
    }

    /// Converts the value for `tojson`.
    pub(super) fn to_json(&self, meter: &Meter) -> Result<serde_json::Value, Fault> {
        // A JSON node takes less memory than this for each byte of its written form.
        meter.make(self.bytes() * 8)?;
        self.json()
    }

    fn json(&self) -> Result<serde_json::Value, Fault> {
        Ok(match self {
            Value::None => serde_json::Value::Null,
            Value::Boolean(value) => (*value).into(),
            Value::Integer(value) => match (i64::try_from(*value), u64::try_from(*value)) {
                (Ok(value), _) => value.into(),
                (_, Ok(value)) => value.into(),
                _ => (*value as f64).into(),
            },
            Value::Float(value) => (*value).into(),
            Value::Text(text) => text.as_ref().into(),
            Value::List(list) => {
                serde_json::Value::Array(list.items.iter().map(Value::json).collect::<Result<_, _>>()?)
            }
            Value::Map(map) => {
                let pair = |(key, value): &(Value, Value)| {
                    let key = match key {
                        Value::Text(text) => text.to_string(),
                        Value::None => "null".to_owned(),
                        Value::Boolean(value) => value.to_string(),
                        other => other.scalar_text(),
                    };
                    Ok((key, value.json()?))
                };
                serde_json::Value::Object(map.entries.iter().map(pair).collect::<Result<_, Fault>>()?)
            }
            other => return Err(Fault::new(format!("{} cannot be converted to JSON", other.kind()))),
        })
    }

    pub(super) fn kind(&self) -> &'static str {
        match self {
            Value::Undefined => "an undefined value",
            Value::None => "none",
            Value::Boolean(_) => "a boolean",
            Value::Integer(_) | Value::Float(_) => "a number",
            Value::Text(_) => "a string",
            Value::List(_) => "a list",
            Value::Map(_) => "a dict",
            Value::Namespace(_) => "a namespace",
            Value::Macro(_) => "a macro",
            Value::Loop(_) => "a loop",
        }
    }

    pub(super) fn is_true(&self) -> bool {
        match self {
            Value::Undefined | Value::None => false,
            Value::Boolean(value) => *value,
            Value::Integer(value) => *value != 0,
            Value::Float(value) => *value != 0.0,
            Value::Text(text) => !text.is_empty(),
            Value::List(list) => !list.items.is_empty(),
            Value::Map(map) => !map.entries.is_empty(),
            Value::Namespace(_) | Value::Macro(_) | Value::Loop(_) => true,
        }
    }

    /// Returns whether the value may be stored in a list, a dict or a namespace.
    pub(super) fn is_plain(&self) -> bool {
        !matches!(self, Value::Namespace(_) | Value::Macro(_) | Value::Loop(_))
    }

    pub(super) fn as_text(&self) -> Option<&str> {
        if let Value::Text(text) = self { Some(text) } else { None }
    }

    pub(super) fn as_integer(&self) -> Option<i128> {
        match self {
            Value::Integer(value) => Some(*value),
            Value::Boolean(value) => Some((*value).into()),
            Value::Float(value) if value.fract() == 0.0 && value.abs() < 1e18 => Some(*value as i128),
            _ => None,
        }
    }

    pub(super) fn as_float(&self) -> Option<f64> {
        match self {
            Value::Integer(value) => Some(*value as f64),
            Value::Boolean(value) => Some((*value).into()),
            Value::Float(value) => Some(*value),
            _ => None,
        }
    }

    /// Returns the elements that a `for` iterates over.
    pub(super) fn items(&self, meter: &Meter) -> Result<Rc<List>, Fault> {
        let made = match self {
            Value::List(list) => return Ok(list.clone()),
            Value::Undefined => Vec::new(),
            Value::Map(map) => map.entries.iter().map(|(key, _)| key.clone()).collect(),
            Value::Text(text) => {
                meter.make(text.len() * (ELEMENT_BYTES + OVERHEAD_BYTES))?;
                text.chars().map(|c| Value::Text((&*c.encode_utf8(&mut [0; 4])).into())).collect()
            }
            other => return Err(Fault::new(format!("{} cannot be iterated over", other.kind()))),
        };
        match Value::list(made, meter)? {
            Value::List(list) => Ok(list),
            _ => unreachable!("Value::list returns a list"),
        }
    }

    pub(super) fn length(&self, meter: &Meter) -> Result<usize, Fault> {
        match self {
            Value::Undefined => Ok(0),
            Value::Text(text) => {
                meter.read(text.len())?;
                Ok(text.chars().count())
            }
            Value::List(list) => Ok(list.items.len()),
            Value::Map(map) => Ok(map.entries.len()),
            other => Err(Fault::new(format!("{} has no length", other.kind()))),
        }
    }

    /// Returns the length of the written form in bytes, without escapes.
    pub(super) fn bytes(&self) -> usize {
        self.extent().bytes
    }

    /// Returns how deep lists and dicts nest in the value.
    pub(super) fn depth(&self) -> u32 {
        self.extent().depth
    }

    fn extent(&self) -> Extent {
        match self {
            Value::Text(text) => Extent { bytes: text.len() + 4, depth: 0 },
            Value::List(list) => list.extent,
            Value::Map(map) => map.extent,
            _ => Extent { bytes: 40, depth: 0 },
        }
    }

    /// Appends the text that `{{ … }}` produces.
    pub(super) fn show(&self, text: &mut String, meter: &Meter) -> Result<(), Fault> {
        match self {
            Value::Undefined => {}
            Value::Text(shown) => {
                meter.make(shown.len())?;
                text.push_str(shown);
            }
            other => {
                // An escape takes up to ten bytes per byte.
                meter.make(other.bytes().saturating_mul(10))?;
                other.write(text);
            }
        }
        Ok(())
    }

    /// Returns the text of the value, as Python's `str` does.
    pub(super) fn shown(&self, meter: &Meter) -> Result<Arc<str>, Fault> {
        if let Value::Text(text) = self {
            return Ok(text.clone());
        }
        let mut text = String::new();
        self.show(&mut text, meter)?;
        meter.make(text.len())?;
        Ok(text.into())
    }

    /// Writes the value as Python's `repr` does.
    fn write(&self, text: &mut String) {
        match self {
            Value::Text(quoted) => write_quoted(quoted, text),
            Value::List(list) => {
                text.push('[');
                for (index, item) in list.items.iter().enumerate() {
                    text.push_str(if index > 0 { ", " } else { "" });
                    item.write(text);
                }
                text.push(']');
            }
            Value::Map(map) => {
                text.push('{');
                for (index, (key, value)) in map.entries.iter().enumerate() {
                    text.push_str(if index > 0 { ", " } else { "" });
                    key.write(text);
                    text.push_str(": ");
                    value.write(text);
                }
                text.push('}');
            }
            scalar => text.push_str(&scalar.scalar_text()),
        }
    }

    fn scalar_text(&self) -> String {
        match self {
            Value::None => "None".to_owned(),
            Value::Boolean(true) => "True".to_owned(),
            Value::Boolean(false) => "False".to_owned(),
            Value::Integer(value) => value.to_string(),
            Value::Float(value) => super::super::json::float(*value),
            Value::Namespace(_) => "<Namespace>".to_owned(),
            Value::Macro(function) => format!("<Macro {:?}>", function.syntax.name),
            Value::Loop(_) => "<LoopContext>".to_owned(),
            Value::Undefined | Value::Text(_) | Value::List(_) | Value::Map(_) => String::new(),
        }
    }

    pub(super) fn equals(&self, other: &Value, meter: &Meter) -> Result<bool, Fault> {
        meter.read(self.bytes().min(other.bytes()))?;
        Ok(is_equal(self, other))
    }

    pub(super) fn compare(&self, other: &Value, meter: &Meter) -> Result<Ordering, Fault> {
        meter.read(self.bytes().min(other.bytes()))?;
        order(self, other)
    }
}

impl List {
    pub(super) fn items(&self) -> &[Value] {
        &self.items
    }
}

impl Map {
    pub(super) fn entries(&self) -> &[(Value, Value)] {
        &self.entries
    }

    pub(super) fn get(&self, key: &Value, meter: &Meter) -> Result<Option<&Value>, Fault> {
        meter.step(self.entries.len() / 8)?;
        Ok(self.entries.iter().find(|(known, _)| is_same_scalar(known, key)).map(|(_, value)| value))
    }

    pub(super) fn named(&self, key: &str, meter: &Meter) -> Result<Option<&Value>, Fault> {
        meter.step(self.entries.len() / 8)?;
        Ok(self.entries.iter().find(|(known, _)| known.as_text() == Some(key)).map(|(_, value)| value))
    }
}

impl Extent {
    /// Returns the extent of a container with these values.
    fn of<'v>(held: impl Iterator<Item = &'v Value>) -> Result<Extent, Fault> {
        let mut extent = Extent { bytes: 4, depth: 1 };
        for value in held {
            if !value.is_plain() {
                return Err(Fault::new(format!("{} cannot be stored in a list or a dict", value.kind())));
            }
            let inner = value.extent();
            extent.bytes = extent.bytes.saturating_add(inner.bytes).saturating_add(4);
            extent.depth = extent.depth.max(inner.depth + 1);
        }
        match extent.depth <= MAX_DEPTH {
            true => Ok(extent),
            false => Err(Fault::new(format!("lists and dicts nest deeper than {MAX_DEPTH}"))),
        }
    }
}

fn is_same_scalar(one: &Value, other: &Value) -> bool {
    match (one, other) {
        (Value::Text(one), Value::Text(other)) => one == other,
        (Value::List(_) | Value::Map(_), _) => false,
        _ => is_equal(one, other),
    }
}

fn is_equal(one: &Value, other: &Value) -> bool {
    match (one, other) {
        (Value::Undefined, Value::Undefined) | (Value::None, Value::None) => true,
        (Value::Text(one), Value::Text(other)) => one == other,
        (Value::Integer(one), Value::Integer(other)) => one == other,
        (Value::List(one), Value::List(other)) => {
            one.items.len() == other.items.len()
                && one.items.iter().zip(&other.items).all(|(a, b)| is_equal(a, b))
        }
        (Value::Map(one), Value::Map(other)) => {
            let has_same = |(key, value): &(Value, Value)| {
                other
                    .entries
                    .iter()
                    .any(|(known, found)| is_same_scalar(known, key) && is_equal(found, value))
            };
            one.entries.len() == other.entries.len() && one.entries.iter().all(has_same)
        }
        (Value::Namespace(one), Value::Namespace(other)) => Rc::ptr_eq(one, other),
        _ => matches!((one.as_float(), other.as_float()), (Some(one), Some(other)) if one == other),
    }
}

fn order(one: &Value, other: &Value) -> Result<Ordering, Fault> {
    let incomparable = || Fault::new(format!("{} and {} cannot be compared", one.kind(), other.kind()));
    match (one, other) {
        (Value::Text(one), Value::Text(other)) => Ok(one.cmp(other)),
        (Value::Integer(one), Value::Integer(other)) => Ok(one.cmp(other)),
        (Value::List(one), Value::List(other)) => {
            for (one, other) in one.items.iter().zip(&other.items) {
                match order(one, other)? {
                    Ordering::Equal => {}
                    different => return Ok(different),
                }
            }
            Ok(one.items.len().cmp(&other.items.len()))
        }
        _ => {
            let (one, other) =
                (one.as_float().ok_or_else(incomparable)?, other.as_float().ok_or_else(incomparable)?);
            one.partial_cmp(&other).ok_or_else(incomparable)
        }
    }
}

/// Writes a string in the quotes that need fewer escapes.
fn write_quoted(quoted: &str, text: &mut String) {
    let quote = if quoted.contains('\'') && !quoted.contains('"') { '"' } else { '\'' };
    text.push(quote);
    for character in quoted.chars() {
        match character {
            '\n' => text.push_str("\\n"),
            '\r' => text.push_str("\\r"),
            '\t' => text.push_str("\\t"),
            '\\' => text.push_str("\\\\"),
            other if other == quote => text.extend(['\\', other]),
            other if other.is_control() => text.push_str(&format!("\\x{:02x}", u32::from(other))),
            other => text.push(other),
        }
    }
    text.push(quote);
}
