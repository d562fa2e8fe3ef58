//! The limit on open files. Each client connection takes one file descriptor, and many systems start
//! processes with a low limit.

/// Raises the soft limit to the hard limit. Logs a warning if that is too low for `max_connections`.
pub fn raise_limit(max_connections: usize) {
    #[cfg(unix)]
    {
        let limit = raised();
        let wanted = needed(max_connections);
        if limit.is_some_and(|limit| limit < wanted) {
            tracing::warn!(
                limit,
                wanted,
                max_connections,
                "the process may open fewer files than its connections can need; raise the hard limit (ulimit -Hn, or \
                 LimitNOFILE of the service), or lower max_connections under [http] in skep.toml"
            );
        }
    }
    #[cfg(not(unix))]
    let _ = max_connections;
}

/// File descriptors beyond client connections: the database, connections that agents open, and files that the
/// system opens itself.
#[cfg(unix)]
const OTHER_FILES: u64 = 512;

#[cfg(unix)]
fn needed(max_connections: usize) -> u64 {
    (max_connections as u64).saturating_add(OTHER_FILES)
}

/// Raises the soft limit and returns the limit that now applies; `None` means unlimited.
#[cfg(unix)]
fn raised() -> Option<u64> {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let limit = getrlimit(Resource::Nofile);
    if limit.current == limit.maximum {
        return limit.current;
    }
    let raised = Rlimit { current: limit.maximum, maximum: limit.maximum };
    match setrlimit(Resource::Nofile, raised) {
        Ok(()) => limit.maximum,
        Err(error) => {
            tracing::debug!(%error, "cannot raise the limit on open files");
            limit.current
        }
    }
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;
    use rustix::process::{Resource, getrlimit};

    #[test]
    fn raises_the_soft_limit_to_the_hard_limit() {
        raise_limit(1);
        let limit = getrlimit(Resource::Nofile);
        assert_eq!(limit.current, limit.maximum);
        assert_eq!(raised(), limit.maximum);
        assert_eq!(needed(8_192), 8_704);
    }
}
