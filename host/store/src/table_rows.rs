//! Rows for tests that compare code with the schema: one in each table that has some column.

use crate::{
    Store,
    sql::{AssertSqlSafe, query, query_as, raw_sql},
};

/// A table with the names and types of its columns.
pub(crate) type Table = (String, Vec<(String, String)>);

/// Returns the tables that have a column of this name, in the order of their names.
pub(crate) async fn tables_with(store: &Store, column: &str) -> Vec<Table> {
    let columns = store.readers.dialect().pick(
        "SELECT m.name, c.name, c.type FROM sqlite_master AS m, pragma_table_info(m.name) AS c
         WHERE m.type = 'table' ORDER BY m.name, c.cid",
        "SELECT CAST(table_name AS TEXT), CAST(column_name AS TEXT), CAST(data_type AS TEXT)
         FROM information_schema.columns WHERE table_schema = current_schema()
         ORDER BY table_name, ordinal_position",
    );
    let columns: Vec<(String, String, String)> = query_as(columns).fetch_all(&store.readers).await.unwrap();
    let mut tables: Vec<Table> = Vec::new();
    for (table, column, kind) in columns {
        if tables.last().is_none_or(|(last, _)| *last != table) {
            tables.push((table, Vec::new()));
        }
        tables.last_mut().unwrap().1.push((column, kind.to_uppercase()));
    }
    tables.retain(|(_, columns)| columns.iter().any(|(name, _)| name == column));
    tables
}

/// Adds a row to a table. Columns without a value in `values`, which are SQL, get one that fits their type. No row that it
/// refers to has to exist.
pub(crate) async fn insert_one(store: &Store, (table, columns): &Table, values: &[(&str, &str)]) {
    let bytes = |digits: &str| store.readers.dialect().pick(format!("x'{digits}'"), format!(r"'\x{digits}'"));
    let value = |(column, kind): &(String, String)| {
        if let Some((_, value)) = values.iter().find(|(name, _)| name == column) {
            return (*value).to_owned();
        }
        match (column.as_str(), kind.as_str()) {
            (_, "INTEGER" | "BIGINT") => "1".to_owned(),
            (_, "BOOLEAN") => "TRUE".to_owned(),
            ("digest", "BLOB" | "BYTEA") => bytes(&"01".repeat(32)),
            (_, "BLOB" | "BYTEA") => bytes("01"),
            _ => "'x'".to_owned(),
        }
    };
    let values = columns.iter().map(value).collect::<Vec<_>>().join(", ");
    let mut filling = store.readers.acquire().await.unwrap();
    let keys = |off: &'static str, on: &'static str| filling.dialect().pick(off, on);
    let without = keys("PRAGMA foreign_keys = OFF", "SET session_replication_role = replica");
    let with = keys("PRAGMA foreign_keys = ON", "SET session_replication_role = DEFAULT");
    raw_sql(without, &mut filling).await.unwrap();
    let insert = AssertSqlSafe(format!("INSERT INTO {table} VALUES ({values})"));
    query(insert).execute(&mut filling).await.unwrap_or_else(|error| panic!("{table}: {error}"));
    raw_sql(with, &mut filling).await.unwrap();
}
