//! Decides on which host of the cluster something happens to a session. Without a cluster it is always this one.
//!
//! A host that drains hands everything new over to hosts that serve, and they wait until it has let go of the session. So a session
//! under load moves after the turn that runs, and nobody refuses a message because of the move.

use super::Dispatch;
use crate::{
    RuntimeError,
    cluster::{Claimed, Cluster, Member, Owned, PATIENCE, POLL_INTERVAL},
    name::SessionKey,
};
use skep_store::HostState;
use std::time::Instant;

/// The reason why somebody looks for a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// To run a turn in it, or to change it as a whole.
    Change,
    /// To follow or cancel a turn that is open. Such a request goes to a host that drains, too, because the turn runs there.
    Follow,
}

/// Whether another host may be asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Asks {
    Others,
    /// Another host asks this one, so a question never travels further.
    Nobody,
}

/// The host on which something happens to a session.
pub(crate) enum Place {
    Here(Owned),
    There(Member),
}

impl Dispatch {
    /// Claims a session for this host, or returns the host that has it. Waits for an owner that drains or is about to be found
    /// dead, but not forever.
    pub(crate) async fn place(
        &self,
        key: &SessionKey,
        purpose: Purpose,
        asks: Asks,
    ) -> Result<Place, RuntimeError> {
        let cluster = &self.host.cluster;
        if !cluster.is_clustered() {
            return Ok(Place::Here(Owned::default()));
        }
        let until = Instant::now() + PATIENCE;
        loop {
            if cluster.hands_over() {
                return match cluster.successor(key) {
                    Some(member) if asks == Asks::Others => Ok(Place::There(member)),
                    _ => Err(Cluster::elsewhere(key, cluster.own_number())),
                };
            }
            let owner = match cluster.ownership.claim(key).await? {
                Claimed::Here(owned) => return Ok(Place::Here(owned)),
                Claimed::Elsewhere(owner) => owner,
            };
            if let Some(member) = self.answering(owner, purpose) {
                return match asks {
                    Asks::Others => Ok(Place::There(member)),
                    Asks::Nobody => Err(Cluster::elsewhere(key, owner)),
                };
            }
            self.until_other_owner(key, owner, purpose, until).await?;
        }
    }

    /// Claims a session for this host. Fails if another one has it.
    pub(crate) async fn claim(&self, key: &SessionKey) -> Result<Owned, RuntimeError> {
        match self.place(key, Purpose::Change, Asks::Nobody).await? {
            Place::Here(owned) => Ok(owned),
            Place::There(member) => Err(Cluster::elsewhere(key, member.number)),
        }
    }

    /// Returns the owner of a session if it answers requests with this purpose now.
    fn answering(&self, owner: i64, purpose: Purpose) -> Option<Member> {
        match self.host.cluster.find(owner)? {
            (member, HostState::Serving) => Some(member),
            (member, HostState::Draining) if purpose == Purpose::Follow => Some(member),
            _ => None,
        }
    }

    /// Resolves when the owner has let go of the session, or answers. Only reads, because many requests may wait.
    async fn until_other_owner(
        &self,
        key: &SessionKey,
        owner: i64,
        purpose: Purpose,
        until: Instant,
    ) -> Result<(), RuntimeError> {
        let cluster = &self.host.cluster;
        if cluster.find(owner).is_none() {
            // It has just joined, or it is gone.
            cluster.refresh().await?;
        }
        loop {
            if Instant::now() >= until {
                return Err(Cluster::elsewhere(key, owner));
            }
            self.host.shutdown.admit()?;
            tokio::time::sleep(POLL_INTERVAL).await;
            let is_owner = self.host.store.owner_of(&key.agent, &key.session).await? == Some(owner);
            if !is_owner || cluster.hands_over() || self.answering(owner, purpose).is_some() {
                return Ok(());
            }
        }
    }
}
