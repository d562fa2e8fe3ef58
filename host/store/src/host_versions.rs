//! The versions of the hosts of a cluster: what they say to each other, and the schema that they know.
//!
//! Hosts whose protocols are at most one apart work together, so a cluster is upgraded one host after the other. A host that is
//! further apart from one that lives does not start, and does not answer it.

use crate::schema::KNOWN;

/// The version of the protocol between the hosts of a cluster: of what they send to each other, and of what they leave in the
/// database for each other. It grows by one when hosts begin to do something that others have to know about. Hosts that
/// report no version speak the first one.
pub const CLUSTER_PROTOCOL: i64 = 2;

/// The versions of one host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostVersions {
    /// The version of the protocol between hosts (see [`CLUSTER_PROTOCOL`]).
    pub protocol: i64,
    /// The newest schema of the database that the host knows.
    pub schema: i64,
}

impl HostVersions {
    /// The versions of this build.
    pub const OWN: HostVersions = HostVersions { protocol: CLUSTER_PROTOCOL, schema: KNOWN };

    /// Returns whether hosts of these versions work together. Schemas may differ by more: the database says which is the oldest
    /// that can use its tables.
    pub fn work_with(self, other: HostVersions) -> bool {
        speak_with(self.protocol, other.protocol)
    }
}

/// Returns whether hosts that speak these versions of the protocol understand each other.
pub fn speak_with(one: i64, other: i64) -> bool {
    one.abs_diff(other) <= 1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_one_version_apart_work_together_and_others_do_not() {
        let of = |protocol| HostVersions { protocol, ..HostVersions::OWN };
        for (other, expected) in [(1, false), (2, true), (3, true), (4, true), (5, false), (i64::MAX, false)]
        {
            assert_eq!(of(3).work_with(of(other)), expected, "{other}");
            assert_eq!(of(other).work_with(of(3)), expected, "{other}");
        }
        let older = HostVersions { schema: KNOWN - 3, ..HostVersions::OWN };
        assert!(older.work_with(HostVersions::OWN), "the database decides which schemas are too old");
    }
}
