//! Approval of calls by people.
//!
//! A request for approval is a row of the store, so it survives the host. A turn whose calls all
//! wait for a person is suspended: its instance is dropped, its clock is paused, and it is rerun from
//! its journal when somebody has decided or the time limit has passed. A turn that waits for a
//! suspended turn, or for one behind it in its session, is suspended too. A decision is made once.

use crate::{
    Json, RunEvent, RuntimeError, Tenant,
    clock::Clock,
    feed::{IdleWatch, Suspension},
    journal::{Call, Identity, Journal, Stopped},
    text::excerpt,
};
use serde_json::Value;
use skep_store::{ApprovalRow, Decision, NewApproval, Store, Verdict};
use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};
use tokio::{sync::watch, task::JoinSet};

/// Reason for the refusal, as the agent and its model see it.
const NOT_IN_TIME: &str = "nobody approved this call in time; it was not made (`approval_ms` under [limits] in agent.toml \
                           sets the time)";

const MAX_PAGE: u32 = 1_000;
/// Interval at which a waiting turn of a cluster looks for decisions that were made on another host, which cannot wake it.
/// Requests to decide are sent to the host of the turn, so this is needed only if the session moves at that moment.
const LOOK_INTERVAL: Duration = Duration::from_secs(3);
const MAX_REASON_BYTES: usize = 2 << 10;
/// Maximum number of calls of one turn that wait at the same time.
const MAX_WAITING: usize = 32;
/// Maximum size of the arguments that are shown to people.
const MAX_ARGUMENT_BYTES: usize = 256 << 10;

/// A call that waits for a person's decision.
#[derive(Clone, Debug, PartialEq)]
pub struct Approval {
    pub id: String,
    pub agent: String,
    /// The host's id of the session.
    pub session: String,
    pub turn_id: String,
    pub tool: String,
    pub arguments: Json,
    pub created_at_ms: u64,
    /// When the call is refused if nobody decides.
    pub expires_at_ms: u64,
}

/// Wakes the turns that wait, by turn id.
#[derive(Default)]
struct Wakers(Mutex<HashMap<String, watch::Sender<()>>>);

/// Requests for approval of all turns. Clones share what wakes the turns.
#[derive(Clone)]
pub(crate) struct ApprovalDesk {
    store: Store,
    clock: Clock,
    wakers: Arc<Wakers>,
}

/// The approvals that one turn has requested and the suspensions it waits for.
pub(crate) struct TurnApprovals {
    desk: ApprovalDesk,
    journal: Arc<Journal>,
    turn_id: String,
    /// Time within which somebody has to decide.
    wait_ms: u32,
    inner: Mutex<Inner>,
}

struct Inner {
    /// Changes with every decision on a call of this turn.
    decided: watch::Receiver<()>,
    /// Number of calls that ask for a decision or wait for it.
    asking: usize,
    /// The calls that wait for a decision. They stay here while the turn is suspended.
    waiting: HashMap<u32, Waiting>,
    /// Called turns of other agents that are suspended, or wait behind a suspended one.
    called: HashMap<u32, IdleWatch>,
    /// Calls of the model that a person approved, by call id, with the tool and the arguments that
    /// the person saw.
    approved: HashMap<String, (String, String)>,
}

/// The place of one call among those that may ask at the same time.
struct Asking<'a>(&'a TurnApprovals);

struct Waiting {
    approval: String,
    /// When the call is refused.
    expires_at_ms: u64,
}

impl Wakers {
    fn subscribe(&self, turn_id: &str) -> watch::Receiver<()> {
        let mut wakers = self.lock();
        wakers.retain(|_, waker| waker.receiver_count() > 0);
        wakers.entry(turn_id.to_owned()).or_insert_with(|| watch::Sender::new(())).subscribe()
    }

    fn wake(&self, turn_id: &str) {
        if let Some(waker) = self.lock().get(turn_id) {
            waker.send_replace(());
        }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<String, watch::Sender<()>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Asking<'_> {
    fn drop(&mut self) {
        self.0.lock().asking -= 1;
    }
}

impl TurnApprovals {
    /// Creates the state of a turn that has not requested any approval yet.
    pub(crate) fn new(desk: ApprovalDesk, journal: Arc<Journal>, turn_id: String, wait_ms: u32) -> Self {
        let (_, decided) = watch::channel(());
        let (waiting, called, approved) = (HashMap::new(), HashMap::new(), HashMap::new());
        let inner = Mutex::new(Inner { decided, asking: 0, waiting, called, approved });
        TurnApprovals { desk, journal, turn_id, wait_ms, inner }
    }

    /// Returns whether a person approved exactly this call of the model.
    pub(crate) fn is_approved(&self, call_id: &str, tool: &str, arguments: &str) -> bool {
        let inner = self.lock();
        inner.approved.get(call_id).is_some_and(|seen| (&*seen.0, &*seen.1) == (tool, arguments))
    }

    pub(crate) fn approve(&self, call_id: &str, tool: &str, arguments: &str) {
        self.lock().approved.insert(call_id.to_owned(), (tool.to_owned(), arguments.to_owned()));
    }

    /// Records that a call waits for a turn that is suspended or waits behind a suspended one.
    pub(crate) fn wait_for_called(&self, call: &Call, called: &IdleWatch) {
        self.lock().called.insert(call.number(), called.clone());
    }

    pub(crate) fn called_turn_resumed(&self, call: &Call) {
        self.lock().called.remove(&call.number());
    }

    /// Returns what the turn waits for, if it only waits. Returns `None` if a turn that it called
    /// has already resumed.
    pub(crate) fn suspension(&self) -> Option<Suspension> {
        let inner = self.lock();
        let own = inner.waiting.values().min_by_key(|waiting| waiting.expires_at_ms);
        own.map(|waiting| Suspension { approval: waiting.approval.clone() })
            .or_else(|| inner.called.values().find_map(IdleWatch::current))
    }

    /// Resolves when the turn may continue: somebody has decided, the time limit of a call has
    /// passed, or a turn that it called has resumed.
    pub(crate) async fn decided(&self) {
        let (mut decided, expires_at_ms, called, asked) = {
            let inner = self.lock();
            let called: Vec<IdleWatch> = inner.called.values().cloned().collect();
            let asked: Vec<String> = inner.waiting.values().map(|waiting| waiting.approval.clone()).collect();
            let expires_at_ms = inner.waiting.values().map(|waiting| waiting.expires_at_ms).min();
            (inner.decided.clone(), expires_at_ms, called, asked)
        };
        let own = async {
            let Some(at_ms) = expires_at_ms else { return std::future::pending().await };
            tokio::select! {
                () = self.desk.decided_elsewhere(&asked) => {}
                changed = decided.changed() => {
                    // A decision requires that approval was requested.
                    debug_assert!(changed.is_ok());
                }
                // If the clock was changed meanwhile, the rerun turn checks what that means for its
                // calls.
                () = self.desk.clock.sleep_until(at_ms) => {}
            }
        };
        let mut ended: JoinSet<()> =
            called.into_iter().map(|mut called| async move { called.ends().await }).collect();
        tokio::select! {
            () = own => {}
            Some(_one) = ended.join_next() => {}
        }
    }

    /// Obtains a person's decision as a separate call, from the journal or by asking now.
    pub(crate) async fn decision(
        &self,
        identity: Identity,
        tool: &str,
        arguments: &str,
    ) -> Result<Result<(), String>, Stopped> {
        let mut call = self.journal.call(identity)?;
        if let Some((decided, position)) = self.journal.recorded(&mut call)? {
            position.reached().await;
            return Ok(decided);
        }
        self.journal.caught_up().await;
        let decided = self.ask(&call, tool, arguments).await?;
        self.journal.ended(&call, &decided, Vec::new());
        Ok(decided)
    }

    /// Asks a person about a call and waits for the decision. The inner error is the text that replaces
    /// the call's result.
    pub(crate) async fn ask(
        &self,
        call: &Call,
        tool: &str,
        arguments: &str,
    ) -> Result<Result<(), String>, Stopped> {
        match self.ask_store(call, tool, arguments).await {
            Ok(decided) => Ok(decided),
            Err(error) => {
                self.journal.fail(error);
                Err(Stopped)
            }
        }
    }

    /// Takes a place for a call that asks a person, or returns `None` if all are taken.
    fn asking(&self) -> Option<Asking<'_>> {
        let mut inner = self.lock();
        if inner.asking >= MAX_WAITING {
            return None;
        }
        inner.asking += 1;
        Some(Asking(self))
    }

    async fn ask_store(
        &self,
        call: &Call,
        tool: &str,
        arguments: &str,
    ) -> Result<Result<(), String>, RuntimeError> {
        if arguments.len() > MAX_ARGUMENT_BYTES {
            let bytes = arguments.len();
            return Ok(Err(format!(
                "the call cannot be submitted for approval: its arguments have {bytes} bytes, and at most {MAX_ARGUMENT_BYTES} can be shown"
            )));
        }
        // A call without a place is neither stored nor shown, because nobody would wait for the decision.
        let Some(_asking) = self.asking() else {
            return Ok(Err(format!("{MAX_WAITING} calls of this turn are already waiting for a person")));
        };
        let ApprovalDesk { store, clock, wakers } = &self.desk;
        let id = format!("{}-{}", self.turn_id, call.number());
        let mut decided = wakers.subscribe(&self.turn_id);
        let now_ms = clock.now_ms();
        let approval = NewApproval {
            id: id.clone(),
            turn: self.journal.turn(),
            tool: tool.to_owned(),
            arguments: arguments.to_owned(),
            created_at_ms: now_ms,
            expires_at_ms: now_ms + u64::from(self.wait_ms),
        };
        // Everything that led to the call is stored first, so that the guest asks the same again after
        // a crash.
        if !self.journal.is_stored().await {
            return Err(RuntimeError::Cancelled);
        }
        store.ask_approval(&approval).await?;
        loop {
            decided.mark_unchanged();
            let row = store.approval(&id).await?.ok_or(RuntimeError::Cancelled)?;
            // A decision on another call does not apply to this one.
            if (&*row.tool, &*row.arguments) != (tool, arguments) {
                let (expected, made) =
                    (row.tool, format!("{tool} with arguments other than those submitted for approval"));
                return Err(RuntimeError::Divergence { call: call.number(), expected, made });
            }
            if call.shown() == 0 {
                self.journal.shown(call, required(clock, &row));
            }
            if let Some(decision) = &row.decision {
                if call.shown() < 2 {
                    self.journal.shown(call, decided_event(&row, decision));
                }
                return Ok(outcome(decision));
            }
            let (now_ms, expires_at_ms) = (clock.now_ms(), expires_at_ms(clock, &row));
            if expires_at_ms <= now_ms {
                let decision = Decision {
                    verdict: Verdict::Expired,
                    reason: None,
                    decided_by: "host".into(),
                    decided_at_ms: now_ms,
                };
                // Somebody may have decided in the meantime.
                store.decide_approval(&id, &decision).await?;
                continue;
            }
            {
                let mut inner = self.lock();
                inner.decided = decided.clone();
                let waiting = Waiting { approval: id.clone(), expires_at_ms };
                inner.waiting.insert(call.number(), waiting);
            }
            // The turn is suspended here, unless another part of it is still running.
            let _waits = self.journal.waits();
            tokio::select! {
                _ = decided.changed() => {}
                () = self.desk.decided_elsewhere(std::slice::from_ref(&id)) => {}
                () = clock.sleep_until(expires_at_ms) => {}
            }
            self.lock().waiting.remove(&call.number());
        }
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Returns when the call is refused if nobody decides. Time skipped by a clock that was set forward
/// is added. A request dated in the future because the clock was set back counts as made now, until
/// the store's row is corrected too.
fn expires_at_ms(clock: &Clock, row: &ApprovalRow) -> u64 {
    let began_ms = row.created_at_ms.min(clock.now_ms());
    clock.elapsed_after(began_ms, row.expires_at_ms.saturating_sub(row.created_at_ms))
}

fn required(clock: &Clock, row: &ApprovalRow) -> RunEvent {
    RunEvent::ApprovalRequired {
        id: row.id.clone(),
        tool: row.tool.clone(),
        arguments: arguments(row),
        expires_at_ms: expires_at_ms(clock, row),
    }
}

fn decided_event(row: &ApprovalRow, decision: &Decision) -> RunEvent {
    RunEvent::ApprovalDecided {
        id: row.id.clone(),
        approved: decision.verdict == Verdict::Approved,
        reason: match decision.verdict {
            Verdict::Approved => decision.reason.clone(),
            Verdict::Denied | Verdict::Expired => outcome(decision).err(),
        },
    }
}

fn outcome(decision: &Decision) -> Result<(), String> {
    let because = decision.reason.as_ref().map(|reason| format!(": {reason}")).unwrap_or_default();
    match decision.verdict {
        Verdict::Approved => Ok(()),
        Verdict::Denied => Err(format!("a person refused this call{because}")),
        Verdict::Expired => Err(NOT_IN_TIME.to_owned()),
    }
}

fn arguments(row: &ApprovalRow) -> Json {
    Json::from_text(row.arguments.clone())
        .unwrap_or_else(|_| Json::from(Value::String(row.arguments.clone())))
}

impl ApprovalDesk {
    pub(crate) fn new(store: Store, clock: Clock) -> Self {
        ApprovalDesk { store, clock, wakers: Arc::default() }
    }

    /// Returns the calls that wait for a person's decision, oldest first, of one tenant or of all.
    pub(crate) async fn pending(
        &self,
        tenant: Option<&Tenant>,
        limit: u32,
    ) -> Result<Vec<Approval>, RuntimeError> {
        let folder = tenant.map(Tenant::folder);
        let rows = self.store.pending_approvals(folder.as_ref(), limit.min(MAX_PAGE)).await?;
        Ok(rows.iter().map(|row| approval(&self.clock, row)).collect())
    }

    /// Resolves when one of these approvals was decided, also by another host of the cluster. Without a cluster, whoever decides
    /// wakes the turn.
    async fn decided_elsewhere(&self, asked: &[String]) {
        if !self.store.is_clustered() {
            return std::future::pending().await;
        }
        loop {
            tokio::time::sleep(LOOK_INTERVAL).await;
            for id in asked {
                match self.store.approval(id).await {
                    Ok(Some(ApprovalRow { decision: None, .. })) => {}
                    Ok(_) => return,
                    Err(error) => tracing::warn!(id, "cannot look for the decision on a call: {error}"),
                }
            }
        }
    }

    /// Decides on a call and resumes its turn. If the call is denied, the reason is passed to the
    /// agent.
    pub(crate) async fn decide(
        &self,
        id: &str,
        approve: bool,
        reason: Option<String>,
        decided_by: &str,
    ) -> Result<Approval, RuntimeError> {
        if let Some(bytes) = reason.as_ref().map(String::len).filter(|bytes| *bytes > MAX_REASON_BYTES) {
            let message = format!("the reason has {bytes} bytes; at most {MAX_REASON_BYTES} are allowed");
            return Err(RuntimeError::InvalidMessage { message });
        }
        let decision = Decision {
            verdict: if approve { Verdict::Approved } else { Verdict::Denied },
            reason,
            decided_by: decided_by.to_owned(),
            decided_at_ms: self.clock.now_ms(),
        };
        let not_found = || RuntimeError::ApprovalNotFound { id: excerpt(id) };
        let row = self.store.approval(id).await?.ok_or_else(not_found)?;
        let is_in_time = expires_at_ms(&self.clock, &row) > self.clock.now_ms();
        if is_in_time && self.store.decide_approval(id, &decision).await? {
            self.wakers.wake(&row.turn_id);
            tracing::info!(
                id,
                agent = row.agent,
                tool = row.tool,
                approve,
                decided_by,
                "an approval was decided"
            );
            return Ok(approval(&self.clock, &row));
        }
        let row = self.store.approval(id).await?.ok_or_else(not_found)?;
        let how = match row.decision.map(|decision| decision.verdict) {
            Some(Verdict::Approved) => "was already approved",
            Some(Verdict::Denied) => "was already denied",
            None if !row.is_open => "belongs to a turn that has ended",
            Some(Verdict::Expired) | None => "expired before anyone decided",
        };
        Err(RuntimeError::ApprovalDecided { id: row.id, how })
    }
}

fn approval(clock: &Clock, row: &ApprovalRow) -> Approval {
    Approval {
        id: row.id.clone(),
        agent: row.agent.clone(),
        session: row.session.clone(),
        turn_id: row.turn_id.clone(),
        tool: row.tool.clone(),
        arguments: arguments(row),
        created_at_ms: row.created_at_ms,
        expires_at_ms: expires_at_ms(clock, row),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::feed::{Feed, Hold};
    use crate::journal::tests::{first_turn, put_agent};
    use futures::FutureExt as _;

    async fn approvals(store: &Store, feed: Arc<Feed>) -> TurnApprovals {
        put_agent(store, &[]).await;
        let key = first_turn(store).await;
        let (clock, seed) = (Clock::default(), vec![1; 32]);
        let journal = Journal::open(store.clone(), clock.clone(), key, seed, feed, Vec::new()).expect("new");
        TurnApprovals::new(ApprovalDesk::new(store.clone(), clock), journal, "t".into(), 600_000)
    }

    #[tokio::test]
    async fn nobody_is_asked_about_a_call_beyond_the_maximum() {
        let (store, feed) = (Store::for_tests().await.expect("a database"), Feed::new("t".into()));
        let mut events = feed.follow(Hold::Watches);
        let approvals = Arc::new(approvals(&store, feed).await);
        let (mut calls, extra) = (JoinSet::new(), 3);
        let mut number = 0;
        let mut call = |calls: &mut JoinSet<_>| {
            let (approvals, identity) = (approvals.clone(), Identity::new("tools.approve", &number));
            number += 1;
            calls.spawn(async move { approvals.decision(identity, "x", "{}").await });
        };
        (0..MAX_WAITING + extra).for_each(|_| call(&mut calls));
        for _ in 0..extra {
            let refused = calls.join_next().await.expect("a call").expect("no panic").expect("not stopped");
            assert!(refused.as_ref().is_err_and(|why| why.contains("already waiting")), "{refused:?}");
        }
        for _ in 0..MAX_WAITING {
            let event = events.next().await.expect("the turn is open").expect("no error");
            assert!(matches!(event, RunEvent::ApprovalRequired { .. }), "{event:?}");
        }
        assert!(events.next().now_or_never().is_none(), "only the calls that wait are shown");
        let asked = store.pending_approvals(None, 100).await.expect("listed");
        assert_eq!(asked.len(), MAX_WAITING);
        // A call that was decided leaves its place to another one.
        approvals.desk.decide(&asked[0].id, true, None, "tester").await.expect("open");
        assert!(calls.join_next().await.expect("a call").expect("no panic").expect("not stopped").is_ok());
        call(&mut calls);
        let next = loop {
            match events.next().await.expect("the turn is open").expect("no error") {
                RunEvent::ApprovalDecided { .. } => {}
                event => break event,
            }
        };
        assert!(matches!(next, RunEvent::ApprovalRequired { .. }), "{next:?}");
    }
}
