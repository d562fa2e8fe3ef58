//! The pages of a layer, by the kind of its attention.
//!
//! Invariant: a page number means the same tokens in every layer; the kinds differ only in the bytes of a page.

use skep_kernels::buffer::Backing;
use skep_kernels::kv::{KvFormat, KvLayer};
use skep_kernels::latent::LatentLayer;
use skep_kernels::{Isa, KernelError};

/// The content of a layer's pages for each token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CacheShape {
    /// A key and a value for each head.
    Grouped { kv_heads: usize, head_size: usize },
    /// One latent, and one rotated key.
    Latent { rank: usize, rotated: usize },
}

/// The pages of one layer.
pub(crate) enum LayerCache {
    Grouped(KvLayer),
    Latent(LatentLayer),
}

impl CacheShape {
    /// Returns the size in bytes of a layer of this shape, or `None` if it overflows.
    pub(crate) fn byte_len(self, format: KvFormat, pages: usize) -> Option<usize> {
        match self {
            CacheShape::Grouped { kv_heads, head_size } => {
                KvLayer::byte_len(format, pages, kv_heads, head_size)
            }
            CacheShape::Latent { rank, rotated } => LatentLayer::byte_len(format, pages, rank, rotated),
        }
    }

    /// Allocates the pages of a layer for the kernels of a tier. Whatever the tier, they are as large as
    /// [`CacheShape::byte_len`] says.
    pub(crate) fn pages(self, format: KvFormat, isa: Isa, pages: usize) -> Result<LayerCache, KernelError> {
        Ok(match self {
            CacheShape::Grouped { kv_heads, head_size } => {
                let format = format.for_heads(isa, head_size);
                LayerCache::Grouped(KvLayer::new(format, pages, kv_heads, head_size)?)
            }
            CacheShape::Latent { rank, rotated } => {
                LayerCache::Latent(LatentLayer::new(format, pages, rank, rotated)?)
            }
        })
    }
}

impl LayerCache {
    /// Returns the number of bytes of one page.
    pub(crate) fn page_bytes(&self) -> usize {
        match self {
            LayerCache::Grouped(layer) => layer.page_bytes(),
            LayerCache::Latent(layer) => layer.page_bytes(),
        }
    }

    /// Returns the address ranges of the layer's pages, each with the number of bytes that it has of a page.
    pub(crate) fn backings(&self) -> Vec<(Backing, usize)> {
        match self {
            LayerCache::Grouped(layer) => layer.backings().collect(),
            LayerCache::Latent(layer) => vec![(layer.backing(), layer.page_bytes())],
        }
    }

    pub(crate) fn read_page(&self, page: u32, out: &mut [u8]) -> Result<(), KernelError> {
        match self {
            LayerCache::Grouped(layer) => layer.read_page(page, out),
            LayerCache::Latent(layer) => layer.read_page(page, out),
        }
    }

    pub(crate) fn write_page(&mut self, page: u32, bytes: &[u8]) -> Result<(), KernelError> {
        match self {
            LayerCache::Grouped(layer) => layer.write_page(page, bytes),
            LayerCache::Latent(layer) => layer.write_page(page, bytes),
        }
    }
}
