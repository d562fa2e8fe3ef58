//! Prices of models.

use super::{Amount, Currency, UsageDay, money::parse_decimal};
use serde::{Deserialize, Deserializer, de};
use skep_store::UsageCounts;
use std::{collections::BTreeMap, fmt, str::FromStr};

/// Decimals of a price for a million tokens.
const DECIMALS: usize = 6;
/// Maximum price for a million tokens. A larger one is a mistake.
const MAX_RATE: u64 = 1_000_000 * MICROS;
const MICROS: u64 = 10u64.pow(DECIMALS as u32);
/// Maximum number of prices of one model.
const MAX_PRICES: usize = 1_000;

/// A price for a million tokens, in millionths of the currency. It is exact: a decimal number with more
/// decimals is refused.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Rate(u64);

/// The prices of a model from a day on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Price {
    /// Price of a million input tokens that were not cached.
    pub input: Rate,
    /// Price of a million input tokens that were in the prefix cache.
    pub cached_input: Rate,
    /// Price of a million input tokens that another server wrote to its cache, if it has one for them. Without it, such
    /// tokens cost an unknown amount.
    #[serde(default)]
    pub cache_write: Option<Rate>,
    /// Price of a million output tokens.
    pub output: Rate,
    pub currency: Currency,
    /// The first day on which the prices apply.
    pub from: UsageDay,
}

/// The prices of models over time.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PriceList {
    /// The prices by model, each list in the order of its days.
    models: BTreeMap<String, Vec<Price>>,
}

impl Rate {
    /// Returns the price of this many tokens.
    pub(crate) fn of(self, tokens: u64) -> Amount {
        Amount::of_units(u128::from(self.0) * u128::from(tokens))
    }

    /// Returns the number of tokens that an amount pays for.
    pub(crate) fn tokens_for(self, amount: Amount) -> u64 {
        let tokens = amount.units().checked_div(self.0.into()).unwrap_or(u128::MAX);
        u64::try_from(tokens).unwrap_or(u64::MAX)
    }
}

impl fmt::Display for Rate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.of(1_000_000).fmt(f)
    }
}

impl FromStr for Rate {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        let micros = u64::try_from(parse_decimal(text, DECIMALS)?).unwrap_or(u64::MAX);
        match micros > MAX_RATE {
            true => Err(format!("{text} is too much for a million tokens; a price is at most 1000000")),
            false => Ok(Rate(micros)),
        }
    }
}

impl<'de> Deserialize<'de> for Rate {
    fn deserialize<D: Deserializer<'de>>(reader: D) -> Result<Self, D::Error> {
        struct Visitor;
        impl de::Visitor<'_> for Visitor {
            type Value = Rate;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a price for a million tokens, such as 0.60")
            }
            fn visit_i64<E: de::Error>(self, number: i64) -> Result<Rate, E> {
                number.to_string().parse().map_err(E::custom)
            }
            fn visit_u64<E: de::Error>(self, number: u64) -> Result<Rate, E> {
                number.to_string().parse().map_err(E::custom)
            }
            fn visit_f64<E: de::Error>(self, number: f64) -> Result<Rate, E> {
                // The shortest decimal that denotes the number is what was written.
                number.to_string().parse().map_err(E::custom)
            }
            fn visit_str<E: de::Error>(self, text: &str) -> Result<Rate, E> {
                text.parse().map_err(E::custom)
            }
        }
        reader.deserialize_any(Visitor)
    }
}

impl Price {
    /// Returns the cost of these counts, without those whose cost is unknown.
    pub fn cost(&self, counts: &UsageCounts) -> Amount {
        let UsageCounts { input_tokens, cached_tokens, cache_write_tokens, output_tokens, .. } = *counts;
        let computed = input_tokens.saturating_sub(cached_tokens).saturating_sub(cache_write_tokens);
        self.input.of(computed)
            + self.cached_input.of(cached_tokens)
            + self.cache_write.map_or(Amount::ZERO, |rate| rate.of(cache_write_tokens))
            + self.output.of(output_tokens)
    }

    /// Returns the part of the counts whose cost is unknown, if there is one: tokens that were written to another server's
    /// cache, without a price for them.
    pub(crate) fn unpriced(&self, counts: &UsageCounts) -> Option<UsageCounts> {
        let written = counts.cache_write_tokens;
        (written > 0 && self.cache_write.is_none()).then(|| UsageCounts {
            input_tokens: written,
            cache_write_tokens: written,
            ..UsageCounts::default()
        })
    }

    /// Returns the highest price of a million input tokens.
    pub(crate) fn dearest_input(&self) -> Rate {
        self.cache_write.unwrap_or_default().max(self.input)
    }

    /// Returns how much less the cached tokens cost than they would have cost without the cache.
    pub fn saved(&self, counts: &UsageCounts) -> Amount {
        self.input.of(counts.cached_tokens).saturating_sub(self.cached_input.of(counts.cached_tokens))
    }
}

impl PriceList {
    /// Adds the prices of a model. Fails if they are contradictory.
    pub fn add(&mut self, model: &str, mut prices: Vec<Price>) -> Result<(), String> {
        if model.is_empty() || prices.is_empty() || prices.len() > MAX_PRICES {
            return Err(format!("a model needs a name and 1 to {MAX_PRICES} prices"));
        }
        if let Some(price) = prices.iter().find(|price| price.cached_input > price.input) {
            return Err(format!("the prices from {}: `cached_input` is higher than `input`", price.from));
        }
        prices.sort_by_key(|price| price.from);
        if let Some(pair) = prices.windows(2).find(|pair| pair[0].from == pair[1].from) {
            return Err(format!("two prices begin on {}; a day has one price", pair[0].from));
        }
        self.models.insert(model.to_owned(), prices);
        Ok(())
    }

    /// Returns the names of the models that have prices.
    pub fn models(&self) -> impl Iterator<Item = &str> {
        self.models.keys().map(String::as_str)
    }

    /// Returns the prices of a model in the order of their days.
    pub fn of_model(&self, model: &str) -> &[Price] {
        self.models.get(model).map_or(&[], Vec::as_slice)
    }

    /// Returns the price of a model on a day, if it is known.
    pub fn price(&self, model: &str, day: UsageDay) -> Option<&Price> {
        self.models.get(model)?.iter().rfind(|price| price.from <= day)
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    pub(crate) fn price(input: &str, cached_input: &str, output: &str, currency: &str, from: &str) -> Price {
        let rate = |text: &str| text.parse().expect("a price");
        Price {
            input: rate(input),
            cached_input: rate(cached_input),
            cache_write: None,
            output: rate(output),
            currency: currency.parse().expect("a currency"),
            from: from.parse().expect("a day"),
        }
    }

    #[test]
    fn the_price_of_a_day_is_the_last_one_that_began() {
        let mut list = PriceList::default();
        let (early, late) =
            (price("1", "0.1", "2", "USD", "2026-01-10"), price("3", "0.1", "4", "EUR", "2026-02-01"));
        list.add("m", vec![late, early]).expect("two prices");
        let on = |day: &str| list.price("m", day.parse().expect("a day")).copied();
        assert_eq!(on("2026-01-09"), None);
        assert_eq!(on("2026-01-10"), Some(early));
        assert_eq!(on("2026-01-31"), Some(early));
        assert_eq!(on("2026-02-01"), Some(late));
        assert_eq!(list.price("other", "2026-02-01".parse().expect("a day")), None);
    }

    #[test]
    fn contradictory_prices_are_refused() {
        let mut list = PriceList::default();
        let twice =
            vec![price("1", "0", "1", "USD", "2026-01-01"), price("2", "0", "1", "USD", "2026-01-01")];
        let error = list.add("m", twice).expect_err("twice");
        assert!(error.contains("two prices begin on 2026-01-01"), "{error}");
        let error = list.add("m", vec![price("1", "1.1", "1", "USD", "2026-01-01")]).expect_err("a fine");
        assert!(error.contains("`cached_input` is higher"), "{error}");
        list.add("m", Vec::new()).expect_err("no price");
        for (text, why) in
            [("0.0000001", "more than 6 decimals"), ("1000001", "at most 1000000"), ("-1", "not a decimal")]
        {
            let error = text.parse::<Rate>().expect_err(text);
            assert!(error.contains(why), "{error}");
        }
    }

    #[test]
    fn a_price_is_read_exactly_from_numbers_and_texts() {
        let read = |text: &str| serde_json::from_str::<Rate>(text).expect("a price");
        for (text, micros) in
            [("0.60", 600_000), ("0.1", 100_000), ("3", 3_000_000), ("\"0.000001\"", 1), ("0.3", 300_000)]
        {
            assert_eq!(read(text), Rate(micros), "{text}");
        }
        assert_eq!([Rate(600_000).to_string(), Rate(1).to_string()], ["0.60", "0.000001"]);
        serde_json::from_str::<Rate>("true").expect_err("not a number");
        assert_eq!(Rate(3_000_000).tokens_for("1.50".parse().expect("an amount")), 500_000);
        assert_eq!(Rate(0).tokens_for(Amount::ZERO), u64::MAX);
    }
}
