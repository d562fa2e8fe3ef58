//! Turns of sessions that other hosts own: they are sent there, followed there and cancelled there.
//!
//! A question whose answer is lost is repeated only if that is safe. A turn that outlives its caller is sent with an idempotency
//! key, if necessary with one of the host's own, so it runs once however often it is sent, also when its session has another
//! owner by then. A turn that ends with its caller is not sent again once its first host may have received it.
//!
//! The refusal of an owner is final. One of a host that was only chosen, because of what that host lacks, is not: nothing was
//! accepted, so the message is then placed here.

use super::{
    Asks, Dispatch, Place, Purpose, check_same,
    pump::{Pump, Source},
    session_key,
};
use crate::{
    Invocation, Member, PeerError, PeerInvocation, Peers, RemoteRun, RunHandle, RuntimeError, TurnAddress,
    TurnClient,
    cluster::{
        Cluster, DRAIN_PATIENCE, LONGEST_POLL_INTERVAL, Owned, PATIENCE, PEER_KEY, POLL_INTERVAL,
        is_of_one_host, refusal,
    },
    feed::{Feed, Hold},
    name::SessionKey,
    session::TurnHost,
};
use futures::future::BoxFuture;
use skep_store::{HostState, TurnRow};
use std::{
    sync::{Arc, Weak},
    time::{Duration, Instant},
};
use tracing::Instrument as _;

/// Time within which another host answers a question. It may itself wait for the owner of the session.
const ANSWER_TIME: Duration = DRAIN_PATIENCE.saturating_add(Duration::from_secs(15));

/// A turn that is followed.
pub(super) enum Located {
    Here(RunHandle),
    There(Member, RemoteRun),
}

/// The host to which a message is sent.
pub(super) enum Target {
    /// It owns the session, or this host hands the session over to it.
    Owner(Member),
    /// The session may begin there. This host may run it as well.
    Chosen(Member),
}

impl Dispatch {
    /// Returns the turn of an invocation with an idempotency key, if it runs at a host that hands its sessions over: this one, or
    /// another one that `asks` allows to ask. Only then is it looked for before the session is claimed, because the claim
    /// would wait for its end.
    pub(super) async fn already_running(
        self: &Arc<Self>,
        invocation: &Invocation,
        asks: Asks,
    ) -> Result<Option<RunHandle>, RuntimeError> {
        let TurnHost { cluster, store, live, .. } = &*self.host;
        let hands_over = cluster.hands_over();
        let may_be_there = asks == Asks::Others && cluster.has_other_draining();
        let Some(key) = invocation.idempotency_key.as_ref().filter(|_| hands_over || may_be_there) else {
            return Ok(None);
        };
        let (agent, session) = (&invocation.agent, &invocation.session);
        let row = store.turn_with_idempotency_key(agent, session, key).await?;
        let Some(row) = row.filter(TurnRow::is_open) else { return Ok(None) };
        if hands_over {
            return match live.get(&row.id) {
                Some(_) => self.follow_known(invocation, row).await.map(Some),
                None => Ok(None),
            };
        }
        let owner = store.owner_of(agent, session).await?;
        let is_draining = |owner| matches!(cluster.find(owner), Some((_, HostState::Draining)));
        if !owner.is_some_and(is_draining) {
            return Ok(None);
        }
        check_same(invocation, &row)?;
        self.follow_as(agent, session, &row.id, asks).await.map(Some)
    }

    /// Sends an invocation to another host, and returns a handle of its turn.
    pub(super) async fn forward(
        self: &Arc<Self>,
        invocation: Invocation,
        client: Option<Weak<dyn TurnClient>>,
        purpose: Purpose,
        target: Target,
    ) -> Result<RunHandle, RuntimeError> {
        let outlives = outlives_caller(&invocation);
        let asking = self.clone().send_to(target, invocation, client, purpose);
        if !outlives {
            return asking.await;
        }
        // Runs in a separate task, because such a message is accepted even if its caller is gone by then.
        tokio::spawn(asking.in_current_span()).await.unwrap_or_else(|error| {
            let message = format!("a message could not be sent to its host: {error}");
            Err(RuntimeError::Internal { message })
        })
    }

    async fn send_to(
        self: Arc<Self>,
        target: Target,
        mut invocation: Invocation,
        client: Option<Weak<dyn TurnClient>>,
        mut purpose: Purpose,
    ) -> Result<RunHandle, RuntimeError> {
        let outlives = outlives_caller(&invocation);
        if outlives && invocation.idempotency_key.is_none() {
            invocation.idempotency_key = Some(format!("{PEER_KEY}{}", uuid::Uuid::now_v7().simple()));
        }
        // Counts until the other host has the message.
        let held = self.admission.hold(&invocation)?;
        let key = session_key(&invocation);
        let (mut member, mut is_chosen) = target.into_parts();
        let (mut until, last) = (Instant::now() + PATIENCE, Instant::now() + DRAIN_PATIENCE + PATIENCE);
        loop {
            let began = Instant::now();
            let asked = self.peers()?.invoke(member.clone(), PeerInvocation::from(&invocation));
            let error = match self.in_time(&member, asked).await {
                Ok(run) => return Ok(self.followed(key, member, run, outlives)),
                Err(error) => error,
            };
            let refused = refusal(&error);
            let stays = is_chosen && is_of_one_host(&error);
            if let Some(refused) = refused.filter(|_| !stays) {
                return Err(refused);
            }
            if error != PeerError::Moved {
                // A session that nobody owns does not begin there now.
                self.host.cluster.avoid(member.number);
            }
            if let PeerError::Broken(why) = &error
                && !outlives
            {
                return Err(gone(&member, why));
            }
            if stays {
                purpose = Purpose::Change;
            } else {
                if error == PeerError::Moved {
                    // The host that was asked has waited for an owner that drains.
                    until += began.elapsed();
                }
                if Instant::now() >= until.min(last) {
                    return Err(Cluster::elsewhere(&key, member.number));
                }
                tokio::time::sleep(POLL_INTERVAL).await;
            }
            let (began, was_owned) = (Instant::now(), self.host.cluster.ownership.owns(&key));
            let place = self.place(&key, purpose, Asks::Others).await?;
            // The wait for an owner has a limit of its own.
            until += began.elapsed();
            (member, is_chosen) = match place {
                Place::There(next) => (next, false),
                Place::Chosen(next) => (next, true),
                Place::Here(owned) => {
                    // The turn is counted again as one of this host.
                    drop(held);
                    let accepted = self.accept_here(invocation, client, owned).await;
                    return self.unless_refused(accepted, &key, was_owned).await;
                }
            };
        }
    }

    /// Finds a turn here, in the store or on the host that runs it.
    pub(super) async fn locate(
        self: &Arc<Self>,
        agent: &str,
        session: &str,
        turn: &str,
        asks: Asks,
    ) -> Result<Located, RuntimeError> {
        let mut row = self.row(agent, session, turn).await?;
        let until = Instant::now() + PATIENCE;
        loop {
            let is_elsewhere =
                self.host.cluster.is_clustered() && row.is_open() && self.host.live.get(&row.id).is_none();
            if !is_elsewhere {
                return self.follow_row(row).await.map(Located::Here);
            }
            let (key, address) = (key_of(&row), address_of(&row));
            let member = match self.place(&key, Purpose::Follow, asks).await? {
                // The session stays with this host until the turn is adopted.
                Place::Here(_owned) => return self.follow_row(row).await.map(Located::Here),
                Place::There(member) | Place::Chosen(member) => member,
            };
            match self.in_time(&member, self.peers()?.follow(member.clone(), address)).await {
                Ok(run) => return Ok(Located::There(member, run)),
                Err(error) => give_up(&error, &key, &member, until)?,
            }
            tokio::time::sleep(POLL_INTERVAL).await;
            // It may have ended meanwhile.
            row = self.row(agent, session, &row.id).await?;
        }
    }

    /// Cancels an open turn where it runs. Returns what keeps its session here if it has to be cancelled by this host.
    pub(super) async fn cancel_elsewhere(
        &self,
        row: &TurnRow,
        asks: Asks,
    ) -> Result<Option<Owned>, RuntimeError> {
        let (key, until) = (key_of(row), Instant::now() + PATIENCE);
        loop {
            let member = match self.place(&key, Purpose::Follow, asks).await? {
                Place::Here(owned) => return Ok(Some(owned)),
                Place::There(member) | Place::Chosen(member) => member,
            };
            let asked = self.peers()?.cancel(member.clone(), address_of(row));
            match self.in_time(&member, asked).await {
                Ok(()) => return Ok(None),
                Err(error) => give_up(&error, &key, &member, until)?,
            }
            tokio::time::sleep(POLL_INTERVAL).await;
            if !self.row(&row.agent, &row.session, &row.id).await?.is_open() {
                return Ok(None);
            }
        }
    }

    /// Cancels a turn on the host that runs it, without waiting.
    pub(super) fn cancel_there(self: Arc<Self>, member: Member, address: TurnAddress) {
        tokio::spawn(async move {
            let Ok(peers) = self.peers() else { return };
            let asked = peers.cancel(member.clone(), address.clone());
            if self.in_time(&member, asked).await.is_ok() {
                return;
            }
            let TurnAddress { agent, session, turn } = &address;
            if let Err(error) = self.cancel_turn(agent, session, turn, Asks::Others).await {
                tracing::warn!(agent, session, turn, "a turn on another host cannot be cancelled: {error}");
            }
        });
    }

    /// Publishes the events of a turn that runs on another host in a feed of this one.
    pub(super) fn followed(
        self: &Arc<Self>,
        SessionKey { agent, session }: SessionKey,
        member: Member,
        run: RemoteRun,
        outlives_caller: bool,
    ) -> RunHandle {
        let feed = Feed::new(run.turn_id.clone());
        let handle = feed.follow(if outlives_caller { Hold::Watches } else { Hold::Cancels });
        let address = TurnAddress { agent, session, turn: run.turn_id };
        let pump = Pump::new(self, address, &feed, outlives_caller);
        tokio::spawn(pump.run(Source { member: Some(member), events: run.events }).in_current_span());
        handle
    }

    /// Waits for the answer of another host, but not forever, and not after that host is gone.
    async fn in_time<T>(
        &self,
        member: &Member,
        asked: BoxFuture<'static, Result<T, PeerError>>,
    ) -> Result<T, PeerError> {
        let is_gone = async {
            while self.host.cluster.find(member.number).is_some() {
                tokio::time::sleep(LONGEST_POLL_INTERVAL).await;
            }
        };
        tokio::select! {
            biased;
            answer = asked => answer,
            () = is_gone => Err(PeerError::Broken("it is gone".to_owned())),
            () = tokio::time::sleep(ANSWER_TIME) => {
                Err(PeerError::Broken(format!("no answer within {} s", ANSWER_TIME.as_secs())))
            }
        }
    }

    fn peers(&self) -> Result<&Arc<dyn Peers>, RuntimeError> {
        self.host.cluster.peers().ok_or_else(|| RuntimeError::Internal {
            message: "a host without a cluster has nobody to ask".to_owned(),
        })
    }
}

impl Target {
    /// Returns the host, and whether it was only chosen.
    fn into_parts(self) -> (Member, bool) {
        match self {
            Target::Owner(member) => (member, false),
            Target::Chosen(member) => (member, true),
        }
    }
}

/// Returns whether a turn continues without its caller.
pub(super) fn outlives_caller(invocation: &Invocation) -> bool {
    invocation.detached || invocation.idempotency_key.is_some()
}

fn key_of(row: &TurnRow) -> SessionKey {
    SessionKey { agent: row.agent.clone(), session: row.session.clone() }
}

fn address_of(row: &TurnRow) -> TurnAddress {
    TurnAddress { agent: row.agent.clone(), session: row.session.clone(), turn: row.id.clone() }
}

/// Fails if another attempt at another host cannot succeed, or if there were enough of them.
fn give_up(error: &PeerError, key: &SessionKey, member: &Member, until: Instant) -> Result<(), RuntimeError> {
    match refusal(error) {
        Some(refused) => Err(refused),
        None if Instant::now() >= until => Err(Cluster::elsewhere(key, member.number)),
        None => Ok(()),
    }
}

/// Returns the error of a turn whose host cannot be reached anymore and that ends with its caller.
pub(super) fn gone(member: &Member, why: &str) -> RuntimeError {
    RuntimeError::RefusedElsewhere {
        code: "host_gone",
        message: format!(
            "host {}, which runs the turn, cannot be reached: {why}; it is not known whether the turn ended; a message with an \
             idempotency key, or with `?detach=true`, is not lost with its connection",
            member.number
        ),
        status: 503,
        retry_after_ms: Some(1_000),
    }
}
