//! The pages that are erased from memory and from the disk when their clients are deleted.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::Arc;

use skep_cache::{DiskTier, EraseFilter, PageNamer};

use crate::kv::PrefixOwner;

/// The pages to erase, by the names of their owners.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EraseScope {
    /// All pages, also those in a cache that several hosts share.
    Everyone,
    /// All pages of this host. Those in a cache that several hosts share stay.
    EveryoneHere,
    Tenant(String),
    /// Pages that are used only by sessions of this agent.
    Agent(String),
    /// Pages that are used only by this session.
    Session {
        agent: String,
        session: String,
    },
    /// Pages that are used only by one of these sessions, which are listed by their agents.
    Sessions(Arc<BTreeMap<String, BTreeSet<String>>>),
}

impl EraseScope {
    /// Returns whether the pages of a client are among these.
    pub(crate) fn includes(&self, owner: &PrefixOwner) -> bool {
        match self {
            EraseScope::Everyone | EraseScope::EveryoneHere => true,
            EraseScope::Tenant(tenant) => owner.tenant == *tenant,
            EraseScope::Agent(agent) => owner.agent.as_ref() == Some(agent),
            EraseScope::Session { agent, session } => {
                owner.agent.as_ref() == Some(agent) && owner.session.as_ref() == Some(session)
            }
            EraseScope::Sessions(all) => {
                let of_agent = owner.agent.as_ref().and_then(|agent| all.get(agent));
                of_agent
                    .zip(owner.session.as_ref())
                    .is_some_and(|(of_agent, session)| of_agent.contains(session))
            }
        }
    }

    /// Erases the pages from the disk and returns their number. It waits for the disk, for many sessions no longer than for one.
    /// After an error pages may be left, which the next erasure tries to remove.
    pub fn erase_from(&self, tier: &DiskTier) -> io::Result<u64> {
        tier.erase(self.filters(tier.keys()))
    }

    /// Returns the erasures of a tier that names its pages under these keys.
    fn filters(&self, keys: &PageNamer) -> Vec<EraseFilter> {
        let session =
            |agent: &str, session: &str| EraseFilter::Session(keys.owner(Some(agent), Some(session)));
        let one = match self {
            EraseScope::Everyone => EraseFilter::All,
            EraseScope::EveryoneHere => EraseFilter::AllHere,
            EraseScope::Tenant(tenant) => EraseFilter::Tenant(keys.tenant(tenant)),
            EraseScope::Agent(agent) => EraseFilter::Agent(keys.owner(Some(agent), None).agent),
            EraseScope::Session { agent, session: name } => session(agent, name),
            EraseScope::Sessions(all) => {
                let names = all.iter().flat_map(|(agent, names)| names.iter().map(move |name| (agent, name)));
                return names.map(|(agent, name)| session(agent, name)).collect();
            }
        };
        vec![one]
    }
}
