//! `[prices."MODEL"]` in `skep.toml`: what a model costs, once or from several days on.

use std::collections::BTreeMap;
use std::fmt;

use anyhow::Result;
use serde::Deserialize;
use serde::de::value::{MapAccessDeserializer, SeqAccessDeserializer};
use serde::de::{Deserializer, MapAccess, SeqAccess, Visitor};
use skep_runtime::{Price, PriceList};

/// The prices of one model: one table, or a list of tables with different first days.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct PricesConfig(Vec<Price>);

impl PricesConfig {
    /// Adds the prices of a model to a list.
    pub fn add_to(&self, prices: &mut PriceList, model: &str) -> Result<()> {
        let added = prices.add(model, self.0.clone());
        added.map_err(|problem| anyhow::anyhow!("[prices.{model:?}]: {problem}"))
    }
}

impl<'de> Deserialize<'de> for PricesConfig {
    fn deserialize<D: Deserializer<'de>>(reader: D) -> Result<Self, D::Error> {
        struct OneOrMore;
        impl<'de> Visitor<'de> for OneOrMore {
            type Value = PricesConfig;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(
                    "a table with input, cached_input, output, currency and from, or a list of such tables",
                )
            }
            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<PricesConfig, A::Error> {
                Ok(PricesConfig(vec![Price::deserialize(MapAccessDeserializer::new(map))?]))
            }
            fn visit_seq<A: SeqAccess<'de>>(self, list: A) -> Result<PricesConfig, A::Error> {
                Ok(PricesConfig(Vec::deserialize(SeqAccessDeserializer::new(list))?))
            }
        }
        reader.deserialize_any(OneOrMore)
    }
}

/// Returns the prices of the file.
pub(super) fn list(models: &BTreeMap<String, PricesConfig>) -> Result<PriceList> {
    let mut prices = PriceList::default();
    models.iter().try_for_each(|(model, config)| config.add_to(&mut prices, model))?;
    Ok(prices)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{config::Config, server_options::ServerOptions};

    fn applied(text: &str) -> Result<PriceList> {
        let mut options = ServerOptions::default();
        Config::parse(text)?.apply(&mut options)?;
        Ok(options.runtime.prices)
    }

    #[test]
    fn a_model_has_one_price_or_several_over_time() {
        let one =
            "input = 0.60\ncached_input = 0.10\noutput = 3\ncurrency = \"USD\"\nfrom = \"2026-01-01\"\n";
        let prices = applied(&format!("[prices.\"vendor/kimi-k2.5\"]\n{one}")).expect("valid");
        let on = |prices: &PriceList, model: &str, day: &str| {
            let price = prices.price(model, day.parse().expect("a day"));
            price.map(|price| (price.input, price.currency.to_string()))
        };
        let rate = |text: &str| text.parse().expect("a price");
        assert_eq!(on(&prices, "vendor/kimi-k2.5", "2026-01-01"), Some((rate("0.60"), "USD".to_owned())));
        assert_eq!(on(&prices, "vendor/kimi-k2.5", "2025-12-31"), None);
        let later = one.replace("0.60", "\"0.5\"").replace("2026-01-01", "2026-02-01");
        let prices = applied(&format!("[[prices.m]]\n{one}[[prices.m]]\n{later}")).expect("valid");
        assert_eq!(on(&prices, "m", "2026-01-31"), Some((rate("0.60"), "USD".to_owned())));
        assert_eq!(on(&prices, "m", "2026-02-01"), Some((rate("0.50"), "USD".to_owned())));
    }

    #[test]
    fn mistakes_in_prices_are_errors_that_say_where() {
        let with = |from: &str, to: &str| {
            let text = "[prices.m]\ninput = 0.60\ncached_input = 0.10\noutput = 3.00\ncurrency = \"USD\"\nfrom = \"2026-01-01\"\n";
            assert!(text.contains(from), "{from}");
            text.replace(from, to)
        };
        for (text, expected) in [
            (with("input = 0.60", "inputs = 0.60"), "did you mean `input`?"),
            (with("output = 3.00\n", ""), "missing field `output`"),
            (with("0.60", "0.0000001"), "more than 6 decimals"),
            (with("0.60", "-1"), "is not a decimal number"),
            (with("0.60", "true"), "a price for a million tokens"),
            (with("USD", "dollars"), "three letters"),
            (with("2026-01-01", "2026-02-30"), "is not a day"),
            (with("0.10", "0.70"), "[prices.\"m\"]: the prices from 2026-01-01: `cached_input` is higher"),
            ("[prices]\nm = 1\n".to_owned(), "a table with input"),
            ("[prices]\nm = []\n".to_owned(), "1 to 1000 prices"),
        ] {
            let error = format!("{:#}", applied(&text).expect_err(&text));
            assert!(error.contains(expected), "{error}");
        }
    }
}
