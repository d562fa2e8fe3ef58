//! Every write is once the last one: each scenario is cut off at each of its writes, as a kill cuts a process off, and a
//! new host goes on with what the file holds.
//!
//! A host lives in a runtime of its own. At the chosen write its store stops for ever, either before the commit or after
//! it and before anybody hears of it; the files are copied as they lie there, what is in memory is thrown away, and the
//! next host starts on the copy. Its clients begin anew and ask for everything again, as clients do that lost their
//! connection. What was done is counted by servers outside of the host.

mod deliveries;
mod models;
mod sessions;
mod turns;
mod versions;

use super::{
    fixture::{Host, tiny_engine},
    outside::Outside,
};
use crate::{Clock, RuntimeOptions, capability::log::now_ms};
use skep_engine::ModelSet;
use skep_store::{Durability, Fault, Faults, Moment, Store};
use std::{fs, future::Future, path::Path, pin::pin, time::Duration};
use tempfile::TempDir;
use tokio::sync::oneshot;

/// A life of a host that takes longer hangs.
const LIFE: Duration = Duration::from_secs(150);
/// Between two looks at something that goes on by itself.
const LOOK: Duration = Duration::from_millis(3);
/// After every second kind of crash the next host is cut off as well, at one of its first writes.
const WRITES_OF_A_RESTART: u32 = 6;

/// Something that clients do, and what must come of it.
trait Scenario {
    /// What its clients were told, which outlives the host.
    type Told: Default;

    fn outside(&self) -> &Outside;

    fn options(&self) -> RuntimeOptions {
        self.outside().options()
    }

    /// Before there are any crashes.
    async fn prepare(&self, host: &Host);

    /// Everything that the clients do, until they are told that all of it is done. After a crash they begin anew.
    async fn act(&self, host: &Host, clock: &Clock, told: &mut Self::Told);

    /// Nothing goes on any more. How many effects were told as interrupted, each of which may have been made or not.
    async fn check(&self, host: &Host, told: &Self::Told) -> usize;
}

/// What a scenario went through.
#[derive(Debug, Default)]
struct Tally {
    crashes: u32,
    /// Rounds in which something was told as interrupted.
    interrupted: u32,
}

/// When a host is cut off.
#[derive(Clone, Copy, Debug)]
struct Crash {
    moment: Moment,
    /// Counted in transactions, from 1.
    number: u32,
}

enum Life<T> {
    /// It went on to its end.
    Whole(T),
    /// This is what it left on the disk.
    Cut(TempDir),
}

/// Cuts the scenario off at each of its writes, in both ways.
fn cut_off_at_every_write(scenario: &impl Scenario) -> Tally {
    let models = ModelSet::new(tiny_engine("tiny"));
    let prepared = tempfile::tempdir().expect("a temporary folder");
    let life = live(prepared.path(), &models, scenario.options(), None, async |host| {
        scenario.prepare(host).await;
        host.agents.drain(Duration::ZERO).await;
        host.store().close().await;
    });
    assert!(matches!(life, Life::Whole(())), "nobody cut it off");
    let mut tally = Tally::default();
    for moment in [Moment::Commit, Moment::Committed] {
        for number in 1.. {
            // The last line that a failed test shows is where it failed.
            eprintln!("{moment:?} {number}");
            let again = Crash { moment, number: 1 + number % WRITES_OF_A_RESTART };
            let again = (moment == Moment::Committed).then_some(again);
            let crashes: Vec<_> = [Some(Crash { moment, number }), again].into_iter().flatten().collect();
            let (cut, interrupted) = round(scenario, &models, prepared.path(), &crashes);
            if cut == 0 {
                assert_eq!(interrupted, 0, "nothing was cut off");
                break;
            }
            tally.crashes += cut;
            tally.interrupted += u32::from(interrupted > 0);
        }
    }
    println!("{tally:?}");
    tally
}

/// One host after the other, each cut off but the last one. How many were, and what was told as interrupted.
fn round<S: Scenario>(scenario: &S, models: &ModelSet, prepared: &Path, crashes: &[Crash]) -> (u32, usize) {
    scenario.outside().forget();
    let (clock, mut told) = (Clock::at(now_ms()), S::Told::default());
    let mut folder = copy_of(prepared);
    let lives = crashes.iter().copied().map(Some).chain([None]);
    for (cut, crash) in (0..).zip(lives) {
        let options = RuntimeOptions { clock: clock.clone(), ..scenario.options() };
        let life = live(folder.path(), models, options, crash, async |host| {
            scenario.act(host, &clock, &mut told).await;
            settled(host, &clock).await;
            scenario.check(host, &told).await
        });
        match life {
            Life::Whole(interrupted) => return (cut, interrupted),
            Life::Cut(left) => folder = left,
        }
    }
    unreachable!("the last one is not cut off")
}

/// One life of a host.
fn live<T>(
    folder: &Path,
    models: &ModelSet,
    options: RuntimeOptions,
    crash: Option<Crash>,
    living: impl AsyncFnOnce(&Host) -> T,
) -> Life<T> {
    let options = RuntimeOptions {
        artifact_dir: Some(folder.join("artifacts")),
        key_file: Some(folder.join("secrets.key")),
        ..options
    };
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    let runtime = runtime.expect("a runtime");
    let life = runtime.block_on(async {
        let store = Store::open(&folder.join("skep.db"), Durability::Process).await.expect("it opens");
        let store = store.in_small_pieces();
        store.faults().separate_writes();
        let crashed = crash.map(|crash| crash.arm(store.faults()));
        let mut living = pin!(async {
            let host = Host::on(store, models.clone(), options).await;
            living(&host).await
        });
        let mut crashed = pin!(async {
            match crashed {
                Some(crashed) => crashed.await.expect("the store says so, or goes on"),
                None => std::future::pending().await,
            }
        });
        tokio::select! {
            biased;
            () = &mut crashed => Life::Cut(copy_of(folder)),
            ended = tokio::time::timeout(LIFE, &mut living) => Life::Whole(ended.expect("it comes to its end")),
        }
    });
    // Nothing of it runs after this.
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
            // Whoever waits for it is there until then.
            let _ = cut.take()?.send(());
            Some(Fault::Ends)
        });
        is_cut
    }
}

/// Resolves when nothing is open and nothing on its way.
async fn settled(host: &Host, clock: &Clock) {
    const UNDER_WAY: &str = "SELECT (SELECT COUNT(*) FROM turns WHERE ended_at_ms IS NULL)
        + (SELECT COUNT(*) FROM schedules WHERE state IN (1, 2))
        + (SELECT COUNT(*) FROM deliveries WHERE state IN (0, 1))
        + (SELECT COUNT(*) FROM batches WHERE ended_at_ms IS NULL)";
    eventually(async || {
        if host.store().count("SELECT COUNT(*) FROM deliveries WHERE state = 0").await.expect("counted") > 0 {
            // What was put off is due.
            clock.advance(500);
        }
        host.store().count(UNDER_WAY).await.expect("counted") == 0
    })
    .await;
}

/// Looks until it is so. The life of a host is bounded; this is not.
async fn eventually(mut is_so: impl AsyncFnMut() -> bool) {
    while !is_so().await {
        tokio::time::sleep(LOOK).await;
    }
}

/// The same, for what somebody waits for beside something else.
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

/// All files as they lie there, but what only the living share.
fn copy_of(folder: &Path) -> TempDir {
    let copy = tempfile::tempdir().expect("a temporary folder");
    copy_into(folder, copy.path());
    copy
}

fn copy_into(folder: &Path, copy: &Path) {
    for entry in fs::read_dir(folder).expect("readable") {
        let path = entry.expect("readable").path();
        let to = copy.join(path.file_name().expect("it has a name"));
        if path.is_dir() {
            fs::create_dir(&to).expect("writable");
            copy_into(&path, &to);
        } else if path.extension().is_none_or(|extension| extension != "db-shm") {
            fs::copy(&path, &to).expect("copied");
        }
    }
}
