//! The tokens of long sections that were encoded lately. Conversations send the same system message, and all their earlier
//! messages, with every request.
//!
//! Invariant: a section is found only in the scope in which it was encoded, so the time of an encoding tells nobody what
//! others have sent. The memory has a bound, whatever is sent.

use std::collections::HashMap;
use std::mem::take;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Minimum length in bytes of a section that is kept. Shorter ones are encoded nearly as fast as they are found.
const MIN_BYTES: usize = 128;
/// Default bound of the memory for texts and tokens.
const CAPACITY_BYTES: usize = 8 << 20;
/// Maximum size of a section that is kept, as a fraction of the capacity.
const MAX_SHARE: usize = 8;

/// The sections encoded last, by the scope of their sender.
pub struct SectionCache {
    generations: Mutex<Generations>,
    min_bytes: usize,
    capacity_bytes: usize,
}

/// The sections found or encoded since the generation began, and those of the generation before, which are dropped with the
/// next change.
#[derive(Default)]
struct Generations {
    newest: Generation,
    older: Generation,
}

/// The tokens of sections by their text.
type Sections = HashMap<Box<str>, Arc<[u32]>>;

#[derive(Default)]
struct Generation {
    scopes: HashMap<Box<str>, Sections>,
    bytes: usize,
}

impl Default for SectionCache {
    fn default() -> Self {
        Self::new(MIN_BYTES, CAPACITY_BYTES)
    }
}

impl SectionCache {
    /// Creates a cache of sections of at least `min_bytes`, which takes at most `capacity_bytes` for their texts and tokens.
    pub(super) fn new(min_bytes: usize, capacity_bytes: usize) -> Self {
        SectionCache { generations: Mutex::default(), min_bytes, capacity_bytes }
    }

    /// Returns the tokens of a section from the cache, or those that `encode` returns.
    pub(super) fn get_or_encode<E>(
        &self,
        scope: &str,
        section: &str,
        encode: impl FnOnce() -> Result<Vec<u32>, E>,
    ) -> Result<Arc<[u32]>, E> {
        if section.len() < self.min_bytes {
            return Ok(encode()?.into());
        }
        let known = self.lock().newest.get(scope, section);
        if let Some(tokens) = known {
            return Ok(tokens);
        }
        // The lock is not held while a text is encoded.
        let known = self.lock().older.get(scope, section);
        let tokens = known.map_or_else(|| encode().map(Arc::from), Ok)?;
        self.keep(scope, section, &tokens);
        Ok(tokens)
    }

    /// Returns the size of the texts and the tokens that are kept, in bytes.
    pub fn bytes(&self) -> usize {
        let generations = self.lock();
        generations.newest.bytes + generations.older.bytes
    }

    /// Forgets the sections of a scope, or all of them.
    pub fn forget(&self, scope: Option<&str>) {
        let mut generations = self.lock();
        let Generations { newest, older } = &mut *generations;
        match scope {
            Some(scope) => [newest, older].map(|generation| generation.forget(scope)),
            None => [newest, older].map(|generation| *generation = Generation::default()),
        };
    }

    fn keep(&self, scope: &str, section: &str, tokens: &Arc<[u32]>) {
        let bytes = byte_len(scope, section, tokens);
        if bytes > self.capacity_bytes / MAX_SHARE {
            return;
        }
        let mut generations = self.lock();
        if generations.newest.bytes + bytes > self.capacity_bytes / 2 {
            generations.older = take(&mut generations.newest);
        }
        let newest = &mut generations.newest;
        let sections = newest.scopes.entry(scope.into()).or_default();
        // Another request may have encoded the same section meanwhile.
        if sections.insert(section.into(), tokens.clone()).is_none() {
            newest.bytes += bytes;
        }
    }

    fn lock(&self) -> MutexGuard<'_, Generations> {
        self.generations.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Generation {
    fn get(&self, scope: &str, section: &str) -> Option<Arc<[u32]>> {
        self.scopes.get(scope)?.get(section).cloned()
    }

    fn forget(&mut self, scope: &str) {
        let forgotten = self.scopes.remove(scope).unwrap_or_default();
        self.bytes -=
            forgotten.iter().map(|(section, tokens)| byte_len(scope, section, tokens)).sum::<usize>();
    }
}

/// Returns the size of the texts and the tokens of a section, in bytes.
fn byte_len(scope: &str, section: &str, tokens: &[u32]) -> usize {
    scope.len() + section.len() + size_of_val(tokens)
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::convert::Infallible;

    use super::*;

    /// A cache whose encoder counts its calls. The token of a section is its length.
    struct Counted {
        cache: SectionCache,
        encoded: Cell<usize>,
    }

    impl Counted {
        fn new(capacity_bytes: usize) -> Self {
            Counted { cache: SectionCache::new(MIN_BYTES, capacity_bytes), encoded: Cell::new(0) }
        }

        /// Returns whether the section was encoded.
        fn encodes(&self, scope: &str, section: &str) -> bool {
            let before = self.encoded.get();
            let encode = || {
                self.encoded.set(before + 1);
                Ok::<_, Infallible>(vec![section.len() as u32])
            };
            let Ok(tokens) = self.cache.get_or_encode(scope, section, encode);
            assert_eq!(*tokens, [section.len() as u32]);
            self.encoded.get() > before
        }
    }

    #[test]
    fn a_long_section_is_encoded_once_in_each_scope() {
        let cache = Counted::new(CAPACITY_BYTES);
        let (long, short) = ("s".repeat(MIN_BYTES), "s".repeat(MIN_BYTES - 1));
        assert!(cache.encodes("one", &long) && !cache.encodes("one", &long));
        assert!(cache.encodes("other", &long) && !cache.encodes("other", &long));
        assert!(cache.encodes("one", &short) && cache.encodes("one", &short), "short ones are not kept");
        assert!(!cache.encodes("one", &long));
    }

    #[test]
    fn the_memory_is_bounded_and_what_is_used_stays() {
        let capacity = 16 << 10;
        let cache = Counted::new(capacity);
        let system = "You are helpful. ".repeat(20);
        let text = |number: usize| format!("{number:05}").repeat(60);
        cache.encodes("t", &system);
        for number in 0..1000 {
            assert!(cache.encodes("t", &text(number)));
            assert!(!cache.encodes("t", &system), "it was found a moment ago");
            assert!(cache.cache.bytes() <= capacity);
        }
        assert!(cache.encodes("t", &text(0)), "it is forgotten");
        let huge = "h".repeat(capacity / MAX_SHARE);
        assert!(cache.encodes("t", &huge) && cache.encodes("t", &huge), "too long to be kept");
        assert!(!cache.encodes("t", &text(999)));
    }

    #[test]
    fn a_scope_that_is_forgotten_is_encoded_again() {
        let cache = Counted::new(4 << 10);
        let section = |name: char| name.to_string().repeat(300);
        for name in 'a'..='f' {
            cache.encodes("one", &section(name));
        }
        cache.encodes("other", &section('a'));
        assert!(cache.cache.lock().older.bytes > 0, "both generations have sections");
        cache.cache.forget(Some("one"));
        assert_eq!(cache.cache.bytes(), byte_len("other", &section('a'), &[0]));
        assert!(!cache.encodes("other", &section('a')));
        assert!(('a'..='f').all(|name| cache.encodes("one", &section(name))));
        cache.cache.forget(None);
        assert_eq!(cache.cache.bytes(), 0);
        assert!(cache.encodes("other", &section('a')) && cache.encodes("one", &section('f')));
    }

    #[test]
    fn an_error_is_not_kept() {
        let cache = SectionCache::default();
        let section = "s".repeat(MIN_BYTES);
        assert_eq!(cache.get_or_encode("t", &section, || Err("no")), Err("no"));
        assert_eq!(*cache.get_or_encode("t", &section, || Ok::<_, &str>(vec![7])).unwrap(), [7]);
    }
}
