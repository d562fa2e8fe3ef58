//! How many files the process may have open. Each connection of a client is one, and systems begin with few.

/// Raises the limit to what the system allows. The log says so if that is too little for the bound of connections.
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
                "the process may have fewer files open than its connections can need; raise the hard limit (ulimit -Hn, or \
                 LimitNOFILE of the service), or set max_connections under [http] in skep.toml to less"
            );
        }
    }
    #[cfg(not(unix))]
    let _ = max_connections;
}

/// Beside connections of clients there are the database, connections that agents make, and what the system opens itself.
#[cfg(unix)]
const OTHER_FILES: u64 = 512;

#[cfg(unix)]
fn needed(max_connections: usize) -> u64 {
    (max_connections as u64).saturating_add(OTHER_FILES)
}

/// The limit that holds now; `None` is none at all.
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
            tracing::debug!(%error, "the limit of open files stays as it is");
            limit.current
        }
    }
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;
    use rustix::process::{Resource, getrlimit};

    #[test]
    fn the_soft_limit_becomes_the_hard_one() {
        raise_limit(1);
        let limit = getrlimit(Resource::Nofile);
        assert_eq!(limit.current, limit.maximum);
        assert_eq!(raised(), limit.maximum);
        assert_eq!(needed(8_192), 8_704);
    }
}
