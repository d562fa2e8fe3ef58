//! The record of one slot: the digest and the owners of its page.
//!
//! Invariant: a record that was not written whole, or was written for another slot, reads as empty.

use sha2::{Digest as _, Sha256};

use crate::{Digest, Owner, TenantTag};

pub(super) const RECORD_BYTES: usize = 256;
const MAGIC: [u8; 8] = *b"SKEPSLOT";
const HEAD_MAGIC: [u8; 8] = *b"SKEPKVIX";
/// The version of records and of the names in them.
const VERSION: u32 = 2;
/// Maximum number of owners of one page that are recorded. Further owners are not recorded, so the page may be erased while
/// such an owner still exists. It is then computed again.
pub(super) const MAX_OWNERS: usize = 8;
const OWNERS_AT: usize = 96;
const CHECKSUM_AT: usize = RECORD_BYTES - 16;

/// The page in a slot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Record {
    /// The tenant and the tokens up to the end of the page.
    pub prefix: Digest,
    /// The page before it, unless it is the first of its prefix.
    pub parent: Option<Digest>,
    /// The tenant that the page counts for.
    pub tenant: TenantTag,
    /// A number that is larger for pages that were used later.
    pub used: u64,
    /// The owners whose prefix ends with this page.
    pub owners: Vec<Owner>,
}

/// The first record of an index, which describes its pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Head {
    /// The weights and the format of the pages.
    pub layout: Digest,
    /// Number of bytes of keys and values of each page.
    pub payload_bytes: usize,
}

/// The record of a slot without a page.
pub(super) const EMPTY: [u8; RECORD_BYTES] = [0; RECORD_BYTES];

impl Record {
    /// Returns the bytes of the record in a slot. The checksum covers the number of the slot.
    pub fn encode(&self, slot: u32) -> [u8; RECORD_BYTES] {
        let mut bytes = EMPTY;
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8..12].copy_from_slice(&VERSION.to_le_bytes());
        let owners = &self.owners[..self.owners.len().min(MAX_OWNERS)];
        bytes[12..16].copy_from_slice(&(owners.len() as u32).to_le_bytes());
        bytes[16..48].copy_from_slice(&self.prefix.0);
        bytes[48..80].copy_from_slice(&self.parent.map_or([0; 32], |parent| parent.0));
        bytes[80..88].copy_from_slice(&self.tenant.0.to_le_bytes());
        bytes[88..96].copy_from_slice(&self.used.to_le_bytes());
        for (owner, to) in owners.iter().zip(bytes[OWNERS_AT..CHECKSUM_AT].chunks_exact_mut(16)) {
            to[..8].copy_from_slice(&owner.agent.to_le_bytes());
            to[8..].copy_from_slice(&owner.session.to_le_bytes());
        }
        seal(&mut bytes, u64::from(slot));
        bytes
    }

    /// Reads the record of a slot. Returns `None` if the slot is empty or its record is damaged.
    pub fn decode(bytes: &[u8], slot: u32) -> Option<Record> {
        let bytes: &[u8; RECORD_BYTES] = bytes.try_into().ok()?;
        if bytes[..8] != MAGIC || number32(bytes, 8) != VERSION || !is_sealed(bytes, u64::from(slot)) {
            return None;
        }
        let owners = bytes[OWNERS_AT..CHECKSUM_AT].chunks_exact(16).take(number32(bytes, 12) as usize);
        let owner = |owner: &[u8]| Owner { agent: number64(owner, 0), session: number64(owner, 8) };
        let parent = digest(bytes, 48);
        Some(Record {
            prefix: digest(bytes, 16),
            parent: (parent.0 != [0; 32]).then_some(parent),
            tenant: TenantTag(number64(bytes, 80)),
            used: number64(bytes, 88),
            owners: owners.map(owner).collect(),
        })
    }
}

impl Head {
    /// Returns the bytes of the record.
    pub fn encode(&self) -> [u8; RECORD_BYTES] {
        let mut bytes = EMPTY;
        bytes[..8].copy_from_slice(&HEAD_MAGIC);
        bytes[8..12].copy_from_slice(&VERSION.to_le_bytes());
        bytes[16..48].copy_from_slice(&self.layout.0);
        bytes[48..56].copy_from_slice(&(self.payload_bytes as u64).to_le_bytes());
        seal(&mut bytes, u64::MAX);
        bytes
    }

    /// Reads the first record of an index. Returns `None` if it is damaged or of another version.
    pub fn decode(bytes: &[u8]) -> Option<Head> {
        let bytes: &[u8; RECORD_BYTES] = bytes.try_into().ok()?;
        let is_head = bytes[..8] == HEAD_MAGIC && number32(bytes, 8) == VERSION && is_sealed(bytes, u64::MAX);
        let payload_bytes = usize::try_from(number64(bytes, 48)).ok()?;
        (is_head && (1..=crate::MAX_PAYLOAD_BYTES).contains(&payload_bytes))
            .then(|| Head { layout: digest(bytes, 16), payload_bytes })
    }
}

fn checksum(bytes: &[u8; RECORD_BYTES], place: u64) -> [u8; 16] {
    let hash = Sha256::new_with_prefix(&bytes[..CHECKSUM_AT]).chain_update(place.to_le_bytes()).finalize();
    std::array::from_fn(|at| hash[at])
}

fn seal(bytes: &mut [u8; RECORD_BYTES], place: u64) {
    let checksum = checksum(bytes, place);
    bytes[CHECKSUM_AT..].copy_from_slice(&checksum);
}

fn is_sealed(bytes: &[u8; RECORD_BYTES], place: u64) -> bool {
    bytes[CHECKSUM_AT..] == checksum(bytes, place)
}

fn digest(bytes: &[u8], at: usize) -> Digest {
    Digest(std::array::from_fn(|index| bytes[at + index]))
}

fn number64(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(std::array::from_fn(|index| bytes[at + index]))
}

fn number32(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(std::array::from_fn(|index| bytes[at + index]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_is_read_only_complete_and_from_its_own_slot() {
        let owner = |number| Owner { agent: number, session: number + 1 };
        let record = Record {
            prefix: Digest([3; 32]),
            parent: Some(Digest([4; 32])),
            tenant: TenantTag(5),
            used: 6,
            owners: (1..=8).map(owner).collect(),
        };
        let bytes = record.encode(9);
        assert_eq!(Record::decode(&bytes, 9), Some(record.clone()));
        assert_eq!(Record::decode(&bytes, 8), None, "a record of another slot");
        let first = Record { parent: None, owners: vec![], ..record };
        assert_eq!(Record::decode(&first.encode(0), 0), Some(first));
        for at in 0..RECORD_BYTES {
            let mut torn = bytes;
            torn[at] ^= 0x10;
            assert_eq!(Record::decode(&torn, 9), None, "byte {at}");
        }
        assert_eq!(Record::decode(&EMPTY, 0), None);
        let head = Head { layout: Digest([1; 32]), payload_bytes: 77 };
        assert_eq!(Head::decode(&head.encode()), Some(head));
        assert_eq!(Head::decode(&bytes), None);
    }

    #[test]
    fn an_index_with_names_of_version_1_is_not_read() {
        let mut head = Head { layout: Digest([1; 32]), payload_bytes: 77 }.encode();
        head[8..12].copy_from_slice(&1u32.to_le_bytes());
        seal(&mut head, u64::MAX);
        assert_eq!(Head::decode(&head), None);
    }
}
