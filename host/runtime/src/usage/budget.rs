//! Daily budgets of tenants in money.
//!
//! The counts of the day are kept, not their cost, so that budgets and prices can be replaced at any time.
//!
//! Invariant: what is spent and what running requests may still cost never exceeds a budget together, except
//! for requests that a restart interrupted, and attempts that another server cut off. A request reserves the most
//! that it can cost before it is sent, at the prices of the dearest model that may answer it; the
//! reservation is replaced with the cost when the request ends, and becomes part of the day's sum when the
//! store has it. A request whose cost cannot be known is refused.

use super::{Amount, Currency, DayCounts, ModelUse, Money, Price, PriceList, UsageDay, WorstCase};
use crate::{BudgetUsedUp, Clock, PriceUnknown, error::Budget};
use skep_store::{Store, StoreError, UsageBy, UsageCounts, UsageFilter, UsageRow};
use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

/// The reason why no money can be reserved.
pub(crate) enum BudgetRefusal {
    UsedUp(BudgetUsedUp),
    NoPrice(PriceUnknown),
    /// The rest is reserved for others, who may release it.
    Reserved,
}

/// The budgets of a host. Clones share the same budgets.
#[derive(Clone)]
pub(crate) struct MoneyBudgets(Arc<Inner>);

struct Inner {
    clock: Clock,
    today: Mutex<Today>,
}

struct Today {
    day: UsageDay,
    used: DayCounts,
    /// Money held by tenants that have a budget in this currency.
    held: HashMap<(String, Currency), Held>,
}

/// Money held for open turns and running requests, regardless of the day they started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Held {
    reserved: Amount,
    spent: Amount,
}

/// The share of one turn, or of one client's request, in the budget of its tenant. Dropping it releases what is
/// held.
pub(crate) struct MoneyShare {
    budgets: MoneyBudgets,
    tenant: String,
    limit: Option<Money>,
    prices: Arc<PriceList>,
    /// Locked only while the tallies are locked.
    held: Mutex<Held>,
}

/// The reservation for a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct ReservedCost {
    /// Number of output tokens that the amount pays for.
    pub(crate) output_tokens: u32,
    pub(crate) amount: Amount,
}

impl MoneyBudgets {
    /// Opens the budgets with what was used today.
    pub(crate) async fn open(store: &Store, clock: Clock) -> Result<Self, StoreError> {
        let day = UsageDay::of_ms(clock.now_ms());
        let today = Today { day, used: DayCounts::default(), held: HashMap::new() };
        let budgets = MoneyBudgets(Arc::new(Inner { clock, today: Mutex::new(today) }));
        budgets.refresh(store).await?;
        Ok(budgets)
    }

    /// Reads what was used today, by all hosts. Only one reading happens at a time.
    pub(crate) async fn refresh(&self, store: &Store) -> Result<(), StoreError> {
        self.today().used.begin_reading();
        let day = self.today().day.number();
        let filter = UsageFilter { tenant: None, first_day: day, last_day: day };
        let sums = store.usage(&filter, UsageBy::Tenant, u32::MAX).await?;
        self.today().used.end_reading(&sums);
        Ok(())
    }

    /// Returns the share for work of a tenant that has this budget, at these prices.
    pub(crate) fn share(&self, tenant: &str, limit: Option<Money>, prices: Arc<PriceList>) -> MoneyShare {
        let (budgets, tenant) = (self.clone(), tenant.to_owned());
        MoneyShare { budgets, tenant, limit, prices, held: Mutex::default() }
    }

    /// Returns the current day's state, resetting it if the day has changed.
    fn today(&self) -> MutexGuard<'_, Today> {
        let day = UsageDay::of_ms(self.0.clock.now_ms());
        let mut today = self.0.today.lock().unwrap_or_else(PoisonError::into_inner);
        if today.day != day {
            today.day = day;
            today.used = DayCounts::default();
            today.held.retain(|_, held| *held != Held::default());
        }
        today
    }
}

impl MoneyShare {
    /// Fails if the budget is used up.
    pub(crate) fn check(&self) -> Result<(), BudgetUsedUp> {
        let Some(limit) = self.limit else { return Ok(()) };
        match self.spent() >= limit.amount {
            true => Err(self.used_up(&format!("tenant {:?} has used its {limit} for today", self.tenant))),
            false => Ok(()),
        }
    }

    /// Returns what the tenant has spent of its budget today, with what its open turns have spent.
    pub(crate) fn spent(&self) -> Amount {
        let today = self.budgets.today();
        let held = self.limit.map_or(Amount::ZERO, |limit| self.all_held(&today, limit).spent);
        self.used(&today) + held
    }

    /// Reserves the maximum cost of a request. If that is more than is left, a request that accepts `least` output
    /// tokens gets as many tokens as the remaining budget covers. Each of the `models` may answer, and all need a price.
    pub(crate) fn reserve(
        &self,
        models: &[String],
        worst: WorstCase,
        least: u32,
    ) -> Result<ReservedCost, BudgetRefusal> {
        let asked = worst.output_tokens;
        let Some(limit) = self.limit else {
            return Ok(ReservedCost { output_tokens: asked, amount: Amount::ZERO });
        };
        self.check().map_err(BudgetRefusal::UsedUp)?;
        let mut today = self.budgets.today();
        let prices = models.iter().map(|model| self.whole_price(limit.currency, model, &today));
        let prices = prices.collect::<Result<Vec<&Price>, _>>().map_err(BudgetRefusal::NoPrice)?;
        let cost = |output_tokens: u32| {
            let costs = prices.iter().map(|price| worst.cost(price, output_tokens));
            costs.max().unwrap_or(Amount::ZERO)
        };
        let least = least.min(asked);
        let affordable = |room: Amount| {
            let tokens = prices.iter().map(|price| worst.affordable(price, room));
            tokens.min().unwrap_or(Some(asked)).filter(|tokens| *tokens >= least)
        };
        let (used, held) = (self.used(&today), self.all_held(&today, limit));
        let left = limit.amount - (used + held.spent);
        let Some(output_tokens) = affordable(left - held.reserved) else {
            if affordable(left).is_some() {
                return Err(BudgetRefusal::Reserved);
            }
            let most = cost(least);
            return Err(BudgetRefusal::UsedUp(self.used_up(&format!(
                "the request may cost {} {}, and tenant {:?} has {} of its {limit} for today left",
                most.rounded(6),
                limit.currency,
                self.tenant,
                left.rounded(6)
            ))));
        };
        let amount = cost(output_tokens);
        self.hold(&mut today, |held| held.reserved += amount);
        Ok(ReservedCost { output_tokens, amount })
    }

    /// Reserves what was reserved before a restart, regardless of the budget.
    pub(crate) fn reserve_again(&self, models: &[String], worst: WorstCase) -> ReservedCost {
        let mut today = self.budgets.today();
        let day = today.day;
        let prices = self.limit.into_iter().flat_map(|limit| {
            models.iter().filter_map(move |model| self.price_in(limit.currency, model, day).ok())
        });
        let amount = prices.map(|price| worst.cost(price, worst.output_tokens)).max().unwrap_or(Amount::ZERO);
        self.hold(&mut today, |held| held.reserved += amount);
        ReservedCost { output_tokens: worst.output_tokens, amount }
    }

    /// Replaces a reservation with the cost of what was used.
    pub(crate) fn settle(&self, reserved: Amount, used: &ModelUse) {
        let mut today = self.budgets.today();
        let costs = used.iter().map(|(model, counts)| self.cost(today.day, model, counts));
        let cost = costs.fold(Amount::ZERO, |sum, cost| sum + cost);
        self.hold(&mut today, |held| {
            held.reserved -= reserved;
            held.spent += cost;
        });
    }

    /// Adds rows of usage to what the tenant has used today, and removes their cost from what is held.
    ///
    /// Callers do this once the rows are written. Only a request without a turn does it before, because its rows are written in the
    /// background and the next request has to be refused meanwhile.
    pub(crate) fn add_to_day(&self, rows: &[UsageRow]) {
        let mut today = self.budgets.today();
        let day = today.day;
        let spent = std::mem::take(&mut self.held().spent);
        self.change(&mut today, |held| held.spent -= spent);
        for row in rows.iter().filter(|row| row.day == day.number()) {
            today.used.count(&self.tenant, &row.model, &row.counts);
        }
    }

    /// Returns the cost of what the tenant has used today.
    fn used(&self, today: &Today) -> Amount {
        let models = today.used.of(&self.tenant);
        models.fold(Amount::ZERO, |sum, (model, counts)| sum + self.cost(today.day, model, counts))
    }

    /// Returns what all shares of the tenant hold.
    fn all_held(&self, today: &Today, limit: Money) -> Held {
        today.held.get(&(self.tenant.clone(), limit.currency)).copied().unwrap_or_default()
    }

    /// Returns the price of a model in the currency of the budget.
    fn price_in(&self, currency: Currency, model: &str, day: UsageDay) -> Result<&Price, PriceUnknown> {
        match self.prices.price(model, day) {
            Some(price) if price.currency == currency => Ok(price),
            Some(price) => Err(self.unknown(model, &format!("is priced in {}", price.currency))),
            None => Err(self.unknown(model, "has no price for today")),
        }
    }

    /// Returns the price of a model if it covers everything that the model has used today.
    fn whole_price(&self, currency: Currency, model: &str, today: &Today) -> Result<&Price, PriceUnknown> {
        let price = self.price_in(currency, model, today.day)?;
        let used = today.used.of_model(&self.tenant, model);
        match used.and_then(|counts| price.unpriced(counts)) {
            None => Ok(price),
            Some(_) => {
                Err(self.unknown(model, "wrote to its server's cache today and has no `cache_write` price"))
            }
        }
    }

    /// Returns the cost in the currency of the budget. What has no such price was not allowed by this budget,
    /// and does not count.
    fn cost(&self, day: UsageDay, model: &str, counts: &UsageCounts) -> Amount {
        let Some(limit) = self.limit else { return Amount::ZERO };
        let price = self.prices.price(model, day).filter(|price| price.currency == limit.currency);
        price.map_or(Amount::ZERO, |price| price.cost(counts))
    }

    /// Changes what is held for this share.
    fn hold(&self, today: &mut Today, change: impl Fn(&mut Held)) {
        change(&mut self.held());
        self.change(today, change);
    }

    fn change(&self, today: &mut Today, change: impl Fn(&mut Held)) {
        if let Some(limit) = self.limit {
            change(today.held.entry((self.tenant.clone(), limit.currency)).or_default());
        }
    }

    fn held(&self) -> MutexGuard<'_, Held> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn used_up(&self, what: &str) -> BudgetUsedUp {
        let message =
            format!("{what}; raise `money_per_day` under [tenants.{}] in skep.toml for more", self.tenant);
        BudgetUsedUp::until_midnight(Budget::Money, message, self.budgets.0.clock.now_ms())
    }

    fn unknown(&self, model: &str, why: &str) -> PriceUnknown {
        let limit = self.limit.map_or_else(String::new, |limit| limit.to_string());
        let tenant = &self.tenant;
        PriceUnknown {
            message: format!(
                "model {model} {why}, and tenant {tenant:?} has a budget of {limit} a day, which only models with a price in \
                 this currency can use; hint: add the price under [prices.\"{model}\"] in skep.toml"
            ),
        }
    }
}

impl Drop for MoneyShare {
    fn drop(&mut self) {
        let Held { reserved, spent } = *self.held();
        if reserved + spent == Amount::ZERO {
            return;
        }
        self.change(&mut self.budgets.today(), |held| {
            held.reserved -= reserved;
            held.spent -= spent;
        });
    }
}

#[cfg(test)]
mod tests {
    use super::{super::price::tests::price, *};
    use crate::name::setting_of;

    const DAY_MS: u64 = 86_400_000;

    fn amount(text: &str) -> Amount {
        text.parse().expect("an amount")
    }

    /// The budgets of a host with these limits and prices.
    struct Budgets {
        budgets: MoneyBudgets,
        limits: std::collections::BTreeMap<String, Money>,
        prices: Arc<PriceList>,
    }

    impl Budgets {
        fn share(&self, tenant: &str) -> MoneyShare {
            let limit = setting_of(&self.limits, tenant).copied();
            self.budgets.share(tenant, limit, self.prices.clone())
        }
    }

    async fn budgets(store: &Store, clock: &Clock, limits: &[(&str, &str)]) -> Budgets {
        let mut prices = PriceList::default();
        // A token of input costs one millionth, a token of output ten.
        prices.add("m", vec![price("1", "0.1", "10", "USD", "1970-01-01")]).expect("a price");
        prices.add("euro", vec![price("1", "0.1", "10", "EUR", "1970-01-01")]).expect("a price");
        prices.add("late", vec![price("1", "0.1", "10", "USD", "2030-01-01")]).expect("a price");
        let limits = limits.iter().map(|(name, money)| ((*name).to_owned(), money.parse().expect("money")));
        let budgets = MoneyBudgets::open(store, clock.clone()).await.expect("readable");
        Budgets { budgets, limits: limits.collect(), prices: Arc::new(prices) }
    }

    fn worst(input_tokens: usize, output_tokens: u32) -> WorstCase {
        WorstCase { input_tokens, output_tokens, asks: 1 }
    }

    fn names(names: &[&str]) -> Vec<String> {
        names.iter().map(ToString::to_string).collect()
    }

    fn of_m(counts: UsageCounts) -> ModelUse {
        let mut used = ModelUse::default();
        used.add("m", &counts);
        used
    }

    fn counts(input: u64, cached: u64, output: u64) -> UsageCounts {
        let (input_tokens, cached_tokens, output_tokens) = (input, cached, output);
        UsageCounts { requests: 1, input_tokens, cached_tokens, output_tokens, ..UsageCounts::default() }
    }

    fn row(day: u32, tenant: &str, counts: UsageCounts) -> UsageRow {
        UsageRow { day, tenant: tenant.into(), model: "m".into(), counts, ..UsageRow::default() }
    }

    #[tokio::test]
    async fn the_worst_case_is_reserved_and_the_cost_is_settled() {
        let store = Store::for_tests().await.expect("a database in memory");
        let budgets = budgets(&store, &Clock::at(0), &[("acme", "0.001 USD")]).await;
        let (one, two) = (budgets.share("acme"), budgets.share("acme"));
        // 100 × 1 + 50 × 10 = 600 millionths of 1,000.
        let reserved = one.reserve(&names(&["m"]), worst(100, 50), 1).ok().expect("there is room");
        assert_eq!(reserved, ReservedCost { output_tokens: 50, amount: amount("0.0006") });
        // 400 are left: 100 for the input, 300 for 30 tokens of output.
        let rest = two.reserve(&names(&["m"]), worst(100, 50), 1).ok().expect("there is some room");
        assert_eq!(rest, ReservedCost { output_tokens: 30, amount: amount("0.0004") });
        assert!(
            matches!(two.reserve(&names(&["m"]), worst(1, 1), 1), Err(BudgetRefusal::Reserved)),
            "others may release it"
        );
        // 60 × 1 + 40 × 0.1 + 10 × 10 = 164 millionths.
        one.settle(reserved.amount, &of_m(counts(100, 40, 10)));
        two.settle(rest.amount, &of_m(UsageCounts::default()));
        // 836 are left, of which 830 pay for 83 tokens.
        let rest = two.reserve(&names(&["m"]), worst(0, 1_000), 1).ok().expect("released");
        assert_eq!(rest, ReservedCost { output_tokens: 83, amount: amount("0.00083") });
        two.settle(rest.amount, &of_m(UsageCounts::default()));
        // The same when the turn has ended, and its row is written.
        one.add_to_day(&[row(0, "acme", counts(100, 40, 10))]);
        drop(one);
        let Err(BudgetRefusal::UsedUp(error)) = two.reserve(&names(&["m"]), worst(100, 100), 100) else {
            panic!("too much")
        };
        let text = error.to_string();
        assert!(
            text.contains("the request may cost 0.0011 USD")
                && text.contains("has 0.000836 of its 0.001 USD"),
            "{text}"
        );
        assert!(
            text.contains("`money_per_day` under [tenants.acme]") && text.contains("00:00 UTC"),
            "{text}"
        );
        assert_eq!(u64::from(error.retry_after_ms), DAY_MS);
    }

    #[tokio::test]
    async fn a_used_up_budget_survives_restarts_until_midnight() {
        let store = Store::for_tests().await.expect("a database in memory");
        let clock = Clock::at(3 * DAY_MS + 1_000);
        let limits = [("acme", "0.001 USD"), ("default", "0.002 USD")];
        // 1,000 × 1 = 1,000 millionths.
        store.count_use(None, vec![row(3, "acme", counts(1_000, 0, 0))]).await.expect("written");
        let budgets = budgets(&store, &clock, &limits).await;
        let error = budgets.share("acme").check().expect_err("used before the restart");
        assert!(error.to_string().contains("has used its 0.001 USD for today"), "{error}");
        budgets.share("globex").check().expect("another tenant has its own");
        clock.advance(DAY_MS);
        budgets.share("acme").check().expect("a new day");
    }

    #[tokio::test]
    async fn replaced_budgets_and_prices_apply_to_what_the_day_has_used_already() {
        let store = Store::for_tests().await.expect("a database in memory");
        let mut budgets = budgets(&store, &Clock::at(0), &[]).await;
        // The tenant has no budget yet: 100 × 1 + 10 × 10 = 200 millionths.
        budgets.share("acme").add_to_day(&[row(0, "acme", counts(100, 0, 10))]);
        budgets.limits = [("acme".to_owned(), "0.0002 USD".parse().expect("money"))].into();
        budgets.share("acme").check().expect_err("a new budget counts what was used before");
        budgets.limits = [("acme".to_owned(), "0.001 USD".parse().expect("money"))].into();
        let running = budgets.share("acme");
        let reserved = running.reserve(&names(&["m"]), worst(100, 10), 1).ok().expect("800 are left");
        let mut dearer = PriceList::default();
        dearer.add("m", vec![price("5", "0.5", "50", "USD", "1970-01-01")]).expect("a price");
        budgets.prices = Arc::new(dearer);
        budgets.share("acme").check().expect_err("five times the price");
        running.settle(reserved.amount, &of_m(counts(100, 0, 10)));
        budgets.limits = [("acme".to_owned(), "0.001 EUR".parse().expect("money"))].into();
        budgets.share("acme").check().expect("another currency begins anew");
        budgets.limits = [("acme".to_owned(), "1 USD".parse().expect("money"))].into();
        let held = budgets.share("acme").all_held(&budgets.budgets.today(), "1 USD".parse().expect("money"));
        assert_eq!(
            (held.reserved, held.spent),
            (Amount::ZERO, amount("0.0002")),
            "at the price of its start"
        );
        drop(running);
        let held = budgets.share("acme").all_held(&budgets.budgets.today(), "1 USD".parse().expect("money"));
        assert_eq!(held, Held::default());
    }

    #[tokio::test]
    async fn a_model_without_a_price_in_the_currency_is_refused() {
        let store = Store::for_tests().await.expect("a database in memory");
        let budgets = budgets(&store, &Clock::at(0), &[("acme", "1 USD")]).await;
        for (model, why) in [
            ("euro", "is priced in EUR"),
            ("late", "has no price for today"),
            ("other", "has no price for today"),
        ] {
            let refused = budgets.share("acme").reserve(&names(&[model]), worst(1, 1), 1);
            let Err(BudgetRefusal::NoPrice(error)) = refused else { panic!("{model} is refused") };
            assert!(
                error.message.contains(why) && error.message.contains(&format!("[prices.\"{model}\"]")),
                "{error}"
            );
            budgets
                .share("globex")
                .reserve(&names(&[model]), worst(1, 1), 1)
                .ok()
                .expect("no budget in money");
        }
    }

    #[tokio::test]
    async fn a_route_reserves_at_the_dearest_price_and_needs_the_prices_of_all_its_models() {
        let store = Store::for_tests().await.expect("a database in memory");
        let mut budgets = budgets(&store, &Clock::at(0), &[("acme", "0.001 USD")]).await;
        let mut prices = PriceList::clone(&budgets.prices);
        prices.add("dear", vec![price("1", "1", "20", "USD", "1970-01-01")]).expect("a price");
        budgets.prices = Arc::new(prices);
        let share = budgets.share("acme");
        for unpriced in ["euro", "other"] {
            let refused = share.reserve(&names(&["m", unpriced]), worst(1, 1), 1);
            let Err(BudgetRefusal::NoPrice(error)) = refused else { panic!("{unpriced} may answer") };
            assert!(error.message.contains(&format!("[prices.\"{unpriced}\"]")), "{error}");
        }
        // 100 × 1 + 45 × 20 = 1,000 millionths.
        let reserved = share.reserve(&names(&["m", "dear"]), worst(100, 50), 1).ok().expect("there is room");
        assert_eq!(reserved, ReservedCost { output_tokens: 45, amount: amount("0.001") });
        share.settle(reserved.amount, &of_m(counts(100, 0, 45)));
        assert_eq!(share.reserve_again(&names(&["m", "dear"]), worst(100, 50)).amount, amount("0.0011"));
    }

    #[tokio::test]
    async fn an_answer_that_may_be_asked_for_again_reserves_all_its_requests() {
        let store = Store::for_tests().await.expect("a database in memory");
        let budgets = budgets(&store, &Clock::at(0), &[("acme", "0.001 USD")]).await;
        let share = budgets.share("acme");
        // 3 × (100 × 1 + 30 × 10) = 1,200 millionths; 23 tokens of output cost 990.
        let thrice = WorstCase { asks: 3, ..worst(100, 30) };
        assert!(matches!(share.reserve(&names(&["m"]), thrice, 30), Err(BudgetRefusal::UsedUp(_))));
        let reserved = share.reserve(&names(&["m"]), thrice, 1).ok().expect("there is room for less");
        assert_eq!(reserved, ReservedCost { output_tokens: 23, amount: amount("0.00099") });
    }

    #[tokio::test]
    async fn what_is_held_is_released_with_its_owner() {
        let store = Store::for_tests().await.expect("a database in memory");
        let budgets = budgets(&store, &Clock::at(0), &[("acme", "0.001 USD")]).await;
        let share = budgets.share("acme");
        share.reserve(&names(&["m"]), worst(500, 10), 1).ok().expect("there is room");
        let again = share.reserve_again(&names(&["m"]), worst(900, 90));
        assert_eq!(again.amount, amount("0.0018"), "an interrupted request continues");
        assert!(matches!(
            budgets.share("acme").reserve(&names(&["m"]), worst(1, 1), 1),
            Err(BudgetRefusal::Reserved)
        ));
        drop(share);
        budgets.share("acme").reserve(&names(&["m"]), worst(100, 90), 90).ok().expect("all of it is left");
    }
}
