//! Counts the requests and tokens of each caller and decides whether the next request is admitted.
//!
//! Memory is bounded: full buckets are removed, tenants and keys are limited by what the operator creates, and
//! addresses that exceed the maximum share one account, so the limit cannot be bypassed by using many addresses.

use super::{
    RateOptions,
    bucket::{Bucket, Rate},
    shared::SharedAmounts,
    status::{RateStatus, Refusal},
};
use crate::{caller::Caller, client_address::network, metrics::RATE_LIMITED};
use skep_engine::{LiveSetting, TokenMeter};
use skep_runtime::{SharedCounts, Tenant};
use std::{
    collections::{BTreeMap, HashMap},
    fmt,
    net::IpAddr,
    num::NonZeroU32,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

/// The rate limiter of one host. The gateway checks requests with it, and engines report tokens to it.
pub struct RateLimiter {
    options: LiveSetting<RateOptions>,
    clock: Clock,
    max_accounts: usize,
    accounts: Mutex<Accounts>,
}

pub(crate) type Clock = Arc<dyn Fn() -> Instant + Send + Sync>;

/// Maximum number of accounts; above it, addresses share one. An account takes about a hundred bytes.
const MAX_ACCOUNTS: usize = 65_536;
/// Minimum time between two removals of full buckets when there are too many accounts.
const TIDY_EVERY: Duration = Duration::from_secs(1);

/// How far one rate is used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct RateUse {
    /// The setting under `[tenants.NAME]` in skep.toml, or of a key.
    pub name: &'static str,
    /// The key that the rate is of, unless it is one of a tenant.
    pub key: Option<String>,
    pub used: u32,
    /// How many can be used at once.
    pub limit: u32,
}

#[derive(Default)]
struct Accounts {
    buckets: HashMap<Account, Bucket>,
    tidied_at: Option<Instant>,
    shared: SharedAmounts,
}

/// An entity with its own bucket.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) enum Account {
    /// The requests of all keys of a tenant.
    Tenant(String),
    Key(String),
    /// Requests without a key, by the network of the client.
    Address(IpAddr),
    /// The requests of all addresses without an account, and of clients whose address is unknown.
    Crowd,
    /// The tokens of a tenant.
    Tokens(String),
}

impl RateLimiter {
    /// Creates a limiter in which all buckets are full.
    pub fn new(options: RateOptions) -> Self {
        Self::with_clock(options, Arc::new(Instant::now), MAX_ACCOUNTS)
    }

    pub(crate) fn with_clock(options: RateOptions, clock: Clock, max_accounts: usize) -> Self {
        RateLimiter { options: LiveSetting::new(options), clock, max_accounts, accounts: Mutex::default() }
    }

    /// Replaces the limits of tenants. What they have used counts toward the new limits.
    pub fn replace(&self, options: RateOptions) {
        let now = (self.clock)();
        let before = self.options.now();
        let mut accounts = self.accounts();
        accounts.buckets.retain(|account, bucket| match (account.rate(&before), account.rate(&options)) {
            _ if matches!(account, Account::Key(_)) => true,
            (Some(before), Some(after)) => {
                if before.per_minute != after.per_minute {
                    bucket.change_rate(before, after, now);
                }
                true
            }
            _ => false,
        });
        self.options.replace(options);
    }

    /// Counts a request if it is within the limits, and refuses it otherwise.
    pub(crate) fn admit(&self, caller: &Caller, address: Option<IpAddr>) -> Result<RateStatus, Refusal> {
        let now = (self.clock)();
        let requests = self.requests_of(caller, address);
        let tokens = self.tokens_of(caller.tenant.as_str());
        if requests.is_empty() && tokens.is_none() {
            return Ok(RateStatus::default());
        }
        let mut accounts = self.accounts();
        let requests: Vec<(Account, Rate)> = requests
            .into_iter()
            .map(|(account, rate)| (accounts.account_slot(account, self.max_accounts, now), rate))
            .collect();
        let longest = requests
            .iter()
            .chain(&tokens)
            .max_by_key(|(account, rate)| accounts.get(account, now).wait(*rate, now));
        let refused =
            longest.map(|(account, rate)| (account, rate, accounts.get(account, now).wait(*rate, now)));
        let refused = refused.filter(|(_, _, wait)| !wait.is_zero());
        if refused.is_none() {
            for (account, rate) in &requests {
                let bucket = accounts.buckets.entry(account.clone()).or_insert(Bucket::full(now));
                bucket.take(1, *rate, now);
                accounts.shared.add(account, *rate, 1, now);
            }
        }
        let window = |(account, rate): &(Account, Rate)| accounts.get(account, now).window(*rate, now);
        let status = RateStatus {
            requests: requests.iter().map(window).min_by_key(|window| window.remaining),
            tokens: tokens.as_ref().map(window),
        };
        match refused {
            None => Ok(status),
            Some((account, rate, retry_after)) => {
                ::metrics::counter!(RATE_LIMITED, "limit" => account.limit()).increment(1);
                Err(Refusal { message: account.refusal(caller, *rate, retry_after), retry_after, status })
            }
        }
    }

    /// Returns how far the rates of a tenant are used, and those of the caller's key, if the tenant is its own, and of these keys.
    pub(crate) fn used(
        &self,
        tenant: &str,
        keys: Vec<(String, NonZeroU32)>,
        caller: &Caller,
        address: Option<IpAddr>,
    ) -> Vec<RateUse> {
        let now = (self.clock)();
        let mut rates = match tenant == caller.tenant.as_str() {
            true => self.requests_of(caller, address),
            false => {
                let rate = self.options.now().of(tenant).requests();
                rate.map(|rate| (Account::Tenant(tenant.to_owned()), rate)).into_iter().collect()
            }
        };
        let others = keys.into_iter().filter(|(key, _)| caller.key() != Some(key.as_str()));
        rates.extend(others.map(|(key, rate)| (Account::Key(key), Rate::per_minute(rate))));
        let mut accounts = self.accounts();
        let used = |(account, rate): (Account, Rate)| {
            let name = account.setting(rate);
            let key = match &account {
                Account::Key(key) => Some(key.clone()),
                _ => None,
            };
            let account = accounts.account_slot(account, self.max_accounts, now);
            let (limit, left) = (rate.burst.get(), accounts.get(&account, now).window(rate, now).remaining);
            RateUse { name, key, used: limit.saturating_sub(left), limit }
        };
        rates.into_iter().chain(self.tokens_of(tenant)).map(used).collect()
    }

    fn requests_of(&self, caller: &Caller, address: Option<IpAddr>) -> Vec<(Account, Rate)> {
        let of_tenant = self.options.now().of(caller.tenant.as_str()).requests().map(|rate| {
            let account = match (caller.key(), address) {
                (Some(_), _) => Account::Tenant(caller.tenant.to_string()),
                (None, Some(address)) => Account::Address(network(address)),
                (None, None) => Account::Crowd,
            };
            (account, rate)
        });
        let of_key = caller.key().zip(caller.requests_per_minute());
        let of_key =
            of_key.map(|(key, per_minute)| (Account::Key(key.to_owned()), Rate::per_minute(per_minute)));
        of_tenant.into_iter().chain(of_key).collect()
    }

    fn tokens_of(&self, tenant: &str) -> Option<(Account, Rate)> {
        let rate = self.options.now().of(tenant).tokens()?;
        Some((Account::Tokens(tenant.to_owned()), rate))
    }

    fn accounts(&self) -> MutexGuard<'_, Accounts> {
        self.accounts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    #[cfg(test)]
    pub(crate) fn len(&self) -> usize {
        self.accounts().buckets.len()
    }
}

impl TokenMeter for RateLimiter {
    fn count(&self, tenant: &str, tokens: usize) {
        let Some((account, rate)) = self.tokens_of(tenant) else { return };
        let now = (self.clock)();
        let mut accounts = self.accounts();
        accounts.shared.add(&account, rate, tokens as u64, now);
        accounts.take(account, rate, tokens as u64, self.max_accounts, now);
    }
}

impl SharedCounts for RateLimiter {
    fn own(&self) -> BTreeMap<String, u64> {
        self.accounts().shared.report((self.clock)())
    }

    fn note(&self, reports: Vec<(i64, BTreeMap<String, u64>)>) {
        let (now, options) = ((self.clock)(), self.options.now());
        let mut accounts = self.accounts();
        for (name, count) in accounts.shared.grown(reports) {
            let Some((account, own_rate)) = Account::of_shared_name(&name) else { continue };
            if let Some(rate) = own_rate.or_else(|| account.rate(&options)) {
                accounts.take(account, rate, count, self.max_accounts, now);
            }
        }
    }
}

impl Default for RateLimiter {
    /// Creates a limiter without any limits except those of keys.
    fn default() -> Self {
        RateLimiter::new(RateOptions::default())
    }
}

impl fmt::Debug for RateLimiter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RateLimiter").field("options", &self.options).finish_non_exhaustive()
    }
}

impl Accounts {
    fn get(&self, account: &Account, now: Instant) -> Bucket {
        self.buckets.get(account).copied().unwrap_or(Bucket::full(now))
    }

    fn take(&mut self, account: Account, rate: Rate, count: u64, max: usize, now: Instant) {
        let account = self.account_slot(account, max, now);
        self.buckets.entry(account).or_insert(Bucket::full(now)).take(count, rate, now);
    }

    /// Returns the account that the request is counted for.
    fn account_slot(&mut self, account: Account, max: usize, now: Instant) -> Account {
        if self.buckets.len() >= max && !self.buckets.contains_key(&account) {
            self.tidy(now);
        }
        let is_new = self.buckets.len() >= max && !self.buckets.contains_key(&account);
        if is_new && matches!(account, Account::Address(_)) { Account::Crowd } else { account }
    }

    fn tidy(&mut self, now: Instant) {
        if self.tidied_at.is_none_or(|at| now.saturating_duration_since(at) >= TIDY_EVERY) {
            self.tidied_at = Some(now);
            self.buckets.retain(|_, bucket| !bucket.is_full(now));
        }
    }
}

impl Account {
    /// Returns the name under which all hosts of a cluster know the account; `None` for addresses, which each host counts for itself.
    /// That of a key has its rate, which another host may not know.
    pub(super) fn shared_name(&self, rate: Rate) -> Option<String> {
        match self {
            Account::Tenant(tenant) => Some(format!("requests {tenant}")),
            Account::Tokens(tenant) => Some(format!("tokens {tenant}")),
            Account::Key(key) => Some(format!("key {} {key}", rate.per_minute)),
            Account::Address(_) | Account::Crowd => None,
        }
    }

    /// Returns the account with this name, and the rate of a key.
    pub(super) fn of_shared_name(name: &str) -> Option<(Account, Option<Rate>)> {
        let (kind, rest) = name.split_once(' ')?;
        match kind {
            "requests" => Some((Account::Tenant(rest.to_owned()), None)),
            "tokens" => Some((Account::Tokens(rest.to_owned()), None)),
            "key" => {
                let (per_minute, key) = rest.split_once(' ')?;
                Some((Account::Key(key.to_owned()), Some(Rate::per_minute(per_minute.parse().ok()?))))
            }
            _ => None,
        }
    }

    /// Returns the rate of the account. That of a key is the key's own.
    fn rate(&self, options: &RateOptions) -> Option<Rate> {
        match self {
            Account::Tenant(tenant) => options.of(tenant).requests(),
            Account::Address(_) | Account::Crowd => options.of(Tenant::local().as_str()).requests(),
            Account::Tokens(tenant) => options.of(tenant).tokens(),
            Account::Key(_) => None,
        }
    }

    /// Returns the setting that limits how many can be used at once.
    fn setting(&self, rate: Rate) -> &'static str {
        match self {
            Account::Tokens(_) => "tokens_per_minute",
            _ if rate.burst != rate.per_minute => "request_burst",
            _ => "requests_per_minute",
        }
    }

    /// Returns the label value of the metric.
    fn limit(&self) -> &'static str {
        match self {
            Account::Tenant(_) => "tenant_requests",
            Account::Key(_) => "key_requests",
            Account::Address(_) | Account::Crowd => "address_requests",
            Account::Tokens(_) => "tenant_tokens",
        }
    }

    fn refusal(&self, caller: &Caller, rate: Rate, retry_after: Duration) -> String {
        let tenant = &caller.tenant;
        let (who, unit) = match self {
            Account::Tenant(_) => (format!("tenant {tenant}"), "requests"),
            Account::Key(key) => (key.clone(), "requests"),
            Account::Address(_) | Account::Crowd => ("your address".to_owned(), "requests"),
            Account::Tokens(_) => (format!("tenant {tenant}"), "tokens"),
        };
        let setting = match self {
            Account::Key(_) => {
                "`skep key create --requests-per-minute N` creates a key with a different limit".to_owned()
            }
            _ => format!("the operator sets it with {unit}_per_minute under [tenants.{tenant}] in skep.toml"),
        };
        let (limit, seconds) = (rate.per_minute, retry_after.as_secs_f64());
        format!(
            "the rate limit of {who} is reached ({unit} per minute: {limit}); retry in {seconds:.1} s; {setting}"
        )
    }
}
