//! A radix tree over whole pages of token ids, with one root per tenant, so that sequences with a common prefix
//! share pages.
//!
//! Keys are the tenant's name and the token ids themselves, compared exactly: no hash decides whether two
//! prefixes are the same. A lock on a node holds all nodes above it. Unlocked pages can be evicted, least
//! recently used leaves first, from the ends of the leaves. Because a lock covers its ancestors, every unlocked
//! node's descendants are unlocked too, so all unlocked pages can be reached by evicting leaves.
//!
//! When a node is split, the lower part keeps the node's id, so locks that others hold on it stay valid.
//!
//! Each page has a digest, which is published while the page is in the tree. The owners of the leaves are recorded, so
//! that the pages of one of them can be removed before they are evicted.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use skep_model::{PAGE_TOKENS, PageId};

use super::prefix_owners::{PrefixOwner, PrefixOwners};
use super::published_prefixes::{PublishedPrefixes, digests_after, tenant_digest};
use crate::keyed_hash::Digest;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct NodeId(usize);

/// The ids of one page. The edge to a child is labeled by the child's first page.
type PageKey = [u32; PAGE_TOKENS];

#[derive(Debug)]
struct Node {
    parent: Parent,
    tokens: Vec<u32>,
    pages: Vec<PageId>,
    /// The digest of each page.
    digests: Vec<Digest>,
    children: HashMap<PageKey, NodeId>,
    locks: usize,
    used: u64,
}

#[derive(Debug, Clone)]
enum Parent {
    /// This node is the root of a tenant; it holds no pages.
    Tenant(String),
    Node(NodeId),
}

/// A use of a prefix that can be undone: the time of the use before it, and its own.
#[derive(Debug, Clone, Copy)]
pub(crate) struct UseMark {
    before: u64,
    at: u64,
}

/// The result of an insertion.
pub(super) struct Inserted {
    pub node: NodeId,
    /// The pages that now represent the inserted tokens: the given pages where they were new, the tree's pages
    /// where they were not.
    pub pages: Vec<PageId>,
}

#[derive(Debug, Default)]
pub(super) struct PrefixTree {
    roots: HashMap<String, NodeId>,
    nodes: Vec<Option<Node>>,
    vacant: Vec<NodeId>,
    /// Unlocked leaves with pages, least recently used first.
    leaves: BTreeSet<(u64, NodeId)>,
    clock: u64,
    page_count: usize,
    evictable_pages: usize,
    published: Arc<PublishedPrefixes>,
    owners: PrefixOwners,
}

impl PrefixTree {
    /// Creates an empty tree that keeps `published` up to date.
    pub fn new(published: Arc<PublishedPrefixes>) -> Self {
        PrefixTree { published, ..PrefixTree::default() }
    }

    /// Returns the number of pages in the tree, locked or not.
    pub fn page_count(&self) -> usize {
        self.page_count
    }

    /// Returns the number of nodes that have pages.
    #[cfg(test)]
    pub fn node_count(&self) -> usize {
        self.nodes.iter().flatten().filter(|node| !node.pages.is_empty()).count()
    }

    /// Returns the number of pages of each owner. Pages of several owners count for what these have in common: an agent, or
    /// only the tenant.
    pub fn pages_by_owner(&self) -> BTreeMap<PrefixOwner, usize> {
        let mut counted = BTreeMap::new();
        for (tenant, root) in &self.roots {
            let (mut order, mut at) = (vec![*root], 0);
            while let Some(id) = order.get(at) {
                order.extend(self.node(*id).children.values());
                at += 1;
            }
            let mut owners: HashMap<NodeId, PrefixOwner> = HashMap::new();
            // Nodes come after those that continue them.
            for id in order.into_iter().rev() {
                let node = self.node(id);
                let below = node.children.values().filter_map(|child| owners.remove(child));
                let all = self.owners.of(id).cloned().chain(below);
                let owner = all.reduce(|one, other| one.shared_with(&other));
                let owner = owner.unwrap_or_else(|| PrefixOwner::tenant(tenant));
                if !node.pages.is_empty() {
                    *counted.entry(owner.clone()).or_default() += node.pages.len();
                }
                owners.insert(id, owner);
            }
        }
        counted
    }

    /// Returns the number of unlocked pages, all of which could be evicted.
    pub fn evictable_pages(&self) -> usize {
        self.evictable_pages
    }

    /// Returns the node at which the longest cached prefix of `tokens` (whole pages) ends, and the pages of
    /// that prefix.
    pub fn longest_prefix(&mut self, tenant: &str, tokens: &[u32]) -> Option<(NodeId, Vec<PageId>)> {
        let root = *self.roots.get(tenant)?;
        let (node, pages) = self.descend(root, tokens);
        (!pages.is_empty()).then_some((node, pages))
    }

    /// Returns the pages of the longest cached prefix of `tokens` (whole pages), and marks nothing as used.
    pub fn peek(&self, tenant: &str, tokens: &[u32]) -> Vec<PageId> {
        self.path(tenant, tokens).1
    }

    /// Marks the longest cached prefix of `tokens` (whole pages) as used, and returns the mark.
    pub fn mark(&mut self, tenant: &str, tokens: &[u32]) -> Option<UseMark> {
        let end = self.path(tenant, tokens).0.last().copied();
        let before = end.map(|id| self.node(id).used);
        self.longest_prefix(tenant, tokens)?;
        Some(UseMark { before: before.unwrap_or(self.clock), at: self.clock })
    }

    /// Undoes a mark, except for the part of the prefix that was used since.
    pub fn unmark(&mut self, tenant: &str, tokens: &[u32], mark: UseMark) {
        for id in self.path(tenant, tokens).0 {
            if self.node(id).used == mark.at {
                self.unlist(id);
                self.node_mut(id).used = mark.before;
                self.list(id);
            }
        }
    }

    /// Inserts `tokens` (whole pages) as a path in the tenant's tree. `locked` is the node that the inserting sequence has locked. If
    /// nobody else has it, it grows, so that a sequence which inserts its pages one by one does not make a node of each.
    pub fn insert(
        &mut self,
        tenant: &str,
        tokens: &[u32],
        pages: &[PageId],
        locked: Option<NodeId>,
    ) -> Inserted {
        debug_assert!(!pages.is_empty() && tokens.len() == pages.len() * PAGE_TOKENS);
        let root = match self.roots.get(tenant) {
            Some(root) => *root,
            None => {
                let root = self.add(Parent::Tenant(tenant.to_string()), Vec::new(), Vec::new(), Vec::new());
                self.roots.insert(tenant.to_string(), root);
                root
            }
        };
        let (node, mut found) = self.descend(root, tokens);
        if found.len() == pages.len() {
            return Inserted { node, pages: found };
        }
        let rest = &tokens[found.len() * PAGE_TOKENS..];
        let new = &pages[found.len()..];
        let digests = digests_after(self.published.hash(), self.digest_at(node), rest);
        self.published.publish(&digests);
        if locked == Some(node) && self.can_grow(node) {
            self.page_count += new.len();
            found.extend_from_slice(new);
            let grown = self.node_mut(node);
            grown.tokens.extend_from_slice(rest);
            grown.pages.extend_from_slice(new);
            grown.digests.extend(digests);
            return Inserted { node, pages: found };
        }
        self.unlist(node);
        let leaf = self.add(Parent::Node(node), rest.to_vec(), new.to_vec(), digests);
        self.node_mut(node).children.insert(first_page(rest), leaf);
        self.page_count += new.len();
        self.evictable_pages += new.len();
        self.list(leaf);
        found.extend_from_slice(new);
        Inserted { node: leaf, pages: found }
    }

    /// Protects a node and everything above it from eviction.
    pub fn lock(&mut self, node: NodeId) {
        self.walk_up(node, |tree, id| {
            if tree.node(id).locks == 0 {
                tree.unlist(id);
                tree.evictable_pages -= tree.node(id).pages.len();
            }
            tree.node_mut(id).locks += 1;
        });
    }

    /// Undoes one `lock`.
    pub fn unlock(&mut self, node: NodeId) {
        self.walk_up(node, |tree, id| {
            let locks = &mut tree.node_mut(id).locks;
            *locks = locks.checked_sub(1).expect("every unlock follows a lock");
            if *locks == 0 {
                tree.evictable_pages += tree.node(id).pages.len();
                tree.list(id);
            }
        });
    }

    /// Evicts `count` pages, least recently used leaves first. The caller must check that this many are
    /// evictable.
    pub fn evict(&mut self, count: usize) -> Vec<PageId> {
        let mut evicted = Vec::with_capacity(count);
        while evicted.len() < count {
            let Some(&(_, id)) = self.leaves.first() else { break };
            let wanted = count - evicted.len();
            let node = self.node_mut(id);
            let keep = node.pages.len().saturating_sub(wanted);
            let gone = node.pages.split_off(keep);
            let withdrawn = node.digests.split_off(keep);
            node.tokens.truncate(keep * PAGE_TOKENS);
            self.published.withdraw(&withdrawn);
            self.page_count -= gone.len();
            self.evictable_pages -= gone.len();
            // Pages come from the end of the leaf, so that the rest is still a prefix.
            evicted.extend(gone);
            if keep == 0 {
                self.remove_leaf(id);
            }
        }
        evicted
    }

    /// Makes a prefix, as far as it is cached, one of an owner. It takes the place of shorter prefixes of that owner.
    pub fn own(&mut self, owner: &PrefixOwner, tokens: &[u32]) {
        let Some((node, _)) = self.longest_prefix(&owner.tenant, tokens) else { return };
        self.walk_up(node, |tree, id| tree.owners.remove(id, owner));
        self.owners.add(node, owner);
    }

    /// Removes what only the matching owners have, except for locked nodes, and returns the pages.
    pub fn forget(&mut self, matches: impl Fn(&PrefixOwner) -> bool) -> Vec<PageId> {
        let mut gone = Vec::new();
        for node in self.owners.remove_matching(matches) {
            self.remove_unowned(node, &mut gone);
        }
        gone
    }

    /// Removes a prefix as far as nobody owns or continues it, and returns the pages.
    pub fn drop_unowned(&mut self, tenant: &str, tokens: &[u32]) -> Vec<PageId> {
        let mut gone = Vec::new();
        if let Some((node, _)) = self.longest_prefix(tenant, tokens) {
            self.remove_unowned(node, &mut gone);
        }
        gone
    }

    /// Panics if a counter or link is wrong, and otherwise returns all pages of the tree. `locks` are the
    /// locked nodes.
    pub fn check_integrity(&self, locks: &[NodeId]) -> Vec<PageId> {
        let mut expected_locks = vec![0; self.nodes.len()];
        for &lock in locks {
            let mut next = Some(lock);
            while let Some(id) = next {
                expected_locks[id.0] += 1;
                next = self.parent(id);
            }
        }
        let (mut pages, mut evictable) = (Vec::new(), 0);
        for (index, node) in self.nodes.iter().enumerate() {
            let Some(node) = node else { continue };
            let id = NodeId(index);
            assert_eq!(node.locks, expected_locks[index], "locks of {id:?}");
            assert_eq!(node.tokens.len(), node.pages.len() * PAGE_TOKENS, "tokens of {id:?}");
            assert_eq!(node.digests.len(), node.pages.len(), "digests of {id:?}");
            assert!(node.digests.iter().all(|digest| self.published.holds(digest)), "published of {id:?}");
            match &node.parent {
                Parent::Tenant(tenant) => assert_eq!(self.roots.get(tenant), Some(&id)),
                Parent::Node(parent) => {
                    assert_eq!(self.node(*parent).children.get(&first_page(&node.tokens)), Some(&id));
                }
            }
            assert_eq!(
                self.leaves.contains(&(node.used, id)),
                self.is_evictable_leaf(id),
                "listing of {id:?}"
            );
            evictable += if node.locks == 0 { node.pages.len() } else { 0 };
            pages.extend_from_slice(&node.pages);
        }
        assert_eq!(pages.len(), self.page_count, "pages in the tree");
        assert_eq!(evictable, self.evictable_pages, "evictable pages");
        assert_eq!(pages.len(), self.published.page_count(), "published pages");
        self.owners
            .check_integrity(|id| self.nodes[id.0].as_ref().is_some_and(|node| !node.pages.is_empty()));
        pages
    }

    /// Returns the nodes of which `tokens` have all pages, and the pages of the longest cached prefix.
    fn path(&self, tenant: &str, tokens: &[u32]) -> (Vec<NodeId>, Vec<PageId>) {
        let (mut nodes, mut pages) = (Vec::new(), Vec::new());
        let mut next = self.roots.get(tenant).copied();
        while let Some(at) = next {
            let rest = &tokens[pages.len() * PAGE_TOKENS..];
            if rest.is_empty() {
                break;
            }
            let Some(&child) = self.node(at).children.get(&first_page(rest)) else { break };
            let node = self.node(child);
            let matched = matching_pages(&node.tokens, rest);
            pages.extend_from_slice(&node.pages[..matched]);
            let is_whole = matched == node.pages.len();
            nodes.extend(is_whole.then_some(child));
            next = is_whole.then_some(child);
        }
        (nodes, pages)
    }

    /// Follows `tokens` as far as whole pages match, and splits a node in which they diverge. Marks the path as
    /// used.
    fn descend(&mut self, root: NodeId, tokens: &[u32]) -> (NodeId, Vec<PageId>) {
        self.clock += 1;
        let (mut at, mut pages) = (root, Vec::new());
        loop {
            self.touch(at);
            let rest = &tokens[pages.len() * PAGE_TOKENS..];
            if rest.is_empty() {
                return (at, pages);
            }
            let Some(&child) = self.node(at).children.get(&first_page(rest)) else { return (at, pages) };
            let matched = matching_pages(&self.node(child).tokens, rest);
            at = if matched < self.node(child).pages.len() { self.split(child, matched) } else { child };
            pages.extend_from_slice(&self.node(at).pages);
        }
    }

    /// Splits a node after `keep` pages and returns the new upper part; the lower part keeps the id.
    fn split(&mut self, id: NodeId, keep: usize) -> NodeId {
        let node = self.node_mut(id);
        let lower_tokens = node.tokens.split_off(keep * PAGE_TOKENS);
        let upper_tokens = std::mem::replace(&mut node.tokens, lower_tokens);
        let lower_pages = node.pages.split_off(keep);
        let upper_pages = std::mem::replace(&mut node.pages, lower_pages);
        let lower_digests = node.digests.split_off(keep);
        let upper_digests = std::mem::replace(&mut node.digests, lower_digests);
        let (locks, used, parent) = (node.locks, node.used, node.parent.clone());
        let (upper_key, lower_key) = (first_page(&upper_tokens), first_page(&node.tokens));
        let Parent::Node(above) = parent else { unreachable!("a tenant's root holds no pages to split") };
        let upper = self.add(Parent::Node(above), upper_tokens, upper_pages, upper_digests);
        self.node_mut(above).children.insert(upper_key, upper);
        self.node_mut(id).parent = Parent::Node(upper);
        let node = self.node_mut(upper);
        node.children.insert(lower_key, id);
        (node.locks, node.used) = (locks, used);
        upper
    }

    fn touch(&mut self, id: NodeId) {
        self.unlist(id);
        self.node_mut(id).used = self.clock;
        self.list(id);
    }

    /// Removes a node that nobody owns, locks or continues, and then the nodes above it.
    fn remove_unowned(&mut self, id: NodeId, gone: &mut Vec<PageId>) {
        let mut next = Some(id);
        while let Some(id) = next {
            // The node may have been removed with one below it.
            if self.nodes[id.0].is_none() || !self.is_evictable_leaf(id) || self.owners.has_any(id) {
                return;
            }
            next = self.parent(id);
            let node = self.node_mut(id);
            let (pages, digests) = (std::mem::take(&mut node.pages), std::mem::take(&mut node.digests));
            node.tokens.clear();
            self.published.withdraw(&digests);
            self.page_count -= pages.len();
            self.evictable_pages -= pages.len();
            gone.extend(pages);
            self.remove_leaf(id);
        }
    }

    fn remove_leaf(&mut self, id: NodeId) {
        self.unlist(id);
        let heir = self.parent(id).filter(|parent| {
            let parent_node = self.node(*parent);
            parent_node.children.len() == 1 && !parent_node.pages.is_empty() && !self.owners.has_any(*parent)
        });
        // If others still have the prefix, it stays for as long as they do.
        self.owners.move_to(id, heir);
        let node = self.nodes[id.0].take().expect("a listed leaf exists");
        self.vacant.push(id);
        match node.parent {
            Parent::Tenant(tenant) => {
                self.roots.remove(&tenant);
            }
            Parent::Node(parent) => {
                self.node_mut(parent).children.retain(|_, child| *child != id);
                let above = self.node(parent);
                if above.children.is_empty() && above.pages.is_empty() && above.locks == 0 {
                    self.remove_leaf(parent);
                } else {
                    self.list(parent);
                }
            }
        }
    }

    /// Returns whether a node ends with pages that only one sequence has, which keeps them from being evicted.
    fn can_grow(&self, id: NodeId) -> bool {
        let node = self.node(id);
        node.locks == 1 && node.children.is_empty() && !node.pages.is_empty() && !self.owners.has_any(id)
    }

    fn is_evictable_leaf(&self, id: NodeId) -> bool {
        let node = self.node(id);
        node.locks == 0 && node.children.is_empty() && !node.pages.is_empty()
    }

    fn list(&mut self, id: NodeId) {
        if self.is_evictable_leaf(id) {
            self.leaves.insert((self.node(id).used, id));
        }
    }

    fn unlist(&mut self, id: NodeId) {
        let used = self.node(id).used;
        self.leaves.remove(&(used, id));
    }

    fn walk_up(&mut self, node: NodeId, mut visit: impl FnMut(&mut Self, NodeId)) {
        let mut next = Some(node);
        while let Some(id) = next {
            visit(self, id);
            next = self.parent(id);
        }
    }

    fn parent(&self, id: NodeId) -> Option<NodeId> {
        match self.node(id).parent {
            Parent::Tenant(_) => None,
            Parent::Node(parent) => Some(parent),
        }
    }

    /// Returns the digest of the prefix that ends with this node.
    fn digest_at(&self, id: NodeId) -> Digest {
        let node = self.node(id);
        match (node.digests.last(), &node.parent) {
            (Some(digest), _) => *digest,
            (None, Parent::Tenant(tenant)) => tenant_digest(self.published.hash(), tenant),
            (None, Parent::Node(_)) => unreachable!("only a tenant's root holds no pages"),
        }
    }

    fn add(&mut self, parent: Parent, tokens: Vec<u32>, pages: Vec<PageId>, digests: Vec<Digest>) -> NodeId {
        let node =
            Node { parent, tokens, pages, digests, children: HashMap::new(), locks: 0, used: self.clock };
        match self.vacant.pop() {
            Some(id) => {
                self.nodes[id.0] = Some(node);
                id
            }
            None => {
                self.nodes.push(Some(node));
                NodeId(self.nodes.len() - 1)
            }
        }
    }

    fn node(&self, id: NodeId) -> &Node {
        self.nodes[id.0].as_ref().expect("ids are only kept for nodes that exist")
    }

    fn node_mut(&mut self, id: NodeId) -> &mut Node {
        self.nodes[id.0].as_mut().expect("ids are only kept for nodes that exist")
    }
}

fn first_page(tokens: &[u32]) -> PageKey {
    tokens[..PAGE_TOKENS].try_into().expect("keys are whole pages")
}

/// Counts the whole pages that both slices begin with.
fn matching_pages(a: &[u32], b: &[u32]) -> usize {
    a.chunks_exact(PAGE_TOKENS).zip(b.chunks_exact(PAGE_TOKENS)).take_while(|(a, b)| a == b).count()
}
