//! Chooses the prefill host of a prompt: the one with the fewest tokens to compute until the pages are ready.
//!
//! A host that has computed the beginning of a prompt for this one probably has it cached. That is remembered here by the names of the
//! pages, and forgotten after a while, oldest first. If it is wrong, the host computes more, and nothing else happens.

use skep_engine::Digest;
use skep_runtime::WorkingHost;
use std::collections::{HashMap, VecDeque};

/// Maximum number of pages whose host is remembered.
const MAX_REMEMBERED: usize = 1 << 16;
/// Weight of the newest order in the moving average of a host's rate.
const NEWEST: f64 = 0.25;

/// The rates of prefill hosts, and the pages and tokens that each of them has, as far as this host has seen.
#[derive(Default)]
pub(super) struct Known {
    /// The host that has computed a page recently.
    holders: HashMap<Digest, i64>,
    /// The pages, those first that were computed first.
    order: VecDeque<Digest>,
    /// Tokens that were ordered at each host and are not computed yet.
    sent: HashMap<i64, u64>,
    /// Tokens that each host computes in a second, by model.
    rates: HashMap<String, HashMap<i64, f64>>,
}

impl Known {
    /// Returns the hosts in the order in which they are asked for a prompt. `names` are those of all its pages, of `page_tokens`
    /// tokens.
    pub(super) fn ranked(
        &self,
        model: &str,
        mut hosts: Vec<WorkingHost>,
        names: &[Digest],
        page_tokens: usize,
    ) -> Vec<WorkingHost> {
        let held = |host: i64| {
            let has = |name: &Digest| self.holders.get(name) == Some(&host);
            names.iter().rposition(has).map_or(0, |last| (last + 1) * page_tokens) as u64
        };
        let whole = (names.len() * page_tokens) as u64;
        // Until all rates are known, all hosts count as equally fast.
        let all_known = hosts.iter().all(|host| self.rate(model, host.member.number).is_some());
        let cost = |host: &WorkingHost| {
            let number = host.member.number;
            let tokens = self.ahead(host) + whole.saturating_sub(held(number));
            let rate = self.rate(model, number).filter(|_| all_known).unwrap_or(1.0);
            tokens as f64 / rate.max(f64::MIN_POSITIVE)
        };
        hosts.sort_by(|one, other| {
            cost(one).total_cmp(&cost(other)).then(one.member.number.cmp(&other.member.number))
        });
        hosts
    }

    /// Returns the tokens that a host has to compute before a new order.
    pub(super) fn ahead(&self, host: &WorkingHost) -> u64 {
        // The tokens that this host has sent are part of what the other one reports, once it has reported again.
        self.sent.get(&host.member.number).copied().unwrap_or_default().max(host.tokens.prefill)
    }

    /// Returns the rate of a host for a model, if it was measured.
    pub(super) fn rate(&self, model: &str, host: i64) -> Option<f64> {
        self.rates.get(model)?.get(&host).copied()
    }

    pub(super) fn note_sent(&mut self, host: i64, tokens: u64) {
        *self.sent.entry(host).or_default() += tokens;
    }

    pub(super) fn note_ended(&mut self, host: i64, tokens: u64) {
        if let Some(sent) = self.sent.get_mut(&host) {
            *sent = sent.saturating_sub(tokens);
            if *sent == 0 {
                self.sent.remove(&host);
            }
        }
    }

    /// Records that a host has computed pages of a model, and how many tokens of them it computed in how many seconds.
    pub(super) fn note_computed(
        &mut self,
        host: i64,
        (model, names): (&str, &[Digest]),
        (tokens, seconds): (usize, f64),
    ) {
        for name in names {
            if self.holders.insert(*name, host).is_none() {
                self.order.push_back(*name);
            }
        }
        while self.order.len() > MAX_REMEMBERED {
            if let Some(oldest) = self.order.pop_front() {
                self.holders.remove(&oldest);
            }
        }
        if tokens > 0 && seconds > 0.0 {
            let newest = tokens as f64 / seconds;
            let rate = self.rates.entry(model.to_owned()).or_default().entry(host).or_insert(newest);
            *rate += NEWEST * (newest - *rate);
        }
    }

    /// Forgets the rates of all hosts but these, for a model.
    pub(super) fn retain(&mut self, model: &str, hosts: &[WorkingHost]) {
        if let Some(rates) = self.rates.get_mut(model) {
            rates.retain(|number, _| hosts.iter().any(|host| host.member.number == *number));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use skep_runtime::{Member, TokensInFlight};

    fn host(number: i64, prefill: u64) -> WorkingHost {
        let tokens = TokensInFlight { prefill, ..TokensInFlight::default() };
        WorkingHost { member: Member { number, url: format!("http://10.0.0.{number}") }, tokens }
    }

    fn names(count: u8) -> Vec<Digest> {
        (0..count).map(|page| Digest([page; 32])).collect()
    }

    fn first(known: &Known, hosts: &[WorkingHost], names: &[Digest]) -> i64 {
        known.ranked("m", hosts.to_vec(), names, 16)[0].member.number
    }

    #[test]
    fn the_least_busy_host_is_chosen_unless_another_one_has_the_beginning() {
        let mut known = Known::default();
        let hosts = [host(1, 200), host(2, 0)];
        assert_eq!(first(&known, &hosts, &names(100)), 2);
        known.note_computed(1, ("m", &names(10)), (0, 0.0));
        assert_eq!(first(&known, &hosts, &names(100)), 2, "160 tokens are fewer than those ahead");
        known.note_computed(1, ("m", &names(50)), (0, 0.0));
        assert_eq!(first(&known, &hosts, &names(100)), 1);
        known.note_sent(1, 2_000);
        assert_eq!(first(&known, &hosts, &names(100)), 2, "what was sent counts before it is reported");
        known.note_ended(1, 2_000);
        assert_eq!(first(&known, &hosts, &names(100)), 1);
    }

    #[test]
    fn a_fast_host_gets_more_once_the_rates_are_known() {
        let mut known = Known::default();
        let hosts = [host(1, 3_000), host(2, 0)];
        known.note_computed(1, ("m", &[]), (1_000, 0.1));
        assert_eq!(first(&known, &hosts, &names(100)), 2, "nothing is known of the other one");
        known.note_computed(2, ("m", &[]), (1_000, 1.0));
        assert_eq!(first(&known, &hosts, &names(100)), 1);
        assert_eq!((known.rate("m", 2), known.rate("other", 2)), (Some(1_000.0), None));
        known.retain("other", &hosts[..1]);
        assert_eq!(known.rate("m", 2), Some(1_000.0), "an order of another model says nothing about it");
        known.retain("m", &hosts[..1]);
        assert_eq!(known.rate("m", 2), None);
    }

    #[test]
    fn the_remembered_pages_are_bounded() {
        let mut known = Known::default();
        let name = |number: u32| {
            let mut bytes = [0; 32];
            bytes[..4].copy_from_slice(&number.to_le_bytes());
            Digest(bytes)
        };
        let many: Vec<Digest> = (0..MAX_REMEMBERED as u32 + 10).map(name).collect();
        known.note_computed(1, ("m", &many), (0, 0.0));
        assert_eq!((known.holders.len(), known.order.len()), (MAX_REMEMBERED, MAX_REMEMBERED));
        assert!(!known.holders.contains_key(&name(9)) && known.holders.contains_key(&name(10)));
    }
}
