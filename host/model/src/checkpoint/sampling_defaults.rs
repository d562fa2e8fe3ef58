//! The sampling parameters that a model's authors recommend, from generation_config.json or from GGUF keys.

use serde_json::Value;

use crate::error::ModelError;
use crate::gguf::GgufFile;
use crate::sampling::Sampling;

/// Returns the parameters of a generation_config.json, or `None` if it has none. The error says what is wrong with
/// them. `do_sample: false` recommends the most likely token.
pub(super) fn from_generation_config(config: &Value) -> Result<Option<Sampling>, String> {
    let number = |key: &str| match config.get(key) {
        None | Some(Value::Null) => Ok(None),
        Some(value) => value.as_f64().map(Some).ok_or_else(|| format!("{key} is not a number")),
    };
    let greedy = (config.get("do_sample") == Some(&Value::Bool(false))).then_some(0.0);
    recommended(Recommended {
        temperature: greedy.or(number("temperature")?),
        top_p: number("top_p")?,
        top_k: number("top_k")?,
        min_p: number("min_p")?,
        repetition_penalty: number("repetition_penalty")?,
    })
}

/// Returns the parameters in the keys `general.sampling.*`, or `None` if the file has none.
pub(super) fn from_gguf(file: &GgufFile) -> Result<Option<Sampling>, ModelError> {
    let number = |name: &str| file.float(&format!("general.sampling.{name}"));
    let sampling = recommended(Recommended {
        temperature: number("temp")?,
        top_p: number("top_p")?,
        top_k: number("top_k")?,
        min_p: number("min_p")?,
        repetition_penalty: number("penalty_repeat")?,
    });
    sampling.map_err(|problem| ModelError::Malformed {
        path: file.path().to_owned(),
        problem: format!("general.sampling: {problem}"),
    })
}

/// The parameters as written.
struct Recommended {
    temperature: Option<f64>,
    top_p: Option<f64>,
    top_k: Option<f64>,
    min_p: Option<f64>,
    repetition_penalty: Option<f64>,
}

fn recommended(written: Recommended) -> Result<Option<Sampling>, String> {
    let Recommended { temperature, top_p, top_k, min_p, repetition_penalty } = written;
    if [temperature, top_p, top_k, min_p, repetition_penalty].iter().all(Option::is_none) {
        return Ok(None);
    }
    let default = Sampling::default();
    let sampling = Sampling {
        temperature: temperature.map_or(default.temperature, |value| value as f32),
        top_p: top_p.map_or(default.top_p, |value| value as f32),
        top_k: top_k.map_or(default.top_k, |value| value.max(0.0) as u32),
        min_p: min_p.map_or(default.min_p, |value| value as f32),
        repetition_penalty: repetition_penalty.map_or(default.repetition_penalty, |value| value as f32),
        ..default
    };
    sampling.validate().map(|()| Some(sampling))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_generation_config_recommends_what_it_names() {
        let read = |config: Value| from_generation_config(&config);
        assert_eq!(read(json!({ "eos_token_id": 2 })), Ok(None));
        let qwen = json!({ "do_sample": true, "temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.1 });
        let expected = Sampling {
            temperature: 0.7,
            top_p: 0.8,
            top_k: 20,
            repetition_penalty: 1.1,
            ..Sampling::default()
        };
        assert_eq!(read(qwen), Ok(Some(expected)));
        let greedy = read(json!({ "do_sample": false, "temperature": 0.7 })).unwrap().unwrap();
        assert_eq!(greedy.temperature, 0.0);
        assert_eq!(read(json!({ "min_p": null, "top_k": -1 })).unwrap().unwrap().top_k, 0);
    }

    #[test]
    fn a_recommendation_that_cannot_be_followed_is_an_error_that_names_it() {
        for (config, expected) in [
            (json!({ "top_p": 2 }), "top_p"),
            (json!({ "temperature": "warm" }), "temperature is not a number"),
        ] {
            let error = from_generation_config(&config).unwrap_err();
            assert!(error.contains(expected), "{error}");
        }
    }
}
