//! Rows that a statement gets as parameters, so that one statement changes the rows of many writes.

use super::{
    Dialect,
    query::Query,
    value::{Array, IntoValue, Kind, Value},
};
use std::fmt::Write as _;

/// Rows whose values are parameters of a statement, by column. PostgreSQL gets an array for each column, so that the text of
/// the statement does not depend on the number of rows and is parsed once.
pub(crate) struct GivenRows<'q>(Vec<GivenColumn<'q>>);

struct GivenColumn<'q> {
    name: &'static str,
    kind: Kind,
    values: Vec<Value<'q>>,
}

impl<'q> GivenRows<'q> {
    pub(crate) fn new() -> Self {
        GivenRows(Vec::new())
    }

    /// Adds a column with a value for each row.
    pub(crate) fn column<T: IntoValue<'q>>(
        mut self,
        name: &'static str,
        values: impl IntoIterator<Item = T>,
    ) -> Self {
        let values = values.into_iter().map(T::into_value).collect();
        self.0.push(GivenColumn { name, kind: T::NULL.kind(), values });
        self
    }

    /// Returns a statement in which the rows, between these two parts, are a table `new` with the columns that were added, and
    /// `place`, the position of a row. Neither part has parameters of its own.
    pub(crate) fn query(self, dialect: Dialect, before: &str, after: &str) -> Query<'q> {
        let names: Vec<&str> = self.0.iter().map(|column| column.name).collect();
        let names = names.join(", ");
        let (table, values) = match dialect {
            Dialect::Postgres => self.arrays(&names),
            Dialect::Sqlite => self.lists(),
        };
        Query::with(format!("{before} {table} {after}"), values)
    }

    fn arrays(self, names: &str) -> (String, Vec<Value<'q>>) {
        let kinds: Vec<String> = self.0.iter().map(|column| format!("?::{}[]", column.kind.name())).collect();
        let table = format!("unnest({}) WITH ORDINALITY AS new ({names}, place)", kinds.join(", "));
        let array = |column: GivenColumn<'q>| Value::Array(Array { of: column.kind, values: column.values });
        (table, self.0.into_iter().map(array).collect())
    }

    fn lists(self) -> (String, Vec<Value<'q>>) {
        let rows = self.0.first().map_or(0, |column| column.values.len());
        let mut table = "(SELECT ".to_owned();
        for (index, column) in self.0.iter().enumerate() {
            let _ = write!(table, "column{} AS {}, ", index + 1, column.name);
        }
        let _ = write!(table, "column{} AS place FROM (VALUES ", self.0.len() + 1);
        let mut columns: Vec<_> = self.0.into_iter().map(|column| column.values.into_iter()).collect();
        let mut values = Vec::with_capacity(rows * columns.len());
        for place in 1..=rows {
            table.push_str(if place == 1 { "(" } else { ", (" });
            columns.iter_mut().for_each(|_| table.push_str("?, "));
            let _ = write!(table, "{place})");
            values.extend(columns.iter_mut().filter_map(Iterator::next));
        }
        table.push_str(")) AS new");
        (table, values)
    }
}

impl Kind {
    fn name(self) -> &'static str {
        match self {
            Kind::Bool => "boolean",
            Kind::Integer => "bigint",
            Kind::Text => "text",
            Kind::Bytes => "bytea",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        Store,
        row_groups::ROWS_AT_ONCE,
        sql::{Row, query},
    };

    #[tokio::test]
    async fn rows_keep_their_order_their_nulls_and_their_types() {
        let store = Store::for_tests().await.unwrap();
        let mut connection = store.readers.acquire().await.unwrap();
        let texts = [Some("b"), None, Some("a")];
        let bytes = [&b"\0"[..], b"", b"xyz"];
        let rows = GivenRows::new()
            .column("name", texts)
            .column("size", [3_i64, -1, 2])
            .column("body", bytes)
            .column("is_new", [true, false, true]);
        let sql = "SELECT name, size, body, is_new, place FROM";
        let found = rows.query(connection.dialect(), sql, "ORDER BY place").fetch_all(&mut connection).await;
        let read = |row: &Row| {
            (row.get::<Option<String>>(0), row.get::<i64>(1), row.get::<Vec<u8>>(2), row.get::<bool>(3))
        };
        let found: Vec<_> = found.unwrap().iter().map(read).collect();
        let expected = [
            (Some("b".to_owned()), 3, b"\0".to_vec(), true),
            (None, -1, Vec::new(), false),
            (Some("a".to_owned()), 2, b"xyz".to_vec(), true),
        ];
        assert_eq!(found, expected);
    }

    #[tokio::test]
    async fn a_statement_takes_the_largest_group_of_the_widest_rows() {
        let store = Store::for_tests().await.unwrap();
        let mut connection = store.readers.acquire().await.unwrap();
        let names = ["a", "b", "c", "d", "e", "f", "g", "h", "i", "j", "k", "l", "m"];
        let rows = names.into_iter().fold(GivenRows::new(), |rows, name| {
            rows.column(name, (0..ROWS_AT_ONCE as i64).map(|row| (row % 2 == 0).then_some(row)))
        });
        // All values of a column may be missing.
        let rows = rows.column("missing", (0..ROWS_AT_ONCE).map(|_| None::<&str>));
        let sql = "SELECT COUNT(*), COUNT(a), COUNT(m), COUNT(missing), MAX(place) FROM";
        let found = rows.query(connection.dialect(), sql, "").fetch_one(&mut connection).await.unwrap();
        let counts = [0, 1, 2, 3, 4].map(|column| found.get::<i64>(column));
        let all = ROWS_AT_ONCE as i64;
        assert_eq!(counts, [all, all / 2, all / 2, 0, all]);
    }

    #[tokio::test]
    async fn a_character_that_postgresql_does_not_store_fails_the_statement_and_not_the_connection() {
        let store = Store::for_tests().await.unwrap();
        let mut connection = store.readers.acquire().await.unwrap();
        let dialect = connection.dialect();
        let rows = GivenRows::new().column("name", ["a\0b"]);
        let found = rows.query(dialect, "SELECT name FROM", "").fetch_all(&mut connection).await;
        assert_eq!(found.is_err(), dialect == Dialect::Postgres);
        query("SELECT 1").fetch_one(&mut connection).await.unwrap();
    }
}
