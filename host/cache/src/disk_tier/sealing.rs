//! Encryption of pages on disk, if the operator wants it, and of pages on their way to another host.
//!
//! A page is sealed with AES-256-GCM under a key of its own, which is derived from the secret, a fresh random nonce, and the
//! layout and the tokens of the page. Slots are used again and again, and a derived key makes a repeated nonce of the cipher
//! harmless, because no two pages have the same key.
//!
//! Invariant: a page that was sealed with another secret, for another page, or was changed does not open.

use std::io;

use ring::aead::{AES_256_GCM, Aad, LessSafeKey, NONCE_LEN, Nonce, UnboundKey};
use ring::hmac;

use super::SealingSecret;
use crate::Digest;

/// The file in the folder that says which secret sealed the pages. It is missing or empty if none did.
pub(super) const FILE: &str = "sealed";
const NONCE_BYTES: usize = 24;
const TAG_BYTES: usize = 16;
/// Number of bytes by which a sealed page is longer.
pub(crate) const OVERHEAD: usize = NONCE_BYTES + TAG_BYTES;

pub(crate) struct PageCipher {
    secret: hmac::Key,
}

impl PageCipher {
    /// Creates a cipher under a secret that nobody else knows.
    pub fn new(secret: &SealingSecret) -> Self {
        PageCipher { secret: hmac::Key::new(hmac::HMAC_SHA256, &secret.0) }
    }

    /// Returns the text that distinguishes the secret from others.
    pub fn id(&self) -> String {
        let tag = hmac::sign(&self.secret, b"id");
        let bytes: &[u8] = tag.as_ref();
        bytes.iter().take(16).map(|byte| format!("{byte:02x}")).collect()
    }

    /// Returns a fresh nonce, followed by the encrypted page and its tag.
    pub fn seal(&self, layout: Digest, prefix: Digest, page: &[u8]) -> io::Result<Vec<u8>> {
        self.seal_behind(&[], layout, prefix, page)
    }

    /// Returns these bytes with the sealed page behind them. The page is copied once.
    pub fn seal_behind(
        &self,
        start: &[u8],
        layout: Digest,
        prefix: Digest,
        page: &[u8],
    ) -> io::Result<Vec<u8>> {
        let nonce: [u8; NONCE_BYTES] = rand::random();
        let mut sealed = Vec::with_capacity(start.len() + page.len() + OVERHEAD);
        sealed.extend_from_slice(start);
        sealed.extend_from_slice(&nonce);
        let encrypted = sealed.len();
        sealed.extend_from_slice(page);
        let tag = self.key(nonce, layout, prefix).seal_in_place_separate_tag(
            Nonce::assume_unique_for_key([0; NONCE_LEN]),
            Aad::empty(),
            &mut sealed[encrypted..],
        );
        sealed.extend_from_slice(tag.map_err(|_| io::Error::other("the page cannot be encrypted"))?.as_ref());
        Ok(sealed)
    }

    /// Returns the page, or `None` if it was not sealed like this.
    pub fn open(&self, layout: Digest, prefix: Digest, sealed: Vec<u8>) -> Option<Vec<u8>> {
        self.open_behind(0, layout, prefix, sealed)
    }

    /// Returns the page that is sealed behind the first `start` bytes. It moves to the front while it is decrypted.
    pub fn open_behind(
        &self,
        start: usize,
        layout: Digest,
        prefix: Digest,
        mut sealed: Vec<u8>,
    ) -> Option<Vec<u8>> {
        let nonce = *sealed.get(start..)?.first_chunk::<NONCE_BYTES>()?;
        let key = self.key(nonce, layout, prefix);
        let nonce = Nonce::assume_unique_for_key([0; NONCE_LEN]);
        let opened = key.open_within(nonce, Aad::empty(), &mut sealed, start + NONCE_BYTES..);
        let bytes = opened.ok()?.len();
        sealed.truncate(bytes);
        Some(sealed)
    }

    /// Derives the key of a single page.
    fn key(&self, nonce: [u8; NONCE_BYTES], layout: Digest, prefix: Digest) -> LessSafeKey {
        let mut derived = hmac::Context::with_key(&self.secret);
        for part in [b"page".as_slice(), &nonce, &layout.0, &prefix.0] {
            derived.update(part);
        }
        let derived = derived.sign();
        LessSafeKey::new(
            UnboundKey::new(&AES_256_GCM, derived.as_ref()).expect("the key has the cipher's length"),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_opens_only_unchanged_for_itself_and_with_its_secret() {
        let cipher = PageCipher::new(&SealingSecret([7; 32]));
        let (layout, prefix) = (Digest([1; 32]), Digest([2; 32]));
        let page: Vec<u8> = (0..200).collect();
        let sealed = cipher.seal(layout, prefix, &page).unwrap();
        assert_eq!(sealed.len(), page.len() + OVERHEAD);
        assert!(!sealed.windows(8).any(|part| *part == page[8..16]), "a part of the page can be read");
        assert_eq!(cipher.open(layout, prefix, sealed.clone()), Some(page.clone()));
        assert_eq!(cipher.open(prefix, layout, sealed.clone()), None);
        let other = PageCipher::new(&SealingSecret([8; 32]));
        assert_eq!(other.open(layout, prefix, sealed.clone()), None);
        assert_ne!(other.id(), cipher.id());
        for at in 0..sealed.len() {
            let mut changed = sealed.clone();
            changed[at] ^= 1;
            assert_eq!(cipher.open(layout, prefix, changed), None, "byte {at}");
        }
        assert_eq!(cipher.open(layout, prefix, sealed[..20].to_vec()), None);
        assert_ne!(cipher.seal(layout, prefix, &page).unwrap(), sealed, "each writing has another nonce");
    }
}
