//! The two files of one layout: a slot for each page, and a record for each slot.
//!
//! Invariant: a slot's record is written after its page and emptied before its page changes, so a process that is killed
//! leaves either a record with its whole page or no record. Torn writes after a power cut are detected by checksum, and what one
//! leaves in slots without a record is deallocated at the next start. The files can be read by their user alone.

use std::fs::{File, OpenOptions};
use std::io::{self, ErrorKind};
use std::num::NonZeroU64;
use std::ops::Range;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{Advice, FallocateFlags, SeekFrom, fadvise, fallocate, seek};
use rustix::io::Errno;

use super::record::{EMPTY, Head, RECORD_BYTES, Record};
use crate::image::HEADER_BYTES;

/// Slots begin at multiples of this, the block size of most file systems.
const SLOT_ALIGN: u64 = 4096;
/// Maximum number of slots of a layout. Their records take 256 MiB.
pub(super) const MAX_SLOTS: u64 = if cfg!(test) { 1 << 8 } else { 1 << 20 };
/// Number of records read at once.
const RECORDS: usize = 1024;
static ZEROS: [u8; 1 << 16] = [0; 1 << 16];

/// The file with the pages of one layout, and the file with their records.
#[derive(Debug)]
pub(super) struct LayoutFiles {
    /// The first record of the index.
    pub head: Head,
    pages: File,
    index: File,
    paths: [PathBuf; 2],
}

impl LayoutFiles {
    /// Opens the files of a layout, or creates them.
    pub fn open(folder: &Path, head: Head) -> io::Result<LayoutFiles> {
        let name: String = head.layout.0.iter().take(16).map(|byte| format!("{byte:02x}")).collect();
        let paths = [folder.join(format!("{name}.pages")), folder.join(format!("{name}.index"))];
        let [pages, index] = [open(&paths[0])?, open(&paths[1])?];
        let mut first = [0; RECORD_BYTES];
        let found = match index.read_exact_at(&mut first, 0) {
            Ok(()) => Head::decode(&first),
            Err(error) if error.kind() == ErrorKind::UnexpectedEof => None,
            Err(error) => return Err(error),
        };
        if found != Some(head) {
            index.set_len(0)?;
            pages.set_len(0)?;
            index.write_all_at(&head.encode(), 0)?;
        }
        Ok(LayoutFiles { head, pages, index, paths })
    }

    /// Returns the layout of an index that is in the folder, if it is one of this version.
    pub fn head_of(index: &Path) -> Option<Head> {
        let mut first = [0; RECORD_BYTES];
        File::open(index).ok()?.read_exact_at(&mut first, 0).ok()?;
        Head::decode(&first)
    }

    /// Returns the records of all slots that have one, and the number of slots.
    pub fn records(&self) -> io::Result<(Vec<(u32, Record)>, u32)> {
        let bytes = self.index.metadata()?.len();
        let slots = (bytes / RECORD_BYTES as u64).saturating_sub(1).min(MAX_SLOTS);
        let mut records = Vec::new();
        let mut buffer = vec![0; RECORDS * RECORD_BYTES];
        let mut slot = 0;
        while slot < slots {
            let count = (slots - slot).min(RECORDS as u64);
            let part = &mut buffer[..count as usize * RECORD_BYTES];
            self.index.read_exact_at(part, (slot + 1) * RECORD_BYTES as u64)?;
            for (at, bytes) in part.chunks_exact(RECORD_BYTES).enumerate() {
                let number = slot as u32 + at as u32;
                records.extend(Record::decode(bytes, number).map(|record| (number, record)));
            }
            slot += count;
        }
        Ok((records, slots as u32))
    }

    /// Returns the number of bytes of a slot.
    pub fn slot_bytes(&self) -> u64 {
        slot_bytes(self.head.payload_bytes)
    }

    /// Has the system begin to read a slot, for which nobody waits.
    pub fn read_ahead(&self, slot: u32) {
        let at = u64::from(slot) * self.slot_bytes();
        // A system that does not want to leaves the whole read to `read_page`.
        let _ = fadvise(&self.pages, at, NonZeroU64::new(self.slot_bytes()), Advice::WillNeed);
    }

    /// Reads the header and the payload of a slot.
    pub fn read_page(
        &self,
        slot: u32,
        header: &mut [u8; HEADER_BYTES],
        payload: &mut [u8],
    ) -> io::Result<()> {
        let at = u64::from(slot) * self.slot_bytes();
        self.pages.read_exact_at(header, at)?;
        self.pages.read_exact_at(payload, at + HEADER_BYTES as u64)
    }

    /// Writes the header and the payload of a slot.
    pub fn write_page(&self, slot: u32, header: &[u8; HEADER_BYTES], payload: &[u8]) -> io::Result<()> {
        let at = u64::from(slot) * self.slot_bytes();
        self.pages.write_all_at(header, at)?;
        self.pages.write_all_at(payload, at + HEADER_BYTES as u64)
    }

    /// Writes the record of a slot.
    pub fn write_record(&self, slot: u32, record: &Record) -> io::Result<()> {
        self.index.write_all_at(&record.encode(slot), record_at(slot))
    }

    /// Marks a slot as empty.
    pub fn clear_record(&self, slot: u32) -> io::Result<()> {
        self.index.write_all_at(&EMPTY, record_at(slot))
    }

    /// Deallocates the bytes of a slot in the file system, or overwrites them if that is not supported.
    pub fn erase_page(&self, slot: u32) -> io::Result<()> {
        self.deallocate(u64::from(slot) * self.slot_bytes(), self.slot_bytes())
    }

    /// Cuts off what follows this number of slots.
    pub fn cut_behind(&self, slots: u32) -> io::Result<()> {
        let end = u64::from(slots) * self.slot_bytes();
        match self.pages.metadata()?.len() > end {
            true => self.pages.set_len(end),
            false => Ok(()),
        }
    }

    /// Deallocates what slots without a page have, as far as the file system has anything there.
    pub fn erase_leftovers(&self, slots: Range<u32>) -> io::Result<()> {
        let [mut at, end] = [slots.start, slots.end].map(|slot| u64::from(slot) * self.slot_bytes());
        while at < end {
            at = match seek(&self.pages, SeekFrom::Data(at)) {
                Ok(data) if data < end => data,
                // Only a hole follows, or the end of the file.
                Ok(_) | Err(Errno::NXIO) => return Ok(()),
                Err(error) => return Err(error.into()),
            };
            let hole = seek(&self.pages, SeekFrom::Hole(at))?.next_multiple_of(SLOT_ALIGN).min(end);
            self.deallocate(at, hole - at)?;
            at = hole;
        }
        Ok(())
    }

    fn deallocate(&self, at: u64, bytes: u64) -> io::Result<()> {
        let end = self.pages.metadata()?.len().min(at + bytes);
        if at >= end {
            return Ok(());
        }
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        if fallocate(&self.pages, flags, at, bytes).is_ok() {
            return Ok(());
        }
        let (mut offset, mut found) = (at, vec![0; ZEROS.len()]);
        while offset < end {
            let length = (end - offset).min(ZEROS.len() as u64);
            let (found, zeros) = (&mut found[..length as usize], &ZEROS[..length as usize]);
            // Slots that were emptied earlier are not written once more.
            if self.pages.read_exact_at(found, offset).is_err() || found != zeros {
                self.pages.write_all_at(zeros, offset)?;
            }
            offset += length;
        }
        Ok(())
    }

    /// Waits until erasures are on the disk. The pages come first: a record without a page is found to be damaged, and a page
    /// without a record would only be found at the next start.
    pub fn sync(&self) -> io::Result<()> {
        self.pages.sync_data()?;
        self.index.sync_data()
    }

    /// Removes both files.
    pub fn remove(&self) -> io::Result<()> {
        self.paths.iter().try_for_each(std::fs::remove_file)
    }
}

pub(super) fn slot_bytes(payload_bytes: usize) -> u64 {
    ((payload_bytes + HEADER_BYTES) as u64).next_multiple_of(SLOT_ALIGN)
}

fn record_at(slot: u32) -> u64 {
    (u64::from(slot) + 1) * RECORD_BYTES as u64
}

fn open(path: &Path) -> io::Result<File> {
    OpenOptions::new().read(true).write(true).create(true).truncate(false).mode(0o600).open(path)
}
