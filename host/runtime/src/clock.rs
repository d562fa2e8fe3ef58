//! The time of day, as schedules and deliveries go by it. Tests have one that only they move.

use crate::capability::log::now_ms;
use std::time::Duration;
#[cfg(test)]
use tokio::sync::watch;

/// A clock that was set forwards meanwhile is noticed after this long.
const LONGEST_SLEEP_MS: u64 = 30_000;

#[derive(Clone, Debug, Default)]
pub struct Clock(Kind);

#[derive(Clone, Debug, Default)]
enum Kind {
    #[default]
    System,
    #[cfg(test)]
    Moved(watch::Sender<u64>),
}

impl Clock {
    /// A clock that stands at `now_ms` until [`Clock::advance`] moves it.
    #[cfg(test)]
    pub(crate) fn at(now_ms: u64) -> Self {
        Clock(Kind::Moved(watch::Sender::new(now_ms)))
    }

    #[cfg(test)]
    pub(crate) fn advance(&self, ms: u64) {
        let Kind::Moved(hand) = &self.0 else { panic!("nobody moves the clock of the system") };
        hand.send_modify(|now_ms| *now_ms += ms);
    }

    /// Milliseconds since 1970-01-01 UTC.
    pub(crate) fn now_ms(&self) -> u64 {
        match &self.0 {
            Kind::System => now_ms(),
            #[cfg(test)]
            Kind::Moved(hand) => *hand.borrow(),
        }
    }

    /// Resolves when this clock shows that time, however it was set meanwhile.
    pub(crate) async fn sleep_until(&self, at_ms: u64) {
        match &self.0 {
            Kind::System => loop {
                let left_ms = at_ms.saturating_sub(now_ms());
                if left_ms == 0 {
                    return;
                }
                tokio::time::sleep(Duration::from_millis(left_ms.min(LONGEST_SLEEP_MS))).await;
            },
            #[cfg(test)]
            Kind::Moved(hand) => {
                // The sender is part of this; it is not dropped meanwhile.
                let _ = hand.subscribe().wait_for(|now_ms| *now_ms >= at_ms).await;
            }
        }
    }
}
