//! Pages on their way between hosts: the request for them, and the sealed images of the answer.
//!
//! ```text
//! question                                   image
//! offset  bytes                              offset  bytes
//!      0      8  magic                            0    128  header
//!      8      4  version                        128         the sealed page
//!     12      4  number of names
//!     16      8  bytes of a page
//!     24     32  layout digest
//!     56  32 n   prefix digests, in order
//! ```
//!
//! Both hosts name pages under the same key, so a question has no tokens. A page is sealed for its layout and its tokens under
//! a key that only these hosts have, because anybody in the network could forge a checksum that needs no key. The seal shows any
//! change of the page, so the header has a checksum of itself alone: that of a page takes longer than to encrypt it.
//!
//! Invariant: the length of what is read is known before memory is taken for it.

use std::io;

use crate::Digest;
use crate::disk_tier::SealingSecret;
use crate::disk_tier::sealing::{OVERHEAD, PageCipher};
use crate::image::{HEADER_BYTES, Header, ImageError, MAX_PAYLOAD_BYTES};

const MAGIC: [u8; 8] = *b"SKEPASKS";
const VERSION: u32 = 1;
const HEAD_BYTES: usize = 56;
const NAME_BYTES: usize = 32;
/// Maximum number of pages of one question: those of 262,144 tokens.
pub const MAX_ASKED_PAGES: usize = 1 << 14;

/// A question of one host to another for pages that follow each other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PageQuestion {
    /// The weights and the format of the pages.
    pub layout: Digest,
    /// Number of bytes of keys and values of each page.
    pub payload_bytes: usize,
    /// The names of the pages, in order.
    pub names: Vec<Digest>,
}

/// The reason that a question cannot be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum QuestionError {
    #[error("it is not a request for KV pages in the form of this version")]
    Foreign,
    #[error("it asks for {found} pages, and at most {max} are allowed", max = MAX_ASKED_PAGES)]
    TooMany { found: usize },
    #[error("it has {found} bytes, and its names need {needed}")]
    Length { found: usize, needed: usize },
    #[error("a page cannot have {found} bytes")]
    PageBytes { found: u64 },
}

impl PageQuestion {
    /// Returns the bytes of the question. Names beyond [`MAX_ASKED_PAGES`] are left out.
    pub fn encode(&self) -> Vec<u8> {
        let names = &self.names[..self.names.len().min(MAX_ASKED_PAGES)];
        let mut bytes = Vec::with_capacity(HEAD_BYTES + names.len() * NAME_BYTES);
        bytes.extend(MAGIC);
        bytes.extend(VERSION.to_le_bytes());
        bytes.extend((names.len() as u32).to_le_bytes());
        bytes.extend((self.payload_bytes as u64).to_le_bytes());
        bytes.extend(self.layout.0);
        names.iter().for_each(|name| bytes.extend(name.0));
        bytes
    }

    /// Reads a question, which must be whole.
    pub fn decode(bytes: &[u8]) -> Result<PageQuestion, QuestionError> {
        let (head, names) = bytes.split_at_checked(HEAD_BYTES).ok_or(QuestionError::Foreign)?;
        if head[..8] != MAGIC || head[8..12] != VERSION.to_le_bytes() {
            return Err(QuestionError::Foreign);
        }
        let count = u32::from_le_bytes(std::array::from_fn(|at| head[12 + at])) as usize;
        if count > MAX_ASKED_PAGES {
            return Err(QuestionError::TooMany { found: count });
        }
        if names.len() != count * NAME_BYTES {
            let (found, needed) = (bytes.len(), HEAD_BYTES + count * NAME_BYTES);
            return Err(QuestionError::Length { found, needed });
        }
        let found = u64::from_le_bytes(std::array::from_fn(|at| head[16 + at]));
        let payload_bytes =
            usize::try_from(found).ok().filter(|bytes| (1..=MAX_PAYLOAD_BYTES).contains(bytes));
        Ok(PageQuestion {
            layout: Digest(std::array::from_fn(|at| head[24 + at])),
            payload_bytes: payload_bytes.ok_or(QuestionError::PageBytes { found })?,
            names: names
                .chunks_exact(NAME_BYTES)
                .map(|name| Digest(std::array::from_fn(|at| name[at])))
                .collect(),
        })
    }

    /// Returns the number of bytes of the image of each page.
    pub fn image_bytes(&self) -> usize {
        PageQuestion::image_bytes_of(self.payload_bytes)
    }

    /// Returns the number of bytes of the image of a page with this many bytes.
    pub fn image_bytes_of(payload_bytes: usize) -> usize {
        HEADER_BYTES + payload_bytes + OVERHEAD
    }
}

/// Seals and opens the images of pages under a key that the hosts share.
pub struct TransitSeal {
    cipher: PageCipher,
}

impl std::fmt::Debug for TransitSeal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("TransitSeal")
    }
}

impl TransitSeal {
    /// Creates the seal of the hosts that have this secret.
    pub fn new(secret: &SealingSecret) -> Self {
        TransitSeal { cipher: PageCipher::new(secret) }
    }

    /// Returns the image of a page.
    pub fn seal(&self, layout: Digest, prefix: Digest, page: &[u8]) -> io::Result<Vec<u8>> {
        let header = Header { layout, prefix, payload_bytes: page.len() + OVERHEAD };
        self.cipher.seal_behind(&header.encode_sealed(), layout, prefix, page)
    }

    /// Returns the page of an image, if it is the page with this layout, name and length.
    pub fn open(
        &self,
        layout: Digest,
        prefix: Digest,
        payload_bytes: usize,
        image: Vec<u8>,
    ) -> Result<Vec<u8>, ImageError> {
        let (header, sealed) = image.split_at_checked(HEADER_BYTES).ok_or(ImageError::Foreign)?;
        let expected = Header { layout, prefix, payload_bytes: payload_bytes + OVERHEAD };
        expected.check_sealed(header, sealed.len())?;
        self.cipher.open_behind(HEADER_BYTES, layout, prefix, image).ok_or(ImageError::Seal)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn question(pages: u8) -> PageQuestion {
        let names = (0..pages).map(|page| Digest([page; 32])).collect();
        PageQuestion { layout: Digest([9; 32]), payload_bytes: 4096, names }
    }

    #[test]
    fn a_question_is_read_only_whole_and_within_its_bounds() {
        for pages in [0, 1, 200] {
            let asked = question(pages);
            assert_eq!(PageQuestion::decode(&asked.encode()), Ok(asked));
        }
        let bytes = question(3).encode();
        for end in 0..bytes.len() {
            assert!(PageQuestion::decode(&bytes[..end]).is_err(), "the first {end} bytes");
        }
        let longer = [bytes.as_slice(), &[0]].concat();
        assert!(matches!(PageQuestion::decode(&longer), Err(QuestionError::Length { .. })));
        for at in 0..12 {
            let mut other = bytes.clone();
            other[at] ^= 1;
            assert_eq!(PageQuestion::decode(&other), Err(QuestionError::Foreign), "byte {at}");
        }
        let with = |at: usize, number: &[u8]| {
            let mut changed = bytes.clone();
            changed[at..at + number.len()].copy_from_slice(number);
            PageQuestion::decode(&changed)
        };
        let many = u32::MAX as usize;
        assert_eq!(with(12, &u32::MAX.to_le_bytes()), Err(QuestionError::TooMany { found: many }));
        assert!(matches!(with(12, &4u32.to_le_bytes()), Err(QuestionError::Length { .. })));
        for bytes in [0, MAX_PAYLOAD_BYTES as u64 + 1, u64::MAX] {
            assert_eq!(with(16, &bytes.to_le_bytes()), Err(QuestionError::PageBytes { found: bytes }));
        }
    }

    #[test]
    fn a_question_never_asks_for_more_than_is_allowed() {
        let names = vec![Digest([1; 32]); MAX_ASKED_PAGES + 5];
        let asked = PageQuestion { names, ..question(0) };
        assert_eq!(PageQuestion::decode(&asked.encode()).unwrap().names.len(), MAX_ASKED_PAGES);
    }

    #[test]
    fn an_image_opens_only_unchanged_for_its_own_page_and_among_its_hosts() {
        let seal = TransitSeal::new(&SealingSecret([1; 32]));
        let (layout, prefix, page) = (Digest([2; 32]), Digest([3; 32]), vec![7; 100]);
        let image = seal.seal(layout, prefix, &page).unwrap();
        let asked = PageQuestion { layout, payload_bytes: page.len(), names: vec![prefix] };
        assert_eq!(image.len(), asked.image_bytes());
        let open = |seal: &TransitSeal, layout, prefix, bytes, image: &[u8]| {
            seal.open(layout, prefix, bytes, image.to_vec())
        };
        assert_eq!(open(&seal, layout, prefix, 100, &image), Ok(page));
        assert_eq!(open(&seal, prefix, prefix, 100, &image), Err(ImageError::Layout));
        assert_eq!(open(&seal, layout, layout, 100, &image), Err(ImageError::Prefix));
        assert_eq!(open(&seal, layout, prefix, 99, &image), Err(ImageError::Length));
        for end in 0..image.len() {
            assert!(open(&seal, layout, prefix, 100, &image[..end]).is_err(), "the first {end} bytes");
        }
        for at in 0..image.len() {
            let mut changed = image.clone();
            changed[at] ^= 1;
            assert!(open(&seal, layout, prefix, 100, &changed).is_err(), "byte {at}");
        }
        // Without the key, anyone can make a header that fits, and no page.
        let other = TransitSeal::new(&SealingSecret([8; 32]));
        let forged = other.seal(layout, prefix, &[0; 100]).unwrap();
        assert_eq!(open(&seal, layout, prefix, 100, &forged), Err(ImageError::Seal));
    }
}
