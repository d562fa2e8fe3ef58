//! The model, requests and collected results that the tests share.

use std::path::Path;
use std::sync::Arc;

use futures::future::join_all;
use serde_json::json;
use skep_model::{
    ChatTemplate, Checkpoint, CpuExecutor, Executor, ExecutorOptions, KvDtype, LoadedModel, ModelDigest,
    ModelWeights, Sampling, Tokenizer,
};

use crate::{
    Engine, EngineError, EngineOptions, FinishReason, Finished, GenerateRequest, Speculation, TokenEvent,
    TokenLogprob, TokenStream,
};

/// The end-of-generation token of the test tokenizer; ids below 256 are bytes.
pub const EOS: u32 = 257;

/// Returns a byte-level tokenizer without merges: every byte is a token of the same number.
pub fn byte_tokenizer() -> Tokenizer {
    tokenizer(&[])
}

/// Returns a byte-level tokenizer with further special tokens, whose ids begin at 259.
pub fn tokenizer_with(specials: &[&str]) -> Tokenizer {
    tokenizer_of(&[], specials)
}

/// Returns a tokenizer with the bytes, and longer tokens for parts of JSON: most texts can be spelled in
/// several ways.
pub fn merging_tokenizer() -> Tokenizer {
    tokenizer(&[
        ("{", "\""),
        ("\"", ":"),
        ("\":", " "),
        ("\": ", "\""),
        (" ", "\""),
        (",", " \""),
        ("\"", ","),
        ("\",", " \""),
        ("c", "i"),
        ("ci", "t"),
        ("cit", "y"),
        ("d", "a"),
        ("da", "y"),
        ("day", "s"),
        ("t", "a"),
        ("ta", "g"),
        ("\"", "}"),
        ("o", "r"),
        ("a", "b"),
        ("ab", "a"),
        ("tag", "s"),
        ("[", "\""),
        ("\"", "]"),
        (",", " "),
        ("u", "n"),
        ("un", "i"),
        ("uni", "t"),
        ("unit", "s"),
        ("m", "e"),
        ("1", "2"),
        ("}", "\n"),
        ("\"", "\n"),
    ])
}

fn tokenizer(merges: &[(&str, &str)]) -> Tokenizer {
    tokenizer_of(merges, &[])
}

fn tokenizer_of(merges: &[(&str, &str)], specials: &[&str]) -> Tokenizer {
    let mut unprintable = 0;
    let mut vocabulary: serde_json::Map<String, serde_json::Value> = (0..=255u8)
        .map(|byte| {
            let printable = matches!(byte, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF);
            let symbol = if printable {
                char::from(byte)
            } else {
                unprintable += 1;
                char::from_u32(0x100 + unprintable - 1).expect("a letter of the byte alphabet")
            };
            (symbol.to_string(), json!(byte))
        })
        .collect();
    // These are the names of a blank and a line break in the byte alphabet.
    let symbols = |text: &str| text.replace(' ', "Ġ").replace('\n', "Ċ");
    let merges: Vec<(String, String)> =
        merges.iter().map(|(one, other)| (symbols(one), symbols(other))).collect();
    for (number, (one, other)) in merges.iter().enumerate() {
        vocabulary.insert(format!("{one}{other}"), json!(259 + number));
    }
    let special = |id: u32, content: &str| {
        json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
               "normalized": false, "special": true})
    };
    let mut added = vec![special(256, "<s>"), special(EOS, "<|im_end|>"), special(258, "<|im_start|>")];
    added.extend((259..).zip(specials).map(|(id, content)| special(id, content)));
    let byte_level =
        json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false});
    let tokenizer = json!({
        "version": "1.0", "truncation": null, "padding": null, "normalizer": null, "post_processor": null,
        "added_tokens": added,
        "pre_tokenizer": byte_level, "decoder": byte_level,
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
                  "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false,
                  "vocab": vocabulary, "merges": merges},
    });
    Tokenizer::from_json(tokenizer.to_string().as_bytes()).expect("the generated tokenizer is valid")
}

/// Returns the options of the test model, unless a test sets others.
pub fn executor_options(kv_tokens: usize) -> ExecutorOptions {
    ExecutorOptions {
        threads: Some(1),
        kv: KvDtype::F32,
        kv_tokens: Some(kv_tokens),
        max_batch_tokens: 256,
        ..ExecutorOptions::default()
    }
}

pub fn executor(kv_tokens: usize) -> (Checkpoint, CpuExecutor) {
    let checkpoint = checkpoint();
    let options = executor_options(kv_tokens);
    let executor = CpuExecutor::load(&checkpoint, options).expect("the fixture loads");
    (checkpoint, executor)
}

pub fn checkpoint() -> Checkpoint {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/tiny/llama-gqa");
    Checkpoint::open(&path).expect("the fixture opens")
}

/// Loads a model whose executor is wrapped by `wrap`.
pub fn model(kv_tokens: usize, wrap: impl FnOnce(CpuExecutor) -> Box<dyn Executor>) -> LoadedModel {
    let (checkpoint, executor) = executor(kv_tokens);
    loaded(&checkpoint, wrap(executor))
}

/// Loads a model whose executor is created with these options.
pub fn model_with(options: ExecutorOptions) -> LoadedModel {
    let checkpoint = checkpoint();
    let weights = ModelWeights::load(&checkpoint, &options).expect("the fixture loads");
    loaded(&checkpoint, weights.executor(options).expect("the executor starts"))
}

pub fn loaded(checkpoint: &Checkpoint, executor: Box<dyn Executor>) -> LoadedModel {
    let mut config = checkpoint.config().clone();
    config.eos = vec![EOS];
    LoadedModel {
        name: "tiny".to_string(),
        config,
        tokenizer: Arc::new(byte_tokenizer()),
        template: Arc::new(ChatTemplate::chatml_default()),
        executor,
        digest: ModelDigest::default(),
        weights: None,
        device: "cpu".into(),
        fallback: None,
        restart: None,
        sampling: None,
    }
}

pub fn engine_with(kv_tokens: usize, options: EngineOptions) -> Engine {
    Engine::start(model(kv_tokens, |executor| Box::new(executor)), options).expect("the engine starts")
}

/// Starts an engine with this many replicas.
pub fn replicas(count: usize, options: EngineOptions) -> Engine {
    let models = (0..count).map(|_| model(4096, |executor| Box::new(executor))).collect();
    Engine::start_replicas(models, options).expect("the engine starts")
}

/// Starts an engine for chats whose tools have long schemas: the prompt is the last message alone.
pub fn engine_with_short_prompts() -> Engine {
    let mut model = model(8192, |executor| Box::new(executor));
    let template = "{# shows no tools, and knows of <tool_call> #}{{ messages[-1].content }}";
    model.template = Arc::new(ChatTemplate::new(template, None, None).expect("the template compiles"));
    Engine::start(model, EngineOptions::default()).expect("the engine starts")
}

/// Starts an engine whose tokenizer has longer tokens than bytes.
pub fn merging_engine(kv_tokens: usize, speculation: Speculation) -> Engine {
    let mut model = model(kv_tokens, |executor| Box::new(executor));
    model.tokenizer = Arc::new(merging_tokenizer());
    let options = EngineOptions { speculation, ..EngineOptions::default() };
    Engine::start(model, options).expect("the engine starts")
}

pub fn engine() -> Engine {
    engine_with(4096, EngineOptions::default())
}

/// Returns a greedy request that runs to exactly `max_tokens` unless a constraint or stop string ends it.
pub fn greedy(prompt: &str, max_tokens: usize) -> GenerateRequest {
    let mut request = GenerateRequest::new(prompt.bytes().map(u32::from).collect());
    request.sampling = Sampling { temperature: 0.0, ..Sampling::default() };
    request.max_tokens = Some(max_tokens);
    request.ignore_eos = true;
    request
}

/// Everything that a generation reported.
#[derive(Debug)]
pub struct Generated {
    pub text: String,
    pub ids: Vec<u32>,
    pub logprobs: Vec<Option<TokenLogprob>>,
    pub prompt_logprobs: Option<Vec<Option<TokenLogprob>>>,
    pub finished: Finished,
}

impl Generated {
    pub fn reason(&self) -> &FinishReason {
        &self.finished.reason
    }
}

/// Runs requests at the same time and returns their results in order.
pub async fn together(engine: &Engine, requests: &[GenerateRequest]) -> Vec<Generated> {
    let streams: Vec<_> = requests.iter().map(|request| engine.generate(request.clone()).unwrap()).collect();
    join_all(streams.into_iter().map(collect)).await.into_iter().map(|run| run.unwrap()).collect()
}

pub async fn ids_together(engine: &Engine, requests: &[GenerateRequest]) -> Vec<Vec<u32>> {
    together(engine, requests).await.into_iter().map(|run| run.ids).collect()
}

pub async fn collect(mut stream: TokenStream) -> Result<Generated, EngineError> {
    let (mut text, mut ids, mut logprobs, mut prompt_logprobs) =
        (String::new(), Vec::new(), Vec::new(), None);
    while let Some(event) = stream.next().await {
        match event? {
            TokenEvent::Started { .. } => {}
            TokenEvent::PromptLogprobs(scores) => prompt_logprobs = Some(scores),
            TokenEvent::Token(token) => {
                text += &token.text;
                ids.push(token.id);
                logprobs.push(token.logprob);
            }
            TokenEvent::Finished(finished) => {
                text += &finished.text_rest;
                assert_eq!(ids, finished.tokens);
                assert_eq!(finished.usage.completion_tokens as usize, ids.len());
                assert!(stream.next().await.is_none(), "nothing comes after the end");
                return Ok(Generated { text, ids, logprobs, prompt_logprobs, finished });
            }
        }
    }
    panic!("the stream ended without a result");
}

pub async fn generate(engine: &Engine, request: GenerateRequest) -> Result<Generated, EngineError> {
    collect(engine.generate(request)?).await
}

/// Reads up to the first token.
pub async fn first_token(stream: &mut TokenStream) {
    while let Some(event) = stream.next().await {
        if let TokenEvent::Token(_) = event.expect("the generation runs") {
            return;
        }
    }
    panic!("the stream ended without a token");
}
