//! The operator's settings of the cluster cache.

use std::path::PathBuf;

/// The operator's settings.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    /// The folder of the library; `None` leaves the search to the system.
    pub library: Option<PathBuf>,
    /// The address of the master, with its port.
    pub master: String,
    /// The address of the metadata server, or `P2PHANDSHAKE` for none.
    pub metadata: String,
    /// The name or the address under which other hosts reach this one.
    pub hostname: String,
    /// How bytes are moved, such as `tcp` or `rdma`.
    pub protocol: String,
    /// The devices that move them, separated by commas; empty for all.
    pub devices: String,
    /// Memory of this host for pages of all hosts.
    pub segment_bytes: u64,
    /// Memory for pages on their way.
    pub buffer_bytes: u64,
}
