//! Tracks what a connection waits for, and until when.

use super::ConnectionOptions;
use std::{
    sync::{Mutex, MutexGuard, PoisonError},
    time::Duration,
};
use tokio::time::Instant;

/// Minimum number of bytes that a client must read within the send timeout while a response waits to be sent, unless
/// it reads all of it.
const MIN_READ_BYTES: usize = 64 << 10;

/// The state of one connection. The socket, the requests and the responses report to it, all from the connection's
/// task.
#[derive(Debug)]
pub(super) struct Pace(Mutex<State>);

#[derive(Debug)]
struct State {
    phase: Phase,
    blocked: Option<Blocked>,
}

#[derive(Clone, Copy, Debug)]
enum Phase {
    /// No data has been received over the connection.
    Opened(Instant),
    /// A part of a request's head has been received.
    Head(Instant),
    /// A request is being handled. This is the only phase without a deadline.
    Answering,
    /// The connection is idle between requests.
    Idle(Instant),
}

/// A response that waits for the client to read.
#[derive(Clone, Copy, Debug)]
struct Blocked {
    since: Instant,
    read_bytes: usize,
}

/// The reason why the host closed a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Overdue {
    Head,
    Idle,
    Reader,
}

impl Overdue {
    /// Returns the label value of the metric.
    pub(super) fn reason(self) -> &'static str {
        match self {
            Overdue::Head => "slow_head",
            Overdue::Idle => "idle",
            Overdue::Reader => "slow_reader",
        }
    }
}

impl Pace {
    pub(super) fn new() -> Self {
        Pace(Mutex::new(State::opened(Instant::now())))
    }

    pub(super) fn received(&self) {
        self.state().received(Instant::now());
    }

    pub(super) fn request_began(&self) {
        self.state().phase = Phase::Answering;
    }

    pub(super) fn answer_ended(&self) {
        self.state().phase = Phase::Idle(Instant::now());
    }

    /// Records that the socket is full because the client has not read earlier data.
    pub(super) fn send_blocked(&self) {
        self.state().send_blocked(Instant::now());
    }

    pub(super) fn sent(&self, bytes: usize) {
        self.state().sent(bytes, Instant::now());
    }

    /// Records that all data has been sent.
    pub(super) fn sent_all(&self) {
        self.state().sent_all(Instant::now());
    }

    pub(super) fn deadline(&self, options: &ConnectionOptions) -> Option<(Instant, Overdue)> {
        self.state().deadline(options)
    }

    /// Returns whether the connection can be closed now without losing a request or a response.
    pub(super) fn is_quiet(&self) -> bool {
        self.state().is_quiet()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn opened(now: Instant) -> Self {
        State { phase: Phase::Opened(now), blocked: None }
    }

    fn received(&mut self, now: Instant) {
        match self.phase {
            Phase::Opened(since) => self.phase = Phase::Head(since),
            Phase::Idle(_) => self.phase = Phase::Head(now),
            Phase::Head(_) | Phase::Answering => {}
        }
    }

    fn send_blocked(&mut self, now: Instant) {
        self.blocked.get_or_insert(Blocked { since: now, read_bytes: 0 });
    }

    fn sent(&mut self, bytes: usize, now: Instant) {
        let Some(blocked) = &mut self.blocked else { return };
        blocked.read_bytes += bytes;
        if blocked.read_bytes >= MIN_READ_BYTES {
            *blocked = Blocked { since: now, read_bytes: 0 };
        }
    }

    fn sent_all(&mut self, now: Instant) {
        if self.blocked.take().is_some() && matches!(self.phase, Phase::Idle(_)) {
            self.phase = Phase::Idle(now);
        }
    }

    fn deadline(&self, options: &ConnectionOptions) -> Option<(Instant, Overdue)> {
        let after = |since: Instant, time: Duration, overdue| Some((since + time, overdue));
        match (self.blocked, self.phase) {
            (Some(blocked), _) => after(blocked.since, options.send_timeout, Overdue::Reader),
            (None, Phase::Opened(since) | Phase::Head(since)) => {
                after(since, options.header_timeout, Overdue::Head)
            }
            (None, Phase::Idle(since)) => after(since, options.idle_timeout, Overdue::Idle),
            (None, Phase::Answering) => None,
        }
    }

    fn is_quiet(&self) -> bool {
        self.blocked.is_none() && matches!(self.phase, Phase::Opened(_) | Phase::Idle(_))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn second(number: u64) -> Duration {
        Duration::from_secs(number)
    }

    /// Returns when the connection is overdue, in seconds after `begin`.
    fn overdue(state: &State, begin: Instant) -> Option<(u64, Overdue)> {
        let options = ConnectionOptions {
            header_timeout: second(1),
            idle_timeout: second(10),
            send_timeout: second(100),
            ..ConnectionOptions::default()
        };
        state.deadline(&options).map(|(at, overdue)| ((at - begin).as_secs(), overdue))
    }

    #[test]
    fn sending_single_bytes_does_not_extend_the_header_timeout() {
        let begin = Instant::now();
        let mut state = State::opened(begin);
        state.received(begin + second(5));
        state.received(begin + second(6));
        assert_eq!(overdue(&state, begin), Some((1, Overdue::Head)));
        state.phase = Phase::Answering;
        assert_eq!(overdue(&state, begin), None);
        state.phase = Phase::Idle(begin + second(20));
        assert_eq!(overdue(&state, begin), Some((30, Overdue::Idle)));
        state.received(begin + second(25));
        state.received(begin + second(26));
        assert_eq!(overdue(&state, begin), Some((26, Overdue::Head)));
    }

    #[test]
    fn a_slow_reader_is_overdue_unless_it_keeps_reading() {
        let begin = Instant::now();
        let mut state = State::opened(begin);
        state.phase = Phase::Answering;
        state.send_blocked(begin);
        state.sent(MIN_READ_BYTES - 1, begin + second(60));
        state.send_blocked(begin + second(60));
        assert_eq!(overdue(&state, begin), Some((100, Overdue::Reader)));
        state.sent(1, begin + second(70));
        assert_eq!(overdue(&state, begin), Some((170, Overdue::Reader)));
        state.sent_all(begin + second(80));
        assert_eq!(overdue(&state, begin), None);
    }

    #[test]
    fn a_connection_is_idle_only_after_its_response_is_sent() {
        let begin = Instant::now();
        let mut state = State::opened(begin);
        state.phase = Phase::Answering;
        state.send_blocked(begin);
        state.phase = Phase::Idle(begin + second(1));
        assert_eq!(overdue(&state, begin), Some((100, Overdue::Reader)));
        assert!(!state.is_quiet());
        state.sent_all(begin + second(50));
        assert_eq!(overdue(&state, begin), Some((60, Overdue::Idle)));
        assert!(state.is_quiet());
    }
}
