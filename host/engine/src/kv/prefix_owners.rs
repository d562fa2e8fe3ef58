//! The sessions for which the prefixes in the tree were computed, so that a deleted session takes its pages along.
//!
//! An owner stands at the last node of each of its prefixes. Pages that nobody owns or continues are removed, so
//! forgetting a session removes exactly the pages that no other session of its tenant has.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use super::prefix_tree::NodeId;
use crate::Affinity;

/// Maximum number of owners of one node. The prefix stays as long as one of the recorded owners has it.
const MAX_OWNERS: usize = 1024;

/// The client that pages were computed for.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct PrefixOwner {
    pub tenant: String,
    pub agent: Option<String>,
    /// Only sessions of agents count; those of other clients end with their tenant.
    pub session: Option<String>,
}

impl PrefixOwner {
    /// Returns the client of a request. Without an agent, it has no session.
    pub fn of(affinity: &Affinity) -> Self {
        let Affinity { tenant, agent, session, .. } = affinity.clone();
        PrefixOwner { tenant, session: agent.as_ref().and(session), agent }
    }

    /// Returns the owner of pages that no single session owns.
    pub fn tenant(tenant: &str) -> Self {
        PrefixOwner { tenant: tenant.to_owned(), agent: None, session: None }
    }

    /// Returns the owner that stands for this one and another one of its tenant.
    pub fn shared_with(self, other: &PrefixOwner) -> Self {
        let is_one_agent = self.agent == other.agent;
        let agent = self.agent.filter(|_| is_one_agent);
        let session = self.session.filter(|session| is_one_agent && other.session.as_ref() == Some(session));
        PrefixOwner { tenant: self.tenant, agent, session }
    }
}

/// The owners of all nodes of a tree.
#[derive(Debug, Default)]
pub(super) struct PrefixOwners {
    nodes: HashMap<Arc<PrefixOwner>, BTreeSet<NodeId>>,
    owners: HashMap<NodeId, Vec<Arc<PrefixOwner>>>,
}

impl PrefixOwners {
    /// Returns the owners that stand at a node.
    pub fn of(&self, node: NodeId) -> impl Iterator<Item = &PrefixOwner> {
        self.owners.get(&node).into_iter().flatten().map(Arc::as_ref)
    }

    /// Returns whether anyone owns a prefix that ends at this node.
    pub fn has_any(&self, node: NodeId) -> bool {
        self.owners.contains_key(&node)
    }

    /// Records that `owner` has a prefix that ends at this node.
    pub fn add(&mut self, node: NodeId, owner: &PrefixOwner) {
        let owner = match self.nodes.get_key_value(owner) {
            Some((known, _)) => known.clone(),
            None => Arc::new(owner.clone()),
        };
        self.add_shared(node, owner);
    }

    /// Removes the owner from this node. Does nothing if the owner is not recorded there.
    pub fn remove(&mut self, node: NodeId, owner: &PrefixOwner) {
        let Some(nodes) = self.nodes.get_mut(owner) else { return };
        if !nodes.remove(&node) {
            return;
        }
        if nodes.is_empty() {
            self.nodes.remove(owner);
        }
        if let Some(owners) = self.owners.get_mut(&node) {
            owners.retain(|other| **other != *owner);
            if owners.is_empty() {
                self.owners.remove(&node);
            }
        }
    }

    /// Removes all owners that match, and returns the nodes that they had.
    pub fn remove_matching(&mut self, matches: impl Fn(&PrefixOwner) -> bool) -> BTreeSet<NodeId> {
        let gone: Vec<Arc<PrefixOwner>> =
            self.nodes.keys().filter(|owner| matches(owner)).map(Arc::clone).collect();
        let mut nodes = BTreeSet::new();
        for owner in gone {
            let had = self.nodes.get(&owner).cloned().unwrap_or_default();
            had.iter().for_each(|node| self.remove(*node, &owner));
            nodes.extend(had);
        }
        nodes
    }

    /// Moves the owners of a node that is removed to another one, or forgets them.
    pub fn move_to(&mut self, node: NodeId, other: Option<NodeId>) {
        for owner in self.owners.get(&node).cloned().unwrap_or_default() {
            self.remove(node, &owner);
            if let Some(other) = other {
                self.add_shared(other, owner);
            }
        }
    }

    /// Panics if the two maps disagree, or a node is owned that `exists` does not know.
    pub fn check_integrity(&self, exists: impl Fn(NodeId) -> bool) {
        for (owner, nodes) in &self.nodes {
            assert!(!nodes.is_empty(), "{owner:?} owns nothing");
            for node in nodes {
                assert!(exists(*node), "{owner:?} owns {node:?}, which does not exist");
                assert!(self.owners[node].contains(owner), "{owner:?} is not listed at {node:?}");
            }
        }
        let listed: usize = self.owners.values().map(Vec::len).sum();
        assert_eq!(listed, self.nodes.values().map(BTreeSet::len).sum::<usize>(), "owners of nodes");
    }

    fn add_shared(&mut self, node: NodeId, owner: Arc<PrefixOwner>) {
        let owners = self.owners.entry(node).or_default();
        if owners.len() < MAX_OWNERS && !owners.contains(&owner) {
            owners.push(owner.clone());
            self.nodes.entry(owner).or_default().insert(node);
        }
    }
}
