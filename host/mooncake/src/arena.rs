//! The memory from which pages are written to the store, and into which they are read from it.
//!
//! Invariant: the memory of a lane is never freed and never read in place. A transfer that was reported as failed may still
//! write to it later, so what a lane holds is copied out before it is checked, and a page that such a transfer has
//! overwritten is not accepted.

#![allow(unsafe_code)]

use std::alloc::{Layout, alloc_zeroed, handle_alloc_error};
use std::ffi::c_void;
use std::ptr::NonNull;

const ALIGNMENT: usize = 4096;

/// The memory of one thread for its transfers.
#[derive(Debug)]
pub(crate) struct Lane {
    region: Region,
}

/// The place of a lane, which the store registers.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Region {
    pub start: NonNull<u8>,
    pub bytes: usize,
}

// SAFETY: the region is plain memory that is never freed. Rust code reads and writes it only through the one lane that owns
// it, and the address itself may be anywhere.
unsafe impl Send for Region {}
// SAFETY: as above; a shared region gives away nothing but its address.
unsafe impl Sync for Region {}

impl Lane {
    /// Takes memory for at least `bytes` bytes, which must not be 0, until the process ends.
    pub fn new(bytes: usize) -> Lane {
        let bytes = bytes.next_multiple_of(ALIGNMENT).max(ALIGNMENT);
        let layout = Layout::from_size_align(bytes, ALIGNMENT).expect("a lane is far smaller than memory");
        // SAFETY: the layout has a size that is not zero.
        let start = unsafe { alloc_zeroed(layout) };
        let start = NonNull::new(start).unwrap_or_else(|| handle_alloc_error(layout));
        Lane { region: Region { start, bytes } }
    }

    /// Returns the memory of the lane.
    pub fn region(&self) -> Region {
        self.region
    }

    /// Returns how many objects of `bytes` bytes fit into the lane.
    pub fn room(&self, bytes: usize) -> usize {
        self.region.bytes / bytes.max(1)
    }

    /// Returns the addresses of objects of these sizes that follow each other, or `None` if they have no room.
    pub fn places(&self, sizes: &[usize]) -> Option<Vec<*mut c_void>> {
        let mut at = 0usize;
        let mut places = Vec::with_capacity(sizes.len());
        for size in sizes {
            let end = at.checked_add(*size).filter(|end| *end <= self.region.bytes)?;
            // SAFETY: `at` is at most the size of the region, so the address is in it or one past its end.
            places.push(unsafe { self.region.start.as_ptr().add(at) }.cast());
            at = end;
        }
        Some(places)
    }

    /// Copies objects into the lane, one after the other. Returns their addresses, or `None` if they have no room.
    pub fn fill(&mut self, objects: &[Vec<u8>]) -> Option<Vec<*mut c_void>> {
        let sizes: Vec<usize> = objects.iter().map(Vec::len).collect();
        let places = self.places(&sizes)?;
        for (place, object) in places.iter().zip(objects) {
            // SAFETY: `places` has checked that the bytes of the object fit behind this address, and a vector of somebody
            // else does not overlap the region.
            unsafe { std::ptr::copy_nonoverlapping(object.as_ptr(), place.cast(), object.len()) };
        }
        Some(places)
    }

    /// Returns a copy of `bytes` bytes from the object with this number, if all objects have that many.
    pub fn copy(&self, number: usize, bytes: usize) -> Option<Vec<u8>> {
        let at = number.checked_mul(bytes)?;
        at.checked_add(bytes).filter(|end| *end <= self.region.bytes)?;
        let mut copy = vec![0; bytes];
        // SAFETY: the range was just checked to be in the region, and `copy` has room for it.
        unsafe {
            std::ptr::copy_nonoverlapping(self.region.start.as_ptr().add(at), copy.as_mut_ptr(), bytes);
        }
        Some(copy)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lane_gives_places_only_inside_of_itself() {
        let mut lane = Lane::new(1);
        assert_eq!((lane.region().bytes, lane.room(1024), lane.room(5000)), (4096, 4, 0));
        let places = lane.places(&[1000, 96, 3000]).expect("they fit");
        let start = places[0] as usize;
        assert_eq!((places[1] as usize - start, places[2] as usize - start), (1000, 1096));
        assert!(lane.places(&[4096, 1]).is_none());
        assert!(lane.places(&[1, usize::MAX]).is_none());
        assert!(lane.fill(&[vec![1; 2048], vec![2; 2048]]).is_some());
        assert_eq!((lane.copy(0, 2048), lane.copy(1, 2048)), (Some(vec![1; 2048]), Some(vec![2; 2048])));
        assert_eq!((lane.copy(2, 2048), lane.copy(usize::MAX, 2)), (None, None));
        assert!(lane.fill(&[vec![0; 4097]]).is_none());
    }
}
