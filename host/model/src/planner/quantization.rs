//! Reads from the `quantization_config` of config.json which weights of a checkpoint are quantized, and how.
//!
//! Invariant: names are compared as the quantizers compare them. An entry of compressed-tensors is the exact name or
//! class of a module, or after `re:` a pattern that Python's `re.match` applies to the name; a substring never matches.

use fancy_regex::{Regex, RegexBuilder};
use serde_json::Value;

use super::storage::{Group, Storage};
use crate::config::{Keys, brief};
use crate::error::ModelError;

/// Maximum number of entries in a list of modules.
const MAX_ENTRIES: usize = 4096;
/// Maximum number of patterns in a list of modules, their maximum length in bytes, and the maximum number of steps of
/// one on a name.
const MAX_PATTERNS: usize = 64;
const MAX_PATTERN_BYTES: usize = 1024;
const MAX_BACKTRACKS: usize = 1000;

/// A module with a weight: a matrix of a layer, or a table.
#[derive(Clone, Copy, Debug)]
pub(super) struct Module<'a> {
    /// Name inside the language model, such as `model.layers.3.mlp.experts.0.up_proj`.
    pub(super) name: &'a str,
    /// Prefix of the name in the checkpoint, such as `language_model.`.
    pub(super) prefix: &'a str,
    pub(super) class: &'static str,
    pub(super) is_expert: bool,
}

/// The quantization of a model.
#[derive(Debug)]
pub(super) struct Quantization {
    /// Name of the method for messages.
    pub(super) name: String,
    groups: Vec<QuantizedGroup>,
    ignored: Vec<Entry>,
}

#[derive(Debug)]
struct QuantizedGroup {
    storage: Storage,
    targets: Vec<Entry>,
}

/// An entry of a list of modules.
#[derive(Debug)]
enum Entry {
    Exact(String),
    Pattern(Box<Regex>),
    /// The name of a module, or of a part of the model with all its modules.
    Part(String),
    /// Every module of the experts.
    Experts,
}

impl Quantization {
    /// Reads `quantization_config`.
    pub(super) fn read(value: &Value) -> Result<Self, ModelError> {
        let keys = Keys::of(value, "quantization_config.")?;
        let method = keys.string("quant_method")?.unwrap_or("compressed-tensors");
        match method {
            "compressed-tensors" => compressed_tensors(&keys),
            "fp8" => fp8(&keys),
            "fbgemm_fp8" => floats_with(&keys, Storage::FP8_ROWS),
            "mxfp4" => Ok(Quantization {
                name: "MXFP4".to_owned(),
                groups: vec![QuantizedGroup { storage: Storage::MXFP4, targets: vec![Entry::Experts] }],
                ignored: parts(&keys, "modules_to_not_convert")?,
            }),
            "gptq" | "awq" => integers(&keys, method),
            other => Err(ModelError::unsupported(
                "quantization_config.quant_method",
                format!("\"{other}\""),
                "compressed-tensors, fp8, fbgemm_fp8, mxfp4, gptq, awq",
            )),
        }
    }

    /// Returns the format of a module's weight, or `None` if it is not quantized.
    pub(super) fn storage(&self, module: &Module<'_>) -> Result<Option<Storage>, ModelError> {
        for entry in &self.ignored {
            if entry.matches(module)? {
                return Ok(None);
            }
        }
        for group in &self.groups {
            for target in &group.targets {
                if target.matches(module)? {
                    return Ok(Some(group.storage));
                }
            }
        }
        Ok(None)
    }
}

impl Entry {
    fn parse(text: &str) -> Result<Self, ModelError> {
        let Some(pattern) = text.strip_prefix("re:") else { return Ok(Entry::Exact(text.to_owned())) };
        if pattern.len() > MAX_PATTERN_BYTES {
            let problem = format!("a pattern has {} bytes; {MAX_PATTERN_BYTES} are allowed", pattern.len());
            return Err(ModelError::config("quantization_config", problem));
        }
        // `re.match` is anchored at the start only.
        let built = RegexBuilder::new(&format!("^(?:{pattern})")).backtrack_limit(MAX_BACKTRACKS).build();
        built.map(|regex| Entry::Pattern(Box::new(regex))).map_err(|error| {
            ModelError::config("quantization_config", format!("the pattern \"{text}\" is not valid: {error}"))
        })
    }

    fn matches(&self, module: &Module<'_>) -> Result<bool, ModelError> {
        let full = format!("{}{}", module.prefix, module.name);
        Ok(match self {
            Entry::Exact(name) => name == module.name || *name == full || name == module.class,
            Entry::Pattern(regex) => {
                let found = |name: &str| {
                    regex.is_match(name).map_err(|error| {
                        let problem = format!("the pattern \"{regex}\" fails on \"{name}\": {error}");
                        ModelError::config("quantization_config", problem)
                    })
                };
                found(&full)? || (!module.prefix.is_empty() && found(module.name)?)
            }
            Entry::Part(part) => {
                let of = |name: &str| {
                    name == part || name.strip_prefix(part.as_str()).is_some_and(|rest| rest.starts_with('.'))
                };
                of(module.name) || of(&full)
            }
            Entry::Experts => module.is_expert,
        })
    }
}

fn compressed_tensors(keys: &Keys<'_>) -> Result<Quantization, ModelError> {
    let missing = || ModelError::config("quantization_config.config_groups", "is missing or empty");
    let groups = keys.get("config_groups").and_then(Value::as_object).filter(|groups| !groups.is_empty());
    let outer = keys.string("format")?;
    let mut read = Vec::new();
    for group in groups.ok_or_else(missing)?.values().take(MAX_ENTRIES) {
        let group = Keys::of(group, "quantization_config.config_groups.")?;
        let targets = entries(&group, "targets")?;
        let Some(weights) = group.get("weights") else { continue };
        let weights = Keys::of(weights, "quantization_config.config_groups.weights.")?;
        let format = group.string("format")?.or(outer).unwrap_or("pack-quantized");
        read.push(QuantizedGroup { storage: weight_storage(&weights, format)?, targets });
    }
    let bits = read.first().map(|group| group.storage.to_string()).unwrap_or_default();
    let name = format!("compressed-tensors {}, {bits}", outer.unwrap_or("pack-quantized"));
    Ok(Quantization { name, groups: read, ignored: entries(keys, "ignore")? })
}

fn weight_storage(weights: &Keys<'_>, format: &str) -> Result<Storage, ModelError> {
    let bits = weights.size("num_bits")?.unwrap_or(8) as u64;
    if !matches!(bits, 1..=8) {
        return Err(ModelError::config(
            "quantization_config.config_groups.weights.num_bits",
            format!("{bits} is outside 1..=8"),
        ));
    }
    let group = match weights.size("group_size")? {
        Some(0) => {
            return Err(ModelError::config("quantization_config.config_groups.weights.group_size", "is 0"));
        }
        Some(values) => Group::Values(values as u64),
        None if weights.string("strategy")? == Some("tensor") => Group::Tensor,
        None => Group::Row,
    };
    if let Some([rows, columns]) = pair(weights.get("block_structure")) {
        return Ok(Storage::Blocks8 { rows, columns });
    }
    let has_zero_points = !weights.boolean("symmetric")?.unwrap_or(true);
    let scale_bytes = match format {
        "pack-quantized" | "int-quantized" | "float-quantized" | "naive-quantized" | "dense" => 2,
        "nvfp4-pack-quantized" | "mxfp4-pack-quantized" => 1,
        other => {
            return Err(ModelError::unsupported(
                "quantization_config.format",
                format!("\"{other}\""),
                "pack-quantized, int-quantized, float-quantized, naive-quantized, nvfp4-pack-quantized, mxfp4-pack-quantized",
            ));
        }
    };
    Ok(Storage::Grouped { bits, group, scale_bytes, has_zero_points })
}

fn fp8(keys: &Keys<'_>) -> Result<Quantization, ModelError> {
    let storage = match pair(keys.get("weight_block_size")) {
        Some([rows, columns]) => Storage::Blocks8 { rows, columns },
        None => Storage::Grouped { bits: 8, group: Group::Tensor, scale_bytes: 4, has_zero_points: false },
    };
    floats_with(keys, storage)
}

/// Returns a quantization that stores every matrix but the head and the listed modules this way.
fn floats_with(keys: &Keys<'_>, storage: Storage) -> Result<Quantization, ModelError> {
    let mut ignored = parts(keys, "modules_to_not_convert")?;
    ignored.push(Entry::Part("lm_head".to_owned()));
    let linear = vec![Entry::Exact("Linear".to_owned())];
    Ok(Quantization {
        name: storage.to_string(),
        groups: vec![QuantizedGroup { storage, targets: linear }],
        ignored,
    })
}

/// Reads GPTQ and AWQ: integers with a 16-bit scale and a zero point for each group.
fn integers(keys: &Keys<'_>, method: &str) -> Result<Quantization, ModelError> {
    let bits = keys.size("bits")?.unwrap_or(4) as u64;
    if !matches!(bits, 1..=8) {
        return Err(ModelError::config("quantization_config.bits", format!("{bits} is outside 1..=8")));
    }
    // A group of −1 is a whole row.
    let group = match keys.get("group_size").and_then(Value::as_i64) {
        Some(values) if values > 0 => Group::Values(values as u64),
        Some(-1) => Group::Row,
        None => Group::Values(128),
        Some(other) => {
            return Err(ModelError::config(
                "quantization_config.group_size",
                format!("{other} is neither positive nor -1"),
            ));
        }
    };
    // Symmetric integers of GPTQ have the zero point 8, which takes no place in memory.
    let symmetric = keys.boolean("sym")? == Some(true) || keys.boolean("zero_point")? == Some(false);
    let storage = Storage::Grouped { bits, group, scale_bytes: 2, has_zero_points: !symmetric };
    let mut ignored = parts(keys, "modules_to_not_convert")?;
    ignored.push(Entry::Part("lm_head".to_owned()));
    let linear = vec![Entry::Exact("Linear".to_owned())];
    Ok(Quantization {
        name: format!("{}, {storage}", method.to_uppercase()),
        groups: vec![QuantizedGroup { storage, targets: linear }],
        ignored,
    })
}

fn pair(value: Option<&Value>) -> Option<[u64; 2]> {
    let [rows, columns] = value?.as_array()?.as_slice() else { return None };
    let side = |value: &Value| value.as_u64().filter(|side| (1..=1 << 20).contains(side));
    Some([side(rows)?, side(columns)?])
}

fn entries(keys: &Keys<'_>, key: &str) -> Result<Vec<Entry>, ModelError> {
    bounded(key, texts(keys, key)?.into_iter().map(Entry::parse).collect::<Result<_, _>>()?)
}

fn bounded(key: &str, entries: Vec<Entry>) -> Result<Vec<Entry>, ModelError> {
    let patterns = entries.iter().filter(|entry| matches!(entry, Entry::Pattern(_))).count();
    match patterns {
        0..=MAX_PATTERNS => Ok(entries),
        _ => Err(ModelError::config(
            format!("quantization_config.{key}"),
            format!("has {patterns} patterns; {MAX_PATTERNS} are allowed"),
        )),
    }
}

/// Reads names of modules, or of parts that hold modules. A layer is written `model.layers.*` or with its number.
fn parts(keys: &Keys<'_>, key: &str) -> Result<Vec<Entry>, ModelError> {
    let entry = |text: &str| match text.split_once('*') {
        None => Ok(Entry::Part(text.to_owned())),
        Some(_) => Entry::parse(&format!("re:{}", text.replace('.', "\\.").replace('*', "[^.]*"))),
    };
    bounded(key, texts(keys, key)?.into_iter().map(entry).collect::<Result<_, _>>()?)
}

fn texts<'a>(keys: &Keys<'a>, key: &str) -> Result<Vec<&'a str>, ModelError> {
    let wrong = |value: &Value| {
        ModelError::config(
            format!("quantization_config.{key}"),
            format!("{} is not a list of at most {MAX_ENTRIES} names", brief(value)),
        )
    };
    let Some(value) = keys.get(key) else { return Ok(Vec::new()) };
    let list = value.as_array().filter(|list| list.len() <= MAX_ENTRIES).ok_or_else(|| wrong(value))?;
    list.iter().map(|text| text.as_str().ok_or_else(|| wrong(value))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn module<'a>(name: &'a str, prefix: &'a str, class: &'static str) -> Module<'a> {
        Module { name, prefix, class, is_expert: name.contains(".experts.") }
    }

    fn kimi() -> Quantization {
        Quantization::read(&json!({
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": {
                "num_bits": 4, "group_size": 32, "strategy": "group", "symmetric": true, "type": "int"}}},
            "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*",
                       "re:.*mlp\\.(gate|up|gate_up|down)_proj.*"],
        }))
        .unwrap()
    }

    #[test]
    fn only_the_routed_experts_of_kimi_are_integers() {
        let kimi = kimi();
        let int4 =
            Storage::Grouped { bits: 4, group: Group::Values(32), scale_bytes: 2, has_zero_points: false };
        for (name, class, expected) in [
            ("model.layers.3.mlp.experts.0.up_proj", "Linear", Some(int4)),
            ("model.layers.0.mlp.up_proj", "Linear", None),
            ("model.layers.3.mlp.shared_experts.up_proj", "Linear", None),
            ("model.layers.3.self_attn.q_b_proj", "Linear", None),
            ("model.layers.3.mlp.gate", "Router", None),
            ("model.embed_tokens", "Embedding", None),
            ("lm_head", "Linear", None),
        ] {
            for prefix in ["", "language_model."] {
                let found = kimi.storage(&module(name, prefix, class)).unwrap();
                assert_eq!(found, expected, "{prefix}{name}");
            }
        }
    }

    #[test]
    fn names_match_whole_and_patterns_from_the_start() {
        let with = |ignore: &str| {
            Quantization::read(&json!({
                "quant_method": "compressed-tensors", "format": "pack-quantized",
                "config_groups": {"g": {"targets": ["Linear"], "weights": {"num_bits": 4, "group_size": 32}}},
                "ignore": [ignore],
            }))
            .unwrap()
        };
        let quantized = |ignore: &str| {
            let module = module("model.layers.1.self_attn.o_proj", "", "Linear");
            with(ignore).storage(&module).unwrap().is_some()
        };
        // Neither a part of a name nor a pattern for its middle is a match.
        assert!(quantized("self_attn") && quantized("o_proj") && quantized("re:self_attn"));
        assert!(!quantized("re:.*self_attn") && !quantized("model.layers.1.self_attn.o_proj"));
        assert!(!quantized("Linear") && quantized("re:^(?!.*self_attn).*$"));
    }

    #[test]
    fn fp8_blocks_and_mxfp4_leave_the_listed_modules_alone() {
        let fp8 = json!({"quant_method": "fp8", "weight_block_size": [128, 128]});
        let fp8 = Quantization::read(&fp8).unwrap();
        let blocks = Some(Storage::Blocks8 { rows: 128, columns: 128 });
        let of = |quantization: &Quantization, name, class| {
            quantization.storage(&module(name, "", class)).unwrap()
        };
        assert_eq!(of(&fp8, "model.layers.1.self_attn.o_proj", "Linear"), blocks);
        assert_eq!(of(&fp8, "lm_head", "Linear"), None);
        assert_eq!(of(&fp8, "model.embed_tokens", "Embedding"), None);
        let oss = Quantization::read(&json!({"quant_method": "mxfp4", "modules_to_not_convert":
            ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]}));
        let oss = oss.unwrap();
        assert_eq!(of(&oss, "model.layers.7.mlp.experts.0.down_proj", "Linear"), Some(Storage::MXFP4));
        assert_eq!(of(&oss, "model.layers.7.self_attn.q_proj", "Linear"), None);
    }

    #[test]
    fn every_method_that_the_loader_reads_is_planned() {
        let rows = Quantization::read(&json!({
            "quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0,
            "modules_to_not_convert": ["model.layers.0.self_attn", "lm_head"],
        }))
        .unwrap();
        let of = |name| rows.storage(&module(name, "", "Linear")).unwrap();
        assert_eq!(of("model.layers.1.mlp.up_proj"), Some(Storage::FP8_ROWS));
        assert_eq!((of("model.layers.0.self_attn.q_proj"), of("lm_head")), (None, None));
        // A byte for each value, and an f32 for each row.
        assert_eq!(Storage::FP8_ROWS.bytes(10, 64), 10 * 64 + 10 * 4);
        let weights =
            json!({"num_bits": 4, "type": "int", "symmetric": true, "group_size": 32, "strategy": "group"});
        let groups = json!({"group_0": {"targets": ["Linear"], "weights": weights}});
        for config in [
            json!({"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}),
            json!({"quant_method": "fp8", "weight_block_size": [128, 128]}),
            json!({"quant_method": "fbgemm_fp8"}),
            json!({"quant_method": "mxfp4"}),
            json!({"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": false, "sym": true}),
            json!({"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": true, "version": "gemm"}),
        ] {
            let read = crate::config::WeightCoding::read(&json!({"quantization_config": config}));
            assert!(read.is_ok_and(|coding| coding.is_some()), "{config}");
            assert!(Quantization::read(&config).is_ok(), "{config}");
        }
    }

    #[test]
    fn errors_name_the_key() {
        let error = |config: Value| Quantization::read(&config).unwrap_err().to_string();
        assert!(error(json!({"quant_method": "bitsandbytes"})).contains("\"bitsandbytes\""));
        assert!(error(json!({"config_groups": {}})).contains("config_groups"));
        let bad = json!({"config_groups": {"g": {"targets": ["re:("], "weights": {}}}});
        assert!(error(bad).contains("re:("));
        let group = json!({"config_groups": {"g": {"weights": {"num_bits": 4, "group_size": 0}}}});
        assert!(error(group).contains("group_size"));
        assert!(error(json!({"quant_method": "gptq", "group_size": -3})).contains("-3"));
        assert!(error(json!({"quant_method": "awq", "bits": 40})).contains("40"));
    }
}
