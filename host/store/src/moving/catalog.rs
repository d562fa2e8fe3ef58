//! The columns that tables have in two databases, which must be the same.

use super::{TABLES, UNMOVED};
use crate::{
    StoreError,
    sql::{Connection, Dialect, Row, query},
};
use std::collections::BTreeMap;

/// The tables of both databases, in the order of [`TABLES`].
pub(super) struct Catalog(Vec<Table>);

pub(super) struct Table {
    pub(super) name: String,
    pub(super) columns: Vec<Column>,
    /// The column with numbers that the database gives to new rows and never gives twice.
    pub(super) numbered_by: Option<String>,
}

pub(super) struct Column {
    pub(super) name: String,
    pub(super) kind: ColumnKind,
}

/// The type of a column. PostgreSQL's catalog reports it; SQLite does not enforce types.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ColumnKind {
    Bool,
    Integer,
    Text,
    Bytes,
}

const COLUMNS_OF_SQLITE: &str = "SELECT tables.name, columns.name, '', \
     columns.pk > 0 AND instr(tables.sql, 'AUTOINCREMENT') > 0 \
     FROM sqlite_schema AS tables JOIN pragma_table_info(tables.name) AS columns \
     WHERE tables.type = 'table' AND substr(tables.name, 1, 7) != 'sqlite_' ORDER BY tables.name, columns.cid";
const COLUMNS_OF_POSTGRES: &str = "SELECT CAST(relname AS text), CAST(attname AS text), \
     CAST(atttypid::regtype AS text), attidentity != '' \
     FROM pg_class JOIN pg_attribute ON attrelid = pg_class.oid \
     WHERE relkind = 'r' AND relnamespace = to_regnamespace(current_schema()) AND attnum > 0 \
         AND NOT attisdropped AND relname != 'skep_schema' ORDER BY relname, attnum";

struct Described {
    column: String,
    kind: String,
    is_numbered: bool,
}

impl Catalog {
    /// Reads the catalog of an SQLite and a PostgreSQL database, in either order.
    pub(super) async fn of_both(one: &mut Connection, other: &mut Connection) -> Result<Self, StoreError> {
        let (sqlite, postgres) = match (one.dialect(), other.dialect()) {
            (Dialect::Sqlite, Dialect::Postgres) => (one, other),
            (Dialect::Postgres, Dialect::Sqlite) => (other, one),
            _ => return Err(different("both databases are of the same kind".into())),
        };
        let sqlite = described(sqlite, COLUMNS_OF_SQLITE).await?;
        let mut postgres = described(postgres, COLUMNS_OF_POSTGRES).await?;
        let unlisted = |name: &&String| !TABLES.contains(&name.as_str()) && !UNMOVED.contains(&name.as_str());
        if let Some(name) = sqlite.keys().chain(postgres.keys()).find(unlisted) {
            return Err(different(format!("the table {name} is not one of skep's")));
        }
        let mut tables = Vec::with_capacity(TABLES.len());
        for name in TABLES {
            let (Some(of_sqlite), Some(columns)) = (sqlite.get(name), postgres.remove(name)) else {
                return Err(different(format!("one of them has no table {name}")));
            };
            let names = |columns: &[Described]| {
                let mut names: Vec<_> = columns.iter().map(|column| column.column.clone()).collect();
                names.sort();
                names
            };
            if names(of_sqlite) != names(&columns) {
                return Err(different(format!("the columns of the table {name} differ")));
            }
            let numbered = |columns: &[Described]| {
                columns.iter().find(|column| column.is_numbered).map(|column| column.column.clone())
            };
            let numbered_by =
                numbered(of_sqlite).filter(|column| numbered(&columns).as_ref() == Some(column));
            let columns = columns
                .into_iter()
                .map(|Described { column, kind, .. }| Ok(Column { kind: kind_of(&kind)?, name: column }));
            tables.push(Table {
                name: name.into(),
                columns: columns.collect::<Result<_, _>>()?,
                numbered_by,
            });
        }
        Ok(Catalog(tables))
    }

    pub(super) fn tables(&self) -> &[Table] {
        &self.0
    }
}

impl Table {
    pub(super) fn column_list(&self) -> String {
        let names: Vec<_> = self.columns.iter().map(|column| column.name.as_str()).collect();
        names.join(", ")
    }
}

async fn described(
    connection: &mut Connection,
    sql: &'static str,
) -> Result<BTreeMap<String, Vec<Described>>, StoreError> {
    let failed = || StoreError::while_it("read the columns of the tables");
    let rows = query(sql).fetch_all(connection).await.map_err(failed())?;
    let read = |row: &Row| -> Result<(String, Described), sqlx::Error> {
        let (column, kind, is_numbered) = (row.try_get(1)?, row.try_get(2)?, row.try_get(3)?);
        Ok((row.try_get(0)?, Described { column, kind, is_numbered }))
    };
    let mut tables: BTreeMap<_, Vec<_>> = BTreeMap::new();
    for row in &rows {
        let (table, column) = read(row).map_err(failed())?;
        tables.entry(table).or_default().push(column);
    }
    Ok(tables)
}

fn kind_of(name: &str) -> Result<ColumnKind, StoreError> {
    Ok(match name {
        "boolean" => ColumnKind::Bool,
        "bigint" => ColumnKind::Integer,
        "text" => ColumnKind::Text,
        "bytea" => ColumnKind::Bytes,
        other => return Err(different(format!("a column has the type {other}"))),
    })
}

fn different(reason: String) -> StoreError {
    StoreError::DifferentTables { reason }
}
