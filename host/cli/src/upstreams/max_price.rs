//! `max_price` of a model of a route: the highest cost of a request, with or without its currency.
//!
//! Invariant: a bound is compared only with prices in its own currency. A file in which it could be another is refused.

use std::collections::BTreeMap;
use std::fmt;

use anyhow::{Result, bail};
use serde::Deserialize;
use serde::de::{Deserializer, Error, Visitor};
use skep_runtime::{Currency, Money, PriceList};

use super::route::RouteModelConfig;

/// The highest cost of a request.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum MaxPriceConfig {
    /// A number in the currency of the prices, which must be the same for all models of the route.
    Number(f64),
    Money(Money),
}

impl MaxPriceConfig {
    /// Returns the number, without its currency.
    pub fn amount(self) -> f64 {
        match self {
            MaxPriceConfig::Number(number) => number,
            MaxPriceConfig::Money(money) => money.amount.as_f64(),
        }
    }
}

/// Checks that no bound of a route is compared with prices in another currency.
pub fn check(models: &[RouteModelConfig], prices: &PriceList) -> Result<()> {
    let mut of_numbers: BTreeMap<Currency, &str> = BTreeMap::new();
    for RouteModelConfig { model, max_price, .. } in models {
        let Some(most) = max_price else { continue };
        for price in prices.of_model(model) {
            match most {
                MaxPriceConfig::Number(_) => _ = of_numbers.entry(price.currency).or_insert(model),
                MaxPriceConfig::Money(Money { currency, .. }) if *currency != price.currency => bail!(
                    "max_price of {model:?} is in {currency}, and its price from {} is in {}",
                    price.from,
                    price.currency
                ),
                MaxPriceConfig::Money(_) => {}
            }
        }
    }
    if of_numbers.len() > 1 {
        let priced = of_numbers.iter().map(|(currency, model)| format!("{model:?} in {currency}"));
        bail!(
            "max_price is a number without a currency, and the models have prices in several: {}\n  hint: add the currency, \
             such as max_price = \"0.01 USD\"",
            priced.collect::<Vec<_>>().join(", ")
        );
    }
    Ok(())
}

impl<'de> Deserialize<'de> for MaxPriceConfig {
    fn deserialize<D: Deserializer<'de>>(reader: D) -> Result<Self, D::Error> {
        struct NumberOrMoney;
        impl Visitor<'_> for NumberOrMoney {
            type Value = MaxPriceConfig;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a number, or an amount with its currency such as \"0.01 USD\"")
            }
            fn visit_i64<E: Error>(self, number: i64) -> Result<MaxPriceConfig, E> {
                self.visit_f64(number as f64)
            }
            fn visit_f64<E: Error>(self, number: f64) -> Result<MaxPriceConfig, E> {
                match number.is_finite() && number >= 0.0 {
                    true => Ok(MaxPriceConfig::Number(number)),
                    false => Err(E::custom("it must not be negative")),
                }
            }
            fn visit_str<E: Error>(self, text: &str) -> Result<MaxPriceConfig, E> {
                text.parse().map(MaxPriceConfig::Money).map_err(E::custom)
            }
        }
        reader.deserialize_any(NumberOrMoney)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;

    /// Checks a route over two models with these prices and bounds.
    fn checked(prices: [&str; 2], bounds: [&str; 2]) -> Result<()> {
        let mut list = PriceList::default();
        let mut route = String::from("[[route]]\nname = \"r\"\n");
        for ((name, currencies), bound) in ["a", "b"].into_iter().zip(prices).zip(bounds) {
            let price = |(month, currency): (usize, &str)| {
                let text = format!(
                    "input = 1\ncached_input = 0\noutput = 1\ncurrency = \"{currency}\"\nfrom = \"2026-0{}-01\"",
                    month + 1
                );
                skep_runtime::parse_toml(&text).expect("a price")
            };
            let prices: Vec<_> = currencies.split_whitespace().enumerate().map(price).collect();
            if !prices.is_empty() {
                list.add(name, prices).expect("prices");
            }
            route.push_str(&format!("[[route.models]]\nmodel = \"{name}\"\n{bound}\n"));
        }
        let config = Config::parse(&route)?;
        check(&config.route[0].models, &list)
    }

    #[test]
    fn prices_in_different_currencies_are_not_compared_with_one_number() {
        let (number, dollars) = ("max_price = 0.01", "max_price = \"0.01 USD\"");
        for (prices, bounds) in [
            (["USD", "USD"], [number, number]),
            (["USD", "EUR"], [dollars, "max_price = \"0.01 EUR\""]),
            (["USD", "EUR"], [number, ""]),
            (["USD", ""], [number, number]),
            (["", ""], [dollars, number]),
        ] {
            checked(prices, bounds).unwrap_or_else(|error| panic!("{prices:?} {bounds:?}: {error:#}"));
        }
        for (prices, bounds, why) in [
            (["USD", "EUR"], [number, number], "prices in several: \"b\" in EUR, \"a\" in USD"),
            (["USD EUR", ""], [number, ""], "hint: add the currency"),
            (
                ["USD", "EUR"],
                [dollars, dollars],
                "max_price of \"b\" is in USD, and its price from 2026-01-01 is in EUR",
            ),
            (["USD EUR", ""], [dollars, ""], "its price from 2026-02-01 is in EUR"),
            (["", ""], ["max_price = \"0.01\"", ""], "such as \"1.50 USD\""),
            (["", ""], ["max_price = -1", ""], "must not be negative"),
            (["", ""], ["max_price = true", ""], "an amount with its currency"),
        ] {
            let error = format!("{:#}", checked(prices, bounds).expect_err(why));
            assert!(error.contains(why), "{error}");
        }
    }
}
