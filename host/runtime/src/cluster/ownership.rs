//! The sessions that this host owns.
//!
//! Invariants:
//!
//! - A session is used only by whoever holds an [`Owned`] of it: a command in a mailbox, a live turn until its end is stored, a
//!   message that is being accepted. A session in use is not given back.
//! - While the owner of a session is being changed in the database, by a claim or because the session is given back, nobody begins to
//!   use it; later users wait for the result. So the order of the changes is the same here and in the database.
//! - What is remembered is bounded. A session that is forgotten is given back first, because otherwise another host would wait for a
//!   host that does not know that it owns the session.
//!
//! A remembered ownership needs no check: it ends only when this host gives the session back, not with the session, and a host that
//! was declared dead writes nothing anymore. An ownership that the database has and nobody here remembers, because the answer to a
//! claim was lost, does no harm either: the next claim of this host finds it.

use crate::name::SessionKey;
use skep_store::{Claim, Store, StoreError};
use std::{
    collections::{HashMap, hash_map},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};
use tokio::sync::Notify;

/// Number of attempts to give sessions back. Afterwards the database says that they are this host's until somebody uses them here, or
/// the host ends.
const RELEASE_ATTEMPTS: u32 = 5;
const RELEASE_PAUSE: Duration = Duration::from_millis(200);

/// The sessions of one host. Clones share them.
#[derive(Clone)]
pub(crate) struct Ownership(Option<Arc<Shared>>);

struct Shared {
    store: Store,
    max_remembered: usize,
    sessions: Mutex<HashMap<SessionKey, Entry>>,
    /// Rung when an entry changes that somebody may wait for.
    changed: Notify,
}

struct Entry {
    state: State,
    /// Number of users. There are none while the owner is being changed.
    uses: usize,
    used_at: Instant,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    Owned,
    /// The owner is being changed in the database.
    Changing,
}

/// The result of a claim.
pub(crate) enum Claimed {
    Here(Owned),
    /// This live host owns the session.
    Elsewhere(i64),
}

/// Keeps a session with this host as long as it exists. Clones share one use. Without a cluster there is nothing to keep.
#[derive(Clone, Default)]
pub(crate) struct Owned {
    _used: Option<Arc<Use>>,
}

struct Use {
    shared: Arc<Shared>,
    key: SessionKey,
}

/// An attempt to begin using a session.
enum Entered {
    Owned(Owned),
    /// Somebody else changes the owner.
    Changing,
    /// An entry was made, whose maker has to claim the session.
    New,
}

impl Ownership {
    /// Returns the ownership of a host without a cluster, to which all sessions belong.
    pub(super) fn of_all() -> Self {
        Ownership(None)
    }

    /// Returns the ownership of a host of a cluster, which owns what it has claimed.
    pub(super) fn of_claimed(store: Store, max_remembered: usize) -> Self {
        let (sessions, changed) = (Mutex::default(), Notify::new());
        Ownership(Some(Arc::new(Shared { store, max_remembered, sessions, changed })))
    }

    /// Claims a session, unless another live host owns it.
    pub(crate) async fn claim(&self, key: &SessionKey) -> Result<Claimed, StoreError> {
        let Some(shared) = &self.0 else { return Ok(Claimed::Here(Owned::default())) };
        loop {
            let changed = shared.changed.notified();
            tokio::pin!(changed);
            // No change is missed from here on.
            changed.as_mut().enable();
            match shared.enter(key) {
                Entered::Owned(owned) => return Ok(Claimed::Here(owned)),
                Entered::Changing => changed.await,
                Entered::New => {
                    // A claim that was begun is finished even if its caller gives up, because others may wait for it.
                    let claiming = tokio::spawn(shared.clone().claim(key.clone()));
                    return claiming.await.map_err(|_ended| StoreError::Closed)?;
                }
            }
        }
    }

    /// Returns whether this host remembers that it owns a session.
    pub(crate) fn owns(&self, key: &SessionKey) -> bool {
        let Some(shared) = &self.0 else { return true };
        shared.lock().get(key).is_some_and(|entry| entry.state == State::Owned)
    }

    /// Records sessions that this host has claimed by taking them over.
    pub(crate) fn took_over(&self, sessions: Vec<(String, String)>) {
        let Some(shared) = &self.0 else { return };
        let mut known = shared.lock();
        for (agent, session) in sessions {
            // A session that is being given back at this moment is claimed again when its turns are adopted.
            if let hash_map::Entry::Vacant(vacant) = known.entry(SessionKey { agent, session }) {
                vacant.insert(Entry { state: State::Owned, uses: 0, used_at: Instant::now() });
            }
        }
    }

    /// Returns the number of sessions that this host remembers.
    pub(crate) fn count(&self) -> usize {
        self.0.as_ref().map_or(0, |shared| shared.lock().len())
    }

    /// Returns the sessions that this host remembers.
    pub(crate) fn sessions(&self) -> Vec<SessionKey> {
        self.0.as_ref().map(|shared| shared.lock().keys().cloned().collect()).unwrap_or_default()
    }

    /// Returns how many sessions should be forgotten, so that no more than the bound are remembered.
    pub(crate) fn excess(&self) -> usize {
        let Some(shared) = &self.0 else { return 0 };
        // Forgets a little more than necessary, so that the next claims find room without a search.
        match self.count().saturating_sub(shared.max_remembered) {
            0 => 0,
            over => over + shared.max_remembered / 16,
        }
    }

    /// Chooses up to `limit` sessions that nobody uses, those first that were not used for the longest time. Nobody begins to use
    /// them until [`Ownership::end_release`].
    pub(crate) fn begin_release(&self, limit: usize) -> Vec<SessionKey> {
        let Some(shared) = &self.0 else { return Vec::new() };
        let mut sessions = shared.lock();
        let free = sessions.iter().filter(|(_, entry)| entry.uses == 0 && entry.state == State::Owned);
        let mut free: Vec<(Instant, SessionKey)> =
            free.map(|(key, entry)| (entry.used_at, key.clone())).collect();
        if free.len() > limit {
            free.sort_unstable_by_key(|(used_at, _)| *used_at);
            free.truncate(limit);
        }
        let chosen: Vec<SessionKey> = free.into_iter().map(|(_, key)| key).collect();
        for key in &chosen {
            if let Some(entry) = sessions.get_mut(key) {
                entry.state = State::Changing;
            }
        }
        chosen
    }

    /// Does the same for one session. Returns whether nobody uses it, so that it is chosen.
    pub(crate) fn begin_release_of(&self, key: &SessionKey) -> bool {
        let Some(shared) = &self.0 else { return false };
        match shared.lock().get_mut(key) {
            Some(entry) if entry.uses == 0 && entry.state == State::Owned => {
                entry.state = State::Changing;
                true
            }
            _ => false,
        }
    }

    /// Gives the chosen sessions back, which no actor of this host has in memory anymore.
    pub(crate) async fn end_release(&self, chosen: Vec<SessionKey>) {
        let Some(shared) = self.0.as_ref().filter(|_| !chosen.is_empty()) else { return };
        let rows: Vec<(String, String)> =
            chosen.iter().map(|key| (key.agent.clone(), key.session.clone())).collect();
        for attempt in 1..=RELEASE_ATTEMPTS {
            match shared.store.release_sessions(rows.clone()).await {
                Ok(()) => break,
                Err(error) if error.is_fenced() => break,
                Err(error) => {
                    tracing::warn!(attempt, sessions = rows.len(), "cannot give sessions back yet: {error}");
                    tokio::time::sleep(RELEASE_PAUSE).await;
                }
            }
        }
        shared.forget(&chosen);
    }
}

impl Shared {
    /// Begins to use a session that is owned, or makes an entry for one that is not.
    fn enter(self: &Arc<Self>, key: &SessionKey) -> Entered {
        let mut sessions = self.lock();
        match sessions.get_mut(key) {
            Some(Entry { state: State::Changing, .. }) => Entered::Changing,
            Some(entry) => Entered::Owned(self.begin_use(key, entry)),
            None => {
                let entry = Entry { state: State::Changing, uses: 0, used_at: Instant::now() };
                sessions.insert(key.clone(), entry);
                Entered::New
            }
        }
    }

    fn begin_use(self: &Arc<Self>, key: &SessionKey, entry: &mut Entry) -> Owned {
        entry.uses += 1;
        entry.used_at = Instant::now();
        Owned { _used: Some(Arc::new(Use { shared: self.clone(), key: key.clone() })) }
    }

    /// Claims the session of a new entry.
    async fn claim(self: Arc<Self>, key: SessionKey) -> Result<Claimed, StoreError> {
        let claimed = self.store.claim_session(&key.agent, &key.session).await;
        let claimed = match claimed {
            Ok(Claim::Ours { .. }) => {
                let mut sessions = self.lock();
                let new = || Entry { state: State::Owned, uses: 0, used_at: Instant::now() };
                let entry = sessions.entry(key.clone()).or_insert_with(new);
                entry.state = State::Owned;
                let owned = self.begin_use(&key, entry);
                drop(sessions);
                self.changed.notify_waiters();
                return Ok(Claimed::Here(owned));
            }
            Ok(Claim::Elsewhere { host }) => Ok(Claimed::Elsewhere(host)),
            Err(error) => Err(error),
        };
        self.forget(&[key]);
        claimed
    }

    /// Removes entries whose owner was being changed.
    fn forget(&self, keys: &[SessionKey]) {
        let mut sessions = self.lock();
        for key in keys {
            sessions.remove(key);
        }
        drop(sessions);
        self.changed.notify_waiters();
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<SessionKey, Entry>> {
        self.sessions.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Use {
    fn drop(&mut self) {
        // An entry in use is never removed, so it is that of this use.
        if let Some(entry) = self.shared.lock().get_mut(&self.key) {
            entry.uses -= 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(session: &str) -> SessionKey {
        SessionKey { agent: "a".into(), session: session.into() }
    }

    /// Returns the ownership of a host whose database gives it every session.
    async fn ownership(max_remembered: usize) -> Ownership {
        Ownership::of_claimed(Store::for_tests().await.expect("a database"), max_remembered)
    }

    async fn owned(ownership: &Ownership, session: &str) -> Owned {
        match ownership.claim(&key(session)).await.expect("claimed") {
            Claimed::Here(owned) => owned,
            Claimed::Elsewhere(host) => panic!("host {host} has it"),
        }
    }

    #[tokio::test]
    async fn a_session_in_use_is_not_given_back() {
        let ownership = ownership(8).await;
        let (used, shared) = (owned(&ownership, "used").await, owned(&ownership, "used").await);
        drop(owned(&ownership, "free").await);
        drop(used);
        let chosen = ownership.begin_release(8);
        assert_eq!(chosen, [key("free")]);
        ownership.end_release(chosen).await;
        assert!(!ownership.owns(&key("free")) && ownership.owns(&key("used")));
        drop(shared.clone());
        assert!(ownership.begin_release(8).is_empty(), "a clone is the same use");
        assert!(!ownership.begin_release_of(&key("used")) && !ownership.begin_release_of(&key("free")));
        drop(shared);
        assert_eq!(ownership.begin_release(8), [key("used")]);
        assert!(!ownership.begin_release_of(&key("used")), "it is already being given back");
        ownership.end_release(vec![key("used")]).await;
        drop(owned(&ownership, "used").await);
        assert!(ownership.begin_release_of(&key("used")) && !ownership.owns(&key("used")));
    }

    #[tokio::test]
    async fn a_claim_waits_for_a_session_that_is_being_given_back() {
        let ownership = ownership(8).await;
        drop(owned(&ownership, "s").await);
        let chosen = ownership.begin_release(8);
        let claiming = tokio::spawn({
            let ownership = ownership.clone();
            async move { drop(owned(&ownership, "s").await) }
        });
        tokio::task::yield_now().await;
        assert!(!claiming.is_finished() && !ownership.owns(&key("s")));
        ownership.end_release(chosen).await;
        claiming.await.expect("claimed");
        assert!(ownership.owns(&key("s")));
    }

    #[tokio::test]
    async fn a_claim_whose_caller_gives_up_is_finished() {
        let ownership = ownership(8).await;
        {
            let (session, waker) = (key("s"), std::task::Waker::noop());
            let mut claiming = std::pin::pin!(ownership.claim(&session));
            assert!(claiming.as_mut().poll(&mut std::task::Context::from_waker(waker)).is_pending());
        }
        drop(owned(&ownership, "s").await);
        assert_eq!(ownership.begin_release(8), [key("s")], "nobody uses it");
    }

    #[tokio::test]
    async fn what_was_not_used_for_the_longest_time_is_forgotten_first() {
        let ownership = ownership(2).await;
        for session in ["a", "b", "c"] {
            drop(owned(&ownership, session).await);
        }
        drop(owned(&ownership, "a").await);
        assert_eq!((ownership.excess(), ownership.begin_release(1)), (1, vec![key("b")]));
        assert_eq!(Ownership::of_all().excess(), 0);
    }
}
