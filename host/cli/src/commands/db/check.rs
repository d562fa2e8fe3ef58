//! `skep db check`.

use anyhow::{Result, bail};
use indicatif::HumanBytes;
use serde_json::json;
use skep_runtime::{Sealed, check_sealed};
use skep_store::{
    DatabaseReport, Durability, HostReport, MAX_CONNECTIONS, ServerReport, Store, inspect_file,
    inspect_server, known_schema,
};

use super::{DatabaseTarget, out, print_rows, refuse_absent, rows_as_json};
use crate::database_flag::DatabaseAddress;

/// Checks a database without changing it, and prints what was found.
pub async fn run(DatabaseTarget { address, sealing_key }: &DatabaseTarget, as_json: bool) -> Result<()> {
    let report = match address {
        DatabaseAddress::Postgres(url) => inspect_server(url).await?,
        DatabaseAddress::Sqlite(path) => {
            refuse_absent(path)?;
            inspect_file(path).await?
        }
    };
    let (rows, sealed) = match report.is_current {
        false => (Vec::new(), Sealed { values: 0, unreadable: 0 }),
        true => {
            let store = match address {
                DatabaseAddress::Postgres(url) => Store::connect_beside(url).await?,
                DatabaseAddress::Sqlite(path) => Store::open_beside(path, Durability::Process).await?,
            };
            let found = (store.table_rows().await?, check_sealed(&store, sealing_key).await?);
            store.close().await;
            found
        }
    };
    let DatabaseReport { product, schema, is_current, bytes, server } = &report;
    if as_json {
        let server = server.as_ref().map(|server| {
            json!({
                "encrypted": server.is_encrypted,
                "max_connections": server.max_connections,
                "connections": server.connections,
                "has_host": server.has_host,
                "host": server.host.as_ref().map(|HostReport { number, version, silent_ms }| {
                    json!({ "number": number, "version": version, "silent_ms": silent_ms })
                }),
            })
        });
        out::json(&json!({
            "database": address.to_string(),
            "product": product,
            "schema": schema,
            "known_schema": known_schema(),
            "current": is_current,
            "bytes": bytes,
            "server": server,
            "sealed": sealed.values,
            "unreadable": sealed.unreadable,
            "rows": rows_as_json(&rows),
        }))?;
    } else {
        out::line(&format!("{address}: {product}, {}", HumanBytes(*bytes)))?;
        if let Some(ServerReport { is_encrypted, max_connections, connections, has_host, host }) = server {
            let encrypted = if *is_encrypted { "encrypted" } else { "not encrypted" };
            let host = match host {
                Some(HostReport { number, version, silent_ms }) => format!(
                    "a host uses the database: number {number}, version {version}, last heard from {} s ago",
                    silent_ms / 1000
                ),
                None if *has_host => "a host uses the database".to_owned(),
                None => "no host uses the database".to_owned(),
            };
            out::line(&format!(
                "connections: {encrypted}; {connections} of {max_connections} are open; {host}"
            ))?;
        }
        out::line(&schema_line(*schema, *is_current))?;
        if sealed.values > 0 {
            let opened = sealed.values - sealed.unreadable;
            out::line(&format!("secrets: {opened} of {} open with the key of {sealing_key}", sealed.values))?;
        }
        if !rows.is_empty() {
            print_rows(&rows)?;
        }
    }
    judge(&report, sealed)
}

fn schema_line(schema: i64, is_current: bool) -> String {
    let known = known_schema();
    match schema {
        0 => "schema: there are no tables yet; `skep up` or `skep db migrate` creates them".into(),
        schema if schema == known => format!("schema: {schema}, the one of this version"),
        schema if is_current => {
            format!("schema: {schema}, newer than {known}, the one of this version, which can use it")
        }
        schema => format!("schema: {schema}; this version has {known}"),
    }
}

/// Fails if a host of this version could not start, or could not open all secrets.
fn judge(report: &DatabaseReport, sealed: Sealed) -> Result<()> {
    if report.schema > known_schema() && !report.is_current {
        bail!("the tables belong to a newer version of skep\n  hint: upgrade skep");
    }
    if let Some(server) = &report.server {
        let free = server.max_connections.saturating_sub(server.connections);
        if !server.has_host && free < MAX_CONNECTIONS {
            bail!(
                "the server has room for {free} more connections, and a host opens up to {MAX_CONNECTIONS}\n  hint: raise \
                 max_connections of the server"
            );
        }
    }
    if sealed.unreadable > 0 {
        bail!(
            "{} of {} secrets do not open\n  hint: name the data folder with secrets.key, or the settings with [secrets], or \
             put the key back from a backup",
            sealed.unreadable,
            sealed.values
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_without_room_for_the_connections_of_a_host_is_reported() {
        let report = |connections, has_host| DatabaseReport {
            product: "PostgreSQL 17.1".to_owned(),
            schema: known_schema(),
            is_current: true,
            bytes: 1,
            server: Some(ServerReport {
                is_encrypted: false,
                max_connections: 20,
                connections,
                has_host,
                host: None,
            }),
        };
        let judged = |report: &DatabaseReport| judge(report, Sealed { values: 0, unreadable: 0 });
        judged(&report(20 - MAX_CONNECTIONS, false)).expect("there is room");
        let error = judged(&report(21 - MAX_CONNECTIONS, false)).expect_err("one is missing").to_string();
        assert!(error.contains("room for 9 more connections, and a host opens up to 10"), "{error}");
        assert!(error.contains("hint: raise max_connections"), "{error}");
        judged(&report(20, true)).expect("the connections are those of the host");
    }
}
