//! The balance of a fleet: how evenly turns are spread over the living hosts, and how long it takes until that is so again after
//! some have died.

use super::host::Host;

/// Looks that are ignored at the beginning, while the fleet fills.
const WARM_UP: u64 = 20;
/// Looks in a row at which the turns must be as evenly spread as before.
const CALM: u32 = 4;
/// Multiple of the imbalance before the deaths that counts as balanced.
const TOLERANCE: f64 = 1.25;

/// Looks at a fleet every half second.
#[derive(Debug, Default)]
pub(super) struct Balance {
    looks: u64,
    /// The sum of all imbalances before the deaths, and their number.
    sum: f64,
    counted: u64,
    died_us: Option<u64>,
    /// The time since which the turns are evenly spread, and the number of looks that say so.
    calm: Option<(u64, u32)>,
    balanced_us: Option<u64>,
}

impl Balance {
    /// Takes a look at the hosts.
    pub(super) fn look(&mut self, hosts: &[Host], now_us: u64) {
        self.looks += 1;
        let Some(imbalance) = imbalance(hosts) else { return };
        let Some(died_us) = self.died_us else {
            if self.looks > WARM_UP {
                self.sum += imbalance;
                self.counted += 1;
            }
            return;
        };
        if self.balanced_us.is_some() {
            return;
        }
        let is_calm = self.mean().is_some_and(|before| imbalance <= before * TOLERANCE);
        self.calm = match (is_calm, self.calm) {
            (false, _) => None,
            (true, None) => Some((now_us, 1)),
            (true, Some((since_us, looks))) => Some((since_us, looks + 1)),
        };
        if let Some((since_us, looks)) = self.calm
            && looks >= CALM
        {
            self.balanced_us = Some(since_us.saturating_sub(died_us));
        }
    }

    /// Records that hosts die.
    pub(super) fn note_deaths(&mut self, now_us: u64) {
        self.died_us = Some(now_us);
    }

    /// Returns the mean imbalance before hosts died: the turns of the host with the most of them, divided by their mean.
    pub(super) fn mean(&self) -> Option<f64> {
        (self.counted > 0).then(|| self.sum / self.counted as f64)
    }

    /// Returns the time in seconds from the deaths until the turns were as evenly spread as before, and stayed so.
    pub(super) fn balanced_after_s(&self) -> Option<f64> {
        self.balanced_us.map(|us| us as f64 / 1e6)
    }
}

fn imbalance(hosts: &[Host]) -> Option<f64> {
    let (mut sum, mut most, mut alive) = (0_usize, 0_usize, 0_u32);
    for host in hosts.iter().filter(|host| host.is_alive()) {
        let open = host.open_turns();
        (sum, most, alive) = (sum + open, most.max(open), alive + 1);
    }
    (sum > 0).then(|| most as f64 * f64::from(alive) / sum as f64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::commands::bench::fleet::costs::Costs;
    use crate::commands::bench::fleet::workload::Turn;

    fn hosts(open: &[u32]) -> Vec<Host> {
        let filled = open.iter().map(|open| {
            let mut host = Host::new(&Costs::for_tests());
            for session in 0..*open {
                host.push(Turn { at_us: 0, session, agent: 0, prompt_tokens: 9, output_tokens: 1, cuts: 0 });
            }
            host
        });
        filled.collect()
    }

    #[test]
    fn a_fleet_is_balanced_once_it_stays_as_even_as_before() {
        let (even, uneven) = (hosts(&[2, 2, 3]), hosts(&[1, 9, 2]));
        let mut balance = Balance::default();
        for look in 0..WARM_UP {
            balance.look(&uneven, look);
        }
        assert_eq!(balance.mean(), None, "the fleet fills");
        balance.look(&even, 20);
        assert_eq!(balance.mean(), Some(9.0 / 7.0));
        balance.note_deaths(1_000_000);
        for (fleet, at_us) in [(&even, 1_500_000), (&uneven, 2_000_000)] {
            balance.look(fleet, at_us);
        }
        for at_us in [2_500_000, 3_000_000, 3_500_000] {
            balance.look(&even, at_us);
            assert_eq!(balance.balanced_after_s(), None);
        }
        balance.look(&even, 4_000_000);
        assert_eq!(balance.balanced_after_s(), Some(1.5));
        assert_eq!(balance.mean(), Some(9.0 / 7.0));
    }
}
