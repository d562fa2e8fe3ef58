//! KV pages of what one host deletes are erased at all others, also at those that are away meanwhile.

use super::{Cluster, number};
use crate::tests::{
    fixture::{Host, Setup, engine_with_disk, until},
    inference::chatter,
    warming::{QUESTION, tier},
};
use skep_engine::{DiskTier, ModelSet, PageWrite};
use skep_store::Store;
use std::{sync::Arc, time::Duration};

const DEADLINE: Duration = Duration::from_secs(60);

/// Starts a host with a model of its own, whose pages are in this tier.
async fn host(cluster: &Cluster, tier: &Arc<DiskTier>) -> Host {
    let store = Store::connect_to_cluster(&cluster.url, "http://127.0.0.1:1").await.expect("it joins");
    let setup = Setup { disk: Some(tier.clone()), peers: Some(cluster.calls.clone()), ..Setup::default() };
    let host = Host::on(store, ModelSet::new(engine_with_disk("tiny", tier)), setup).await;
    cluster.calls.hosts().insert(number(&host), host.agents.clone());
    host
}

/// Makes a turn of a session, and waits until its pages are on disk.
async fn turn(host: &Host, session: &str, tier: &DiskTier) {
    host.answer("chat", session, QUESTION).await;
    until(async || (tier.status().pages >= 2 && tier.status().queued_bytes == 0).then_some(())).await;
}

/// Returns the number of pages in memory that somebody has.
async fn in_memory(host: &Host) -> usize {
    let engine = host.agents.models().engines().next().expect("the tiny model");
    engine.page_owners().await.into_iter().flatten().map(|owner| owner.pages).sum()
}

#[tokio::test(flavor = "multi_thread")]
async fn pages_of_a_session_that_moved_are_erased_where_it_was() {
    let Some(cluster) = Cluster::new().await else { return };
    let folders = [(); 3].map(|()| tempfile::tempdir().expect("a folder"));
    let [tier_of_one, tier_of_other, tier_of_third] = folders.each_ref().map(|folder| tier(folder.path()));
    let (one, other) = (host(&cluster, &tier_of_one).await, host(&cluster, &tier_of_other).await);
    one.deploy("chat", "", chatter()).await.expect("valid");
    until(async || other.agents.agent("chat").ok()).await;
    cluster.met(&[&one, &other]).await;
    turn(&one, "s", &tier_of_one).await;
    one.agents.hand_over(DEADLINE).await;
    assert!(tier_of_one.status().pages > 0 && in_memory(&one).await > 0);
    other.agents.delete_session("chat", "s").await.expect("it has moved");
    until(async || (tier_of_one.status().pages == 0 && in_memory(&one).await == 0).then_some(())).await;
    cluster.kill(one);

    // A host that is away erases them when it comes back.
    let third = host(&cluster, &tier_of_third).await;
    until(async || third.agents.agent("chat").ok()).await;
    turn(&other, "t", &tier_of_other).await;
    cluster.met(&[&other, &third]).await;
    other.agents.hand_over(DEADLINE).await;
    cluster.kill(other);
    third.agents.delete_session("chat", "t").await.expect("it has moved");
    assert!(tier_of_other.status().pages > 0, "nobody was there to erase them");
    let again = host(&cluster, &tier_of_other).await;
    until(async || (tier_of_other.status().pages == 0).then_some(())).await;
    // Pages that are used later stay.
    turn(&again, "u", &tier_of_other).await;
    third.agents.delete_session("chat", "nobody").await.expect_err("there is none");
    assert!(tier_of_other.status().pages > 0);
}

/// A cache in the memory of several hosts has the pages of all of them, and one host does not know what they may keep.
#[tokio::test(flavor = "multi_thread")]
async fn a_host_that_does_not_know_what_others_deleted_erases_its_own_pages_and_no_copies_elsewhere() {
    let Some(cluster) = Cluster::new().await else { return };
    let folder = tempfile::tempdir().expect("a folder");
    let before = tier(folder.path());
    let keys = before.keys();
    let layout = before.layout(keys.layout("weights", "form"), 1_000).expect("a layout");
    assert!(before.write(PageWrite {
        layout,
        prefix: keys.prefixes("t", &[7; 16], 16)[0],
        parent: None,
        tenant: keys.tenant("t"),
        owner: keys.owner(None, None),
        bytes: vec![1; 1_000],
    }));
    before.flush();
    drop(before);
    let disk = tier(folder.path());
    assert_eq!((disk.status().pages, disk.erased_until().expect("readable")), (1, None));
    let (erased, notices) = std::sync::mpsc::channel();
    disk.when_erased(move |pages| erased.send(format!("{pages:?}")).expect("the test waits"));
    let _host = host(&cluster, &disk).await;
    until(async || (disk.status().pages == 0).then_some(())).await;
    assert_eq!(notices.try_iter().collect::<Vec<_>>(), Vec::<String>::new());
}
