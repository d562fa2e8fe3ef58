//! The key of an upstream. It is read for every request, so that a vault can change it, and exists only there and in
//! the request's header.

use std::fmt;

use futures::future::{BoxFuture, ready};

/// Text that replaces the key where a server repeated it.
const REDACTED: &str = "[key]";
/// Maximum length of a key in bytes.
const MAX_KEY_BYTES: usize = 4096;
/// Keys that are shorter are not looked for in texts, because they are part of ordinary words.
const MIN_REDACTED_BYTES: usize = 4;

/// Returns the key that is valid now.
pub trait KeySource: Send + Sync {
    /// Reads the key. The error says why there is none, and does not contain it.
    fn key(&self) -> BoxFuture<'_, Result<Key, String>>;
}

/// A key that can be sent in a header.
#[derive(Clone, PartialEq, Eq)]
pub struct Key(String);

impl Key {
    /// Checks that the key can be sent. White space around it is dropped.
    pub fn new(text: &str) -> Result<Self, String> {
        let text = text.trim();
        if text.is_empty() {
            return Err("the key is empty".to_owned());
        }
        if text.len() > MAX_KEY_BYTES || !text.bytes().all(|b| b.is_ascii_graphic()) {
            return Err(format!(
                "the key is not a word of at most {MAX_KEY_BYTES} visible ASCII characters, so no header can carry it"
            ));
        }
        Ok(Key(text.to_owned()))
    }

    pub(crate) fn reveal(&self) -> &str {
        &self.0
    }

    /// Replaces the key wherever `text` has it.
    pub(crate) fn redact(&self, text: String) -> String {
        match self.0.len() >= MIN_REDACTED_BYTES && text.contains(&self.0) {
            true => text.replace(&self.0, REDACTED),
            false => text,
        }
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Key")
    }
}

/// A key that never changes.
#[derive(Clone, Debug)]
pub struct FixedKey(pub Key);

impl KeySource for FixedKey {
    fn key(&self) -> BoxFuture<'_, Result<Key, String>> {
        Box::pin(ready(Ok(self.0.clone())))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_checked_and_never_shown() {
        let key = Key::new(" sk-secret\n").expect("valid");
        assert_eq!(key.reveal(), "sk-secret");
        assert_eq!(format!("{key:?} {:?}", FixedKey(key.clone())), "Key FixedKey(Key)");
        assert_eq!(key.redact("Bearer sk-secret is wrong".into()), "Bearer [key] is wrong");
        for bad in ["", " ", "a b", "ä", &"k".repeat(5000)] {
            let error = Key::new(bad).expect_err("invalid");
            assert!(bad.len() < 2 || !error.contains(bad), "{error}");
        }
    }
}
