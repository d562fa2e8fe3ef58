//! Who has asked for how much, and whether the next request may come.
//!
//! Memory is bounded: what is full again is forgotten, tenants and keys are as many as the operator makes, and addresses that
//! find no place share one account, so that nobody gets past a limit by coming from everywhere.

use super::{
    RateOptions,
    answer::{Refusal, Standing},
    bucket::{Bucket, Rate},
};
use crate::{access::Caller, client_address::network, metrics::RATE_LIMITED};
use skep_engine::TokenMeter;
use std::{
    collections::HashMap,
    fmt,
    net::IpAddr,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

/// Of one host; the gateway asks it, and engines tell it of tokens.
pub struct RateLimiter {
    options: RateOptions,
    clock: Clock,
    max_accounts: usize,
    accounts: Mutex<Accounts>,
}

pub(crate) type Clock = Arc<dyn Fn() -> Instant + Send + Sync>;

/// Past these no address gets an account of its own. One takes about a hundred bytes.
const MAX_ACCOUNTS: usize = 65_536;
/// Between two looks for accounts that are not needed any more, once there are too many.
const TIDY_EVERY: Duration = Duration::from_secs(1);

#[derive(Default)]
struct Accounts {
    buckets: HashMap<Account, Bucket>,
    tidied_at: Option<Instant>,
}

/// What is counted alone.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Account {
    /// Requests of all keys of a tenant.
    Tenant(String),
    Key(String),
    /// Requests without a key, by the network that one client has.
    Address(IpAddr),
    /// All addresses that have no account, and where none is known.
    Crowd,
    /// Of a tenant.
    Tokens(String),
}

impl RateLimiter {
    pub fn new(options: RateOptions) -> Self {
        Self::with_clock(options, Arc::new(Instant::now), MAX_ACCOUNTS)
    }

    pub(crate) fn with_clock(options: RateOptions, clock: Clock, max_accounts: usize) -> Self {
        RateLimiter { options, clock, max_accounts, accounts: Mutex::default() }
    }

    /// Counts a request, if it may come now.
    pub(crate) fn admit(&self, caller: &Caller, address: Option<IpAddr>) -> Result<Standing, Refusal> {
        let now = (self.clock)();
        let requests = self.requests_of(caller, address);
        let tokens = self.tokens_of(caller.tenant.as_str());
        if requests.is_empty() && tokens.is_none() {
            return Ok(Standing::default());
        }
        let mut accounts = self.accounts();
        let requests: Vec<(Account, Rate)> = requests
            .into_iter()
            .map(|(account, rate)| (accounts.place(account, self.max_accounts, now), rate))
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
            }
        }
        let window = |(account, rate): &(Account, Rate)| accounts.get(account, now).window(*rate, now);
        let standing = Standing {
            requests: requests.iter().map(window).min_by_key(|window| window.remaining),
            tokens: tokens.as_ref().map(window),
        };
        match refused {
            None => Ok(standing),
            Some((account, rate, retry_after)) => {
                ::metrics::counter!(RATE_LIMITED, "limit" => account.limit()).increment(1);
                Err(Refusal { message: account.refusal(caller, *rate, retry_after), retry_after, standing })
            }
        }
    }

    fn requests_of(&self, caller: &Caller, address: Option<IpAddr>) -> Vec<(Account, Rate)> {
        let rates = self.options.of(caller.tenant.as_str());
        let of_tenant = rates.requests_per_minute.map(|per_minute| {
            let account = match (caller.key(), address) {
                (Some(_), _) => Account::Tenant(caller.tenant.to_string()),
                (None, Some(address)) => Account::Address(network(address)),
                (None, None) => Account::Crowd,
            };
            (account, Rate { per_minute, burst: rates.request_burst.unwrap_or(per_minute) })
        });
        let of_key = caller.key().zip(caller.requests_per_minute());
        let of_key =
            of_key.map(|(key, per_minute)| (Account::Key(key.to_owned()), Rate::per_minute(per_minute)));
        of_tenant.into_iter().chain(of_key).collect()
    }

    fn tokens_of(&self, tenant: &str) -> Option<(Account, Rate)> {
        let per_minute = self.options.of(tenant).tokens_per_minute?;
        Some((Account::Tokens(tenant.to_owned()), Rate::per_minute(per_minute)))
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
        let account = accounts.place(account, self.max_accounts, now);
        accounts.buckets.entry(account).or_insert(Bucket::full(now)).take(tokens as u64, rate, now);
    }
}

impl Default for RateLimiter {
    /// Without any limit but those of keys.
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

    /// Where this is counted.
    fn place(&mut self, account: Account, max: usize, now: Instant) -> Account {
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
    /// As the metric calls it.
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
                "`skep key create --requests-per-minute N` makes a key with another limit".to_owned()
            }
            _ => format!("the operator sets it as {unit}_per_minute under [tenants.{tenant}] in skep.toml"),
        };
        let (limit, seconds) = (rate.per_minute, retry_after.as_secs_f64());
        format!(
            "the rate limit of {who} is reached ({unit} per minute: {limit}); the next request may come in {seconds:.1} s; {setting}"
        )
    }
}
