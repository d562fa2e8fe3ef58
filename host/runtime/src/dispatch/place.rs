//! Decides which host of the cluster handles a request for a session. Without a cluster it is always this one.
//!
//! A host that drains hands everything new over to hosts that serve, and they wait until it has let go of the session. So a session
//! under load moves after the turn that runs, and nobody refuses a message because of the move.
//!
//! A session without an owner begins here or at another host, as `placement` decides. The other host claims it when it gets
//! the message. The owner is read before a message is sent there, instead of the claim, so no message costs another
//! statement. A host that refuses the message gives the claim back, and the message stays with the host that chose
//! (`forwarding`).

use super::{Dispatch, digest_of};
use crate::{
    RuntimeError,
    cluster::{
        Claimed, Cluster, DRAIN_PATIENCE, LONGEST_POLL_INTERVAL, Member, Owned, PATIENCE, POLL_INTERVAL,
    },
    metric,
    name::SessionKey,
    placement::Choice,
};
use skep_store::HostState;
use std::time::{Duration, Instant};

/// The reason why somebody looks for a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// To run a turn in it, or to change it as a whole.
    Change,
    /// To run a turn in it. If nobody owns it, it may begin at another host.
    Begin,
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
    /// The owner of the session, or the host to which this one hands it over.
    There(Member),
    /// The host at which a session that nobody owns begins. This host may run it as well.
    Chosen(Member),
}

/// The result of a claim, or of a choice of another host.
enum Found {
    Place(Place),
    /// This live host owns the session.
    Owner(i64),
}

/// The time for which a request has waited for a session. Time in which its owner drained is counted separately: the owner lets
/// go of the session after the turn that runs.
struct Patience {
    counted: Instant,
    waited: Duration,
    drained: Duration,
}

impl Default for Patience {
    fn default() -> Self {
        Patience { counted: Instant::now(), waited: Duration::ZERO, drained: Duration::ZERO }
    }
}

impl Patience {
    /// Counts the time since the last call, for an owner that drains or one that does not answer. Returns whether it was enough.
    fn is_over(&mut self, is_draining: bool) -> bool {
        let since = std::mem::replace(&mut self.counted, Instant::now());
        let (time, most) = match is_draining {
            true => (&mut self.drained, DRAIN_PATIENCE),
            false => (&mut self.waited, PATIENCE),
        };
        *time += self.counted.duration_since(since);
        *time >= most
    }
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
        let mut patience = Patience::default();
        loop {
            if cluster.hands_over() {
                return match cluster.successor(key) {
                    Some(member) if asks == Asks::Others => Ok(Place::There(member)),
                    _ => Err(Cluster::elsewhere(key, cluster.own_number())),
                };
            }
            let owner = match self.find(key, purpose, asks).await? {
                Found::Place(place) => return Ok(place),
                Found::Owner(owner) => owner,
            };
            if let Some(member) = self.answering(owner, purpose) {
                return match asks {
                    Asks::Others => Ok(Place::There(member)),
                    Asks::Nobody => Err(Cluster::elsewhere(key, owner)),
                };
            }
            self.until_other_owner(key, owner, purpose, &mut patience).await?;
        }
    }

    /// Claims a session for this host, unless another one owns it or it begins elsewhere.
    async fn find(&self, key: &SessionKey, purpose: Purpose, asks: Asks) -> Result<Found, RuntimeError> {
        let cluster = &self.host.cluster;
        // A session that this host owns needs neither a choice nor a statement.
        let may_begin = purpose == Purpose::Begin && asks == Asks::Others && !cluster.ownership.owns(key);
        let choice = if may_begin { self.choose(key) } else { None };
        if let Some(Choice::There { host, .. }) = choice
            && let Some((member, HostState::Serving)) = cluster.find(host)
        {
            match self.host.store.owner_of(&key.agent, &key.session).await? {
                None => {
                    cluster.note_sent(host);
                    count_choice(choice);
                    return Ok(Found::Place(Place::Chosen(member)));
                }
                Some(owner) if owner != cluster.own_number() => return Ok(Found::Owner(owner)),
                // This host has claimed it, and the answer was lost.
                Some(_) => {}
            }
        }
        match cluster.ownership.claim(key).await? {
            Claimed::Here(owned) => {
                if let Some(Choice::Here(_)) = choice {
                    cluster.note_sent(cluster.own_number());
                    count_choice(choice);
                }
                Ok(Found::Place(Place::Here(owned)))
            }
            Claimed::Elsewhere(owner) => Ok(Found::Owner(owner)),
        }
    }

    /// Chooses the host at which a session begins if nobody owns it.
    fn choose(&self, key: &SessionKey) -> Option<Choice> {
        let agent = self.host.deployments.agent(&key.agent).ok()?;
        // A turn that waits for a person, or behind another one, takes no room.
        let ((running, _), open) = (self.host.instances.taken(), self.admission.open_turns());
        self.host.cluster.choose(key, digest_of(&agent, &key.session), running, open)
    }

    /// Claims a session for this host. Fails if another one has it.
    pub(crate) async fn claim(&self, key: &SessionKey) -> Result<Owned, RuntimeError> {
        match self.place(key, Purpose::Change, Asks::Nobody).await? {
            Place::Here(owned) => Ok(owned),
            Place::There(member) | Place::Chosen(member) => Err(Cluster::elsewhere(key, member.number)),
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
        patience: &mut Patience,
    ) -> Result<(), RuntimeError> {
        let cluster = &self.host.cluster;
        if cluster.find(owner).is_none() {
            // It has just joined, or it is gone.
            cluster.refresh().await?;
        }
        let mut pause = POLL_INTERVAL;
        loop {
            let is_draining = matches!(cluster.find(owner), Some((_, HostState::Draining)));
            if patience.is_over(is_draining) {
                return Err(Cluster::elsewhere(key, owner));
            }
            self.host.shutdown.admit()?;
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(LONGEST_POLL_INTERVAL);
            let is_owner = self.host.store.owner_of(&key.agent, &key.session).await? == Some(owner);
            if !is_owner || cluster.hands_over() || self.answering(owner, purpose).is_some() {
                return Ok(());
            }
        }
    }
}

fn count_choice(choice: Option<Choice>) {
    if let Some(choice) = choice {
        metrics::counter!(metric::PLACEMENTS, "outcome" => choice.name()).increment(1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_waits_longer_for_a_host_that_drains_than_for_one_that_does_not_answer() {
        let mut patience = Patience::default();
        let mut waits = |time: Duration, is_draining: bool| {
            patience.counted = Instant::now().checked_sub(time).expect("the machine runs for longer");
            patience.is_over(is_draining)
        };
        assert!(!waits(PATIENCE * 2, true));
        assert!(!waits(PATIENCE / 2, false), "the time before does not count");
        assert!(waits(PATIENCE / 2, false));
        assert!(waits(DRAIN_PATIENCE - PATIENCE * 2, true));
    }
}
