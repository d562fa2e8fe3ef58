//! Watches in the database which hosts own the sessions while hosts fail: the epochs of a session only grow, and each is that of one
//! owner.

use sqlx::{Connection as _, PgConnection};
use std::{
    collections::HashMap,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::JoinHandle,
    time::Duration,
};

/// Time between two looks.
const LOOK: Duration = Duration::from_millis(20);

/// A session: its agent and its name.
type Session = (String, String);

/// The owners of all sessions as they were seen.
#[derive(Default)]
pub struct Owners {
    /// The last host of each session, with its epoch.
    last: HashMap<Session, (i64, i64)>,
    by_epoch: HashMap<i64, (Session, i64)>,
    /// Number of times that a session had another host than before.
    pub moves: usize,
    pub faults: Vec<String>,
}

/// A thread that looks until it is ended.
pub struct Watch {
    ends: Arc<AtomicBool>,
    looking: JoinHandle<Owners>,
}

impl Owners {
    fn note(&mut self, session: Session, host: i64, epoch: i64) {
        let owner = (session.clone(), host);
        let known = self.by_epoch.entry(epoch).or_insert_with(|| owner.clone());
        if *known != owner {
            self.faults.push(format!("epoch {epoch} is that of {known:?} and of {owner:?}"));
        }
        let Some((before, last)) = self.last.insert(session, (host, epoch)) else { return };
        if epoch < last {
            self.faults.push(format!("the epoch of {owner:?} is {epoch}, after {last} of host {before}"));
        }
        self.moves += usize::from(host != before);
    }
}

impl Watch {
    /// Looks at the owners in the database with this address, which may be restarted meanwhile.
    pub fn start(url: String) -> Watch {
        let ends = Arc::new(AtomicBool::new(false));
        let has_ended = ends.clone();
        let looking = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async move {
                let mut owners = Owners::default();
                while !has_ended.load(Ordering::Relaxed) {
                    // The database is away, or has no tables yet.
                    let _ = look(&url, &mut owners, &has_ended).await;
                    tokio::time::sleep(LOOK).await;
                }
                owners
            })
        });
        Watch { ends, looking }
    }

    /// Ends the thread, and returns what it has seen.
    pub fn end(self) -> Owners {
        self.ends.store(true, Ordering::Relaxed);
        self.looking.join().expect("it does not panic")
    }
}

/// Looks on one connection, until it is lost or nobody needs it any more.
async fn look(url: &str, owners: &mut Owners, has_ended: &AtomicBool) -> Result<(), sqlx::Error> {
    let mut connection = PgConnection::connect(url).await?;
    while !has_ended.load(Ordering::Relaxed) {
        let rows: Vec<(String, String, i64, i64)> =
            sqlx::query_as("SELECT agent, session, host, epoch FROM session_owners")
                .fetch_all(&mut connection)
                .await?;
        for (agent, session, host, epoch) in rows {
            owners.note((agent, session), host, epoch);
        }
        tokio::time::sleep(LOOK).await;
    }
    Ok(())
}

#[test]
fn an_epoch_that_goes_back_or_has_two_owners_is_found() {
    let session = |name: &str| ("a".to_owned(), name.to_owned());
    let mut owners = Owners::default();
    for (name, host, epoch) in [("s", 1, 1), ("t", 1, 2), ("s", 1, 1), ("s", 2, 3), ("s", 1, 4)] {
        owners.note(session(name), host, epoch);
    }
    assert_eq!((owners.moves, owners.faults.len()), (2, 0), "{:?}", owners.faults);
    owners.note(session("s"), 3, 4);
    owners.note(session("t"), 2, 1);
    let (two, back) = (&owners.faults[0], &owners.faults[2]);
    assert!(
        two.contains("epoch 4 is that of") && back.contains("is 1, after 2 of host 1"),
        "{:?}",
        owners.faults
    );
}
