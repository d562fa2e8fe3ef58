//! Messages to the service manager that started this process, in systemd's notification protocol: a datagram for each
//! message, to the socket that `NOTIFY_SOCKET` names.
//!
//! Without that variable nothing is sent. A message that cannot be sent is logged and changes nothing else.

use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::time::Duration;

use anyhow::{Context as _, Result, bail};

/// Environment variable with the path of the socket, or with `@` and its abstract name.
const SOCKET: &str = "NOTIFY_SOCKET";
/// Environment variables with the time after which a silent process is restarted, and the process it applies to.
const WATCHDOG_US: &str = "WATCHDOG_USEC";
const WATCHDOG_PROCESS: &str = "WATCHDOG_PID";

/// A connection to the service manager.
pub(super) struct ServiceManager {
    socket: Option<UnixDatagram>,
    watchdog: Option<Duration>,
}

impl ServiceManager {
    /// Reads the environment.
    pub fn new() -> Self {
        let variable = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
        let socket = variable(SOCKET).and_then(|name| {
            let opened = open(&name);
            opened.inspect_err(|error| tracing::warn!("cannot notify the service manager: {error:#}")).ok()
        });
        let is_for_us =
            variable(WATCHDOG_PROCESS).is_none_or(|process| process == std::process::id().to_string());
        let watchdog = variable(WATCHDOG_US).filter(|_| is_for_us).and_then(|us| interval(&us));
        Self { socket, watchdog }
    }

    /// Reports that the host answers requests. From now on, and until the process ends, a task also reports at intervals
    /// that the asynchronous runtime is running, if the service manager wants to know that.
    pub fn ready(&self, url: &str) {
        self.send(&format!("READY=1\nSTATUS=serving at {url}"));
        let Some((interval, socket)) = self.watchdog.zip(self.socket.as_ref()) else { return };
        let socket = match socket.try_clone() {
            Ok(socket) => socket,
            Err(error) => return tracing::warn!("cannot notify the watchdog: {error}"),
        };
        tokio::spawn(async move {
            let mut ticks = tokio::time::interval(interval);
            loop {
                ticks.tick().await;
                // A manager that is restarting takes nothing for a moment, and the next message follows.
                let _ = socket.send(b"WATCHDOG=1");
            }
        });
    }

    /// Reports that the host has begun to stop.
    pub fn stopping(&self) {
        self.send("STOPPING=1\nSTATUS=finishing running requests");
    }

    fn send(&self, message: &str) {
        if let Some(socket) = &self.socket
            && let Err(error) = socket.send(message.as_bytes())
        {
            tracing::warn!("cannot send {message:?} to the service manager: {error}");
        }
    }
}

fn open(name: &str) -> Result<UnixDatagram> {
    let address = address(name).with_context(|| format!("{SOCKET}={name}"))?;
    let socket = UnixDatagram::unbound()?;
    socket.connect_addr(&address).with_context(|| format!("{SOCKET}={name}"))?;
    // A manager that reads nothing must not stop the host.
    socket.set_nonblocking(true)?;
    Ok(socket)
}

fn address(name: &str) -> Result<SocketAddr> {
    match name.strip_prefix('@') {
        #[cfg(target_os = "linux")]
        Some(name) => {
            use std::os::linux::net::SocketAddrExt as _;
            Ok(SocketAddr::from_abstract_name(name)?)
        }
        #[cfg(not(target_os = "linux"))]
        Some(_) => bail!("only Linux has abstract sockets"),
        None if name.starts_with('/') => Ok(SocketAddr::from_pathname(name)?),
        None => bail!("it is neither an absolute path nor an abstract name"),
    }
}

/// Returns half of the time after which the service manager gives up, as its documentation recommends.
fn interval(watchdog_us: &str) -> Option<Duration> {
    let us: u64 = watchdog_us.parse().ok().filter(|us| *us > 0)?;
    Some(Duration::from_micros(us / 2).max(Duration::from_millis(1)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_socket_that_is_not_there_is_named_in_the_error() {
        for (name, expected) in [
            ("/no/such/socket", "NOTIFY_SOCKET=/no/such/socket"),
            ("relative", "neither an absolute path"),
            ("vsock:2:1", "neither an absolute path"),
        ] {
            let error = format!("{:#}", open(name).expect_err(name));
            assert!(error.contains(expected), "{error}");
        }
    }

    #[test]
    fn the_watchdog_hears_from_the_host_twice_in_its_time() {
        assert_eq!(interval("30000000"), Some(Duration::from_secs(15)));
        assert_eq!(interval("1"), Some(Duration::from_millis(1)));
        assert_eq!((interval("0"), interval("soon")), (None, None));
    }
}
