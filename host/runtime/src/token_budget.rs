//! Daily budgets of agents and tenants: in tokens, and those of tenants also in money (see `usage`). A day is a
//! day in UTC.
//!
//! Invariant: the tokens used are those recorded in the store, in the commit that ends the turn
//! that used them. Tokens that open turns have used or may still use are held for them in memory,
//! so that many concurrent turns do not exceed a budget together.

use crate::{
    BudgetUsedUp, Clock, PriceUnknown, RuntimeError, UsageDay, WorstCase,
    error::Budget,
    name::setting_of,
    options::Rules,
    usage::{Amount, BudgetRefusal, ModelUse, Money, MoneyBudgets, MoneyShare, ReservedCost, Source},
};
use skep_engine::LiveSetting;
use skep_store::{Store, TokenUse, UsageRow};
use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

const DAY_MS: u64 = 24 * 3_600 * 1_000;

/// The reason why no tokens can be reserved.
pub(crate) enum NoTokens {
    UsedUp(BudgetUsedUp),
    /// A budget in money cannot pay for a model without a price.
    NoPrice(PriceUnknown),
    /// The rest is reserved for others, who may release it.
    Reserved,
}

/// The budgets of a host. Clones share the same budgets.
#[derive(Clone)]
pub(crate) struct TokenBudgets(Arc<Inner>);

struct Inner {
    clock: Clock,
    rules: LiveSetting<Rules>,
    money: MoneyBudgets,
    today: Mutex<Today>,
    /// Held while the sums are read again.
    refreshing: tokio::sync::Mutex<()>,
}

struct Today {
    /// Number of the day since 1970.
    day: u32,
    tallies: HashMap<Account, Tally>,
    /// Tokens that were counted since the sums were begun to be read again.
    meanwhile: Option<HashMap<Account, u64>>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Account {
    Agent(String),
    Tenant(String),
}

#[derive(Clone, Copy, Debug, Default)]
struct Tally {
    /// Tokens used by turns that ended today.
    used: u64,
    held: Held,
}

/// Tokens held by open turns, regardless of the day they started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Held {
    /// Tokens reserved for running generations.
    reserved: u64,
    produced: u64,
}

/// The share of one turn in the budgets of its agent and tenant. Dropping it releases what is held.
pub(crate) struct DayShare {
    budgets: TokenBudgets,
    agent: Option<String>,
    tenant: String,
    /// The accounts with their limits.
    accounts: Vec<(Account, u64)>,
    pub(crate) money: MoneyShare,
    /// Locked only while the tallies are locked.
    held: Mutex<Held>,
}

/// The usage of a turn, first as rows to be written at its end, then counted for the day.
#[derive(Clone)]
pub(crate) struct TokenSpend {
    share: Arc<DayShare>,
    used: Option<TokenUse>,
    usage: Vec<UsageRow>,
}

impl TokenSpend {
    pub(crate) fn new(share: &Arc<DayShare>, tokens: u64, source: &Source, models: &ModelUse) -> Self {
        let day = UsageDay::from_number(share.budgets.today().day);
        TokenSpend { share: share.clone(), used: share.used(tokens), usage: source.rows(day, models) }
    }

    pub(crate) fn row(&self) -> Option<TokenUse> {
        self.used.clone()
    }

    pub(crate) fn usage(&self) -> Vec<UsageRow> {
        self.usage.clone()
    }

    /// Returns whether nothing was used.
    pub(crate) fn is_empty(&self) -> bool {
        self.used.is_none() && self.usage.is_empty()
    }

    /// Counts what was used after its rows were written.
    pub(crate) fn add_to_day(&self) {
        if let Some(used) = &self.used {
            self.share.add_to_day(used);
        }
        self.share.money.add_to_day(&self.usage);
    }
}

impl TokenBudgets {
    /// Opens the budgets with the tokens used today.
    pub(crate) async fn open(
        store: &Store,
        clock: Clock,
        rules: LiveSetting<Rules>,
    ) -> Result<Self, RuntimeError> {
        let mut today = Today { day: day_of(clock.now_ms()), tallies: HashMap::new(), meanwhile: None };
        for used in store.token_use(today.day).await? {
            today.count(&used);
        }
        let money = MoneyBudgets::open(store, clock.clone()).await?;
        let (today, refreshing) = (Mutex::new(today), tokio::sync::Mutex::default());
        Ok(TokenBudgets(Arc::new(Inner { clock, rules, money, today, refreshing })))
    }

    /// Reads what was used today again, because other hosts of the cluster use the same budgets. Tokens that are counted meanwhile
    /// may or may not be in the sums, so they are added: for a moment some may count twice, and none are lost. What the turns of
    /// other hosts hold is unknown until they end.
    pub(crate) async fn refresh(&self, store: &Store) -> Result<(), RuntimeError> {
        let _one = self.0.refreshing.lock().await;
        let day = {
            let mut today = self.today();
            today.meanwhile = Some(HashMap::new());
            today.day
        };
        let sums = store.token_use(day).await?;
        {
            let mut today = self.today();
            // Without it, the day has changed.
            if let Some(meanwhile) = today.meanwhile.take() {
                today.tallies.values_mut().for_each(|tally| tally.used = 0);
                sums.iter().for_each(|used| today.count(used));
                for (account, tokens) in meanwhile {
                    today.tallies.entry(account).or_default().used += tokens;
                }
            }
        }
        Ok(self.0.money.refresh(store).await?)
    }

    /// Returns the share for work of a tenant, either with an agent that has this daily limit or
    /// directly with a model. The share keeps the budgets and prices that apply now.
    pub(crate) fn share(&self, tenant: &str, agent: Option<(&str, u32)>) -> DayShare {
        let mut accounts = Vec::with_capacity(2);
        if let Some((name, limit)) = agent {
            accounts.push((Account::Agent(name.to_owned()), u64::from(limit)));
        }
        let rules = self.0.rules.now();
        let limit = setting_of(&rules.tenant_tokens_per_day, tenant);
        if let Some(limit) = limit {
            accounts.push((Account::Tenant(tenant.to_owned()), u64::from(*limit)));
        }
        let limit = setting_of(&rules.tenant_money_per_day, tenant).copied();
        let money = self.0.money.share(tenant, limit, rules.prices.clone());
        let (agent, tenant) = (agent.map(|(name, _)| name.to_owned()), tenant.to_owned());
        DayShare { budgets: self.clone(), agent, tenant, accounts, money, held: Mutex::default() }
    }

    /// Returns the tokens that an agent has used today, with those of its open turns.
    pub(crate) fn used_by_agent(&self, agent: &str) -> u64 {
        self.today().tally(&Account::Agent(agent.to_owned())).spent()
    }

    /// Returns the tokens that a tenant has used today, with those of its open turns, and how many it may use; `None` without such a limit.
    pub(crate) fn tokens_of_tenant(&self, tenant: &str) -> Option<(u64, u64)> {
        let limit = setting_of(&self.0.rules.now().tenant_tokens_per_day, tenant).copied()?;
        let spent = self.today().tally(&Account::Tenant(tenant.to_owned())).spent();
        Some((spent, limit.into()))
    }

    /// Returns the money that a tenant has spent today, with that of its open turns, and its budget; `None` if it has none.
    pub(crate) fn money_of_tenant(&self, tenant: &str) -> Option<(Amount, Money)> {
        let rules = self.0.rules.now();
        let limit = setting_of(&rules.tenant_money_per_day, tenant).copied()?;
        let share = self.0.money.share(tenant, Some(limit), rules.prices.clone());
        Some((share.spent(), limit))
    }

    /// Returns the current day's state, resetting it if the day has changed.
    fn today(&self) -> MutexGuard<'_, Today> {
        let day = day_of(self.0.clock.now_ms());
        let mut today = self.0.today.lock().unwrap_or_else(PoisonError::into_inner);
        if today.day != day {
            today.day = day;
            today.meanwhile = None;
            today.tallies.retain(|_, tally| {
                tally.used = 0;
                tally.held != Held::default()
            });
        }
        today
    }
}

impl Tally {
    /// Returns the tokens that were produced today, whether their turns have ended or not.
    fn spent(self) -> u64 {
        self.used + self.held.produced
    }
}

impl Today {
    fn tally(&self, account: &Account) -> Tally {
        self.tallies.get(account).copied().unwrap_or_default()
    }

    fn count(&mut self, used: &TokenUse) {
        let agent = used.agent.clone().map(Account::Agent);
        for account in agent.into_iter().chain([Account::Tenant(used.tenant.clone())]) {
            if let Some(meanwhile) = &mut self.meanwhile {
                *meanwhile.entry(account.clone()).or_default() += used.tokens;
            }
            self.tallies.entry(account).or_default().used += used.tokens;
        }
    }
}

impl DayShare {
    /// Fails if any of the budgets is used up.
    pub(crate) fn check(&self) -> Result<(), BudgetUsedUp> {
        self.check_tokens()?;
        self.money.check()
    }

    fn check_tokens(&self) -> Result<(), BudgetUsedUp> {
        let today = self.budgets.today();
        let is_used_up = |tally: Tally, limit| tally.spent() >= limit;
        match self.accounts.iter().find(|(account, limit)| is_used_up(today.tally(account), *limit)) {
            Some((account, limit)) => Err(self.used_up(account, *limit)),
            None => Ok(()),
        }
    }

    /// Reserves tokens and money for a request that one of the models answers: at most the worst case, and at least one
    /// token.
    pub(crate) fn reserve_request(
        &self,
        models: &[String],
        worst: WorstCase,
    ) -> Result<ReservedCost, NoTokens> {
        let reserved = self.money.reserve(models, worst, 1)?;
        match self.reserve(reserved.output_tokens) {
            Ok(output_tokens) => Ok(ReservedCost { output_tokens, ..reserved }),
            Err(none) => {
                self.money.settle(reserved.amount, &ModelUse::default());
                Err(none)
            }
        }
    }

    /// Reserves at most `asked` tokens, and at least one.
    fn reserve(&self, asked: u32) -> Result<u32, NoTokens> {
        self.check_tokens().map_err(NoTokens::UsedUp)?;
        let mut today = self.budgets.today();
        let room = self.accounts.iter().map(|(account, limit)| {
            let Tally { used, held } = today.tally(account);
            limit.saturating_sub(used + held.reserved + held.produced)
        });
        let tokens = room.min().unwrap_or(u64::MAX).min(asked.into());
        if tokens == 0 && asked > 0 {
            return Err(NoTokens::Reserved);
        }
        self.hold(&mut today, |held| held.reserved += tokens);
        Ok(tokens as u32)
    }

    /// Reserves what was reserved before a restart, regardless of the budgets.
    pub(crate) fn reserve_again(&self, models: &[String], worst: WorstCase) -> ReservedCost {
        self.hold(&mut self.budgets.today(), |held| held.reserved += u64::from(worst.output_tokens));
        self.money.reserve_again(models, worst)
    }

    /// Replaces a generation's reservation with the tokens that it produced.
    pub(crate) fn settle(&self, reserved: u32, produced: u32) {
        self.hold(&mut self.budgets.today(), |held| {
            held.reserved -= u64::from(reserved);
            held.produced += u64::from(produced);
        });
    }

    /// Returns the row to be written for this many tokens.
    fn used(&self, tokens: u64) -> Option<TokenUse> {
        let day = self.budgets.today().day;
        let (tenant, agent) = (self.tenant.clone(), self.agent.clone());
        (tokens > 0).then_some(TokenUse { day, tenant, agent, tokens })
    }

    /// Counts the tokens after their row was written.
    fn add_to_day(&self, used: &TokenUse) {
        let mut today = self.budgets.today();
        let produced = std::mem::take(&mut self.held().produced);
        self.change(&mut today, |held| held.produced -= produced);
        if today.day == used.day {
            today.count(used);
        }
    }

    /// Changes what is held for this turn.
    fn hold(&self, today: &mut Today, change: impl Fn(&mut Held)) {
        change(&mut self.held());
        self.change(today, change);
    }

    fn change(&self, today: &mut Today, change: impl Fn(&mut Held)) {
        for (account, _) in &self.accounts {
            change(&mut today.tallies.entry(account.clone()).or_default().held);
        }
    }

    fn held(&self) -> MutexGuard<'_, Held> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn used_up(&self, account: &Account, limit: u64) -> BudgetUsedUp {
        let message = match account {
            Account::Agent(name) => format!(
                "agent {name:?} has used its {limit} tokens for today; raise `tokens_per_day` under [limits] in agent.toml for \
                 more, up to the operator's ceiling in skep.toml"
            ),
            Account::Tenant(name) => format!(
                "tenant {name:?} has used its {limit} tokens for today; raise `tokens_per_day` under [tenants.{name}] in \
                 skep.toml for more"
            ),
        };
        BudgetUsedUp::until_midnight(Budget::Tokens, message, self.budgets.0.clock.now_ms())
    }
}

impl From<BudgetRefusal> for NoTokens {
    fn from(none: BudgetRefusal) -> Self {
        match none {
            BudgetRefusal::UsedUp(why) => NoTokens::UsedUp(why),
            BudgetRefusal::NoPrice(why) => NoTokens::NoPrice(why),
            BudgetRefusal::Reserved => NoTokens::Reserved,
        }
    }
}

impl Drop for DayShare {
    fn drop(&mut self) {
        let Held { reserved, produced } = *self.held();
        if reserved + produced == 0 {
            return;
        }
        self.change(&mut self.budgets.today(), |held| {
            held.reserved -= reserved;
            held.produced -= produced;
        });
    }
}

fn day_of(ms: u64) -> u32 {
    u32::try_from(ms / DAY_MS).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::RuntimeOptions;
    use std::collections::BTreeMap;

    async fn budgets(store: &Store, clock: &Clock) -> TokenBudgets {
        let tenant_tokens_per_day = BTreeMap::from([("acme".to_owned(), 100), ("default".to_owned(), 50)]);
        let options = RuntimeOptions { tenant_tokens_per_day, ..RuntimeOptions::default() };
        let rules = LiveSetting::new(Rules::from(&options));
        TokenBudgets::open(store, clock.clone(), rules).await.expect("readable")
    }

    async fn spend(store: &Store, share: &DayShare, tokens: u64) {
        let used = share.used(tokens).expect("some");
        store.count_use(Some(used.clone()), Vec::new()).await.expect("written");
        share.add_to_day(&used);
    }

    #[tokio::test]
    async fn reserved_tokens_are_not_reserved_twice_and_are_released() {
        let store = Store::for_tests().await.expect("a database in memory");
        let budgets = budgets(&store, &Clock::at(0)).await;
        let (one, two) = (budgets.share("acme", Some(("a", 10))), budgets.share("acme", Some(("a", 10))));
        assert!(matches!(one.reserve(7), Ok(7)));
        assert!(matches!(two.reserve(7), Ok(3)), "only the rest can be reserved");
        assert!(matches!(two.reserve(1), Err(NoTokens::Reserved)));
        one.settle(7, 5);
        assert!(matches!(two.reserve(7), Ok(2)));
        two.settle(5, 5);
        assert!(matches!(two.reserve(7), Err(NoTokens::UsedUp(_))), "nothing is left to be released");
        drop(one);
        assert!(matches!(two.reserve(7), Ok(5)), "the other turn did not end, so its tokens are released");
    }

    #[tokio::test]
    async fn another_host_that_used_tokens_leaves_fewer() {
        let store = Store::for_tests().await.expect("a database in memory");
        let clock = Clock::at(0);
        let (one, other) = (budgets(&store, &clock).await, budgets(&store, &clock).await);
        let share = other.share("acme", Some(("a", 10)));
        spend(&store, &one.share("acme", Some(("a", 10))), 7).await;
        assert!(matches!(share.reserve(1), Ok(1)));
        other.refresh(&store).await.expect("readable");
        assert!(matches!(share.reserve(7), Ok(2)), "7 are used, and one is reserved here");
        one.refresh(&store).await.expect("readable");
        assert!(matches!(one.share("acme", Some(("a", 10))).reserve(7), Ok(3)), "its own use counts once");
        clock.advance(DAY_MS);
        other.refresh(&store).await.expect("readable");
        assert!(matches!(other.share("acme", Some(("a", 10))).reserve(20), Ok(7)), "a new day");
    }

    #[tokio::test]
    async fn a_used_up_budget_survives_restarts_until_midnight() {
        let store = Store::for_tests().await.expect("a database in memory");
        let clock = Clock::at(3 * DAY_MS + 1_000);
        let share = budgets(&store, &clock).await.share("acme", Some(("a", 10)));
        spend(&store, &share, 10).await;
        let again = budgets(&store, &clock).await;
        let error = again.share("other", Some(("a", 10))).check().expect_err("used by all tenants together");
        assert_eq!(u64::from(error.retry_after_ms), DAY_MS - 1_000);
        assert!(error.to_string().contains("`tokens_per_day` under [limits] in agent.toml"), "{error}");
        again.share("acme", Some(("b", 10))).check().expect("another agent has its own");
        let share = again.share("acme", Some(("a", 10)));
        clock.advance(DAY_MS);
        assert!(matches!(share.reserve(20), Ok(10)), "a new day");
    }

    #[tokio::test]
    async fn a_replaced_budget_counts_what_was_used_before_and_spares_turns_that_run() {
        let store = Store::for_tests().await.expect("a database in memory");
        let budgets = budgets(&store, &Clock::at(0)).await;
        let running = budgets.share("acme", Some(("a", 1_000)));
        spend(&store, &budgets.share("acme", Some(("a", 1_000))), 40).await;
        let tenant_tokens_per_day = BTreeMap::from([("acme".to_owned(), 45)]);
        let options = RuntimeOptions { tenant_tokens_per_day, ..RuntimeOptions::default() };
        budgets.0.rules.replace(Rules::from(&options));
        assert!(matches!(budgets.share("acme", None).reserve(20), Ok(5)), "40 of 45 are used");
        assert!(matches!(running.reserve(50), Ok(50)), "a turn keeps the budget with which it began");
        assert!(matches!(budgets.share("local", None).reserve(500), Ok(500)), "the default budget is gone");
    }

    #[tokio::test]
    async fn a_tenant_has_its_own_or_the_default_budget_across_agents() {
        let store = Store::for_tests().await.expect("a database in memory");
        let budgets = budgets(&store, &Clock::at(0)).await;
        for (tenant, limit, line) in
            [("acme", 100, "[tenants.acme] in skep.toml"), ("local", 50, "[tenants.local] in skep.toml")]
        {
            spend(&store, &budgets.share(tenant, Some(("a", 1_000))), limit - 1).await;
            let itself = budgets.share(tenant, None);
            assert!(matches!(itself.reserve(9), Ok(1)), "{tenant}");
            spend(&store, &itself, 1).await;
            let error = budgets.share(tenant, Some(("b", 1_000))).check().expect_err(tenant).to_string();
            assert!(error.contains(line), "{error}");
        }
    }
}
