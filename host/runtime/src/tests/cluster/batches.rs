//! Items of batches that run on one host while another one cancels them, or after their host died.

use super::{Cluster, number, owner};
use crate::{
    BatchOptions, BatchOutcome, BatchPhase, BatchResults, RuntimeOptions, TurnPhase,
    tests::{
        batches::{PRINCIPAL, counts, queue, results, turn},
        fixture::{Host, until},
        guest::spinner,
        tools::{caller, echoing, granted, granting},
    },
};

/// Waits until an item of a batch runs.
async fn until_running(host: &Host, id: &str) {
    until(async || (counts(host, id).await.running == 1).then_some(())).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_item_of_a_dead_host_finishes_on_a_live_one() {
    let Some(cluster) = Cluster::new().await else { return };
    let one = cluster.host(granting(&["agent:*/*"])).await;
    one.deploy("orders", "[tools.find]\napproval = true", echoing()).await.expect("valid");
    one.deploy("desk", &granted("\"agent:orders/find\""), caller()).await.expect("valid");
    let id = queue(&one, "agent:desk", vec![turn("agent:orders/find")]).await.expect("room");
    until_running(&one, &id).await;
    let approval = until(async || one.agents.approvals(None, 10).await.expect("listed").pop()).await.id;
    let other = cluster.host(granting(&["agent:*/*"])).await;
    cluster.met(&[&one, &other]).await;
    assert_eq!(counts(&other, &id).await.running, 1, "a host that starts leaves it alone");

    cluster.kill(one);
    let session = format!("batch-{id}-0");
    until(async || (owner(&other, "desk", &session).await == Some(number(&other))).then_some(())).await;
    other.agents.decide(&approval, true, None, "tester").await.expect("still open");
    let BatchResults { items, .. } = results(&other, &id).await;
    let BatchOutcome::Done(answer) = &items[0].outcome else { panic!("{items:?}") };
    assert_eq!(answer.text, r#"{"id":1}"#);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_batch_is_cancelled_on_the_host_that_runs_it() {
    let Some(cluster) = Cluster::new().await else { return };
    let one = cluster.host(RuntimeOptions::default()).await;
    // It starts no items.
    let batch = BatchOptions { max_running: 0, ..BatchOptions::default() };
    let other = cluster.host(RuntimeOptions { batch, ..RuntimeOptions::default() }).await;
    one.deploy("spin", "[limits]\ncpu_ms = 60000", spinner()).await.expect("valid");
    until(async || other.agents.agent("spin").ok()).await;
    let id = queue(&one, "agent:spin", vec![turn("spin")]).await.expect("room");
    let session = format!("batch-{id}-0");
    let running = async || {
        let turn = one.agents.turns("spin", &session, None, 1).await.ok()?.pop()?;
        matches!(turn.phase, TurnPhase::Running { .. }).then_some(turn.id)
    };
    let turn = until(running).await;

    other.agents.cancel_batch(PRINCIPAL, &id).await.expect("known");
    until(async || {
        let found = one.agents.turn("spin", &session, &turn).await.expect("kept");
        matches!(found.phase, TurnPhase::Failed { code, .. } if code == "cancelled").then_some(())
    })
    .await;
    let status = results(&one, &id).await.status;
    assert!(matches!(status.phase, BatchPhase::Ended { cancelled: true, .. }), "{status:?}");
}
