//! The prices of models in `skep.toml`: under `[prices."MODEL"]`, and as `prices` of a `[[model]]` or of a model of an
//! `[[upstream]]`.

use std::collections::BTreeMap;

use anyhow::{Result, bail};
use skep_runtime::PriceList;

use super::Config;
use super::model::ModelSetting;
use crate::model_prices::PricesConfig;

/// The prices of one model, with the place where the file states them.
struct Stated<'a> {
    model: String,
    place: String,
    prices: &'a PricesConfig,
}

/// Returns the prices of the file.
pub(super) fn list(config: &Config) -> Result<PriceList> {
    let mut prices = PriceList::default();
    let mut places: BTreeMap<String, String> = BTreeMap::new();
    for Stated { model, place, prices: stated } in stated(config) {
        if let Some(other) = places.get(&model) {
            bail!("the model {model:?} has prices under {other} and under {place}\n  hint: keep one of them");
        }
        if let Err(problem) = stated.add_to(&mut prices, &model) {
            bail!("{place}: {problem}");
        }
        places.insert(model, place);
    }
    Ok(prices)
}

fn stated(config: &Config) -> Vec<Stated<'_>> {
    let mut all = Vec::new();
    for (model, prices) in &config.prices {
        all.push(Stated { model: model.clone(), place: format!("[prices.{model:?}]"), prices });
    }
    if let Some(ModelSetting::Several(models)) = &config.model {
        for model in models {
            // Loading a source without a name reports that there is no such model.
            if let (Some(prices), Some(name)) = (&model.prices, model.served_name()) {
                let place = format!("[[model]] with the name {name:?}");
                all.push(Stated { model: name, place, prices });
            }
        }
    }
    for upstream in &config.upstream {
        for model in &upstream.models {
            if let Some(prices) = &model.prices {
                let name = format!("{}/{}", upstream.name, model.name);
                let place =
                    format!("[[upstream.models]] with the name {:?} of {:?}", model.name, upstream.name);
                all.push(Stated { model: name, place, prices });
            }
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::server_options::ServerOptions;

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

    #[test]
    fn tokens_written_to_a_cache_can_have_a_price() {
        for (more, expected) in [("", None), ("cache_write = 0.75\n", Some("0.75".parse().expect("a price")))]
        {
            let prices = applied(&format!("[prices.m]\n{PRICE}{more}")).expect("valid");
            assert_eq!(prices.of_model("m")[0].cache_write, expected);
        }
    }

    #[test]
    fn a_list_price_of_the_catalog_can_be_taken() {
        let prices =
            applied("[prices.\"far/k\"]\ncatalog = \"kimi\"\nfrom = \"2026-03-01\"\n").expect("valid");
        let [price] = prices.of_model("far/k") else { panic!("one price") };
        let rates = [price.input, price.cached_input, price.output].map(|rate| rate.to_string());
        assert_eq!(
            (rates, price.currency.to_string()),
            (["0.60", "0.10", "3.00"].map(str::to_owned), "USD".to_owned())
        );
        assert_eq!(price.from.to_string(), "2026-03-01");
        for (text, expected) in [
            ("catalog = \"kimi\"\n", "missing field `from`"),
            ("catalog = \"kimi\"\nfrom = \"2026-03-01\"\noutput = 1\n", "only `from` stands beside it"),
            ("catalog = \"kimi-k2\"\nfrom = \"2026-03-01\"\n", "did you mean \"kimi-k2.5\"?"),
            ("catalog = \"qwen3-4b\"\nfrom = \"2026-03-01\"\n", "it has those of llama-3.2-1b"),
        ] {
            let error = format!("{:#}", applied(&format!("[prices.m]\n{text}")).expect_err(text));
            assert!(error.contains(expected), "{error}");
        }
    }

    const PRICE: &str =
        "input = 0.60\ncached_input = 0.10\noutput = 3.00\ncurrency = \"USD\"\nfrom = \"2026-01-01\"\n";
    const UPSTREAM: &str = "[[upstream]]\nname = \"far\"\nkind = \"openai\"\nurl = \"https://far.example/v1\"\n\
                            [[upstream.models]]\nname = \"big\"\n";

    #[test]
    fn prices_can_be_set_with_their_model() {
        let later = PRICE.replace("0.60", "0.50").replace("2026-01-01", "2026-02-01");
        let text = format!(
            "[[model]]\nname = \"home\"\nsource = \"smollm2-135m\"\n[model.prices]\n{PRICE}\
             [[model]]\nsource = \"smollm2-135m\"\n[model.prices]\n{PRICE}\
             {UPSTREAM}[[upstream.models.prices]]\n{PRICE}[[upstream.models.prices]]\n{later}\
             [[upstream.models]]\nname = \"free\"\n[prices.other]\n{PRICE}"
        );
        let prices = applied(&text).expect("valid");
        let input = |model: &str, day: &str| {
            prices.price(model, day.parse().expect("a day")).map(|price| price.input)
        };
        let rate = |text: &str| Some(text.parse().expect("a price"));
        for model in ["home", "smollm2-135m", "far/big", "other"] {
            assert_eq!(input(model, "2026-01-31"), rate("0.60"), "{model}");
        }
        assert_eq!(input("far/big", "2026-02-01"), rate("0.50"));
        assert_eq!((input("big", "2026-02-01"), input("far/free", "2026-02-01")), (None, None));
    }

    #[test]
    fn prices_of_one_model_in_two_places_are_an_error_that_names_both() {
        let local = format!("[[model]]\nname = \"home\"\nsource = \"smollm2-135m\"\n[model.prices]\n{PRICE}");
        let remote = format!("{UPSTREAM}[upstream.models.prices]\n{PRICE}");
        for (text, places) in [
            (
                format!("{local}[prices.home]\n{PRICE}"),
                "the model \"home\" has prices under [prices.\"home\"] and under [[model]] with the name \"home\"",
            ),
            (
                format!("{remote}[prices.\"far/big\"]\n{PRICE}"),
                "the model \"far/big\" has prices under [prices.\"far/big\"] and under [[upstream.models]] with the name \
                 \"big\" of \"far\"",
            ),
        ] {
            let error = format!("{:#}", applied(&text).expect_err(places));
            assert!(error.contains(places) && error.contains("hint: keep one of them"), "{error}");
        }
        for (text, expected) in [
            (local.replace("0.10", "0.70"), "[[model]] with the name \"home\": the prices from 2026-01-01"),
            (remote.replace("input = 0.60", "inputs = 0.60"), "did you mean `input`?"),
        ] {
            let error = format!("{:#}", applied(&text).expect_err(expected));
            assert!(error.contains(expected), "{error}");
        }
    }
}
