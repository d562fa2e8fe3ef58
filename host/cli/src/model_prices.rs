//! Prices of one model as `skep.toml` states them, once or from several days on.

use std::fmt;

use serde::Deserialize;
use serde::de::value::{MapAccessDeserializer, SeqAccessDeserializer};
use serde::de::{Deserializer, MapAccess, SeqAccess, Visitor};
use skep_runtime::{Price, PriceList};

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
