//! Crash tests of session operations that take several transactions: copies, imports, deletions and
//! expiry.

use super::{
    super::{fixture::Host, guest::counter, outside::Outside},
    Scenario, cut_off_at_every_write,
};
use crate::{Clock, PortableSession, SessionSummary};
use std::collections::BTreeMap;

/// More entries than are written in one transaction.
const KEYS: usize = 1_200;
const HOUR_MS: u64 = 3_600_000;

fn exported(id: &str, value: &[u8]) -> PortableSession {
    let summary = SessionSummary { id: id.into(), turns: 7, created_at_ms: 1, updated_at_ms: 1 };
    let state: BTreeMap<_, _> = (0..KEYS).map(|key| (format!("{key:05}"), value.to_vec())).collect();
    PortableSession { summary, state, conversations: Vec::new() }
}

/// Returns the value of the session's state, which must be complete or absent.
async fn value_of(host: &Host, session: &str) -> Option<Vec<u8>> {
    let found = host.agents.export_session("count", session).await.ok()?;
    assert_eq!((found.summary.turns, found.state.len()), (7, KEYS), "{session} is incomplete");
    let value = found.state.values().next().expect("more than one").clone();
    assert!(found.state.values().all(|other| *other == value), "{session} is inconsistent");
    Some(value)
}

/// Checks that no rows of interrupted operations are left.
async fn assert_all_or_nothing(host: &Host) {
    let left =
        "SELECT (SELECT COUNT(*) FROM erasures) + (SELECT COUNT(*) FROM sessions WHERE session IS NULL)
        + (SELECT COUNT(*) FROM state WHERE session NOT IN (SELECT key FROM sessions))
        + (SELECT COUNT(*) FROM agents WHERE deleted)";
    assert_eq!(host.store().count(left).await.expect("counted"), 0, "invisible rows are left");
}

/// An operation on a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Deed {
    Fork,
    Import,
    Replace,
    Delete,
    Expire,
    DeleteAgent,
}

struct Change {
    outside: Outside,
    deed: Deed,
}

impl Change {
    fn test(deed: Deed) {
        let tally = cut_off_at_every_write(&Change { outside: Outside::start(), deed });
        assert!(tally.crashes > 9, "{deed:?}: {tally:?}");
    }
}

impl Scenario for Change {
    /// Whether the client learned that the operation is done.
    type Observed = bool;

    fn outside(&self) -> &Outside {
        &self.outside
    }

    async fn prepare(&self, host: &Host) {
        host.deploy("count", "[sessions]\nttl_h = 1", counter()).await.expect("valid");
        if self.deed != Deed::Import {
            host.agents
                .import_session("count", exported("s", b"old"), false)
                .await
                .expect("the session does not exist yet");
        }
    }

    async fn act(&self, host: &Host, _clock: &Clock, observed: &mut bool) {
        let agents = &host.agents;
        let code = match self.deed {
            Deed::Fork => agents.fork_session("count", "s", "t").await.map(drop),
            Deed::Import => agents.import_session("count", exported("t", b"new"), false).await.map(drop),
            Deed::Replace => agents.import_session("count", exported("s", b"new"), true).await.map(drop),
            Deed::Delete => agents.delete_session("count", "s").await,
            Deed::Expire => {
                let now_ms = crate::Clock::default().now_ms();
                agents.expire_sessions(now_ms + 2 * HOUR_MS).await.map(drop)
            }
            Deed::DeleteAgent => agents.delete("count").await,
        };
        let done_before = match self.deed {
            Deed::Fork | Deed::Import => "session_exists",
            Deed::Delete => "session_not_found",
            Deed::DeleteAgent => "agent_not_found",
            Deed::Replace | Deed::Expire => "",
        };
        if let Err(error) = code {
            assert_eq!(error.code(), done_before, "{error}");
        }
        *observed = true;
    }

    async fn check(&self, host: &Host, observed: &bool) -> usize {
        assert!(observed);
        assert_all_or_nothing(host).await;
        let expected = match self.deed {
            Deed::Fork => [Some("old"), Some("old")],
            Deed::Import => [None, Some("new")],
            Deed::Replace => [Some("new"), None],
            Deed::Delete | Deed::Expire | Deed::DeleteAgent => [None, None],
        };
        let expected = expected.map(|value| value.map(|value: &str| value.as_bytes().to_vec()));
        assert_eq!([value_of(host, "s").await, value_of(host, "t").await], expected);
        let rows = host.store().count("SELECT COUNT(*) FROM state").await.expect("counted");
        let sessions = expected.iter().flatten().count();
        assert_eq!(rows, (sessions * KEYS) as i64);
        0
    }
}

#[test]
fn a_fork_survives_every_crash() {
    Change::test(Deed::Fork);
}

#[test]
fn an_import_survives_every_crash() {
    Change::test(Deed::Import);
}

#[test]
fn an_import_over_a_session_survives_every_crash() {
    Change::test(Deed::Replace);
}

#[test]
fn a_deletion_survives_every_crash() {
    Change::test(Deed::Delete);
}

#[test]
fn an_expiry_survives_every_crash() {
    Change::test(Deed::Expire);
}

#[test]
fn the_deletion_of_an_agent_survives_every_crash() {
    Change::test(Deed::DeleteAgent);
}
