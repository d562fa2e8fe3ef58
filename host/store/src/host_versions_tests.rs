//! Tests of the versions of hosts on one PostgreSQL database. Without a server there is only one host.

use crate::{
    cluster_tests::member,
    host_tests::{Database, agent},
    postgres::Reconnecting,
    sql::query_scalar,
    *,
};

fn turn(turn: u64) -> TurnCommit {
    TurnCommit { agent: "a".into(), session: "s".into(), turn, ..Default::default() }
}

/// Connects a host that speaks this version of the protocol between hosts.
async fn speaking(database: &Database, name: &str, protocol: i64) -> Result<Store, StoreError> {
    let versions = HostVersions { protocol, ..HostVersions::OWN };
    let url = format!("http://{name}");
    Reconnecting::as_member(database.server.clone(), &url, versions).await.map(Store::on)
}

#[tokio::test]
async fn hosts_one_version_apart_work_together_and_one_further_apart_is_refused() {
    let Some(database) = Database::new().await else { return };
    let (early, middle) =
        (speaking(&database, "early", 5).await.unwrap(), speaking(&database, "middle", 6).await.unwrap());
    let listed =
        |hosts: Vec<HostRow>| -> Vec<i64> { hosts.iter().map(|host| host.versions.protocol).collect() };
    assert_eq!(listed(middle.live_hosts().await.unwrap()), [5, 6]);
    let refused = speaking(&database, "late", 7).await.expect_err("one of the hosts is too old");
    let StoreError::VersionsApart { host, found, own, .. } = &refused else { panic!("{refused}") };
    assert_eq!((Some(*host), *found, *own), (early.host_number(), 5, 7));
    let said = refused.to_string();
    assert!(said.contains("version 5 of the protocol") && said.contains("hint: upgrade"), "{said}");
    assert_eq!(listed(middle.live_hosts().await.unwrap()), [5, 6], "nothing is left of the refused one");
    let refused = speaking(&database, "old", 4).await.expect_err("one of the hosts is too new").to_string();
    assert!(
        refused.contains("version 6 of the protocol") && refused.contains("hint: start a newer"),
        "{refused}"
    );

    // An upgrade replaces one host after the other.
    early.close().await;
    let late = speaking(&database, "late", 7).await.unwrap();
    assert_eq!(listed(late.live_hosts().await.unwrap()), [6, 7]);
    middle.close().await;
    late.close().await;
    speaking(&database, "other", 20).await.expect("hosts that have ended are in nobody's way");
}

#[tokio::test]
async fn the_first_host_of_a_new_version_extends_the_tables_while_one_of_the_version_before_uses_them() {
    let Some(mut database) = Database::new().await else { return };
    let before = member(&database, "before").await;
    before.put_agent(&agent(), b"component", &[]).await.unwrap();
    before.claim_session("a", "s").await.unwrap();
    // The tables become those of an earlier version, whose hosts report no versions.
    let shrink = "DROP INDEX deliveries_by_target; DROP TABLE choices, mcp_sessions;
                  ALTER TABLE hosts DROP COLUMN protocol, DROP COLUMN knows;
                  ALTER TABLE outcomes DROP COLUMN message_digest;
                  UPDATE skep_schema SET version = 28";
    database.run(shrink.into()).await;
    let refused = Store::connect_beside_to(database.server.clone()).await;
    assert!(
        matches!(refused, Err(StoreError::OlderSchema { .. })),
        "a command changes no tables: {refused:?}"
    );

    let new = member(&database, "new").await;
    let versions: Vec<HostVersions> =
        new.live_hosts().await.unwrap().iter().map(|host| host.versions).collect();
    assert_eq!(versions, [HostVersions { protocol: 1, schema: 28 }, HostVersions::OWN]);
    before.commit_turn(turn(1)).await.expect("it continues to work");
    let elsewhere = Claim::Elsewhere { host: before.host_number().unwrap() };
    assert_eq!(new.claim_session("a", "s").await.unwrap(), elsewhere);
    before.close().await;
    let claimed = new.claim_session("a", "s").await.unwrap();
    assert!(matches!(claimed, Claim::Ours { .. }), "{claimed:?}");
    new.commit_turn(turn(2)).await.unwrap();
    let is_indexed: bool = query_scalar("SELECT to_regclass('deliveries_by_target') IS NOT NULL")
        .fetch_one(&new.readers)
        .await
        .unwrap();
    assert!(is_indexed, "a step that only adds an index is made, too");
}
