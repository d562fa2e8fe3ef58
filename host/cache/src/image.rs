//! The image of one page: a header and the page's bytes. It is the unit in which keys and values leave memory.
//!
//! ```text
//! offset  bytes
//!      0      8  magic
//!      8      4  version
//!     12      4  bytes of the header
//!     16      8  bytes of the page
//!     24      8  zero
//!     32     32  layout digest: weights, format of the pages
//!     64     32  prefix digest: tenant, tokens from the first to the page's last
//!     96     32  checksum (SHA-256) of the bytes before it and of the page
//! ```
//!
//! The checksum in front of a page that travels is that of the bytes before it alone, because the page is sealed.
//!
//! Invariant: a reader takes a page only from a header that is the expected one in every field.

use sha2::{Digest as _, Sha256};

use crate::Digest;

const MAGIC: [u8; 8] = *b"SKEPPAGE";
const VERSION: u32 = 1;
/// Number of bytes of a header.
pub const HEADER_BYTES: usize = 128;
/// Maximum number of bytes of a page.
pub const MAX_PAYLOAD_BYTES: usize = 1 << 30;

/// The description of a page in the header of its image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// The weights and the format of the page.
    pub layout: Digest,
    /// The tenant and the tokens up to the end of the page.
    pub prefix: Digest,
    /// Number of bytes of keys and values behind the header.
    pub payload_bytes: usize,
}

/// The reason that an image is not used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ImageError {
    #[error("it has no header of this version")]
    Foreign,
    #[error("it belongs to another layout")]
    Layout,
    #[error("it holds other tokens")]
    Prefix,
    #[error("its page has a different length")]
    Length,
    #[error("its checksum is wrong")]
    Checksum,
    #[error("it was not sealed with the key of these hosts")]
    Seal,
}

impl Header {
    /// Returns the bytes of the header in front of this page.
    pub fn encode(&self, payload: &[u8]) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8..12].copy_from_slice(&VERSION.to_le_bytes());
        bytes[12..16].copy_from_slice(&(HEADER_BYTES as u32).to_le_bytes());
        bytes[16..24].copy_from_slice(&(self.payload_bytes as u64).to_le_bytes());
        bytes[32..64].copy_from_slice(&self.layout.0);
        bytes[64..96].copy_from_slice(&self.prefix.0);
        let checksum = checksum(&bytes[..96], payload);
        bytes[96..].copy_from_slice(&checksum);
        bytes
    }

    /// Returns the bytes of the header in front of a page whose seal shows every change of it. The checksum is that of the header.
    pub(crate) fn encode_sealed(&self) -> [u8; HEADER_BYTES] {
        self.encode(&[])
    }

    /// Checks that an image is the one that this header describes.
    pub fn check(&self, header: &[u8], payload: &[u8]) -> Result<(), ImageError> {
        self.check_parts(header, payload.len(), payload)
    }

    /// Checks that the header of an image is this one, and that it has as many bytes behind it. Whether they are those of the page
    /// is for the seal to show.
    pub(crate) fn check_sealed(&self, header: &[u8], payload_bytes: usize) -> Result<(), ImageError> {
        self.check_parts(header, payload_bytes, &[])
    }

    fn check_parts(&self, header: &[u8], found_bytes: usize, summed: &[u8]) -> Result<(), ImageError> {
        let expected_start = |at: usize, bytes: &[u8]| header.get(at..at + bytes.len()) == Some(bytes);
        let version = [VERSION.to_le_bytes(), (HEADER_BYTES as u32).to_le_bytes()].concat();
        if header.len() != HEADER_BYTES || !expected_start(0, &MAGIC) || !expected_start(8, &version) {
            return Err(ImageError::Foreign);
        }
        if !expected_start(32, &self.layout.0) {
            return Err(ImageError::Layout);
        }
        if !expected_start(64, &self.prefix.0) {
            return Err(ImageError::Prefix);
        }
        let length = (self.payload_bytes as u64).to_le_bytes();
        if !expected_start(16, &length) || found_bytes != self.payload_bytes {
            return Err(ImageError::Length);
        }
        match header[96..] == checksum(&header[..96], summed) {
            true => Ok(()),
            false => Err(ImageError::Checksum),
        }
    }
}

fn checksum(header: &[u8], payload: &[u8]) -> [u8; 32] {
    Sha256::new_with_prefix(header).chain_update(payload).finalize().into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_changed_bit_is_a_mismatch() {
        let payload: Vec<u8> = (0..200u8).collect();
        let header =
            Header { layout: Digest([1; 32]), prefix: Digest([2; 32]), payload_bytes: payload.len() };
        let bytes = header.encode(&payload);
        assert_eq!(header.check(&bytes, &payload), Ok(()));
        for at in 0..HEADER_BYTES {
            for bit in 0..8 {
                let mut changed = bytes;
                changed[at] ^= 1 << bit;
                assert!(header.check(&changed, &payload).is_err(), "byte {at}, bit {bit}");
            }
        }
        for at in 0..payload.len() {
            let mut changed = payload.clone();
            changed[at] ^= 1;
            assert_eq!(header.check(&bytes, &changed), Err(ImageError::Checksum), "byte {at}");
        }
        assert_eq!(header.check(&bytes, &payload[1..]), Err(ImageError::Length));
        assert_eq!(header.check(&bytes[1..], &payload), Err(ImageError::Foreign));
        assert_eq!(header.check(&[], &[]), Err(ImageError::Foreign));
    }

    #[test]
    fn another_layout_or_prefix_is_a_mismatch() {
        let header = Header { layout: Digest([1; 32]), prefix: Digest([2; 32]), payload_bytes: 3 };
        let bytes = header.encode(b"abc");
        for (other, error) in [
            (Header { layout: Digest([3; 32]), ..header }, ImageError::Layout),
            (Header { prefix: Digest([3; 32]), ..header }, ImageError::Prefix),
            (Header { payload_bytes: 4, ..header }, ImageError::Length),
        ] {
            assert_eq!(other.check(&bytes, b"abc"), Err(error));
        }
    }
}
