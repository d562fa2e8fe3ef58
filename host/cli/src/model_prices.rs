//! Prices of one model as `skep.toml` states them, once or from several days on: in full, or as the list price of an entry
//! of the catalog.

use std::fmt;

use serde::Deserialize;
use serde::de::value::{MapAccessDeserializer, SeqAccessDeserializer};
use serde::de::{Deserializer, Error, MapAccess, SeqAccess, Visitor};
use skep_runtime::{Currency, Price, PriceList, Rate, UsageDay, did_you_mean};

use crate::catalog;

/// The prices of one model: one table, or a list of tables with different first days.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct PricesConfig(Vec<Price>);

impl PricesConfig {
    /// Adds the prices of a model to a list. Fails if they are contradictory.
    pub fn add_to(&self, prices: &mut PriceList, model: &str) -> Result<(), String> {
        prices.add(model, self.0.clone())
    }
}

impl<'de> Deserialize<'de> for PricesConfig {
    fn deserialize<D: Deserializer<'de>>(reader: D) -> Result<Self, D::Error> {
        struct OneOrMore;
        impl<'de> Visitor<'de> for OneOrMore {
            type Value = PricesConfig;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(
                    "a table with input, cached_input, output, currency and from, and maybe cache_write, or a list of such tables",
                )
            }
            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<PricesConfig, A::Error> {
                let price = PriceConfig::deserialize(MapAccessDeserializer::new(map))?;
                Ok(PricesConfig(vec![price.0]))
            }
            fn visit_seq<A: SeqAccess<'de>>(self, list: A) -> Result<PricesConfig, A::Error> {
                let prices: Vec<PriceConfig> = Vec::deserialize(SeqAccessDeserializer::new(list))?;
                Ok(PricesConfig(prices.into_iter().map(|price| price.0).collect()))
            }
        }
        reader.deserialize_any(OneOrMore)
    }
}

/// One table of prices.
struct PriceConfig(Price);

impl<'de> Deserialize<'de> for PriceConfig {
    fn deserialize<D: Deserializer<'de>>(reader: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(deny_unknown_fields)]
        struct Keys {
            /// The name of an entry of the catalog, whose list price is taken.
            catalog: Option<String>,
            input: Option<Rate>,
            cached_input: Option<Rate>,
            cache_write: Option<Rate>,
            output: Option<Rate>,
            currency: Option<Currency>,
            from: Option<UsageDay>,
        }
        let Keys { catalog, input, cached_input, cache_write, output, currency, from } =
            Keys::deserialize(reader)?;
        let missing = D::Error::missing_field;
        let from = from.ok_or_else(|| missing("from"))?;
        let Some(name) = catalog else {
            return Ok(PriceConfig(Price {
                input: input.ok_or_else(|| missing("input"))?,
                cached_input: cached_input.ok_or_else(|| missing("cached_input"))?,
                cache_write,
                output: output.ok_or_else(|| missing("output"))?,
                currency: currency.ok_or_else(|| missing("currency"))?,
                from,
            }));
        };
        if [input, cached_input, cache_write, output].iter().any(Option::is_some) || currency.is_some() {
            return Err(D::Error::custom(
                "`catalog` takes the prices of the catalog, so only `from` stands beside it",
            ));
        }
        list_price(&name, from).map(PriceConfig).map_err(D::Error::custom)
    }
}

/// Returns the list price of an entry of the catalog, from a day on.
pub fn list_price(name: &str, from: UsageDay) -> Result<Price, String> {
    let priced = || catalog::entries().iter().filter(|entry| entry.list_price.is_some());
    let named = priced().find(|entry| entry.is_called(name));
    let Some(list) = named.and_then(|entry| entry.list_price.as_ref()) else {
        let names: Vec<&str> = priced().map(|entry| &*entry.name).collect();
        let meant = did_you_mean(name, names.iter().copied());
        return Err(format!(
            "the catalog has no list price of {name:?}{meant}; it has those of {}",
            names.join(", ")
        ));
    };
    let catalog::ListPrice { input, cached_input, output, currency, .. } = *list;
    Ok(Price { input, cached_input, cache_write: None, output, currency, from })
}
