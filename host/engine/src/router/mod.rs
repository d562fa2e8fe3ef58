//! The choice of a replica for a request, made on the caller's thread: the home of its session, or else the
//! replica with the longest cached prefix of its prompt, weighed against the tokens to be computed there first.
//!
//! The router knows of each replica what the replica publishes: the digests of its cached pages, which are
//! exact and bounded by its pages, and its load. The router does not record what it sent to which replica,
//! because it would have to guess what was evicted since. A placement is decided and counted under one lock, so
//! a burst of requests never herds to one replica.

mod load;
pub mod policy;
mod session_table;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use skep_model::PAGE_TOKENS;

use crate::health::Health;
use crate::keyed_hash::{Digest, KeyedHash};
use crate::kv::{PublishedPrefixes, prompt_digests};
use crate::telemetry::{QueueSlot, Telemetry};
use crate::{Affinity, EngineError, GenerateRequest, Routing};

pub(crate) use load::{LoadShare, ReplicaLoad};
use policy::{Candidate, Choice, choose, take_turns};
use session_table::SessionTable;

/// Maximum number of sessions whose home is remembered.
const MAX_SESSIONS: usize = 65_536;

pub(crate) struct Router {
    routing: Routing,
    hash: KeyedHash,
    /// Maximum number of requests that wait at each replica.
    max_queue: usize,
    replicas: Vec<ReplicaView>,
    memory: Mutex<Memory>,
}

/// The router's view of a replica.
#[derive(Clone)]
pub(crate) struct ReplicaView {
    pub load: Arc<ReplicaLoad>,
    pub prefixes: Arc<PublishedPrefixes>,
    pub telemetry: Arc<Telemetry>,
    pub health: Arc<Health>,
    pub page_count: usize,
    pub max_sequences: usize,
}

/// A slot at a replica; dropping it frees the slot.
pub(crate) struct ReplicaSlot {
    pub replica: usize,
    pub queue: QueueSlot,
    pub load: LoadShare,
}

/// The state that the router keeps from one request to the next.
struct Memory {
    sessions: SessionTable,
    turn: usize,
    /// Whether the loop of each replica has terminated; such a replica never comes back.
    gone: Vec<bool>,
}

impl Router {
    /// Creates a router without memory of sessions. `hash` must be the one that the replicas publish prefixes with.
    pub fn new(routing: Routing, hash: KeyedHash, max_queue: usize, replicas: Vec<ReplicaView>) -> Self {
        let memory =
            Memory { sessions: SessionTable::new(MAX_SESSIONS), turn: 0, gone: vec![false; replicas.len()] };
        Router { routing, hash, max_queue, replicas, memory: Mutex::new(memory) }
    }

    /// Finds a replica with room and takes a slot there.
    pub fn assign(&self, request: &GenerateRequest) -> Result<ReplicaSlot, EngineError> {
        let affinity = &request.affinity;
        let session = affinity.session.as_deref().map(|session| self.session_digest(affinity, session));
        let parent = affinity.parent.as_deref().map(|parent| self.session_digest(affinity, parent));
        let pages = self.reusable_pages(request);
        let mut memory = self.memory();
        let home = [session, parent].into_iter().flatten().find_map(|known| memory.sessions.home(known));
        // Because of the lock, no other request can enter a replica's queue between its snapshot and the
        // attempt to enter it, so each replica is tried once at most.
        let mut full = vec![false; self.replicas.len()];
        let is_ready: Vec<bool> =
            self.replicas.iter().map(|replica| replica.health.problem().is_none()).collect();
        // If no replica is ready, trying one is the only way to find out whether it is ready again.
        let any_ready = (0..is_ready.len()).any(|at| is_ready[at] && !memory.gone[at]);
        let mut wait_ms = u32::MAX;
        loop {
            let candidates: Vec<_> = (0..self.replicas.len())
                .map(|at| {
                    let is_usable = (is_ready[at] || !any_ready) && !memory.gone[at];
                    self.candidate(at, &pages, is_usable && !full[at])
                })
                .collect();
            let choice = match self.routing {
                Routing::Affinity => choose(request.prompt.len(), home, &candidates),
                Routing::RoundRobin => take_turns(memory.turn, &candidates),
            };
            let Some(Choice { replica, reason }) = choice else {
                let is_gone = memory.gone.iter().all(|gone| *gone);
                if is_gone {
                    return Err(EngineError::ShuttingDown);
                }
                self.replicas[0].telemetry.of_request(affinity.agent.as_deref()).record_refusal();
                return Err(EngineError::Busy { retry_after_ms: wait_ms });
            };
            let view = &self.replicas[replica];
            match view.telemetry.enter_queue(&affinity.tenant, self.max_queue) {
                Ok(queue) => {
                    memory.turn = replica + 1;
                    if let Some(session) = session {
                        memory.sessions.settle(session, replica);
                    }
                    let computed = request.prompt.len() - candidates[replica].cached_tokens;
                    let load = LoadShare::take(&view.load, computed, request.priority);
                    view.telemetry.record_routed(reason.name());
                    return Ok(ReplicaSlot { replica, queue, load });
                }
                Err(wait) => {
                    wait_ms = wait_ms.min(u32::try_from(wait.as_millis()).unwrap_or(u32::MAX));
                    full[replica] = true;
                }
            }
        }
    }

    /// Returns the replica that the next request of a session is expected at, and makes it the session's home. Takes no slot
    /// there. Returns `None` if no replica is ready.
    pub fn expect(&self, affinity: &Affinity, tokens: &[u32]) -> Option<usize> {
        let session = affinity.session.as_deref().map(|session| self.session_digest(affinity, session));
        let pages = match self.replicas.len() {
            1 => Vec::new(),
            _ => prompt_digests(&self.hash, &affinity.tenant, tokens),
        };
        let mut memory = self.memory();
        let home = session.and_then(|session| memory.sessions.home(session));
        let candidates: Vec<_> = self
            .replicas
            .iter()
            .enumerate()
            .map(|(at, replica)| {
                self.candidate(at, &pages, !memory.gone[at] && replica.health.problem().is_none())
            })
            .collect();
        let Choice { replica, .. } = choose(tokens.len(), home, &candidates)?;
        if let Some(session) = session {
            memory.sessions.settle(session, replica);
        }
        Some(replica)
    }

    /// Records that the replica's loop has terminated: no request is sent there again, and its sessions get a
    /// new home.
    pub fn forget(&self, replica: usize) {
        let mut memory = self.memory();
        memory.gone[replica] = true;
        memory.sessions.forget_replica(replica);
    }

    /// Returns the digests of the pages that the request could reuse. The list is empty if they could not
    /// change the choice.
    fn reusable_pages(&self, request: &GenerateRequest) -> Vec<Digest> {
        let are_compared = self.replicas.len() > 1 && self.routing == Routing::Affinity;
        if !are_compared || request.prompt_logprobs.is_some() {
            return Vec::new();
        }
        prompt_digests(&self.hash, &request.affinity.tenant, &request.prompt)
    }

    fn candidate(&self, at: usize, pages: &[Digest], is_open: bool) -> Candidate {
        let view = &self.replicas[at];
        Candidate {
            is_open,
            prefill_tokens: view.load.prefill_tokens(),
            sequences: view.load.sequences(),
            cached_tokens: view.prefixes.matching_pages(pages) * PAGE_TOKENS,
            vacant_tokens: view.page_count.saturating_sub(view.prefixes.page_count()) * PAGE_TOKENS,
        }
    }

    fn session_digest(&self, affinity: &Affinity, session: &str) -> Digest {
        self.hash.digest((&affinity.tenant, &affinity.agent, session))
    }

    fn memory(&self) -> MutexGuard<'_, Memory> {
        self.memory.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
