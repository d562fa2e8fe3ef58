//! Reports on the use of models and its cost, in groups.

use super::{Amount, Currency, PriceList, UsageBy, UsageCounts, UsageDay};
use skep_store::UsageSum;
use std::collections::{BTreeMap, BTreeSet};

/// A question about the use of models.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UsageQuery {
    /// The tenant; `None` for all of them.
    pub tenant: Option<String>,
    pub by: UsageBy,
    pub since: UsageDay,
    /// The last day, which is included.
    pub until: UsageDay,
}

/// The use of models over some days.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UsageReport {
    pub lines: Vec<UsageLine>,
    /// The sum of all lines.
    pub total: UsageLine,
}

/// The use of models by one group.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct UsageLine {
    /// The agent of a session, in a report by session.
    pub agent: Option<String>,
    /// The agent, model, tenant, day, key or session; `None` for usage that has none.
    pub name: Option<String>,
    pub counts: UsageCounts,
    /// The cost by currency.
    pub bills: BTreeMap<Currency, Bill>,
    /// The part whose cost is unknown.
    pub unpriced: Unpriced,
}

/// The cost in one currency.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Bill {
    pub cost: Amount,
    /// The amount that cached input tokens would have cost more without the prefix cache.
    pub saved: Amount,
    /// The counts that it was spent for.
    pub counts: UsageCounts,
}

/// Usage on days on which its model has no price, or no price for what was written to a cache.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Unpriced {
    pub models: BTreeSet<String>,
    pub counts: UsageCounts,
}

impl UsageReport {
    /// Adds up sums, each at the price of its own day.
    pub(crate) fn new(by: UsageBy, sums: Vec<UsageSum>, prices: &PriceList) -> Self {
        let mut report = UsageReport { lines: Vec::new(), total: UsageLine::default() };
        let mut lines: BTreeMap<(Option<String>, Option<String>), UsageLine> = BTreeMap::new();
        for sum in sums {
            let name = match by {
                UsageBy::Day => Some(UsageDay::from_number(sum.day).to_string()),
                _ => sum.group.clone(),
            };
            let key = (sum.agent.clone(), name.clone());
            let line = lines.entry(key).or_insert_with(|| UsageLine {
                agent: sum.agent.clone(),
                name,
                ..UsageLine::default()
            });
            line.add(&sum, prices);
            report.total.add(&sum, prices);
        }
        report.lines = lines.into_values().collect();
        report
    }
}

impl UsageLine {
    fn add(&mut self, sum: &UsageSum, prices: &PriceList) {
        self.counts.add(&sum.counts);
        match prices.price(&sum.model, UsageDay::from_number(sum.day)) {
            Some(price) => {
                let bill = self.bills.entry(price.currency).or_default();
                bill.cost += price.cost(&sum.counts);
                bill.saved += price.saved(&sum.counts);
                let unknown = price.unpriced(&sum.counts);
                bill.counts.add(&sum.counts.without(&unknown.unwrap_or_default()));
                if let Some(unknown) = unknown {
                    self.unpriced.models.insert(sum.model.clone());
                    self.unpriced.counts.add(&unknown);
                }
            }
            None => {
                self.unpriced.models.insert(sum.model.clone());
                self.unpriced.counts.add(&sum.counts);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{super::Price, super::price::tests::price, *};

    fn sum(group: &str, day: &str, model: &str, input: u64, cached: u64, output: u64) -> UsageSum {
        let (input_tokens, cached_tokens, output_tokens) = (input, cached, output);
        let counts =
            UsageCounts { requests: 1, input_tokens, cached_tokens, output_tokens, ..Default::default() };
        let day = day.parse::<UsageDay>().expect("a day").number();
        UsageSum { agent: None, group: Some(group.into()), day, model: model.into(), counts }
    }

    /// Returns two models with prices, one of which changes, and a third without a price.
    fn prices() -> PriceList {
        let mut prices = PriceList::default();
        let first = price("0.60", "0.10", "3.00", "USD", "2026-01-01");
        let second = price("0.50", "0.05", "2.00", "USD", "2026-01-11");
        prices.add("kimi", vec![first, second]).expect("two prices");
        prices.add("local", vec![price("0.07", "0.07", "0.13", "EUR", "2026-01-01")]).expect("a price");
        prices
    }

    #[test]
    fn each_row_costs_what_its_model_cost_on_its_day() {
        let sums = vec![
            // 600,000 × 0.60 + 400,000 × 0.10 + 100,000 × 3.00 = 0.36 + 0.04 + 0.30 = 0.70 USD
            // The cache saved 400,000 × (0.60 − 0.10) = 0.20 USD.
            sum("a", "2026-01-10", "kimi", 1_000_000, 400_000, 100_000),
            // 600,000 × 0.50 + 400,000 × 0.05 + 100,000 × 2.00 = 0.30 + 0.02 + 0.20 = 0.52 USD
            // The cache saved 400,000 × (0.50 − 0.05) = 0.18 USD.
            sum("a", "2026-01-11", "kimi", 1_000_000, 400_000, 100_000),
            // 7 × 0.07 + 11 × 0.13 = 0.49 + 1.43 = 1.92 millionths of a euro; cached input costs as much.
            sum("a", "2026-01-11", "local", 7, 3, 11),
            // 1 × 0.60 = 0.6 millionths of a dollar
            sum("b", "2026-01-01", "kimi", 1, 0, 0),
            sum("b", "2026-01-01", "mystery", 5, 2, 9),
            // The day before the first price.
            sum("b", "2025-12-31", "kimi", 1_000_000, 0, 0),
        ];
        let report = UsageReport::new(UsageBy::Agent, sums, &prices());
        let bills = |line: &UsageLine| -> Vec<(String, String, String)> {
            let bills = line.bills.iter();
            bills
                .map(|(currency, bill)| (currency.to_string(), bill.cost.to_string(), bill.saved.to_string()))
                .collect()
        };
        let of =
            |name: &str| report.lines.iter().find(|line| line.name.as_deref() == Some(name)).expect(name);
        let text = |parts: [&str; 3]| (parts[0].to_owned(), parts[1].to_owned(), parts[2].to_owned());
        assert_eq!(bills(of("a")), [text(["EUR", "0.00000192", "0.00"]), text(["USD", "1.22", "0.38"])]);
        assert_eq!(bills(of("b")), [text(["USD", "0.0000006", "0.00"])]);
        assert_eq!(of("a").unpriced, Unpriced::default());
        let unpriced = &of("b").unpriced;
        assert_eq!(unpriced.models.iter().map(String::as_str).collect::<Vec<_>>(), ["kimi", "mystery"]);
        assert_eq!((unpriced.counts.input_tokens, unpriced.counts.output_tokens), (1_000_005, 9));
        assert_eq!(
            bills(&report.total),
            [text(["EUR", "0.00000192", "0.00"]), text(["USD", "1.2200006", "0.38"])]
        );
        let counts = report.total.counts;
        assert_eq!(
            (counts.requests, counts.input_tokens, counts.cached_tokens, counts.output_tokens),
            (6, 3_000_013, 800_005, 200_020)
        );
    }

    #[test]
    fn tokens_written_to_a_cache_have_a_price_of_their_own_or_an_unknown_one() {
        let sums = || {
            // 400,000 of 1,000,000 tokens were read from the cache and 500,000 were written to it.
            let mut sum = sum("a", "2026-01-10", "claude", 1_000_000, 400_000, 100_000);
            sum.counts.cache_write_tokens = 500_000;
            vec![sum]
        };
        let with = |cache_write: Option<&str>| {
            let rate = cache_write.map(|text| text.parse().expect("a price"));
            let price = price("3.00", "0.30", "15.00", "USD", "2026-01-01");
            let mut prices = PriceList::default();
            prices.add("claude", vec![Price { cache_write: rate, ..price }]).expect("a price");
            UsageReport::new(UsageBy::Agent, sums(), &prices).total
        };
        let usd: Currency = "USD".parse().expect("a currency");
        // 100,000 × 3.00 + 400,000 × 0.30 + 500,000 × 3.75 + 100,000 × 15.00 = 0.30 + 0.12 + 1.875 + 1.50
        let known = with(Some("3.75"));
        assert_eq!(
            (known.bills[&usd].cost.to_string(), &known.unpriced),
            ("3.795".to_owned(), &Unpriced::default())
        );
        // Without the price, all but the 500,000 tokens is known.
        let partly = with(None);
        let bill = partly.bills[&usd];
        assert_eq!((bill.cost.to_string(), bill.counts.input_tokens), ("1.92".to_owned(), 500_000));
        assert_eq!(partly.unpriced.models.iter().map(String::as_str).collect::<Vec<_>>(), ["claude"]);
        let counts = partly.unpriced.counts;
        assert_eq!((counts.requests, counts.input_tokens, counts.cache_write_tokens), (0, 500_000, 500_000));
        assert_eq!(partly.counts.input_tokens, 1_000_000);
    }

    #[test]
    fn a_report_by_day_names_the_days() {
        let sums = ["2026-01-10", "2026-01-11"].map(|day| sum("", day, "kimi", 1_000_000, 0, 0));
        let report = UsageReport::new(UsageBy::Day, sums.to_vec(), &prices());
        let costs: Vec<_> = report
            .lines
            .iter()
            .map(|line| {
                (
                    line.name.as_deref().expect("a day"),
                    line.bills[&"USD".parse().expect("a currency")].cost.to_string(),
                )
            })
            .collect();
        assert_eq!(costs, [("2026-01-10", "0.60".to_owned()), ("2026-01-11", "0.50".to_owned())]);
    }
}
