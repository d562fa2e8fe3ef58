//! Weight matrices packed in the layout that the products read.
//!
//! Invariant: a matrix takes as many bytes as its rows, rounded up to whole tiles of 16, take in a file. Operations reject a
//! matrix that is only described.

use std::marker::PhantomData;

use crate::buffer::{AlignedBytes, Arena};
use crate::cpu::dispatch;
use crate::cpu::float_tiles;
use crate::cpu::integer_tiles::UnpackRow;
use crate::cpu::pack::pack_tile;
use crate::cpu::tile_format::{TILE_ROWS, with_tile_format};
use crate::error::{expect_len, product};
use crate::pool::{SharedSlice, by_rows};
use crate::{DType, Isa, KernelError, WorkerPool};

/// A weight matrix in tiles of 16 rows. It takes as many bytes as its rows rounded up to whole tiles.
pub struct PackedMatrix {
    pub(crate) dtype: DType,
    pub(crate) rows: usize,
    pub(crate) columns: usize,
    pub(crate) tile_bytes: usize,
    pub(crate) bytes: AlignedBytes,
}

impl PackedMatrix {
    /// Packs `rows` rows of `columns` values of `dtype` into a buffer of `arena`.
    pub fn pack(
        pool: &WorkerPool,
        arena: &mut Arena,
        dtype: DType,
        rows: usize,
        columns: usize,
        data: &[u8],
    ) -> Result<Self, KernelError> {
        const OP: &str = "pack";
        let row_bytes =
            dtype.row_bytes(columns).ok_or(KernelError::PartialBlock { op: OP, dtype, values: columns })?;
        expect_len(OP, "the byte length", product(OP, "the matrix", &[rows, row_bytes])?, data.len())?;
        let tile_bytes = product(OP, "a tile", &[row_bytes, TILE_ROWS])?;
        let tiles = rows.div_ceil(TILE_ROWS);
        let mut bytes = arena.zeroed(product(OP, "the matrix", &[tiles, tile_bytes])?)?;
        if row_bytes > 0 {
            let (packed, isa) = (SharedSlice::new(bytes.as_mut_slice()), Isa::detect());
            by_rows(pool, tiles, tile_bytes, |tile| {
                let first = tile * TILE_ROWS;
                let source = &data[first * row_bytes..rows.min(first + TILE_ROWS) * row_bytes];
                let rows: Vec<&[u8]> = source.chunks_exact(row_bytes).collect();
                // SAFETY: each tile belongs to one task.
                pack_tile(isa, dtype, &rows, unsafe { packed.part(tile * tile_bytes, tile_bytes) });
            });
        }
        Ok(PackedMatrix { dtype, rows, columns, tile_bytes, bytes })
    }

    /// Describes a matrix without weights, for plans. It takes no memory, and operations reject it.
    pub fn described(dtype: DType, rows: usize, columns: usize) -> Result<Self, KernelError> {
        const OP: &str = "pack";
        let row_bytes =
            dtype.row_bytes(columns).ok_or(KernelError::PartialBlock { op: OP, dtype, values: columns })?;
        let tile_bytes = product(OP, "a tile", &[row_bytes, TILE_ROWS])?;
        product(OP, "the matrix", &[rows.div_ceil(TILE_ROWS), tile_bytes])?;
        Ok(PackedMatrix { dtype, rows, columns, tile_bytes, bytes: AlignedBytes::zeroed(0)? })
    }

    /// Rejects a matrix that was only described.
    pub(crate) fn expect_weights(&self, op: &'static str) -> Result<(), KernelError> {
        let expected = self.rows.div_ceil(TILE_ROWS) * self.tile_bytes;
        expect_len(op, "the byte length of the weights", expected, self.bytes.len())
    }

    /// Returns the format of the weights.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Returns the number of rows, which is the number of outputs of a product.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Returns the number of tiles that hold the rows.
    pub(crate) fn tiles(&self) -> usize {
        self.rows.div_ceil(TILE_ROWS)
    }

    /// Returns the number of columns, which is the number of inputs of a product.
    pub fn columns(&self) -> usize {
        self.columns
    }

    /// Returns the size in bytes that a matrix takes when it is packed, or `None` if its rows are not whole blocks or
    /// the size overflows.
    pub fn packed_len(dtype: DType, rows: usize, columns: usize) -> Option<usize> {
        let tile_bytes = dtype.row_bytes(columns)?.checked_mul(TILE_ROWS)?;
        rows.div_ceil(TILE_ROWS).checked_mul(tile_bytes)
    }

    /// Returns the size in bytes of the packed weights.
    pub fn byte_len(&self) -> usize {
        self.bytes.len()
    }

    /// Converts one row to floats.
    pub(crate) fn unpack_row(&self, isa: Isa, row: usize, out: &mut [f32]) {
        let (tile, lane) = (row / TILE_ROWS, row % TILE_ROWS);
        let tile = &self.bytes.as_slice()[tile * self.tile_bytes..][..self.tile_bytes];
        if self.dtype == DType::F8E4M3 {
            for (column, value) in out.iter_mut().enumerate() {
                *value = float_tiles::F8::value(tile, column, lane);
            }
            return;
        }
        if !self.dtype.is_quantized() {
            let size = self.dtype.block_bytes();
            for (column, value) in out.iter_mut().enumerate() {
                let first = match self.dtype {
                    // Columns are stored in pairs, but for the last one of an odd number.
                    DType::BF16 if column | 1 < self.columns => {
                        (column - column % 2) * TILE_ROWS + 2 * lane + column % 2
                    }
                    _ => column * TILE_ROWS + lane,
                };
                let at = &tile[first * size..][..size];
                *value = match self.dtype {
                    DType::F32 => f32::from_le_bytes([at[0], at[1], at[2], at[3]]),
                    DType::F16 => half::f16::from_le_bytes([at[0], at[1]]).to_f32(),
                    _ => half::bf16::from_le_bytes([at[0], at[1]]).to_f32(),
                };
            }
            return;
        }
        macro_rules! unpack {
            ($format:ty) => {{
                let format = PhantomData;
                let kernel = UnpackRow::<$format> { tile: tile.as_ptr(), row: lane, out, format };
                // SAFETY: the tile holds columns / 32 blocks.
                unsafe { dispatch(isa, kernel) }
            }};
        }
        with_tile_format!(self.dtype, unpack);
    }
}
