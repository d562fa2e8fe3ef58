//! The amounts that the hosts of a cluster count for the same accounts.
//!
//! Each host reports what it has counted, and takes from its own buckets what the others report. So the buckets of all hosts hold
//! the same, but for what was counted since the last report. What is taken too much in this time is an overdraft of the
//! bucket, which later requests make up for.

use super::{bucket::Rate, limiter::Account};
use std::{
    collections::{BTreeMap, HashMap},
    time::{Duration, Instant},
};

/// Maximum number of accounts in a report. Further ones are counted by each host for itself.
const MAX_REPORTED: usize = 512;
/// Time for which an amount is reported that does not grow: all hosts have read it many times by then.
const REPORTED_FOR: Duration = Duration::from_secs(10);

#[derive(Default)]
pub(super) struct SharedAmounts {
    /// Whether there are other hosts.
    is_shared: bool,
    own: HashMap<String, Amount>,
    /// The last reports of the others, by host.
    others: HashMap<i64, BTreeMap<String, u64>>,
}

struct Amount {
    count: u64,
    grown_at: Instant,
}

impl SharedAmounts {
    /// Counts an amount of this host.
    pub(super) fn add(&mut self, account: &Account, rate: Rate, count: u64, now: Instant) {
        let Some(name) = account.shared_name(rate).filter(|_| self.is_shared) else { return };
        if self.own.len() >= MAX_REPORTED && !self.own.contains_key(&name) {
            return;
        }
        let amount = self.own.entry(name).or_insert(Amount { count: 0, grown_at: now });
        amount.count = amount.count.saturating_add(count);
        amount.grown_at = now;
    }

    /// Returns the report of this host. From the first call on, its amounts are counted.
    pub(super) fn report(&mut self, now: Instant) -> BTreeMap<String, u64> {
        self.is_shared = true;
        self.own.retain(|_, amount| now.saturating_duration_since(amount.grown_at) < REPORTED_FOR);
        self.own.iter().map(|(name, amount)| (name.clone(), amount.count)).collect()
    }

    /// Returns what other hosts have counted since their last reports, and remembers these ones. The first report of a host only says
    /// where it begins.
    pub(super) fn grown(&mut self, reports: Vec<(i64, BTreeMap<String, u64>)>) -> Vec<(String, u64)> {
        let mut grown = Vec::new();
        for (host, report) in &reports {
            let Some(before) = self.others.get(host) else { continue };
            for (name, count) in report.iter().take(MAX_REPORTED) {
                // An amount that was not reported for a while begins at zero again.
                let added = match before.get(name) {
                    Some(before) => count.checked_sub(*before).unwrap_or(*count),
                    None => *count,
                };
                if added > 0 {
                    grown.push((name.clone(), added));
                }
            }
        }
        self.others = reports.into_iter().collect();
        grown
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::num::NonZeroU32;

    #[test]
    fn what_others_have_counted_is_added_once() {
        let (rate, now) = (Rate::per_minute(NonZeroU32::MIN), Instant::now());
        let (mut one, mut other) = (SharedAmounts::default(), SharedAmounts::default());
        let account = Account::Tenant("acme".to_owned());
        one.add(&account, rate, 1, now);
        assert!(one.report(now).is_empty(), "nobody else counted before");
        assert!(other.grown(vec![(1, one.report(now))]).is_empty());
        one.add(&account, rate, 2, now);
        one.add(&Account::Crowd, rate, 2, now);
        assert_eq!(other.grown(vec![(1, one.report(now))]), [("requests acme".to_owned(), 2)]);
        assert!(other.grown(vec![(1, one.report(now))]).is_empty());
        one.add(&account, rate, 3, now);
        assert_eq!(other.grown(vec![(1, one.report(now))]), [("requests acme".to_owned(), 3)]);

        let later = now + REPORTED_FOR;
        assert!(other.grown(vec![(1, one.report(later))]).is_empty());
        one.add(&account, rate, 4, later);
        assert_eq!(other.grown(vec![(1, one.report(later))]), [("requests acme".to_owned(), 4)]);
        let mut late = SharedAmounts::default();
        assert!(late.grown(vec![(1, one.report(later))]).is_empty(), "it was not there");
    }

    #[test]
    fn an_account_is_known_by_its_name() {
        let rate = Rate::per_minute(NonZeroU32::new(7).unwrap());
        for account in
            [Account::Tenant("acme".into()), Account::Tokens("a b".into()), Account::Key("key 1".into())]
        {
            let name = account.shared_name(rate).unwrap();
            let (found, own) = Account::of_shared_name(&name).unwrap();
            assert_eq!(found, account);
            assert_eq!(own, matches!(account, Account::Key(_)).then_some(rate));
        }
        assert_eq!(Account::Crowd.shared_name(rate), None);
        assert_eq!(Account::of_shared_name("key none"), None);
    }
}
