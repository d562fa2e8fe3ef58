//! Checks that no tile has integers above the bound of its format, on which sums in 16 bits rely.

use std::marker::PhantomData;

use super::super::{Kernel, dispatch};
use super::*;
use crate::random::Random;
use crate::{DType, Isa};

/// Returns the largest integer of the first eight blocks of a tile.
struct Largest<Format> {
    tile: *const u8,
    format: PhantomData<Format>,
}

impl<Format: TileFormat> Kernel for Largest<Format> {
    type Output = u8;

    #[inline(always)]
    unsafe fn run<S: Simd>(self) -> u8 {
        let mut bytes = [0u8; 64];
        let mut largest = 0;
        for block in 0..8 {
            // SAFETY: the tile has eight blocks, and a register has 64 bytes.
            unsafe {
                for register in Format::integers::<S>(self.tile, block) {
                    S::store_i(bytes.as_mut_ptr(), register);
                    largest = bytes.iter().fold(largest, |largest, byte| largest.max(*byte));
                }
            }
        }
        largest
    }
}

#[test]
fn no_integer_exceeds_the_bound_of_its_format() {
    const FORMATS: [DType; 14] = [
        DType::Q4_0,
        DType::Q4_1,
        DType::Q5_0,
        DType::Q5_1,
        DType::Q8_0,
        DType::Q2K,
        DType::Q3K,
        DType::Q4K,
        DType::Q5K,
        DType::Q6K,
        DType::Iq4Nl,
        DType::Iq4Xs,
        DType::Int4,
        DType::Mxfp4,
    ];
    let mut random = Random::fresh();
    for dtype in FORMATS {
        let tile: Vec<u8> =
            (0..dtype.row_bytes(256).unwrap() * TILE_ROWS).map(|_| random.next_u64() as u8).collect();
        for isa in Isa::ALL.into_iter().filter(|isa| isa.supported()) {
            macro_rules! check {
                ($format:ty) => {{
                    let kernel = Largest::<$format> { tile: tile.as_ptr(), format: PhantomData };
                    // SAFETY: the tile has eight blocks.
                    (unsafe { dispatch(isa, kernel) }, <$format as Blocks>::LARGEST)
                }};
            }
            let (largest, bound) = with_tile_format!(dtype, check);
            assert!(largest <= bound, "{dtype:?} on {isa}: {largest}");
            // Random bytes reach nearly every integer.
            assert!(u32::from(largest) * 4 > u32::from(bound) * 3, "{dtype:?} on {isa}: only {largest}");
        }
    }
}
