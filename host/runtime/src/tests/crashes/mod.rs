//! Crash tests: each scenario is interrupted at each of its writes, as when a process is killed,
//! and a new host continues with what the file holds.
//!
//! Each host runs in a separate runtime. At the chosen write its store stops forever, either before
//! the commit, or after it but before anybody is informed. The files are copied as they are,
//! everything in memory is discarded, and the next host starts on the copy. Clients start over and
//! repeat all requests, as clients do that lost their connection. Effects are counted by servers
//! outside of the host.

mod deliveries;
mod models;
mod sessions;
mod turns;
mod versions;

use super::{
    fixture::{Host, Setup, tiny_engine},
    outside::Outside,
};
use crate::{Clock, SealingKey};
use skep_engine::ModelSet;
use skep_store::{Durability, Fault, Faults, Moment, Store};
use std::{fs, future::Future, path::Path, pin::pin, time::Duration};
use tempfile::TempDir;
use tokio::sync::oneshot;

/// Time after which a host's life counts as hung.
const LIFE: Duration = Duration::from_secs(150);
/// Interval between two checks of a background process.
const LOOK: Duration = Duration::from_millis(3);
/// After every second crash, the next host is interrupted as well, at one of its first writes.
const WRITES_OF_A_RESTART: u32 = 6;
/// Maximum number of times that a scenario is interrupted at all its writes until an effect is interrupted. Background processes
/// write as well, so the write before an effect does not always have the same number, and a sweep may miss it.
const SWEEPS: u32 = 4;

/// The actions of clients, and the expected result.
trait Scenario {
    /// The responses that clients have received. They outlive the host.
    type Observed: Default;

    fn outside(&self) -> &Outside;

    fn setup(&self) -> Setup {
        self.outside().setup()
    }

    /// Prepares a host before there are any crashes.
    async fn prepare(&self, host: &Host);

    /// Performs all actions of the clients, until they know that everything is done. After a
    /// crash they start over.
    async fn act(&self, host: &Host, clock: &Clock, observed: &mut Self::Observed);

    /// Checks the result after everything has settled. Returns how many effects were reported as
    /// interrupted, each of which may or may not have happened.
    async fn check(&self, host: &Host, observed: &Self::Observed) -> usize;
}

/// Statistics of a scenario.
#[derive(Debug, Default)]
struct Tally {
    crashes: u32,
    /// Rounds in which something was reported as interrupted.
    interrupted: u32,
}

/// The point at which a host is interrupted.
#[derive(Clone, Copy, Debug)]
struct Crash {
    moment: Moment,
    /// Number of the transaction, starting at 1.
    number: u32,
}

enum Life<T> {
    /// The host ran to completion.
    Whole(T),
    /// The host was interrupted and left this on the disk.
    Cut(TempDir),
}

/// Interrupts the scenario at each of its writes, and checks that there were more than `crashes` crashes and that an effect was
/// interrupted.
fn cut_off_during_effects(scenario: &impl Scenario, crashes: u32) {
    let mut tally = Tally::default();
    for _ in 0..SWEEPS {
        tally = cut_off_at_every_write(scenario);
        if tally.interrupted > 0 {
            break;
        }
    }
    assert!(tally.crashes > crashes && tally.interrupted > 0, "{tally:?}");
}

/// Interrupts the scenario at each of its writes, before and after the commit.
fn cut_off_at_every_write(scenario: &impl Scenario) -> Tally {
    let models = ModelSet::new(tiny_engine("tiny"));
    let prepared = tempfile::tempdir().expect("a temporary folder");
    let life = live(prepared.path(), &models, scenario.setup(), None, async |host| {
        scenario.prepare(host).await;
        host.agents.drain(Duration::ZERO).await;
        host.store().close().await;
    });
    assert!(matches!(life, Life::Whole(())), "the host was not interrupted");
    let mut tally = Tally::default();
    for moment in [Moment::Commit, Moment::Committed] {
        for number in 1.. {
            // The last such line of a failed test shows where it failed.
            eprintln!("{moment:?} {number}");
            let again = Crash { moment, number: 1 + number % WRITES_OF_A_RESTART };
            let again = (moment == Moment::Committed).then_some(again);
            let crashes: Vec<_> = [Some(Crash { moment, number }), again].into_iter().flatten().collect();
            let (cut, interrupted) = round(scenario, &models, prepared.path(), &crashes);
            if cut == 0 {
                assert_eq!(interrupted, 0, "no host was interrupted");
                break;
            }
            tally.crashes += cut;
            tally.interrupted += u32::from(interrupted > 0);
        }
    }
    println!("{tally:?}");
    tally
}

/// Runs one host after the other, interrupting all but the last. Returns how many were interrupted,
/// and how many effects were reported as interrupted.
fn round<S: Scenario>(scenario: &S, models: &ModelSet, prepared: &Path, crashes: &[Crash]) -> (u32, usize) {
    scenario.outside().forget();
    let (clock, mut observed) = (Clock::at(Clock::default().now_ms()), S::Observed::default());
    let mut folder = copy_of(prepared);
    let lives = crashes.iter().copied().map(Some).chain([None]);
    for (cut, crash) in (0..).zip(lives) {
        let setup = Setup { clock: clock.clone(), ..scenario.setup() };
        let life = live(folder.path(), models, setup, crash, async |host| {
            scenario.act(host, &clock, &mut observed).await;
            settled(host, &clock).await;
            scenario.check(host, &observed).await
        });
        match life {
            Life::Whole(interrupted) => return (cut, interrupted),
            Life::Cut(left) => folder = left,
        }
    }
    unreachable!("the last host is not interrupted")
}

/// Runs one host until it completes or is interrupted.
fn live<T>(
    folder: &Path,
    models: &ModelSet,
    setup: impl Into<Setup>,
    crash: Option<Crash>,
    living: impl AsyncFnOnce(&Host) -> T,
) -> Life<T> {
    let mut setup = setup.into();
    setup.options.artifact_dir = Some(folder.join("artifacts"));
    setup.options.sealing_key = SealingKey::File(folder.join("secrets.key"));
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    let runtime = runtime.expect("a runtime");
    let life = runtime.block_on(async {
        let store = Store::open(&folder.join("skep.db"), Durability::Process).await.expect("the database opens");
        let store = store.in_small_chunks();
        store.faults().separate_writes();
        let crashed = crash.map(|crash| crash.arm(store.faults()));
        let mut living = pin!(async {
            let host = Host::on(store, models.clone(), setup).await;
            living(&host).await
        });
        let mut crashed = pin!(async {
            match crashed {
                Some(crashed) => crashed.await.expect("the store reports the crash or continues"),
                None => std::future::pending().await,
            }
        });
        tokio::select! {
            biased;
            () = &mut crashed => Life::Cut(copy_of(folder)),
            ended = tokio::time::timeout(LIFE, &mut living) => Life::Whole(ended.expect("the scenario completes in time")),
        }
    });
    // No part of the host runs after this.
    runtime.shutdown_timeout(LIFE);
    life
}

impl Crash {
    fn arm(self, faults: &Faults) -> oneshot::Receiver<()> {
        let (cut, is_cut) = oneshot::channel();
        let (mut cut, mut left) = (Some(cut), self.number);
        faults.choose(move |moment| {
            left -= u32::from(moment == self.moment);
            if left > 0 {
                return None;
            }
            // The receiver exists until then.
            let _ = cut.take()?.send(());
            Some(Fault::Ends)
        });
        is_cut
    }
}

/// Resolves when nothing is open or in flight.
async fn settled(host: &Host, clock: &Clock) {
    const UNDER_WAY: &str = "SELECT (SELECT COUNT(*) FROM turns WHERE ended_at_ms IS NULL)
        + (SELECT COUNT(*) FROM schedules WHERE state IN (1, 2))
        + (SELECT COUNT(*) FROM deliveries WHERE state IN (0, 1))
        + (SELECT COUNT(*) FROM batches WHERE ended_at_ms IS NULL)";
    eventually(async || {
        if host.store().count("SELECT COUNT(*) FROM deliveries WHERE state = 0").await.expect("counted") > 0 {
            // Postponed deliveries become due.
            clock.advance(500);
        }
        host.store().count(UNDER_WAY).await.expect("counted") == 0
    })
    .await;
}

/// Polls until the condition holds. The host's life is bounded, but this wait is not.
async fn eventually(mut is_so: impl AsyncFnMut() -> bool) {
    while !is_so().await {
        tokio::time::sleep(LOOK).await;
    }
}

/// Polls repeatedly while waiting for another future.
async fn beside<T>(one: impl Future<Output = T>, mut other: impl AsyncFnMut()) -> T {
    let mut one = pin!(one);
    loop {
        tokio::select! {
            biased;
            done = &mut one => return done,
            () = tokio::time::sleep(LOOK) => other().await,
        }
    }
}

/// Copies all files as they are, except those that only a running process uses.
fn copy_of(folder: &Path) -> TempDir {
    let copy = tempfile::tempdir().expect("a temporary folder");
    copy_into(folder, copy.path());
    copy
}

fn copy_into(folder: &Path, copy: &Path) {
    for entry in fs::read_dir(folder).expect("readable") {
        let path = entry.expect("readable").path();
        let to = copy.join(path.file_name().expect("the entry has a name"));
        if path.is_dir() {
            fs::create_dir(&to).expect("writable");
            copy_into(&path, &to);
        } else if path.extension().is_none_or(|extension| extension != "db-shm") {
            fs::copy(&path, &to).expect("copied");
        }
    }
}
