//! A model that produces the text a test scripted for it, behind the real engine, tokenizer and template.

use std::path::Path;
use std::sync::{Arc, Mutex};

use skep_model::{
    Architecture, Batch, ChatTemplate, Executor, ExecutorLimits, LayerStyle, LoadedModel, LogitRow,
    LogitsWanted, MemoryPlan, ModelConfig, ModelDigest, ModelError, Rope, RopePairing, RopeScaling,
    RowOutput, SpecialTokens, Tokenizer,
};

use crate::{Engine, EngineOptions};

pub(crate) const EOS: u32 = 2;

pub(crate) fn tokenizer() -> Tokenizer {
    let path =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/tokenizer/byte-level-chatml.json");
    Tokenizer::from_json(&std::fs::read(path).expect("the fixture exists"))
        .expect("the fixture is a tokenizer")
}

/// Returns the same tokenizer with further special tokens.
pub(crate) fn tokenizer_with(specials: &[&str]) -> Tokenizer {
    let path =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/tokenizer/byte-level-chatml.json");
    let text = std::fs::read_to_string(path).expect("the fixture exists");
    let mut json: serde_json::Value = serde_json::from_str(&text).expect("the fixture is JSON");
    let first = json["model"]["vocab"].as_object().expect("a vocabulary").len();
    let added = json["added_tokens"].as_array_mut().expect("a list");
    for (index, content) in specials.iter().enumerate() {
        let mut token = added[0].clone();
        (token["id"], token["content"]) = ((first + index).into(), (*content).into());
        added.push(token);
    }
    Tokenizer::from_json(json.to_string().as_bytes()).expect("the fixture is a tokenizer")
}

/// Starts an engine whose model produces `scripts`, one for each generation. A text is followed by the end of
/// turn, unless a limit cuts it. If a constraint forbids the next token, the model produces the first token
/// that the constraint allows.
pub(super) fn engine(template: ChatTemplate, scripts: &[&str]) -> Engine {
    engine_with(template, scripts, EngineOptions::default())
}

pub(super) fn engine_with(template: ChatTemplate, scripts: &[&str], options: EngineOptions) -> Engine {
    engine_of(tokenizer(), SpecialTokens::Literal, template, scripts, options)
}

/// Starts an engine with another tokenizer. `special` says whether scripts contain special tokens.
pub(super) fn engine_of(
    tokenizer: Tokenizer,
    special: SpecialTokens,
    template: ChatTemplate,
    scripts: &[&str],
    options: EngineOptions,
) -> Engine {
    let tokenizer = Arc::new(tokenizer);
    let encode = |text: &&str| {
        let mut tokens = tokenizer.encode(text, special).expect("scripts can be encoded");
        tokens.push(EOS);
        tokens
    };
    let scripts: Vec<Vec<u32>> = scripts.iter().map(encode).collect();
    let executor = Scripted {
        limits: ExecutorLimits {
            max_batch_tokens: 256,
            step_tokens: 256,
            max_logit_rows: 16,
            max_sequences: 16,
            page_count: 512,
            context_length: 4096,
            vocabulary_size: tokenizer.vocabulary_size().max(320),
        },
        plan: MemoryPlan::default(),
        scripts: Mutex::new(scripts.into_iter()),
        running: Vec::new(),
    };
    let model = LoadedModel {
        name: "scripted".into(),
        config: config(),
        tokenizer,
        template: Arc::new(template),
        executor: Box::new(executor),
        digest: ModelDigest::default(),
        weights: None,
        device: "cpu".into(),
        fallback: None,
        sampling: None,
    };
    Engine::start(model, options).expect("the engine starts")
}

fn config() -> ModelConfig {
    ModelConfig {
        architecture: Architecture::Llama,
        hidden_size: 8,
        layer_count: 1,
        head_count: 1,
        kv_head_count: 1,
        head_size: 8,
        feed_forward_size: 8,
        vocabulary_size: 320,
        context_length: 4096,
        norm_epsilon: 1e-5,
        rope: Rope { theta: 10_000.0, pairing: RopePairing::Halves, scaling: RopeScaling::None },
        windows: vec![None],
        qkv_bias: false,
        output_bias: false,
        mlp_bias: false,
        qk_norm: false,
        style: LayerStyle::default(),
        tied_head: false,
        bos: None,
        eos: vec![EOS, 0],
        add_bos: false,
    }
}

struct Scripted {
    limits: ExecutorLimits,
    plan: MemoryPlan,
    scripts: Mutex<std::vec::IntoIter<Vec<u32>>>,
    /// The prompt of each running generation, and its script.
    running: Vec<(Vec<u32>, Vec<u32>)>,
}

impl Executor for Scripted {
    fn limits(&self) -> &ExecutorLimits {
        &self.limits
    }

    fn forward(&mut self, batch: &Batch) -> Result<(), ModelError> {
        assert!(batch.sequences.iter().all(|sequence| sequence.logits != LogitsWanted::All));
        Ok(())
    }

    fn logits(&self, _row: usize) -> Result<&[f32], ModelError> {
        unreachable!("the tests sample only")
    }

    fn sample(&mut self, rows: &[LogitRow<'_>]) -> Result<Vec<RowOutput>, ModelError> {
        rows.iter()
            .map(|row| {
                let LogitRow::Sample(row) = row else { unreachable!("the tests sample only") };
                if row.output.is_empty() || !self.running.iter().any(|(prompt, _)| prompt == row.prompt) {
                    let script = self
                        .scripts
                        .lock()
                        .expect("one thread")
                        .next()
                        .expect("a script for each generation");
                    self.running.retain(|(prompt, _)| prompt != row.prompt);
                    self.running.push((row.prompt.to_vec(), script));
                }
                let script =
                    &self.running.iter().find(|(prompt, _)| prompt == row.prompt).expect("just added").1;
                let wanted = script.get(row.output.len()).copied().unwrap_or(EOS);
                let allowed = |id: u32| {
                    !row.banned.contains(&id)
                        && row.mask.is_none_or(|mask| mask[id as usize / 32] >> (id % 32) & 1 == 1)
                };
                let token = if allowed(wanted) {
                    wanted
                } else {
                    (0..self.limits.vocabulary_size as u32).find(|&id| allowed(id)).expect("a token")
                };
                let logprob = row.top_logprobs.map(|_| -1.0);
                Ok(RowOutput { token, logprob, top: Vec::new() })
            })
            .collect()
    }

    fn plan(&self) -> &MemoryPlan {
        &self.plan
    }
}
