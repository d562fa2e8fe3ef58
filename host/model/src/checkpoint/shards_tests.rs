//! Tests a model in hundreds of files: each tensor in one of its own, so that codes and scales are in different ones.

use safetensors::SafeTensors;
use serde_json::{Map, Value, json};

use super::fixtures::fixture;
use crate::verify::{VerifyOptions, verify};

#[test]
fn hundreds_of_files_are_one_model_on_any_number_of_ranks() {
    let (source, folder) = (fixture("kimi-k2-int4"), tempfile::tempdir().unwrap());
    for file in ["config.json", "expected.safetensors"] {
        std::fs::copy(source.join(file), folder.path().join(file)).unwrap();
    }
    let bytes = std::fs::read(source.join("model.safetensors")).unwrap();
    let whole = SafeTensors::deserialize(&bytes).unwrap();
    let count = whole.len();
    assert!(count > 300, "{count} tensors");
    let mut files = Map::new();
    for (number, (name, tensor)) in whole.tensors().into_iter().enumerate() {
        let file = format!("model-{:05}-of-{count:05}.safetensors", number + 1);
        let content = safetensors::serialize([(name.as_str(), tensor)], None).unwrap();
        std::fs::write(folder.path().join(&file), content).unwrap();
        files.insert(name, Value::from(file));
    }
    let index = json!({"metadata": {}, "weight_map": files}).to_string();
    std::fs::write(folder.path().join("model.safetensors.index.json"), index).unwrap();
    for tensor_parallel in [1, 2] {
        let options = VerifyOptions { tensor_parallel, ..VerifyOptions::default() };
        let found = verify(folder.path(), options).unwrap();
        assert!(found.passed, "{tensor_parallel} ranks: {found:?}");
    }
}
