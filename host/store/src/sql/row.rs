//! Rows of results.

use sqlx::{Row as _, postgres::PgRow, sqlite::SqliteRow};

/// A row of either database.
pub(crate) enum Row {
    Sqlite(SqliteRow),
    Postgres(PgRow),
}

/// A type that a column can be read as.
pub(crate) trait Column: Sized {
    fn read(row: &Row, index: usize) -> Result<Self, sqlx::Error>;
}

/// A type that a whole row can be read as.
pub(crate) trait FromRow: Sized {
    fn from_row(row: &Row) -> Result<Self, sqlx::Error>;
}

impl Row {
    /// Returns the value of a column.
    pub(crate) fn try_get<T: Column>(&self, index: usize) -> Result<T, sqlx::Error> {
        T::read(self, index)
    }

    /// Returns the value of a column that the statement is known to have, with this type.
    ///
    /// # Panics
    /// Panics if the row has no such column or the column has another type.
    pub(crate) fn get<T: Column>(&self, index: usize) -> T {
        T::read(self, index).unwrap_or_else(|error| panic!("column {index} cannot be read: {error}"))
    }
}

/// Implements [`Column`] for types that both drivers decode, with and without nulls.
macro_rules! column {
    ($($type:ty),*) => {$(
        impl Column for $type {
            fn read(row: &Row, index: usize) -> Result<Self, sqlx::Error> {
                match row {
                    Row::Sqlite(row) => row.try_get(index),
                    Row::Postgres(row) => row.try_get(index),
                }
            }
        }

        impl Column for Option<$type> {
            fn read(row: &Row, index: usize) -> Result<Self, sqlx::Error> {
                match row {
                    Row::Sqlite(row) => row.try_get(index),
                    Row::Postgres(row) => row.try_get(index),
                }
            }
        }
    )*};
}

column!(bool, String, Vec<u8>);

impl Column for i64 {
    fn read(row: &Row, index: usize) -> Result<Self, sqlx::Error> {
        let value = Option::<i64>::read(row, index)?;
        value.ok_or_else(|| sqlx::Error::ColumnDecode {
            index: index.to_string(),
            source: "the value is null".into(),
        })
    }
}

impl Column for Option<i64> {
    fn read(row: &Row, index: usize) -> Result<Self, sqlx::Error> {
        match row {
            Row::Sqlite(row) => row.try_get(index),
            // Lengths and literals have 32 bits.
            Row::Postgres(row) => match row.try_get(index) {
                Err(sqlx::Error::ColumnDecode { .. }) => {
                    Ok(row.try_get::<Option<i32>, _>(index)?.map(i64::from))
                }
                value => value,
            },
        }
    }
}

/// Implements [`Column`] for integers that PostgreSQL does not have.
macro_rules! narrow_column {
    ($($type:ty),*) => {$(
        impl Column for $type {
            fn read(row: &Row, index: usize) -> Result<Self, sqlx::Error> {
                narrow(i64::read(row, index)?, index)
            }
        }

        impl Column for Option<$type> {
            fn read(row: &Row, index: usize) -> Result<Self, sqlx::Error> {
                Option::<i64>::read(row, index)?.map(|value| narrow(value, index)).transpose()
            }
        }
    )*};
}

narrow_column!(u32, u16);

fn narrow<T: TryFrom<i64>>(value: i64, index: usize) -> Result<T, sqlx::Error> {
    T::try_from(value).map_err(|_range| sqlx::Error::ColumnDecode {
        index: index.to_string(),
        source: format!("{value} is out of range").into(),
    })
}

/// Implements [`FromRow`] for tuples.
macro_rules! tuple {
    ($($name:ident $index:tt),*) => {
        impl<$($name: Column),*> FromRow for ($($name,)*) {
            fn from_row(row: &Row) -> Result<Self, sqlx::Error> {
                Ok(($($name::read(row, $index)?,)*))
            }
        }
    };
}

tuple!(A 0, B 1);
tuple!(A 0, B 1, C 2);
tuple!(A 0, B 1, C 2, D 3);
tuple!(A 0, B 1, C 2, D 3, E 4);
tuple!(A 0, B 1, C 2, D 3, E 4, F 5);
