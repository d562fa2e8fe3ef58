//! Values of parameters.

use sqlx::{
    Arguments as _, Sqlite, error::BoxDynError, postgres::PgArguments, postgres::Postgres,
    sqlite::SqliteArguments,
};
use std::borrow::Cow;

/// The value of a parameter. Nulls have types, because PostgreSQL asks for the type of every parameter.
#[derive(Clone, Debug)]
pub(crate) enum Value<'q> {
    Bool(Option<bool>),
    Integer(Option<i64>),
    Text(Option<Cow<'q, str>>),
    Bytes(Option<Cow<'q, [u8]>>),
    /// Values of one kind, which only PostgreSQL takes as a parameter.
    Array(Array<'q>),
}

/// Values of one kind.
#[derive(Clone, Debug)]
pub(crate) struct Array<'q> {
    pub(super) of: Kind,
    pub(super) values: Vec<Value<'q>>,
}

/// The type of a value.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Kind {
    Bool,
    Integer,
    Text,
    Bytes,
}

impl Value<'_> {
    pub(super) fn kind(&self) -> Kind {
        match self {
            Value::Bool(_) => Kind::Bool,
            Value::Integer(_) => Kind::Integer,
            Value::Text(_) => Kind::Text,
            Value::Bytes(_) => Kind::Bytes,
            Value::Array(array) => array.of,
        }
    }

    pub(super) fn add_to_sqlite(&self, arguments: &mut SqliteArguments) -> Result<(), BoxDynError> {
        match self {
            Value::Bool(value) => arguments.add(*value),
            Value::Integer(value) => arguments.add(*value),
            Value::Text(value) => arguments.add(value.as_deref()),
            Value::Bytes(value) => arguments.add(value.as_deref()),
            Value::Array(_) => Err("SQLite has no arrays".into()),
        }
    }

    pub(super) fn add_to_postgres(&self, arguments: &mut PgArguments) -> Result<(), BoxDynError> {
        match self {
            Value::Bool(value) => arguments.add(*value),
            Value::Integer(value) => arguments.add(*value),
            Value::Text(value) => arguments.add(storable(value.as_deref())?),
            Value::Bytes(value) => arguments.add(value.as_deref()),
            Value::Array(array) => array.add_to(arguments),
        }
    }

    fn as_bool(&self) -> Option<bool> {
        if let Value::Bool(value) = self { *value } else { None }
    }

    fn as_integer(&self) -> Option<i64> {
        if let Value::Integer(value) = self { *value } else { None }
    }

    fn as_text(&self) -> Option<&str> {
        if let Value::Text(value) = self { value.as_deref() } else { None }
    }

    fn as_bytes(&self) -> Option<&[u8]> {
        if let Value::Bytes(value) = self { value.as_deref() } else { None }
    }
}

impl Array<'_> {
    fn add_to(&self, arguments: &mut PgArguments) -> Result<(), BoxDynError> {
        let values = self.values.iter();
        match self.of {
            Kind::Bool => arguments.add(values.map(Value::as_bool).collect::<Vec<_>>()),
            Kind::Integer => arguments.add(values.map(Value::as_integer).collect::<Vec<_>>()),
            Kind::Text => {
                let texts: Result<Vec<_>, _> = values.map(|value| storable(value.as_text())).collect();
                arguments.add(texts?)
            }
            Kind::Bytes => arguments.add(values.map(Value::as_bytes).collect::<Vec<_>>()),
        }
    }
}

/// Refuses a text that PostgreSQL cannot store.
fn storable(text: Option<&str>) -> Result<Option<&str>, BoxDynError> {
    match text {
        Some(text) if text.contains('\0') => {
            Err("PostgreSQL cannot store a text that contains the character U+0000".into())
        }
        text => Ok(text),
    }
}

/// A type that can be the value of a parameter.
pub(crate) trait IntoValue<'q> {
    /// The value of `None`.
    const NULL: Value<'q>;

    fn into_value(self) -> Value<'q>;
}

/// Implements [`IntoValue`] for types and for references to them.
macro_rules! into_value {
    ($($type:ty => $null:expr, |$value:ident| $into:expr;)*) => {$(
        impl<'q> IntoValue<'q> for $type {
            const NULL: Value<'q> = $null;

            fn into_value(self) -> Value<'q> {
                let $value = self;
                $into
            }
        }
    )*};
}

into_value! {
    bool => Value::Bool(None), |value| Value::Bool(Some(value));
    i64 => Value::Integer(None), |value| Value::Integer(Some(value));
    i32 => Value::Integer(None), |value| Value::Integer(Some(i64::from(value)));
    u32 => Value::Integer(None), |value| Value::Integer(Some(i64::from(value)));
    u16 => Value::Integer(None), |value| Value::Integer(Some(i64::from(value)));
    String => Value::Text(None), |value| Value::Text(Some(Cow::Owned(value)));
    Vec<u8> => Value::Bytes(None), |value| Value::Bytes(Some(Cow::Owned(value)));
    &'q str => Value::Text(None), |value| Value::Text(Some(Cow::Borrowed(value)));
    &'q String => Value::Text(None), |value| Value::Text(Some(Cow::Borrowed(value)));
    &&'q str => Value::Text(None), |value| (*value).into_value();
    Cow<'q, str> => Value::Text(None), |value| Value::Text(Some(value));
    &'q [u8] => Value::Bytes(None), |value| Value::Bytes(Some(Cow::Borrowed(value)));
    &'q Vec<u8> => Value::Bytes(None), |value| Value::Bytes(Some(Cow::Borrowed(value)));
    &bool => Value::Bool(None), |value| (*value).into_value();
    &i64 => Value::Integer(None), |value| (*value).into_value();
    &u32 => Value::Integer(None), |value| (*value).into_value();
    &u16 => Value::Integer(None), |value| (*value).into_value();
}

impl<'q, T: IntoValue<'q>> IntoValue<'q> for Option<T> {
    const NULL: Value<'q> = T::NULL;

    fn into_value(self) -> Value<'q> {
        self.map_or(T::NULL, T::into_value)
    }
}

impl<'q, T> IntoValue<'q> for &'q Option<T>
where
    &'q T: IntoValue<'q>,
{
    const NULL: Value<'q> = <&'q T as IntoValue<'q>>::NULL;

    fn into_value(self) -> Value<'q> {
        self.as_ref().into_value()
    }
}

/// Returns the parameters of a statement for each database.
pub(super) fn sqlite_arguments(values: &[Value<'_>]) -> Result<SqliteArguments, sqlx::Error> {
    let mut arguments = <Sqlite as sqlx::Database>::Arguments::default();
    for value in values {
        value.add_to_sqlite(&mut arguments).map_err(sqlx::Error::Encode)?;
    }
    Ok(arguments)
}

pub(super) fn postgres_arguments(values: &[Value<'_>]) -> Result<PgArguments, sqlx::Error> {
    let mut arguments = <Postgres as sqlx::Database>::Arguments::default();
    for value in values {
        value.add_to_postgres(&mut arguments).map_err(sqlx::Error::Encode)?;
    }
    Ok(arguments)
}
