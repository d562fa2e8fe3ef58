//! Turns of sessions that other hosts own: they are sent there, followed there and cancelled there.
//!
//! A question whose answer is lost is repeated only if that is safe. A turn that outlives its caller is sent with an idempotency
//! key, if necessary with one of the host's own, so it runs once however often it is sent, also when its session has another
//! owner by then. A turn that ends with its caller is not sent again once its first host may have received it.

use super::{
    Asks, Dispatch, Place, Purpose,
    pump::{Pump, Source},
    session_key,
};
use crate::{
    Invocation, Member, PeerError, PeerInvocation, Peers, RemoteRun, RunHandle, RuntimeError, TurnAddress,
    TurnClient,
    cluster::{Cluster, Owned, PATIENCE, PEER_KEY, POLL_INTERVAL, refusal},
    feed::{Feed, Hold},
    name::SessionKey,
};
use futures::future::BoxFuture;
use skep_store::TurnRow;
use std::{
    sync::{Arc, Weak},
    time::{Duration, Instant},
};
use tracing::Instrument as _;

/// Time within which another host answers a question. It may itself wait for the owner of the session.
const ANSWER_TIME: Duration = PATIENCE.saturating_add(Duration::from_secs(15));

/// A turn that is followed.
pub(super) enum Located {
    Here(RunHandle),
    There(Member, RemoteRun),
}

impl Dispatch {
    /// Sends an invocation to another host, and returns a handle of its turn.
    pub(super) async fn forward(
        self: &Arc<Self>,
        invocation: Invocation,
        client: Option<Weak<dyn TurnClient>>,
        member: Member,
    ) -> Result<RunHandle, RuntimeError> {
        let outlives = outlives_caller(&invocation);
        let asking = self.clone().send_to(member, invocation, client);
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
        mut member: Member,
        mut invocation: Invocation,
        client: Option<Weak<dyn TurnClient>>,
    ) -> Result<RunHandle, RuntimeError> {
        let outlives = outlives_caller(&invocation);
        if outlives && invocation.idempotency_key.is_none() {
            invocation.idempotency_key = Some(format!("{PEER_KEY}{}", uuid::Uuid::now_v7().simple()));
        }
        // Counts until the other host has the message.
        let held = self.admission.hold(&invocation)?;
        let (key, until) = (session_key(&invocation), Instant::now() + PATIENCE);
        loop {
            let asked = self.peers()?.invoke(member.clone(), PeerInvocation::from(&invocation));
            let error = match in_time(asked).await {
                Ok(run) => return Ok(self.followed(key, member, run, outlives)),
                Err(error) => error,
            };
            if let Some(refused) = refusal(&error) {
                return Err(refused);
            }
            if let PeerError::Broken(why) = &error
                && !outlives
            {
                return Err(gone(&member, why));
            }
            if Instant::now() >= until {
                return Err(Cluster::elsewhere(&key, member.number));
            }
            tokio::time::sleep(POLL_INTERVAL).await;
            match self.place(&key, Purpose::Change, Asks::Others).await? {
                Place::There(next) => member = next,
                Place::Here(owned) => {
                    // The turn is counted again as one of this host.
                    drop(held);
                    return self.accept_here(invocation, client, owned).await;
                }
            }
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
                Place::There(member) => member,
            };
            match in_time(self.peers()?.follow(member.clone(), address)).await {
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
                Place::There(member) => member,
            };
            match in_time(self.peers()?.cancel(member.clone(), address_of(row))).await {
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
            let asked = in_time(peers.cancel(member, address.clone())).await;
            if asked.is_ok() {
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

    fn peers(&self) -> Result<&Arc<dyn Peers>, RuntimeError> {
        self.host.cluster.peers().ok_or_else(|| RuntimeError::Internal {
            message: "a host without a cluster has nobody to ask".to_owned(),
        })
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

/// Waits for the answer of another host, but not forever.
async fn in_time<T>(asked: BoxFuture<'static, Result<T, PeerError>>) -> Result<T, PeerError> {
    match tokio::time::timeout(ANSWER_TIME, asked).await {
        Ok(answer) => answer,
        Err(_elapsed) => Err(PeerError::Broken(format!("no answer within {} s", ANSWER_TIME.as_secs()))),
    }
}

/// Fails if another attempt at another host cannot succeed, or if there were enough of them.
fn give_up(error: &PeerError, key: &SessionKey, member: &Member, until: Instant) -> Result<(), RuntimeError> {
    match refusal(error) {
        Some(refused) => Err(refused),
        None if Instant::now() >= until => Err(Cluster::elsewhere(key, member.number)),
        None => Ok(()),
    }
}

/// Returns the error of a turn whose host cannot be reached any more and that ends with its caller.
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
