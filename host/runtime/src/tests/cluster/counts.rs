//! Hosts learn what the others have counted.

use super::{Cluster, number};
use crate::{
    SharedCounts,
    tests::fixture::{Setup, until},
};
use std::{
    collections::BTreeMap,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

/// The time within which a host learns what another one has counted: one of its meetings after one of the other's, and some for a
/// machine under load.
const SOON: Duration = Duration::from_secs(3);
const NAME: &str = "requests acme";

/// An amount of a host, and the last reports of the others.
#[derive(Default)]
struct Amounts {
    own: AtomicU64,
    others: Mutex<BTreeMap<i64, BTreeMap<String, u64>>>,
}

impl Amounts {
    /// Returns what the host with this number has reported.
    fn of(&self, host: i64) -> Option<u64> {
        self.others.lock().expect("no test panics here").get(&host)?.get(NAME).copied()
    }
}

impl SharedCounts for Amounts {
    fn own(&self) -> BTreeMap<String, u64> {
        [(NAME.to_owned(), self.own.load(Ordering::Acquire))].into()
    }

    fn note(&self, reports: Vec<(i64, BTreeMap<String, u64>)>) {
        *self.others.lock().expect("no test panics here") = reports.into_iter().collect();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn each_host_learns_soon_what_the_others_have_counted() {
    let Some(cluster) = Cluster::new().await else { return };
    let amounts: [Arc<Amounts>; 2] = Default::default();
    let setup = |amounts: &Arc<Amounts>| Setup { counts: Some(amounts.clone()), ..Setup::default() };
    let hosts = [cluster.host(setup(&amounts[0])).await, cluster.host(setup(&amounts[1])).await];
    cluster.met(&[&hosts[0], &hosts[1]]).await;
    for count in [7, 1_000_000_000_000] {
        for (this, other) in [(0, 1), (1, 0)] {
            amounts[this].own.store(count, Ordering::Release);
            let began = Instant::now();
            until(async || (amounts[other].of(number(&hosts[this])) == Some(count)).then_some(())).await;
            assert!(began.elapsed() < SOON, "{:?}", began.elapsed());
        }
    }
    let own = amounts.each_ref().map(|amounts| amounts.others.lock().expect("no test panics here").len());
    assert_eq!(own, [1, 1], "nobody hears of itself");
}
