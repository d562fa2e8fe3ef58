//! The names of pages: a digest of everything that a page depends on, under a key of the data folder.
//!
//! Invariant: two pages have the same name only if they have the same tenant and the same tokens from the first one on.
//! That rests on SHA-256, because a page on disk has no tokens to compare. Every name depends on the key, not just the first name
//! of a prefix. Otherwise, anyone who sees names in an index or in transit could test guesses of the tokens between two of them.

use sha2::{Digest as _, Sha256};

/// The version of the names. It is in every layout, so hosts that name pages in another way find none of each other's.
const NAMES_VERSION: &[u8] = b"2";

/// A SHA-256 digest that names a prefix of tokens or the layout of pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Digest(pub [u8; 32]);

/// A tenant, as records name it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TenantTag(pub u64);

/// The agent and the session for which a page was computed. Requests without a session share one owner.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Owner {
    /// 0 for requests without an agent.
    pub agent: u64,
    /// 0 for requests without a session.
    pub session: u64,
}

/// Computes the names of pages, tenants and owners under one secret key.
#[derive(Clone)]
pub struct PageNamer {
    secret: [u8; 32],
}

impl std::fmt::Debug for PageNamer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("PageNamer")
    }
}

impl PageNamer {
    /// Creates a namer with a secret, which nobody outside of this host knows.
    pub fn new(secret: [u8; 32]) -> Self {
        PageNamer { secret }
    }

    /// Returns a namer with a new random key.
    pub fn random() -> Self {
        PageNamer { secret: rand::random() }
    }

    /// Returns the digest of pages of these weights in this format.
    pub fn layout(&self, weights: &str, form: &str) -> Digest {
        self.digest("layout", &[NAMES_VERSION, weights.as_bytes(), form.as_bytes()])
    }

    /// Returns the name of each whole page of `tokens`. A name covers the tenant and all tokens up to the end of the page.
    pub fn prefixes(&self, tenant: &str, tokens: &[u32], page_tokens: usize) -> Vec<Digest> {
        self.chained(self.digest("prefix", &[tenant.as_bytes()]), tokens, page_tokens)
    }

    /// Returns the names of the same pages if the first `public_pages` of them are public. Those have the same names for all
    /// tenants. The names of the pages after them cover the tenant.
    pub fn prefixes_after_public(
        &self,
        tenant: &str,
        tokens: &[u32],
        page_tokens: usize,
        public_pages: usize,
    ) -> Vec<Digest> {
        let (public, own) = tokens.split_at(tokens.len().min(public_pages.saturating_mul(page_tokens)));
        let mut names = self.chained(self.digest("public prefix", &[]), public, page_tokens);
        let Some(last) = names.last() else { return self.prefixes(tenant, tokens, page_tokens) };
        let start = self.digest("prefix after a public one", &[tenant.as_bytes(), &last.0]);
        names.extend(self.chained(start, own, page_tokens));
        names
    }

    /// Returns the tag of a tenant.
    pub fn tenant(&self, tenant: &str) -> TenantTag {
        TenantTag(self.short("tenant", &[tenant.as_bytes()]))
    }

    /// Returns the tag that public pages have in place of a tenant's.
    pub fn public(&self) -> TenantTag {
        TenantTag(self.short("public", &[]))
    }

    /// Returns the owner that a session, all sessions of an agent, or clients without an agent are.
    pub fn owner(&self, agent: Option<&str>, session: Option<&str>) -> Owner {
        let name = agent.unwrap_or_default().as_bytes();
        Owner {
            agent: agent.map_or(0, |_| self.short("agent", &[name])),
            session: session.map_or(0, |session| self.short("session", &[name, session.as_bytes()])),
        }
    }

    /// Returns the name of each whole page of `tokens`, each of which covers the one before it.
    fn chained(&self, mut last: Digest, tokens: &[u32], page_tokens: usize) -> Vec<Digest> {
        let pages = tokens.chunks_exact(page_tokens).map(|page| {
            let tokens: Vec<u8> = page.iter().flat_map(|token| token.to_le_bytes()).collect();
            last = self.digest("page", &[&last.0, &tokens]);
            last
        });
        pages.collect()
    }

    fn short(&self, kind: &str, parts: &[&[u8]]) -> u64 {
        let [a, b, c, d, e, f, g, h, ..] = self.digest(kind, parts).0;
        // 0 means that there is none.
        u64::from_le_bytes([a, b, c, d, e, f, g, h]).max(1)
    }

    /// Hashes the parts with their lengths, so that different parts never become the same bytes.
    fn digest(&self, kind: &str, parts: &[&[u8]]) -> Digest {
        let mut hash = Sha256::new_with_prefix(self.secret);
        for part in std::iter::once(kind.as_bytes()).chain(parts.iter().copied()) {
            hash.update((part.len() as u64).to_le_bytes());
            hash.update(part);
        }
        Digest(hash.finalize().into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prefix_depends_on_tenant_key_and_every_token_before_its_end() {
        let keys = PageNamer::new([7; 32]);
        let tokens: Vec<u32> = (0..50).collect();
        let names = keys.prefixes("a", &tokens, 16);
        assert_eq!(names.len(), 3, "the last two tokens are no page");
        assert_eq!(keys.prefixes("a", &tokens[..32], 16), names[..2]);
        let mut other = tokens.clone();
        other[3] += 1;
        for (one, other) in names.iter().zip(keys.prefixes("a", &other, 16)) {
            assert_ne!(*one, other);
        }
        assert_ne!(keys.prefixes("b", &tokens, 16), names);
        assert_ne!(PageNamer::new([8; 32]).prefixes("a", &tokens, 16), names);
    }

    /// Somebody who sees the names of pages knows `names[0]`, and guesses the tokens after it.
    #[test]
    fn no_name_follows_from_the_one_before_it_without_the_key() {
        let keys = PageNamer::new([7; 32]);
        let tokens: Vec<u32> = (0..48).collect();
        let guessed: Vec<u8> = tokens[16..32].iter().flat_map(|token| token.to_le_bytes()).collect();
        for names in [keys.prefixes("a", &tokens, 16), keys.prefixes_after_public("a", &tokens, 16, 3)] {
            let without_key = Sha256::new_with_prefix(names[0].0).chain_update(&guessed).finalize();
            assert_ne!(names[1], Digest(without_key.into()));
            let other = PageNamer::new([8; 32]);
            assert_eq!(keys.chained(names[0], &tokens[16..], 16), names[1..]);
            assert_ne!(other.chained(names[0], &tokens[16..], 16), names[1..]);
        }
    }

    #[test]
    fn only_public_pages_have_the_same_names_for_all_tenants() {
        let keys = PageNamer::new([7; 32]);
        let tokens: Vec<u32> = (0..80).collect();
        let of = |tenant: &str, pages| keys.prefixes_after_public(tenant, &tokens, 16, pages);
        assert_eq!(of("a", 0), keys.prefixes("a", &tokens, 16));
        let (a, b) = (of("a", 2), of("b", 2));
        assert_eq!((a.len(), &a[..2]), (5, &b[..2]));
        assert!(a[2..].iter().zip(&b[2..]).all(|(one, other)| one != other));
        let own = of("a", 0);
        assert!(a.iter().zip(&own).all(|(public, own)| public != own));
        assert_ne!(of("a", 3)[2], a[2], "a page is public or not, whatever is before it");
        assert_eq!(of("a", 9), of("b", 9));
        assert_ne!(keys.public(), keys.tenant("public"));
    }

    #[test]
    fn owners_differ_by_agent_and_session() {
        let keys = PageNamer::random();
        let owner = keys.owner(Some("a"), Some("s"));
        assert_eq!(owner, keys.owner(Some("a"), Some("s")));
        assert_eq!(owner.agent, keys.owner(Some("a"), Some("t")).agent);
        assert_ne!(owner.session, keys.owner(Some("b"), Some("s")).session);
        assert_eq!(keys.owner(None, None), Owner::default());
        assert_ne!(keys.layout("ab", "c"), keys.layout("a", "bc"));
    }
}
