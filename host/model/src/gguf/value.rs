//! Metadata values of a GGUF file.
//!
//! Invariant: the elements of an array stay in the file. Parsing visits every element once and keeps only their
//! location.

use std::ops::Range;

use super::cursor::Cursor;

/// A metadata value.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Value {
    Unsigned(u64),
    Signed(i64),
    Float(f64),
    Bool(bool),
    String(String),
    Array(Array),
}

/// The location of an array's elements in the file.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Array {
    pub(crate) kind: ArrayKind,
    pub(crate) count: usize,
    bytes: Range<usize>,
}

/// The type of an array's elements. A scalar type is given by its GGUF code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ArrayKind {
    Scalar(u32),
    Strings,
    Arrays,
}

const STRING: u32 = 8;
const ARRAY: u32 = 9;
const MAX_NESTING: usize = 4;

impl Value {
    pub(super) fn read(cursor: &mut Cursor<'_>, key: &str) -> Result<Self, String> {
        let code = cursor.u32(key)?;
        match code {
            STRING => cursor.string(key).map(|text| Self::String(text.to_owned())),
            ARRAY => read_array(cursor, key, 0).map(Self::Array),
            _ => read_scalar(cursor, code, key),
        }
    }

    pub(crate) fn as_u64(&self) -> Option<u64> {
        match self {
            Self::Unsigned(value) => Some(*value),
            Self::Signed(value) => u64::try_from(*value).ok(),
            _ => None,
        }
    }

    pub(crate) fn as_f64(&self) -> Option<f64> {
        match self {
            Self::Unsigned(value) => Some(*value as f64),
            Self::Signed(value) => Some(*value as f64),
            Self::Float(value) => Some(*value),
            _ => None,
        }
    }

    pub(crate) fn as_bool(&self) -> Option<bool> {
        match self {
            Self::Bool(value) => Some(*value),
            _ => None,
        }
    }

    pub(crate) fn as_str(&self) -> Option<&str> {
        match self {
            Self::String(value) => Some(value),
            _ => None,
        }
    }

    pub(crate) fn as_array(&self) -> Option<&Array> {
        match self {
            Self::Array(array) => Some(array),
            _ => None,
        }
    }

    /// Describes the value for an error message.
    pub(crate) fn describe(&self) -> String {
        match self {
            Self::Unsigned(value) => value.to_string(),
            Self::Signed(value) => value.to_string(),
            Self::Float(value) => value.to_string(),
            Self::Bool(value) => value.to_string(),
            Self::String(_) => "a string".to_owned(),
            Self::Array(array) => format!("an array of {} elements", array.count),
        }
    }
}

impl Array {
    /// Returns the elements as strings, read from the file that the array was parsed from, or `None` if they are not
    /// strings.
    pub(crate) fn strings<'a>(&self, file: &'a [u8]) -> Option<impl Iterator<Item = &'a str> + use<'a>> {
        let mut cursor = Cursor::new(file.get(self.bytes.clone())?);
        let count = match self.kind {
            ArrayKind::Strings => self.count,
            _ => return None,
        };
        Some((0..count).map_while(move |_| cursor.string("a string").ok()))
    }

    /// Returns the elements as scalars, or `None` if they are not scalars.
    pub(crate) fn scalars<'a>(&self, file: &'a [u8]) -> Option<impl Iterator<Item = Value> + use<'a>> {
        let mut cursor = Cursor::new(file.get(self.bytes.clone())?);
        let (code, count) = match self.kind {
            ArrayKind::Scalar(code) => (code, self.count),
            _ => return None,
        };
        Some((0..count).map_while(move |_| read_scalar(&mut cursor, code, "an element").ok()))
    }
}

fn read_array(cursor: &mut Cursor<'_>, key: &str, depth: usize) -> Result<Array, String> {
    let code = cursor.u32(key)?;
    let claimed = cursor.u64(key)?;
    let start = cursor.position();
    let kind = match code {
        STRING => ArrayKind::Strings,
        ARRAY => ArrayKind::Arrays,
        _ => ArrayKind::Scalar(code),
    };
    match kind {
        ArrayKind::Scalar(code) => {
            let width = scalar_bytes(code)
                .ok_or_else(|| format!("metadata key `{key}` is an array of the unknown type {code}"))?;
            cursor.fits(claimed, width, &format!("elements of `{key}`"))?;
            cursor.take(claimed * width, key)?;
        }
        ArrayKind::Strings => {
            cursor.fits(claimed, 8, &format!("elements of `{key}`"))?;
            for _ in 0..claimed {
                cursor.string(key)?;
            }
        }
        ArrayKind::Arrays => {
            if depth + 1 == MAX_NESTING {
                return Err(format!("metadata key `{key}` nests arrays deeper than {MAX_NESTING}"));
            }
            cursor.fits(claimed, 12, &format!("elements of `{key}`"))?;
            for _ in 0..claimed {
                read_array(cursor, key, depth + 1)?;
            }
        }
    }
    // `fits` has checked that the count is less than the length of the file.
    Ok(Array { kind, count: claimed as usize, bytes: start..cursor.position() })
}

fn read_scalar(cursor: &mut Cursor<'_>, code: u32, key: &str) -> Result<Value, String> {
    Ok(match code {
        0 => Value::Unsigned(u8::from_le_bytes(cursor.array(key)?).into()),
        1 => Value::Signed(i8::from_le_bytes(cursor.array(key)?).into()),
        2 => Value::Unsigned(u16::from_le_bytes(cursor.array(key)?).into()),
        3 => Value::Signed(i16::from_le_bytes(cursor.array(key)?).into()),
        4 => Value::Unsigned(u32::from_le_bytes(cursor.array(key)?).into()),
        5 => Value::Signed(i32::from_le_bytes(cursor.array(key)?).into()),
        6 => Value::Float(f32::from_le_bytes(cursor.array(key)?).into()),
        7 => match u8::from_le_bytes(cursor.array(key)?) {
            0 => Value::Bool(false),
            1 => Value::Bool(true),
            other => return Err(format!("metadata key `{key}` has the invalid boolean value {other}")),
        },
        10 => Value::Unsigned(u64::from_le_bytes(cursor.array(key)?)),
        11 => Value::Signed(i64::from_le_bytes(cursor.array(key)?)),
        12 => Value::Float(f64::from_le_bytes(cursor.array(key)?)),
        other => return Err(format!("metadata key `{key}` has the unknown type {other}")),
    })
}

fn scalar_bytes(code: u32) -> Option<u64> {
    match code {
        0 | 1 | 7 => Some(1),
        2 | 3 => Some(2),
        4..=6 => Some(4),
        10..=12 => Some(8),
        _ => None,
    }
}
