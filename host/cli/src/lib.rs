//! skep
